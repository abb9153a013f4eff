"""What every engine holds to, the real one and the scripted one: no torch here."""

from __future__ import annotations

from collections.abc import Collection

from kvferry.engine.contract import EngineLimits, StepPlan
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
        end = sequence.start + len(sequence.token_ids)
        where = f"step {plan.step}, sequence {sequence.key}"
        if not sequence.token_ids or sequence.start < 0:
            raise ValueError(f"{where}: {len(sequence.token_ids)} tokens at start {sequence.start}")
        if end > limits.context_tokens:
            raise ValueError(f"{where}: {end} tokens; the model's context is {limits.context_tokens}")
        if end > len(sequence.pages) * limits.page_size:
            raise ValueError(f"{where}: {end} tokens in {len(sequence.pages)} pages of {limits.page_size}")
        if sequence.sampling is not None and sequence.history is None and looks_back(sequence.sampling):
            raise ValueError(f"{where}: its sampling looks back at tokens, and no history came")
        for name, values, limit in (
            ("page", sequence.pages, limits.pages),
            ("token id", sequence.token_ids, limits.vocab_size),
        ):
            if min(values) < 0 or max(values) >= limit:
                raise ValueError(f"{where}: a {name} outside 0 .. {limit - 1}")
