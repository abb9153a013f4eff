"""Proofs that nobody can write to (or read from) a holding's pages any more.

A `Quiescent` is about one holding. It has two halves: about our own forwards (*stepped*) and about the peers
(*never given away*, *drained* or *exited*). The ledger checks both against what it knows of the holding, so a
proof that is merely asserted is refused.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Stepped:
    """Every forward with a number up to `step` has finished on every rank."""

    step: int


@dataclass(frozen=True)
class NeverGiven:
    """The pages were never handed to a link, nor to the data plane."""


@dataclass(frozen=True)
class Drained:
    """These ranks have said that their writes (or reads) are flushed or will never be posted."""

    acks: frozenset[int]


@dataclass(frozen=True)
class Exited:
    """The kernel of this host says that the process with this incarnation has ended."""

    incarnation: int


@dataclass(frozen=True)
class Quiescent:
    """The proof that goes with `PageLedger.release`; `holding` is the id of the holding it is about."""

    holding: int
    own: Stepped
    peers: NeverGiven | Drained | Exited
