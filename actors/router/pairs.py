"""The choice of a (prefill, decode) pair among the registered ranks; pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from kvferry.protocol.messages import Address, RankInfo


def choose(ranks: Iterable[RankInfo], live: Counter[int], usable: set[int]) -> tuple[RankInfo, RankInfo] | None:
    """The prefill and the decode with the fewest live rooms (`live` counts by incarnation), ties by name.

    `usable` are the incarnations with an open link. None when a role has nobody.
    """
    ranks = list(ranks)

    def least(role: str) -> RankInfo | None:
        able = [info for info in ranks if info.role == role and info.address.incarnation in usable]
        return min(able, key=lambda info: (live[info.address.incarnation], info.instance), default=None)

    prefill, decode = least("prefill"), least("decode")
    return None if prefill is None or decode is None else (prefill, decode)


def leaders(ranks: Iterable[RankInfo]) -> list[Address]:
    """Addresses of the leaders (all first coordinates 0) of both roles."""
    return [
        info.address
        for info in ranks
        if info.role in ("prefill", "decode") and not (info.cp_rank or info.tp_rank or info.pp_rank)
    ]
