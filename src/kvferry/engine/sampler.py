"""From one row of logits to one token: a function of the logits, the sampling settings, the position and, where the
settings look back, the request's tokens so far. Nothing else has a say.

The variate of a token comes from Philox (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011)
keyed by the request's seed at a counter equal to the token's position, so nothing depends on how often, where or
in which batch the request ran before.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from kvferry.engine.contract import Drawn, Sequence
from kvferry.engine.logprobs import logprobs_of
from kvferry.engine.processors import processed
from kvferry.protocol.request import Sampling

Floats = NDArray[np.float64]


def uniform(seed: int, position: int) -> float:
    """The variate in [0, 1) of one token: the top 53 bits of the counter's first word."""
    word = np.random.Philox(key=seed % 2**128, counter=position).random_raw()
    return float((int(word) >> 11) * 2.0**-53)


def sample(logits: torch.Tensor, sequences: list[Sequence], eos_token_ids: Collection[int] = ()) -> list[Drawn]:
    """One token per row of `logits` [R, vocab] float32; row r is of `sequences[r]`, which wants a token.

    Raises FloatingPointError if a row has no finite maximum.
    """
    best = logits.amax(dim=-1)
    if not bool(torch.isfinite(best).all()):
        raise FloatingPointError(f"logits of row {int((~torch.isfinite(best)).nonzero()[0, 0])} are not finite")
    rows = logits.cpu().numpy()
    drawn = [_one(row, sequence, eos_token_ids) for row, sequence in zip(rows, sequences, strict=True)]
    wanted = [(at, s.sampling.logprobs) for at, s in enumerate(sequences) if s.sampling and s.sampling.logprobs >= 0]
    if wanted:
        asked, counts = [at for at, _ in wanted], [count for _, count in wanted]
        found = logprobs_of(logits[asked], [drawn[at].token_id for at in asked], counts)
        for at, logprobs in zip(asked, found, strict=True):
            drawn[at] = Drawn(drawn[at].token_id, drawn[at].margin, logprobs)
    return drawn


def _one(row: NDArray[np.float32], sequence: Sequence, eos_token_ids: Collection[int]) -> Drawn:
    sampling = sequence.sampling
    assert sampling is not None
    logits = processed(row, sampling, sequence.history, eos_token_ids)
    return _greedy(logits) if sampling.temperature == 0 else _draw(logits, sampling, sequence.position)


def _greedy(row: NDArray[Any]) -> Drawn:
    token = int(row.argmax())  # the first of equals
    others = [float(part.max()) for part in (row[:token], row[token + 1 :]) if len(part)]
    return Drawn(token, float(row[token]) - max(others) if others else 0.0)


def _draw(row: NDArray[Any], sampling: Sampling, position: int) -> Drawn:
    """Inverse transform over the filtered distribution, in float64.

    The tokens that pass the filters are laid out by token id, not by probability: two nearly equal tokens would
    change places with the last bit of their logits, and a draw far from every edge would then change with them.
    """
    below_best = row.astype(np.float64) - float(row.max())
    with np.errstate(over="ignore"):  # a temperature close to 0 sends all but the best to -inf, as it should
        weights = np.exp(below_best / sampling.temperature)
    kept, flips = filtered(weights / weights.sum(), sampling.top_k, sampling.top_p, sampling.min_p)
    ids = np.flatnonzero(weights) if kept is None else np.sort(kept)
    edges = np.cumsum(weights[ids])
    edges /= edges[-1]
    u = uniform(sampling.seed, position)
    at = int(np.searchsorted(edges, u, side="right"))
    below = float(edges[at - 1]) if at else 0.0
    margin = min(u - below, float(edges[at]) - u)
    for distance, moved in flips:
        # a filter's decision that flips moves the edges by at most `moved`; it matters only if they reach u
        margin = min(margin, max(distance, margin - moved))
    return Drawn(int(ids[at]), margin)


def filtered(
    probs: Floats, top_k: int, top_p: float, min_p: float = 0.0
) -> tuple[NDArray[np.int64] | None, list[tuple[float, float]]]:
    """The token ids that pass top-k, then top-p over what is left, renormalised, then min-p; None = all of them.

    Equal probabilities count as ordered by token id. top-p keeps the shortest prefix in descending order whose
    probability reaches `top_p` (Holtzman et al., 2020), so at least one token; min-p what has at least `min_p` of the
    best token's probability (Nguyen et al., 2024). With each decision that could have gone the other way comes the
    probability by which it was made, and the probability that the other decision would have moved.
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
    if min_p > 0.0:
        kept, near = _at_least(probs, kept, min(min_p, 1.0) * float(probs.max()))
        flips += near
    return kept, flips


def _at_least(
    probs: Floats, kept: NDArray[np.int64] | None, limit: float
) -> tuple[NDArray[np.int64], list[tuple[float, float]]]:
    """The kept ids with at least `limit`, and the decisions within 1 % of it, the closest first.

    Noise large enough for the second decision flips the first one too, so what they move adds up. It takes a logit
    that is wrong by 0.01 times the temperature to flip one further away.
    """
    ids = np.flatnonzero(probs) if kept is None else kept
    found = probs[ids]
    passed = found >= limit
    total = float(found[passed].sum())
    near = found[np.abs(found - limit) <= 0.01 * limit] / total
    distances = np.abs(near - limit / total)
    order = np.argsort(distances)
    moved = np.cumsum(near[order])
    return ids[passed], list(zip(distances[order].tolist(), moved.tolist(), strict=True))


def _descending(probs: Floats, ids: NDArray[np.int64]) -> NDArray[np.int64]:
    """`ids` (ascending) by falling probability; equals stay in order of id."""
    return ids[np.argsort(-probs[ids], kind="stable")]
