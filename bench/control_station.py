"""One process of the control bench: production actors over real links, in a Ray actor as in production.

A station can be asked for its meter: the CPU seconds of its process, all threads included, and what it has sent. Ray
calls are counted where every call of an actor's method passes, messages where they enter a link, frames where they
enter the carrier.
"""

from __future__ import annotations

import asyncio
import gc
import inspect
import time
from collections import Counter
from typing import Any

import msgspec
import ray
from control_parts import LAYOUT, MAILBOX, build, fabric
from control_room import private_bytes

from kvferry.actors.actor import Actor
from kvferry.actors.links import LinkLayer
from kvferry.actors.ports import LostReason
from kvferry.actors.router.router import Router
from kvferry.actors.settings import LinkSettings
from kvferry.cluster.clock import SystemClock, SystemRandom
from kvferry.cluster.names import NAMESPACE
from kvferry.cluster.network import open_network
from kvferry.cluster.secret import Secret
from kvferry.protocol.address import Address
from kvferry.protocol.messages import Message, OpenDecode, Opened, OpenPrefill, Register
from kvferry.protocol.rank import RankInfo
from kvferry.protocol.request import RequestSpec, Sampling

PROMPT_TOKENS = 16
SECRET = Secret(b"control bench: all its processes")


class Meter(msgspec.Struct, frozen=True):
    """Since the station's start. `calls` by the method's name."""

    cpu_s: float
    wall_s: float
    calls: dict[str, int]
    messages: int
    frames: int

    def since(self, before: Meter) -> Meter:
        calls = Counter(self.calls)
        calls.subtract(before.calls)
        return Meter(
            self.cpu_s - before.cpu_s, self.wall_s - before.wall_s, {k: v for k, v in calls.items() if v},
            self.messages - before.messages, self.frames - before.frames,
        )  # fmt: skip


#: Every Ray call that this process has made, by the method's name.
_calls: Counter[str] = Counter()


def count_calls() -> None:
    """From now on, count this process's calls of actors' methods. Twice is once."""
    handle = ray.actor.ActorHandle
    inner = handle._actor_method_call
    if getattr(inner, "counts", False):
        return

    def counted(self: Any, method_name: str, args: Any = None, *more: Any, **kwargs: Any) -> Any:
        # What goes through a host's `call` is known by the method that it names.
        _calls[args[0] if method_name == "call" and args else method_name] += 1
        return inner(self, method_name, args, *more, **kwargs)

    counted.counts = True  # type: ignore[attr-defined]
    handle._actor_method_call = counted


def process_meter(_actor: object = None) -> Meter:
    """The part of a meter that any process has; also to be run by `__ray_call__`, which is why it takes an actor."""
    return Meter(time.process_time(), time.perf_counter(), dict(_calls), 0, 0)


def process_counts_calls(_actor: object = None) -> None:
    count_calls()


async def resolve(name: str) -> Address:
    """As `kvferry.cluster.roles.resolve`, which a process that loads no model need not import."""
    try:
        address: Address = await ray.get_actor(name, namespace=NAMESPACE).address.remote()
    except (ValueError, ray.exceptions.RayError) as error:
        raise LookupError(f"{name}: {error}") from None
    return address


class Sink:
    """A LinkHandler that takes everything and does nothing: the front, where a front is not measured."""

    def on_link_up(self, peer: Address) -> None: ...
    def on_link_lost(self, peer: Address, reason: LostReason) -> None: ...
    def on_exited(self, peer: Address) -> None: ...
    def on_failure(self, error: Exception) -> None: ...

    def on_message(self, peer: Address, message: Message) -> bool:
        return True


class Parker(Sink):
    """A leader that opens every room and does no more: rooms wait there for ever."""

    def __init__(self, role: str, network: LinkLayer) -> None:
        tokens = 1 << 20
        self._role, self._network = role, network
        self._hello = Register(
            RankInfo(f"{role}-0", role, network.address, LAYOUT, max_prompt_tokens=tokens, max_total_tokens=tokens)
        )

    def on_link_up(self, peer: Address) -> None:
        if peer.name == "registry":
            self._network.send(peer.incarnation, self._hello)

    def on_message(self, peer: Address, message: Message) -> bool:
        if isinstance(message, OpenPrefill | OpenDecode):
            self._network.send(peer.incarnation, Opened(message.room, self._role))
        return True


