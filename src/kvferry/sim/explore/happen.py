"""What each event of a world does, by name."""

from __future__ import annotations

from typing import Any

from kvferry.protocol.messages import Stop
from kvferry.sim.explore.bounds import (
    ALIVE,
    ASKED_TO_ABORT,
    BROKEN,
    CUT_OFF,
    DEAD,
    FRONT,
    LEFT,
    NONE,
    OPEN,
    REQUEST,
    UP,
    WAITING,
    client_of,
    room_of,
)
from kvferry.sim.explore.change import Change
from kvferry.sim.explore.router import RouterNode
from kvferry.sim.explore.violation import Violation
from kvferry.transfer.contract import WriteOutcome


def deliver(change: Change, here: int, peer: int) -> None:
    status, queue, new = change.links[(here, peer)]
    first, rest = queue[0], queue[1:]
    if first != UP:
        change.links[(here, peer)] = (status, rest, new)
        return change.turn(here, ("message", change.world.by_incarnation[peer], first))
    change.links[(here, peer)] = (BROKEN if status == BROKEN else OPEN, rest, new)
    if not change.lives_on(peer):
        change.exits.append((here, peer))  # known only now, and ended already
    if status == NONE:
        change.put(peer, here, UP)
    return change.turn(here, ("up", change.world.by_incarnation[peer]))


def lost(change: Change, here: int, peer: int) -> None:
    change.lost(here, peer)


def exited(change: Change, here: int, peer: int) -> None:
    change.exits.remove((here, peer))
    change.turn(here, ("exited", change.world.by_incarnation[peer]))


def work(change: Change, slot: int, at: int) -> None:
    change.turn(change.incarnation(slot), ("work", at))


def flushed(change: Change, slot: int, handle: Any) -> None:
    """The bytes are placed, then the writer hears of it. That they may lie there earlier is what `safe` is for."""
    (post,) = [post for post, _, _ in change.world.local(change.before, slot).writes if post.handle == handle]
    change.turn(post.target, ("land", post))
    change.turn(change.incarnation(slot), ("write", handle, WriteOutcome.FLUSHED))


def cancelled(change: Change, slot: int, handle: Any) -> None:
    change.turn(change.incarnation(slot), ("write", handle, WriteOutcome.CANCELLED))


def broken(change: Change, slot: int, handle: Any) -> None:
    change.turn(change.incarnation(slot), ("write", handle, WriteOutcome.BROKEN))


def path(change: Change, slot: int, handle: Any) -> None:
    change.faults -= 1
    broken(change, slot, handle)


def notified(change: Change, at: int) -> None:
    _, target, payload = change.notes.pop(at)
    change.turn(target, ("notify", payload))


def expire(change: Change, slot: int, room: int) -> None:
    change.faults -= 1
    change.turn(change.incarnation(slot), ("expire", room))


def tick(change: Change, slot: int) -> None:
    change.turn(change.incarnation(slot), ("tick",))


def stop(change: Change, leader: int, room: int) -> None:
    change.stops.remove((leader, room))
    client, attempt = client_of(room)
    change.turn(leader, ("stop", FRONT, Stop(REQUEST + client, attempt, room)))


def ask(change: Change, client: int, slot: int) -> None:
    doing, attempt, has, _ = change.clients[client]
    attempt += doing == CUT_OFF
    change.clients[client] = (WAITING, attempt, has, slot)
    world = change.world
    legs = [
        world.info(at, change.before.lives[at]) for at, name in enumerate(world.slots) if name in ("prefill", "decode")
    ]
    change.turn(
        change.incarnation(slot), ("open", room_of(client, attempt), attempt, change.world.spec(client, has), *legs)
    )


def abort(change: Change, client: int) -> None:
    _, attempt, has, router = change.clients[client]
    change.clients[client] = (ASKED_TO_ABORT, attempt, has, router)
    change.turn(change.incarnation(router), ("abort", room_of(client, attempt)))


def leave(change: Change, client: int) -> None:
    """After decode has committed, a client that leaves is decode's front's to tell."""
    _, attempt, has, router = change.clients[client]
    change.clients[client] = (LEFT, attempt, has, router)
    decode = change.world.slots.index("decode")
    change.stops.append((change.incarnation(decode), room_of(client, attempt)))


def cut(change: Change, a: int, b: int) -> None:
    change.faults -= 1
    change.broken(a, b)


def crash(change: Change, slot: int) -> None:
    change.faults -= 1
    change.crash(slot)


def restart(change: Change, slot: int) -> None:
    """A new incarnation with new memory registers; every router hears of it."""
    change.lives[slot] += 1
    change.status[slot] = ALIVE
    node = change.world.make(slot, change.lives[slot])
    ranks = change.world.ranks(tuple(change.lives))
    if isinstance(node, RouterNode):
        node.roster(ranks)
    deeds = [deed for effect in node.effects() for deed in change.world.locals._deeds(effect)]
    change.locals[slot] = change.world.locals.add(node)
    change.do(node.address.incarnation, deeds)
    for other, name in enumerate(change.world.slots):
        if other != slot and name.startswith("router") and change.status[other] != DEAD:
            change.turn(change.incarnation(other), ("roster", ranks))


def halt(change: Change, slot: int) -> None:
    """It stands still for longer than the heartbeat limit, so all its links break, and then it goes on.

    That it does nothing meanwhile needs no state of its own: anybody may be slow at any time here, and its writes
    land as long as they have not ended. Nor does it matter when, during its standstill, each link breaks: what is
    sent to it meanwhile is lost in either case.
    """
    change.faults -= 1
    here = change.incarnation(slot)
    for peer in [peer for owner, peer in change.links if owner == here]:
        change.broken(here, peer)


def overdue(change: Change, slot: int) -> None:
    """Pages have waited for their writer's word for too long: decode shuts it out."""
    change.turn(change.incarnation(slot), ("shut_out",))


def kill(change: Change, slot: int) -> None:
    """Pages that wait for proof have passed their budget: the cluster ends their writer."""
    change.crash(slot)


def drain(change: Change, slot: int) -> None:
    change.turn(change.incarnation(slot), ("drain",))


def depart(change: Change, slot: int) -> None:
    """It says that it is done, so its process is ended."""
    local = change.world.local(change.before, slot)
    if local.rooms or local.writes:
        text = f"prefill says that it may go, with {len(local.rooms)} rooms and {len(local.writes)} writes"
        raise Violation("drain-loses-nothing", text)
    change.crash(slot)


def farewell(change: Change, slot: int) -> None:
    change.turn(change.incarnation(slot), ("farewell",))


def end(change: Change, slot: int) -> None:
    """The instance has lost a rank: what was said has arrived, and the process ends."""
    change.crash(slot)
