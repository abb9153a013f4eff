"""Which way the bytes go between two ranks: chosen by the target from what both offer, with the reason in words. Pure.

A way is a backend, or a backend and what it goes over: "local", "ucx/rdma", "ucx/tcp". Not here: how any of them moves
bytes (backends.py makes them).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from kvferry.protocol.offer import CUDA, SHARED, Nic, Offer
from kvferry.transfer.contract import TransferError

#: The names of `transfer.transports` that mean more than a list for UCX_TLS.
AUTO, HOST, TCP, RDMA = "auto", "host", "tcp", "rdma"

#: Backends that move bytes between devices' memory, too.
_OF_DEVICES = ("ucx",)
_SHOWN = 4


class Choice(msgspec.Struct, frozen=True):
    """A way, and why it was picked."""

    way: str
    why: str


def ways_of(backend: str, transports: str) -> tuple[str, ...]:
    """The ways that these settings allow, the best first."""
    if backend == "local":
        return ("local",)
    found = (RDMA, TCP) if transports == AUTO else (transports,)
    if backend != "auto":
        return tuple(f"{backend}/{over}" for over in found)
    return ("local", *(f"ucx/{over}" for over in found))


def backend_of(way: str) -> str:
    return way.partition("/")[0]


def choose(wanted: Sequence[str], ours: Offer, theirs: Offer, lacking: Mapping[str, str]) -> Choice:
    """The first of the `wanted` ways by which the process that offers `theirs` can write to the one that offers `ours`.
    `lacking`: why one of them is not to be had here. What a writer has not said is not held against it, but for its
    host: who maps or reaches memory of the same host must be known to be there.

    Raises TransferError, naming what either side has, when there is none.
    """
    passed: list[str] = []
    for way in wanted:
        problem = lacking.get(way, "") or _problem(way, ours, theirs)
        if not problem:
            return Choice(way, "; ".join((_reason(way, ours, theirs), *passed)))
        passed.append(f"not {way}: {problem}")
    facts = "; ".join(
        f"{name} {there or 'not known'} there, {here or 'none'} here"
        for name, there, here in (
            ("host", theirs.host, ours.host),
            ("memory", theirs.memory, ours.memory),
            ("RDMA", _names(theirs.nics) or "none", _names(ours.nics)),
            ("ways", ", ".join(theirs.ways), ", ".join(ours.ways)),
        )
    )
    raise TransferError(f"no way for the writer: {'; '.join(passed)} ({facts})")


def _problem(way: str, ours: Offer, theirs: Offer) -> str:
    """Why it can't be this one, or ""."""
    backend, _, over = way.partition("/")
    if theirs.ways and way not in theirs.ways:
        return f"the writer has {', '.join(theirs.ways)}"
    if (backend == "local" or over == HOST) and ours.host != theirs.host:
        limit = "" if backend == "local" else ", and transfer.transports is host; set it to auto or tcp"
        return f"the writer is {_where(ours, theirs)}{limit}"
    if backend == "local" and ours.memory != SHARED:
        return f"the pool here is {ours.memory} memory, which others can't map"
    if CUDA in (ours.memory, theirs.memory) and (backend not in _OF_DEVICES or over == HOST):
        return f"it moves host memory only; the pool is {theirs.memory} memory there, {ours.memory} here"
    if over == RDMA and theirs.ways and not _links(ours) & _links(theirs):
        return f"the RDMA ports are {_names(theirs.nics) or 'none'} there, {_names(ours.nics) or 'none'} here"
    return ""


def _reason(way: str, ours: Offer, theirs: Offer) -> str:
    backend, _, over = way.partition("/")
    if way == "local":
        return "the writer is on the same host, so the pool is mapped there: one copy, no wire"
    why = (
        f"the writer is {_where(ours, theirs)}: {backend.upper() if backend != 'mooncake' else 'Mooncake'} over {over}"
    )
    if over == RDMA:
        links = " and ".join(sorted(_links(ours) & _links(theirs))) or "a link that is not known"
        why += f", {links}, by {_names(theirs.nics) or '?'} there and {_names(ours.nics)} here"
    if CUDA in (ours.memory, theirs.memory):
        why += f"; {theirs.memory} memory there, {ours.memory} here"
    return why


def _where(ours: Offer, theirs: Offer) -> str:
    if not theirs.host:
        return "on a host that is not known"
    return "on the same host" if ours.host == theirs.host else "on another host"


def _links(offer: Offer) -> set[str]:
    return {nic.link for nic in offer.nics}


def _names(nics: Sequence[Nic]) -> str:
    more = f" and {len(nics) - _SHOWN} more" if len(nics) > _SHOWN else ""
    return ", ".join(f"{nic.name} ({nic.link})" for nic in nics[:_SHOWN]) + more
