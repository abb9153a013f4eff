"""What changes a row of logits before a token is chosen: bias, penalties, and end tokens that may not come yet.

`kvferry.protocol.request.Sampling` names the order. All of it is computed in float64.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvferry.engine.contract import History
from kvferry.engine.history import looks_back
from kvferry.engine.rules import end_ids
from kvferry.protocol.request import Sampling

Floats = NDArray[np.float64]

#: Stands for a logit that bias or penalty made infinite: the best for sure, and still a number.
_LARGEST = 1e300


def processed(
    row: NDArray[np.float32], sampling: Sampling, history: History | None, eos_token_ids: Collection[int]
) -> NDArray[Any]:
    """The logits to choose from: `row` itself where the request changes nothing, else a changed copy.

    At least one is finite: settings that would forbid every token are not followed.
    """
    if not sampling.logit_bias and not looks_back(sampling):
        return row
    logits = row.astype(np.float64)
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        _add_bias(logits, sampling.logit_bias)
        if history is not None:
            _penalise_repetition(logits, sampling.repetition_penalty, history)
            _penalise_generated(logits, sampling, history.generated_ids)
    if not np.isfinite(logits.max()):
        np.nan_to_num(logits, copy=False, nan=-np.inf, posinf=_LARGEST, neginf=-np.inf)
    if history is not None and len(history.generated_ids) < sampling.min_tokens:
        _mask(logits, end_ids(sampling, eos_token_ids))
    return logits if np.isfinite(logits.max()) else row


def _add_bias(logits: Floats, bias: tuple[tuple[int, float], ...]) -> None:
    for token_id, value in bias:
        if 0 <= token_id < len(logits):
            logits[token_id] += value


def _penalise_repetition(logits: Floats, penalty: float, history: History) -> None:
    """Keskar et al., CTRL (2019), in the form that spread: a positive logit is divided, a negative one multiplied."""
    if penalty == 1.0:
        return
    seen = np.asarray(history.prompt_ids + history.generated_ids, dtype=np.int64)
    found = logits[seen]  # a repeated id is written twice, with one value
    logits[seen] = np.where(found > 0, found / penalty, found * penalty)


def _penalise_generated(logits: Floats, sampling: Sampling, generated_ids: tuple[int, ...]) -> None:
    """OpenAI's formula: logit - count * frequency_penalty - (count > 0) * presence_penalty, prompt not counted."""
    if not generated_ids or (sampling.frequency_penalty == 0.0 and sampling.presence_penalty == 0.0):
        return
    counts = np.bincount(np.asarray(generated_ids, dtype=np.int64))
    ids = np.flatnonzero(counts)
    logits[ids] -= counts[ids] * sampling.frequency_penalty + sampling.presence_penalty


def _mask(logits: Floats, ids: frozenset[int]) -> None:
    """Forbid `ids`, unless nothing else is left."""
    inside = [token_id for token_id in ids if 0 <= token_id < len(logits)]
    kept = logits[inside]
    logits[inside] = -np.inf
    if not np.isfinite(logits.max()):
        logits[inside] = kept
