"""The ranks of simulated instances: production classes with a scripted engine, which has a slice of the model each."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from kvferry.actors.actor import Actor
from kvferry.actors.decode.decode import Decode
from kvferry.actors.decode.follower import DecodeFollower
from kvferry.actors.links import LinkLayer
from kvferry.actors.parts import Parts
from kvferry.actors.ports import Resolve
from kvferry.actors.prefill.follower import PrefillFollower
from kvferry.actors.prefill.prefill import Prefill
from kvferry.actors.ranks.names import instance_of, process_names
from kvferry.actors.unified.leader import UnifiedLeader
from kvferry.engine.contract import EngineLimits
from kvferry.engine.scripted import ScriptedEngine, ScriptedTexts
from kvferry.protocol.rank import LEADER, Layout, RankInfo
from kvferry.sim.digests import SimDigests
from kvferry.sim.endpoint import SimEndpoint, SimInbox
from kvferry.sim.engine import SimEngine
from kvferry.sim.network import SimCarrier, SimClock
from kvferry.transfer.contract import Endpoint
from kvferry.transfer.fake import FakeFabric
from kvferry.transfer.faulty import with_faults
from kvferry.transfer.nowhere import Nowhere

if TYPE_CHECKING:
    from kvferry.sim.system import SimOptions


def rank_names(options: SimOptions, role: str, instance: str) -> list[str]:
    """All processes of an instance, its leader's first."""
    settings = getattr(options, role, None)
    return process_names(instance, getattr(settings, "tp", 1) * getattr(settings, "pp", 1))


def page_size_of(options: SimOptions, role: str) -> int:
    """Tokens of a page of that role's pools."""
    return int(getattr(options, role).page_size or options.page_size)


class RankMaker:
    """Puts the parts of one rank together. `resolve` finds processes by name."""

    def __init__(self, options: SimOptions, fabric: FakeFabric, resolve: Resolve) -> None:
        self._options, self._fabric, self._resolve = options, fabric, resolve

    def make(
        self, role: str, name: str, links: LinkLayer, clock: SimClock, carrier: SimCarrier
    ) -> tuple[Actor, Endpoint | None, SimEndpoint | None]:
        """The actor, its end of the data plane, and that as the actor has it."""
        options = self._options
        settings: Any = getattr(options, role)
        info = self._info(role, name, links)
        engine = self._engine(info, clock)
        inbox = SimInbox(carrier)
        endpoint = self._endpoint(role, engine, links.address.incarnation, inbox, clock)
        fabric = self._fabric  # its methods are asked for when they are used: checkers stand in front of them
        flip = lambda agent, region, offset: fabric.flip(agent, region, offset)  # noqa: E731
        dressed = SimEndpoint(endpoint, carrier, links.address.incarnation, flip)
        texts, mailbox, limits = ScriptedTexts(options.eos_token_ids), options.links.mailbox, options.clocks
        parts = Parts(
            links, clock, mailbox, self._resolve, engine, texts, dressed, info, limits, settings.max_rooms,
            engine.combine, self._digests(engine, clock),
        )  # fmt: skip
        if role == "unified":
            return UnifiedLeader(replace(parts, endpoint=Nowhere(), digests=None), options.unified), None, None
        if role == "prefill":
            prefill = Prefill(parts, options.prefill) if info.rank == LEADER else PrefillFollower(parts)
            return prefill, endpoint, dressed
        decode = Decode(parts, options.decode) if info.rank == LEADER else DecodeFollower(parts)
        inbox.deliver = decode.notified
        return decode, endpoint, dressed

    def _info(self, role: str, name: str, links: LinkLayer) -> RankInfo:
        options = self._options
        settings = getattr(options, role)
        instance, rank = instance_of(name)
        tp, pp = getattr(settings, "tp", 1), getattr(settings, "pp", 1)
        layout = Layout(
            "scripted",
            "1",
            "float32",
            page_size_of(options, role),
            layers=options.layers,
            kv_heads=2,
            head_dim=options.head_dim,
            policy=options.policy,
        )
        tokens = min(settings.pool_pages * layout.page_size, options.context_tokens)
        return RankInfo(
            instance, role, links.address, layout, tp_rank=rank % tp, tp_size=tp, pp_rank=rank // tp, pp_size=pp,
            stages=tuple(getattr(settings, "stages", ())), pages=settings.pool_pages, max_prompt_tokens=tokens,
            max_total_tokens=tokens,
        )  # fmt: skip

    def _engine(self, info: RankInfo, clock: SimClock) -> SimEngine:
        options = self._options
        limits = EngineLimits(info.pages, info.layout.page_size, options.context_tokens, vocab_size=50_000)
        return SimEngine(
            info.layout, limits, metadata_rows=64, sleep=clock.sleep, cost_s=options.cost_s, part=info.slice,
            incarnation=info.address.incarnation,
        )  # fmt: skip

    def _digests(self, engine: ScriptedEngine, clock: SimClock) -> SimDigests | None:
        options = self._options
        return SimDigests(engine.regions(), clock.sleep, options.digest_bytes_s) if options.checksum else None

    def _endpoint(
        self, role: str, engine: ScriptedEngine, incarnation: int, inbox: Callable[[str, bytes], None], clock: SimClock
    ) -> Endpoint:
        endpoint: Endpoint = self._fabric.endpoint(engine.regions(), incarnation, inbox, clock.sleep, clock.running)
        if role != "prefill":
            return endpoint
        loop, ends = asyncio.get_running_loop(), self._options.cancel_ends
        return with_faults(endpoint, self._options.faults, sleep=clock.sleep, loop=loop, cancel_ends=ends)
