"""From one row of logits to one token, a function of the logits, the sampling settings and the position alone.

The variate of a token comes from Philox (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011)
keyed by the request's seed at a counter equal to the token's position, so nothing depends on how often, where or
in which batch the request ran before.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from kvferry.engine.contract import Drawn
from kvferry.protocol.messages import Sampling

Floats = NDArray[np.float64]


def uniform(seed: int, position: int) -> float:
    """The variate in [0, 1) of one token: the top 53 bits of the counter's first word."""
    word = np.random.Philox(key=seed % 2**128, counter=position).random_raw()
    return float((int(word) >> 11) * 2.0**-53)


def sample(logits: torch.Tensor, samplings: list[Sampling], positions: list[int]) -> list[Drawn]:
    """One token per row of `logits` [R, vocab] float32. Raises FloatingPointError if a row has no finite maximum."""
    best = logits.amax(dim=-1)
    if not bool(torch.isfinite(best).all()):
        raise FloatingPointError(f"logits of row {int((~torch.isfinite(best)).nonzero()[0, 0])} are not finite")
    rows = logits.cpu().numpy()
    return [
        _greedy(row) if sampling.temperature == 0 else _draw(row, sampling, position)
        for row, sampling, position in zip(rows, samplings, positions, strict=True)
    ]


def _greedy(row: NDArray[np.float32]) -> Drawn:
    token = int(row.argmax())  # the first of equals
    if len(row) == 1:
        return Drawn(token, 0.0)
    second, first = np.partition(row, -2)[-2:]
    return Drawn(token, float(first) - float(second))


def _draw(row: NDArray[np.float32], sampling: Sampling, position: int) -> Drawn:
    """Inverse transform over the filtered distribution, in float64.

    The tokens that pass the filters are laid out by token id, not by probability: two nearly equal tokens would
    change places with the last bit of their logits, and a draw far from every edge would then change with them.
    """
    below_best = row.astype(np.float64) - float(row.max())
    with np.errstate(over="ignore"):  # a temperature close to 0 sends all but the best to -inf, as it should
        weights = np.exp(below_best / sampling.temperature)
    kept, flips = filtered(weights / weights.sum(), sampling.top_k, sampling.top_p)
    ids = np.flatnonzero(weights) if kept is None else np.sort(kept)
    edges = np.cumsum(weights[ids])
    edges /= edges[-1]
    u = uniform(sampling.seed, position)
    at = int(np.searchsorted(edges, u, side="right"))
    below = float(edges[at - 1]) if at else 0.0
    margin = min(u - below, float(edges[at]) - u)
    for distance, moved in flips:
        # a filter's decision that flips moves the edges by at most `moved`; it matters only if they reach u
        margin = max(min(margin, distance), margin - moved)
    return Drawn(int(ids[at]), margin)


def filtered(probs: Floats, top_k: int, top_p: float) -> tuple[NDArray[np.int64] | None, list[tuple[float, float]]]:
    """The token ids that pass top-k, then top-p over what is left, renormalised; None = all of them.

    Equal probabilities count as ordered by token id. top-p keeps the shortest prefix in descending order whose
    probability reaches `top_p` (Holtzman et al., 2020), so at least one token. With each filter that cut comes the
    probability by which its last decision was made, and the probability that the other decision would have moved.
    """
    kept: NDArray[np.int64] | None = None
    flips: list[tuple[float, float]] = []
    if 0 < top_k < len(probs):
        threshold = np.partition(probs, -top_k)[-top_k]
        order = _descending(probs, np.flatnonzero(probs >= threshold))
        kept = order[:top_k]
        below = probs[order[top_k]] if len(order) > top_k else probs[probs < threshold].max()
        total = float(probs[kept].sum())
        flips.append((float(threshold - below) / total, float(threshold) / total))
        probs = np.where(probs >= threshold, probs, 0.0) / total
    if top_p < 1.0:
        if kept is None:
            # all tokens below (1 - p) / vocab weigh less than 1 - p together, so the prefix never needs one
            kept = _descending(probs, np.flatnonzero(probs >= (1.0 - top_p) / len(probs)))
        reached = np.cumsum(probs[kept])
        count = min(int(np.searchsorted(reached, top_p, side="left")) + 1, len(kept))
        total = float(reached[count - 1])
        short = top_p - (float(reached[count - 2]) if count > 1 else 0.0)
        flips.append((min(short, abs(total - top_p)) / total, float(probs[kept[count - 1]]) / total))
        kept = kept[:count]
    return kept, flips


def _descending(probs: Floats, ids: NDArray[np.int64]) -> NDArray[np.int64]:
    """`ids` (ascending) by falling probability; equals stay in order of id."""
    return ids[np.argsort(-probs[ids], kind="stable")]
