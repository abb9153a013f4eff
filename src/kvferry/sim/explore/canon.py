"""A live actor's state as one value that is equal for states which behave alike.

Left out: counts, journals, measurements, texts of causes, and the absolute value of what only grows (steps, holdings'
ids, ages). What is not known here raises: nothing is left out by oversight.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Mapping
from enum import Enum
from types import BuiltinMethodType, FunctionType, MethodType
from typing import Any

import msgspec

from kvferry.actors.decode.batch import Batch
from kvferry.actors.forward import Forward
from kvferry.actors.leaving import Leaving
from kvferry.actors.prefill.kept import KeptPrompts
from kvferry.actors.ranks.ending import Ending
from kvferry.engine.contract import StepPlan
from kvferry.memory.admission import Claim
from kvferry.memory.ages import Ages
from kvferry.memory.ledger import Holding, PageLedger
from kvferry.protocol.address import Address
from kvferry.protocol.clocks import Clocks
from kvferry.protocol.errors import Cause
from kvferry.protocol.metadata import Metadata
from kvferry.protocol.request import RequestSpec
from kvferry.sim.explore.data_plane import NotedPeer, NotedWrite
from kvferry.sim.explore.fakes import LabelEngine, Work

#: Attributes that no later behaviour depends on, in these models.
LEFT_OUT = frozenset({
    "counts", "commands", "journal", "cause", "reports", "_statistics", "_lives", "membership", "breakers", "fleet",
    "book", "_homes", "_room_places", "_queue_places", "_random", "_speed", "_places", "_around", "around",
    "settings", "limits", "_limits", "texts", "info", "_on_message", "clock", "_clock", "refusal", "_progress_at_s",
    "_redial_at_s", "page_size", "max_rooms", "_pairings", "ended", "_backend", "_policy", "_tasks", "_mailbox",
    "opened_s", "admitted_s", "spec", "text", "kv_bytes", "metadata_bytes", "first_token", "first_logprobs",
    "last_token", "began_s", "era", "queued", "now_s", "handles", "result", "on_end", "_numbers", "chunk", "_moved",
    "_ledger", "_engine", "_endpoint", "_network", "_agent", "_regions", "_incarnation", "_page_size", "_counts",
    "_forward", "outbox", "network", "proofs", "_planner", "_join", "_resolve", "_looking", "_retry_at_s", "_team",
    "steps_done", "_info",
})  # fmt: skip


class Renderer:
    """`done` is the last forward that has finished in the actor that is rendered."""

    def __init__(self, done: int) -> None:
        self._done = done

    def __call__(self, value: Any) -> Hashable:
        known = _PLAIN.get(type(value))
        if known is not None:
            return known(value)
        special = _SPECIAL.get(type(value))
        if special is not None:
            return special(self, value)
        if isinstance(value, Enum):
            return value
        if isinstance(value, tuple | list | deque):
            return tuple(self(item) for item in value)
        if isinstance(value, set | frozenset):
            return frozenset(self(item) for item in value)
        if isinstance(value, Mapping):
            return tuple((self(key), self(item)) for key, item in value.items())
        if isinstance(value, msgspec.Struct):
            fields = (getattr(value, name) for name in value.__struct_fields__)
            return (type(value).__name__, *(self(field) for field in fields))
        return self._object(value)

    def _object(self, value: Any) -> Hashable:
        names = getattr(value, "__dict__", None)
        names = (
            list(names) if names is not None else [n for c in type(value).__mro__ for n in getattr(c, "__slots__", ())]
        )
        kept = [name for name in names if name not in LEFT_OUT]
        return (type(value).__name__, *((name, self(getattr(value, name))) for name in kept))

    def holding(self, holding: Holding) -> Hashable:
        lease = None if holding.lease is None else self(holding.lease)
        named = holding.last_step > self._done
        flags = named, holding.was_given, holding.quarantined, holding.cached, holding.released
        return holding.owner, holding.pages, holding.rows, lease, flags

    def ledger(self, ledger: PageLedger) -> Hashable:
        holdings = tuple(self.holding(holding) for holding in ledger._holdings.values())
        return tuple(ledger._free), tuple(ledger._free_rows), holdings


def _itself(value: Any) -> Hashable:
    hashable: Hashable = value
    return hashable


def _engine(_: Renderer, engine: LabelEngine) -> Hashable:
    rows = [Metadata.unpack(memoryview(row)) if any(row) else None for row in engine.rows]
    read = tuple(
        None if row is None else (row.room, row.incarnation, row.prompt_tokens, row.first_token) for row in rows
    )
    return frozenset((*at, label.room, label.writer) for at, label in engine.labels.items()), read


def _plan(_: Renderer, plan: StepPlan) -> Hashable:
    return tuple((s.key, s.start, len(s.token_ids), s.pages, s.sampling is not None) for s in plan.sequences)


_PLAIN: dict[type, Callable[[Any], Hashable]] = dict.fromkeys((int, bool, str, bytes, float, type(None)), _itself)
_SPECIAL: dict[type, Callable[[Renderer, Any], Hashable]] = {
    Address: lambda _, address: address.incarnation,
    Ages: lambda _, ages: tuple(ages._retracted),
    Cause: lambda *_: "cause",
    Claim: lambda _, claim: (claim.key, claim.phase, claim.initial, claim.need),
    Clocks: lambda _, clocks: (clocks._wait, clocks._stopped),
    Ending: lambda _, ending: bool(ending),
    Forward: lambda _, forward: forward.running,
    Holding: Renderer.holding,
    Batch: lambda render, batch: render(batch._admission),
    KeptPrompts: lambda render, kept: (tuple(kept._rooms), render(kept._holdings)),
    LabelEngine: _engine,
    Leaving: lambda _, leaving: bool(leaving),
    NotedPeer: lambda _, peer: (peer.descriptor.incarnation, peer.descriptor.generation),
    NotedWrite: lambda _, write: (write.post.handle, write.post.target, write.post.agent, write.cancelled),
    PageLedger: Renderer.ledger,
    RequestSpec: lambda _, spec: spec.request,
    StepPlan: _plan,
    Work: lambda render, work: (work.name, render(work.arguments)),
    MethodType: lambda *_: None,
    FunctionType: lambda *_: None,
    BuiltinMethodType: lambda *_: None,
}


def renamed(key: Any, names: Mapping[Any, Any]) -> Hashable:
    """The same key with other names for the rooms: what the state would be if the clients had changed places."""
    if type(key) is int:
        hashable: Hashable = names.get(key, key)
        return hashable
    if isinstance(key, tuple):
        return tuple(renamed(item, names) for item in key)
    if isinstance(key, frozenset):
        return frozenset(renamed(item, names) for item in key)
    return _itself(key)
