"""Proofs that nobody can write to (or read from) a holding's pages any more.

A `Quiescent` is about one holding. It has two halves: about our own forwards (*stepped*) and about the peers, who were
either *never given* the pages, or are quiet rank by rank: each has *drained*, or its process has *exited*, or the agent
that it wrote through was *revoked*. The ledger checks both against what it knows of the holding, so a proof that is
merely asserted is refused.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec


class Stepped(msgspec.Struct, frozen=True):
    """Every forward with a number up to `step` has finished on every rank."""

    step: int


class NeverGiven(msgspec.Struct, frozen=True):
    """The pages were never handed to a link, nor to the data plane."""

    @property
    def name(self) -> str:
        return "never given away"


class Quiet(msgspec.Struct, frozen=True):
    """`drained`: the ranks that have said that their writes (or reads) are flushed or will never be posted. `exited`:
    incarnations whose process has ended, as the kernel of this host says. `revoked`: incarnations whose way here, the
    agent that they wrote through, has been destroyed.
    """

    drained: frozenset[int] = frozenset()
    exited: frozenset[int] = frozenset()
    revoked: frozenset[int] = frozenset()

    def of(self, rank: int, incarnation: int) -> str:
        """Why this rank, a process of that incarnation, is quiet: "drained", "exited" or "revoked"; "" if it isn't.

        Incarnation 0 stands for ourselves: there only *drained* counts.
        """
        if rank in self.drained:
            return "drained"
        if incarnation and incarnation in self.exited:
            return "exited"
        return "revoked" if incarnation and incarnation in self.revoked else ""

    def missing(self, writers: Mapping[int, int]) -> list[int]:
        """The ranks of `writers` (rank -> incarnation) that are not known to be quiet."""
        return sorted(rank for rank, incarnation in writers.items() if not self.of(rank, incarnation))

    def names(self, writers: Mapping[int, int]) -> str:
        """The proofs by which `writers` are quiet, for journals: "drained", "drained and exited", …"""
        found = {self.of(rank, incarnation) for rank, incarnation in writers.items()} - {""}
        return " and ".join(sorted(found))


class Quiescent(msgspec.Struct, frozen=True):
    """The proof that goes with `PageLedger.release`; `holding` is the id of the holding it is about."""

    holding: int
    own: Stepped
    peers: NeverGiven | Quiet
