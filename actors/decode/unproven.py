"""What the status says of quarantined pages: whose they were, who may still write to them, and what is waited for."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from kvferry.actors.decode.room import DecodeRoom
from kvferry.actors.decode.writers import Writers


def quarantined(
    rooms: Iterable[DecodeRoom], writers: Writers, is_up: Callable[[int], bool], now_s: float
) -> list[dict[str, Any]]:
    """One row for each room whose pages wait for proof. `waits_for`: the ranks that have not drained, and what else
    would do for every way by which they write; or what is left of a process that has ended. Room ids are strings: they
    exceed what JSON readers keep exact.
    """
    waiting = [room for room in rooms if room.holding is not None and room.holding.quarantined]
    return [_row(room, writers, is_up, now_s) for room in waiting]


def _row(room: DecodeRoom, writers: Writers, is_up: Callable[[int], bool], now_s: float) -> dict[str, Any]:
    assert room.holding is not None
    machine = room.machine
    gone = machine.exited | machine.revoked
    ranks = [r for r, process in sorted(machine.writers.items()) if r not in machine.acks and process not in gone]
    left = {machine.writers[rank] for rank in ranks}
    proofs = [known for pair, known in room.proofs.items() if pair[0] in left]
    waits_for = [f"drained by rank {rank}" for rank in ranks] if all(p.drained for p in proofs) else []
    waits_for += ["exited"] if proofs and all(p.exited for p in proofs) else []
    waits_for += ["revoked"] if proofs and all(p.revoked for p in proofs) else []
    ended = sorted({target for writer, target in room.agents if writer in left and writers.has_ended(writer)})
    if ended and all(map(writers.has_ended, left)):
        waits_for = [f"the end of what it left at rank {target}" for target in ended]
    cause = machine.cause
    return {
        "room": str(room.room),
        "pages": list(room.holding.pages),
        "writer": room.peer.name,
        "writer_pid": room.peer.pid,
        "linked": is_up(room.peer.incarnation),
        "for_s": round(now_s - room.quarantined_s, 3),
        "waits_for": waits_for,
        "cause": cause.text() if cause is not None else "",
    }
