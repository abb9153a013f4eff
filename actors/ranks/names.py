"""How the processes of an instance are named: its leader as the instance, the others for it.

prefill-0.1 is rank 1 of prefill-0.
"""

from __future__ import annotations

from kvferry.protocol.rank import LEADER


def instance_of(name: str) -> tuple[str, int]:
    """The instance that a process belongs to, and its rank there."""
    instance, _, rank = name.partition(".")
    return instance, int(rank or LEADER)


def process_names(instance: str, ranks: int) -> list[str]:
    """All processes of an instance of so many ranks, its leader's first."""
    return [instance, *(f"{instance}.{rank}" for rank in range(1, ranks))]