class Station:
    """`roles`: registry, router, prefill, decode, sink, parked-prefill, parked-decode; the first is what `call` and
    `address` mean. Made inside a named Ray actor."""

    def __init__(self, carrier: str, roles: list[str]) -> None:
        count_calls()
        self._settings = LinkSettings(carrier=carrier, window=MAILBOX, mailbox=MAILBOX)
        self._roles = roles
        self._networks: list[LinkLayer] = []
        self._messages = self._frames = 0
        self._actors: dict[str, Actor] = {}
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        plane = fabric()
        for role in self._roles:
            name = role if role in ("registry", "sink") else f"{role.removeprefix('parked-')}-0"
            network = await self.network(name)
            if role == "sink":
                await network.start(Sink())
            elif role.startswith("parked-"):
                await network.start(Parker(role.removeprefix("parked-"), network))
                network.dial(self._networks[0].address)
            else:
                actor = self._actors[role] = build(role, network, resolve, plane)
                self._tasks.append(asyncio.get_running_loop().create_task(actor.run()))

    async def addresses(self) -> list[Address]:
        """Of the roles, in their order."""
        return [network.address for network in self._networks]

    async def network(self, name: str) -> LinkLayer:
        """Links whose messages and frames are counted."""
        network = await open_network(name, "127.0.0.1", self._settings, SystemClock(), SystemRandom(), SECRET)
        self._networks.append(network)
        send, carry = network.send, network._carrier.send

        def counted_send(incarnation: int, message: Message) -> bool:
            self._messages += 1
            return send(incarnation, message)

        def counted_carry(path: bytes, data: bytes) -> None:
            self._frames += 1
            carry(path, data)

        network.send, network._carrier.send = counted_send, counted_carry  # type: ignore[method-assign]
        return network

    async def address(self) -> Address:
        return self._networks[0].address

    async def call(self, method: str, *args: Any) -> Any:
        result = getattr(self._actors[self._roles[0]], method)(*args)
        return await result if inspect.isawaitable(result) else result

    async def meter(self) -> Meter:
        own = process_meter()
        return msgspec.structs.replace(own, messages=self._messages, frames=self._frames)

    # --- what a router is asked ---

    async def ready(self) -> None:
        """The router knows both leaders and is linked to them."""
        router = self._router
        while not (
            router.roster.ready and all(router.network.is_up(r.address.incarnation) for r in router.roster.ranks)
        ):
            await asyncio.sleep(0.02)

    async def hand_over(self, count: int, at_once: int, front: Address) -> Meter:
        """`count` rooms from the front's call to the last release, `at_once` at a time, called from within."""
        gc.collect()
        before, left = await self.meter(), count

        async def caller() -> None:
            nonlocal left
            while left > 0:
                left -= 1
                outcome = await self._router.submit(_spec(front), 0)
                assert outcome.ok, outcome

        await asyncio.gather(*(caller() for _ in range(at_once)))
        while self._router.guests:
            await asyncio.sleep(0.002)
        return (await self.meter()).since(before)

    async def park(self, count: int, front: Address) -> float:
        """Bytes of this process's own memory per room that waits, the front's open call included."""
        await self._park(200, front)  # what is allocated once
        gc.collect()
        before = private_bytes()
        await self._park(count, front)
        gc.collect()
        return (private_bytes() - before) / count

    async def _park(self, count: int, front: Address) -> None:
        loop, wanted = asyncio.get_running_loop(), len(self._router.guests) + count
        for _ in range(count):
            self._tasks.append(loop.create_task(self._router.submit(_spec(front), 0)))  # type: ignore[arg-type]
            await asyncio.sleep(0)
        waiting = "BOOTSTRAPPED"
        while sum(g.room.machine.state.name == waiting for g in self._router.guests.values()) < wanted:
            await asyncio.sleep(0.05)
        await asyncio.sleep(1.0)  # acknowledged, so that no link still holds what it has sent

    @property
    def _router(self) -> Router:
        router = self._actors["router"]
        assert isinstance(router, Router)
        return router


def _spec(front: Address, max_tokens: int = 1) -> RequestSpec:
    random = SystemRandom()
    prompt = tuple(1000 + random.bits(8) for _ in range(PROMPT_TOKENS))
    return RequestSpec(random.bits(63), prompt, Sampling(max_tokens=max_tokens), front)


RemoteStation = ray.remote(Station)
