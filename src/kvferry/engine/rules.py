"""What every engine holds to, the real one and the scripted one: no torch here."""

from __future__ import annotations

from collections.abc import Collection

from kvferry.engine.contract import EngineLimits, Sequence, StepPlan
from kvferry.engine.history import looks_back
from kvferry.protocol.request import Sampling


def end_ids(sampling: Sampling, eos_token_ids: Collection[int]) -> frozenset[int]:
    """The tokens that end the request when they are drawn."""
    eos = () if sampling.ignore_eos else eos_token_ids
    return frozenset(sampling.stop_token_ids) | frozenset(eos)


def check_plan(plan: StepPlan, limits: EngineLimits) -> None:
    """Raises ValueError, naming the sequence, for a plan that would read or write outside its pages."""
    if not plan.sequences:
        raise ValueError(f"step {plan.step}: no sequences")
    for sequence in plan.sequences:
        wrong = _wrong(sequence, limits)
        if wrong:
            raise ValueError(f"step {plan.step}, sequence {sequence.key}: {wrong}")


def _wrong(sequence: Sequence, limits: EngineLimits) -> str | None:
    end = sequence.start + len(sequence.token_ids)
    if not sequence.token_ids or sequence.start < 0:
        return f"{len(sequence.token_ids)} tokens at start {sequence.start}"
    if end > limits.context_tokens:
        return f"{end} tokens; the model's context is {limits.context_tokens}"
    if end > len(sequence.pages) * limits.page_size:
        return f"{end} tokens in {len(sequence.pages)} pages of {limits.page_size}"
    if sequence.sampling is not None and sequence.history is None and looks_back(sequence.sampling):
        return "its sampling looks back at tokens, and no history came"
    if min(sequence.pages) < 0 or max(sequence.pages) >= limits.pages:
        return f"a page outside 0 .. {limits.pages - 1}"
    if min(sequence.token_ids) < 0 or max(sequence.token_ids) >= limits.vocab_size:
        return f"a token id outside 0 .. {limits.vocab_size - 1}"
    return None
