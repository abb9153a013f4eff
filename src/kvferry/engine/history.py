"""What a request has said so far, kept for those requests alone whose sampling looks back at it."""

from __future__ import annotations

from kvferry.engine.contract import History
from kvferry.protocol.request import RequestSpec, Sampling


def looks_back(sampling: Sampling) -> bool:
    """Whether a token depends on the ids before it by more than the model's own reading of them."""
    return (
        sampling.repetition_penalty != 1.0
        or sampling.frequency_penalty != 0.0
        or sampling.presence_penalty != 0.0
        or sampling.min_tokens > 0
    )


class Past:
    """One attempt's growing history. `frozen_ids` count as generated: every attempt sees the same tokens."""

    def __init__(self, spec: RequestSpec) -> None:
        self._prompt_ids = spec.prompt_ids
        self._generated: list[int] | None = list(spec.frozen_ids) if looks_back(spec.sampling) else None

    def add(self, token_id: int) -> None:
        if self._generated is not None:
            self._generated.append(token_id)

    def history(self) -> History | None:
        """For the next token's `Sequence`; None where nothing is looked back at."""
        return None if self._generated is None else History(self._prompt_ids, tuple(self._generated))
