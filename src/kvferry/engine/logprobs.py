"""Log-probabilities of the model's own distribution, before bias, penalties, temperature and filters."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from kvferry.protocol.messages import Logprobs
from kvferry.protocol.metadata import MAX_TOP_LOGPROBS

Floats = NDArray[np.float32]


def logprobs_of(logits: torch.Tensor, token_ids: list[int], counts: list[int]) -> list[Logprobs]:
    """For each row of `logits` [R, vocab] float32 the logprob of its token, and the `counts[r]` most likely ones
    (`MAX_TOP_LOGPROBS` at most), computed in float32. Equals come by rising token id.
    """
    rows = torch.log_softmax(logits, dim=-1)
    counts = [min(count, MAX_TOP_LOGPROBS, rows.shape[-1]) for count in counts]
    best = rows.topk(max(counts), dim=-1).values.cpu().numpy()
    return [
        Logprobs(float(row[token_id]), _top(row, values, count) if count > 0 else ())
        for row, values, token_id, count in zip(rows.cpu().numpy(), best, token_ids, counts, strict=True)
    ]


def _top(row: Floats, best: Floats, count: int) -> tuple[tuple[int, float], ...]:
    """`best` are the row's largest values, falling. topk itself says nothing about the order of equals."""
    ids = np.flatnonzero(row >= best[count - 1])
    order = ids[np.argsort(-row[ids], kind="stable")][:count]
    return tuple((int(token_id), float(row[token_id])) for token_id in order)
