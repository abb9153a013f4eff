"""The production actors on virtual time, and what reaches them from outside: bytes on the wires of each process, the
messages of a member of the cluster that has gone mad, notifications on the data path, and the registry's HTTP routes.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Sequence
from typing import Any

from fuzz_decoders import BODIES, FRAMES, HERE, NOTIFICATION, PAYLOADS, Target

from kvferry.actors.bootstrap.registry import Registry
from kvferry.actors.links import LinkLayer
from kvferry.actors.ports import LostReason
from kvferry.actors.settings import LinkSettings
from kvferry.cluster.registry_routes import Request, Routes
from kvferry.obs.metrics import FrontMetrics
from kvferry.protocol.address import Address
from kvferry.protocol.frames import Hello, encode_frame
from kvferry.protocol.messages import BadFrame, Message, OpenDecode, OpenPrefill, Token, decode
from kvferry.protocol.request import Sampling
from kvferry.serve.front import Front
from kvferry.serve.gateway import FrontInfo
from kvferry.sim.backend import SimBackend
from kvferry.sim.loop import VirtualClock
from kvferry.sim.system import SimOptions, SimSystem

TOKEN = "the token of the fuzzer"
#: A member's orders that make a room where they are whole: what they make is not what is looked for here.
ORDERS = (OpenPrefill, OpenDecode)
#: Longer than every memory: silence of links (10 s), DP ranks of rooms (120 s).
QUIET_S = 200.0
SETTLE_S = 5.0
METHODS = (("PUT", "/route"), ("POST", "/register_dp_rank"), ("POST", "/query_dp_ranks"), ("GET", "/route"))


class Member:
    """A process of the cluster, with a link to each other one, that says whatever it is given."""

    def __init__(self, network: LinkLayer) -> None:
        self.network = network
        self.heard: Counter[str] = Counter()

    def on_link_up(self, peer: Address) -> None: ...
    def on_link_lost(self, peer: Address, reason: LostReason) -> None:
        self.heard[f"link lost: {reason.value}"] += 1

    def on_exited(self, peer: Address) -> None: ...
    def on_failure(self, error: Exception) -> None: ...

    def on_message(self, peer: Address, message: Message) -> bool:
        self.heard[type(message).__name__] += 1
        return True

    def say(self, incarnation: int, payload: bytes) -> None:
        """In a session of the real protocol, where only messages come from."""
        link = self.network._links.get(incarnation)
        if link is not None:
            link.session.send(payload, VirtualClock().now_s())
            self.network._after(link)


class Stage:
    """One prefill, one decode, a router, a registry: `states` is what they remember, `crashed` who has ended."""

    def __init__(self, seed: int) -> None:
        self._system = SimSystem(SimOptions(seed=seed))

    async def __aenter__(self) -> Stage:
        await self._system.__aenter__()
        self.member = Member(self._system.network.open("member", LinkSettings()))
        await self.member.network.start(self.member)
        self._incarnations = [process.address.incarnation for process in self._system.processes.values()]
        for process in self._system.processes.values():
            self.member.network.dial(process.address)
        await asyncio.sleep(1.0)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.member.network.close()
        await self._system.__aexit__()

    def crashed(self) -> list[str]:
        """Actors that have ended, links whose timers stand still, and links of the member that somebody gave up."""
        processes = self._system.processes
        tasks = {name: process.task for name, process in processes.items()}
        ended = {name: task for name, task in tasks.items() if task.done() and not task.cancelled()}
        found = [f"{name} ended: {task.exception()!r}" for name, task in ended.items()]
        stand_still = [layer for layer in self._layers() if layer._links and not layer._alarm.is_set]
        found += [f"the timers of {layer.address.name} stand still" for layer in stand_still]
        cut = [
            name for name, process in processes.items() if not self.member.network.is_up(process.address.incarnation)
        ]
        return found + [f"{name} has no link to the member" for name in cut]

    def states(self) -> dict[str, int]:
        """What there is of each kind, over all processes; frames must leave it as it was."""
        system, registry = self._system, self._registry
        leaders = [system.prefill(), system.decode()]
        return {
            "rooms": sum(len(leader.rooms) for leader in leaders) + len(system.router.guests),
            "pages in use": sum(counts.total - counts.free - counts.cached for counts in system.counts().values()),
            "links": sum(len(layer._links) for layer in self._layers()),
            "sessions": sum(len(layer._by_session) for layer in self._layers()),
            "registered ranks": len(registry.table.ranks),
            "rooms with a dp rank": len(registry.rooms),
            "instances that a router knows": len(system.router.fleet.addresses()),
        }

    def refused(self) -> Counter[str]:
        """All counters of actors and links, added up."""
        total: Counter[str] = Counter()
        for process in self._system.processes.values():
            total.update(process.actor.counts)
        for layer in self._layers():
            total.update(layer.counts)
        return total

    async def request(self) -> int:
        """One through the production front; the number of tokens that came."""
        network = self._system.network.open("front-0", LinkSettings())
        front = Front(
            network, SimBackend(self._system), lambda _: (), VirtualClock(), self._system.network.random,
            FrontInfo("scripted", vocab_size=50_000), FrontMetrics(),
        )  # fmt: skip
        await front.start()
        live, tokens = front.open((1, 2, 3), Sampling(max_tokens=4)), list[Token]()
        while not tokens or not tokens[-1].finish_reason:
            tokens += await live.take()
        front.close_request(live)
        await asyncio.sleep(SETTLE_S)
        await front.close()
        await asyncio.sleep(SETTLE_S)
        return len(tokens)

    # --- targets ---

    def targets(self) -> list[Target]:
        hellos = [Hello(1 << 62, HERE, incarnation, 1) for incarnation in self._incarnations]
        wires = tuple(map(encode_frame, (*FRAMES, *hellos)))
        return [
            Target("wires of a process", 0.06, wires, self._on_the_wires()),
            Target("messages of a member", 0.12, PAYLOADS, self._of_the_member()),
            Target("notifications at decode", 0.01, (NOTIFICATION,), self._notified),
            Target("the registry's routes", 0.02, BODIES, self._asked()),
        ]

    def _on_the_wires(self) -> Any:
        turns: Any = itertools.cycle(self._layers())
        return lambda data: next(turns).on_bytes(b"a path", data)

    def _of_the_member(self) -> Any:
        turns = itertools.cycle(self._incarnations)

        def take(data: bytes) -> None:
            try:
                whole = isinstance(decode(data), ORDERS)
            except BadFrame:
                whole = False
            if not whole:
                self.member.say(next(turns), data)

        return take

    def _notified(self, data: bytes) -> None:
        self._system.decode().notified("a stranger", data)

    def _asked(self) -> Any:
        """Half of them with the token. The sender's address is nobody's, so no rank is theirs to tell."""
        routes, turns = Routes(self._registry, TOKEN), itertools.cycle(itertools.product(METHODS, (TOKEN, "x")))

        async def take(data: bytes) -> None:
            (method, path), token = next(turns)
            query = {"prefill_dp_rank": data[:4].decode("latin-1"), "instance": data[4:9].decode("latin-1")}
            await routes.answer(Request(method, path, "203.0.113.1", query, f"Bearer {token}", data))

        return take

    @property
    def _registry(self) -> Registry:
        actor = self._system.processes["registry"].actor
        assert isinstance(actor, Registry)
        return actor

    def _layers(self) -> Sequence[LinkLayer]:
        layers = [process.actor.network for process in self._system.processes.values()]
        return [layer for layer in layers if isinstance(layer, LinkLayer)]
