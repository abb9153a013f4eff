"""From a role's name and the configuration to a running actor: where production parts are put together."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import msgspec
import ray

from kvferry.actors.actor import Actor
from kvferry.actors.bootstrap.registry import Registry
from kvferry.actors.bootstrap.room_ranks import RoomRanks
from kvferry.actors.decode.decode import Decode
from kvferry.actors.decode.follower import DecodeFollower
from kvferry.actors.inbox import Inbox
from kvferry.actors.parts import Parts
from kvferry.actors.ports import Network
from kvferry.actors.prefill.follower import PrefillFollower
from kvferry.actors.prefill.prefill import Prefill
from kvferry.actors.ranks.names import instance_of
from kvferry.actors.router.router import Router
from kvferry.actors.settings import DecodeSettings, PrefillSettings, UnifiedSettings
from kvferry.actors.unified.leader import UnifiedLeader
from kvferry.cluster.clock import SystemClock, SystemRandom
from kvferry.cluster.config import Config
from kvferry.cluster.meeting import Meeting, MeetingPoint, meet_leader
from kvferry.cluster.names import NAMESPACE, REGISTRY
from kvferry.cluster.network import check_reachable, open_network, own_host, secret_of
from kvferry.cluster.secret import load_secret, registry_token
from kvferry.engine.contract import Engine
from kvferry.engine.text import TokenizerTexts
from kvferry.protocol.address import Address
from kvferry.protocol.offer import Offer
from kvferry.protocol.rank import LEADER, RankInfo
from kvferry.transfer.backends import Site, make_endpoint
from kvferry.transfer.contract import Endpoint, OnNotify
from kvferry.transfer.digest import ThreadDigests
from kvferry.transfer.nowhere import Nowhere

if TYPE_CHECKING:
    from kvferry.engine.group import Group
    from kvferry.engine.loader import Loaded
    from kvferry.engine.torch_engine import TorchEngine

LOOKUP_TIMEOUT_S = 5.0


async def resolve(name: str) -> Address:
    """A named actor's address, through its Ray handle. Raises LookupError while it can't be had."""
    try:
        handle = ray.get_actor(name, namespace=NAMESPACE)
        address: Address = await asyncio.wait_for(handle.address.remote(), LOOKUP_TIMEOUT_S)
    except (ValueError, TimeoutError, ray.exceptions.RayError) as error:
        raise LookupError(f"{name}: {error}") from None
    return address


async def build_role(role: str, name: str, config: Config, point: MeetingPoint) -> Actor:
    """The actor of `role`, or of one rank of its, ready to run; models are loaded and memory registered off the loop.
    At an instance's leader, its followers are told through `point` where they find it.
    """
    if role != "registry":
        await _check_reachable(config)
    clock, random = SystemClock(), SystemRandom()
    secret = secret_of(config.links, config.cluster.secret_file)
    network = await open_network(name, config.cluster.bind_host, config.links, clock, random, secret)
    mailbox = config.links.mailbox
    if role == "registry":
        # What is wanted is the controller's to tell.
        return _registry(config, network)
    if role == "router":
        backend = f"{config.transfer.backend}/{config.transfer.transports}"
        return Router(network, clock, mailbox, random, resolve, config.router, config.clocks, backend)
    return await _rank(role, name, config, network, point)


def _registry(config: Config, network: Network) -> Registry:
    settings, follow = config.registry, config.router.dp_choice == "follow_bootstrap_room"
    parts: dict[str, Any] = {
        "one_host": config.transfer.one_host,
        "rooms": RoomRanks(settings.rooms, settings.room_s, follow),
    }
    clock, mailbox = SystemClock(), config.links.mailbox
    if not settings.http_port:
        return Registry(network, clock, mailbox, **parts)
    from kvferry.cluster.registry_http import HttpRegistry

    token = registry_token(load_secret(config.cluster.secret_file))
    return HttpRegistry(network, clock, mailbox, settings.http_host, settings.http_port, token, **parts)


async def _check_reachable(config: Config) -> None:
    """Raises ConfigError when the registry, and with it everything else, can't be reached from this host."""
    try:
        registry = await resolve(REGISTRY)
    except LookupError:
        return  # it is being started again; the links find out
    check_reachable(config.cluster.bind_host, registry)


async def _rank(role: str, name: str, config: Config, network: Network, point: MeetingPoint) -> Actor:
    clock = SystemClock()
    instance, rank = instance_of(name)
    settings: PrefillSettings | DecodeSettings | UnifiedSettings = getattr(config, role)
    loaded = await asyncio.to_thread(load_model, config, role)
    group, leader = None, None
    if config.ranks(role) > 1:
        leader, group = await _group(role, instance, rank, config, network.address, point)
    # A metadata row per room that can be held, those included that only wait for proof.
    sizes = (settings.pool_pages, settings.max_rooms, settings.threads)
    shared = config.transfer.shares_memory and role != "unified"
    engine = await asyncio.to_thread(make_engine, loaded, config, role, *sizes, group, shared)
    texts = TokenizerTexts(loaded.tokenizer, loaded.eos_token_ids)
    inbox = Inbox()
    endpoint: Endpoint = Nowhere()
    info = _rank_info(role, instance, rank, config, network.address, engine)
    if role != "unified":
        endpoint, offer = await _endpoint(config, engine, network, inbox, rank)
        info = msgspec.structs.replace(info, offer=offer)
    mailbox, clocks, rooms = config.links.mailbox, config.clocks, settings.max_rooms
    digests = ThreadDigests(engine.regions()) if config.transfer.checksum and role != "unified" else None
    parts = Parts(
        network, clock, mailbox, resolve, engine, texts, endpoint, info, clocks, rooms, digests=digests,
        leader=leader,
    )  # fmt: skip
    if role == "unified":
        return UnifiedLeader(parts, config.unified)
    if role == "prefill":
        return Prefill(parts, config.prefill) if rank == LEADER else PrefillFollower(parts)
    decode = Decode(parts, config.decode) if rank == LEADER else DecodeFollower(parts)
    inbox.deliver = decode.notified
    return decode


def load_model(config: Config, role: str = "unified") -> Loaded:
    """The configured model; blocks for seconds. Raises ConfigError, also if it can't be cut into the role's ranks."""
    # Imported where a model is loaded: torch and transformers are no concern of the registry and the routers, which
    # start in a quarter of the time without them.
    from kvferry.engine.adapter import check_split
    from kvferry.engine.loader import load

    loaded = load(config.model.model, config.model.dtype)
    check_split(loaded.config, *config.shape(role), config.stages(role), f"{role}.")
    return loaded


def make_engine(
    loaded: Loaded,
    config: Config,
    role: str,
    pages: int,
    rows: int,
    threads: int,
    group: Group | None = None,
    shared: bool = False,
) -> TorchEngine:
    """A role's engine with a pool of its own, which others may map if it is `shared`; `rows` metadata rows."""
    from kvferry.engine.torch_engine import TorchEngine

    return TorchEngine(
        loaded,
        pages=pages,
        page_size=config.page_size(role),
        metadata_rows=rows,
        threads=threads,
        now_s=SystemClock().now_s,
        shared=shared,
        group=group,
    )


def load_engine(config: Config, role: str, pages: int, rows: int, threads: int) -> tuple[Loaded, TorchEngine]:
    """The configured model, whole, and an engine with that role's pages. Blocks for seconds."""
    loaded = load_model(config)
    return loaded, make_engine(loaded, config, role, pages, rows, threads)


async def _group(
    role: str, instance: str, rank: int, config: Config, own: Address, point: MeetingPoint
) -> tuple[Address, Group]:
    """The instance's leader, and what ties this rank's engine to the others'; waits for all of them."""
    from kvferry.engine.group import Group, Place, join_store, open_store

    if rank == LEADER:
        store, port = await asyncio.to_thread(open_store)
        meeting = Meeting(own, port)
        point.open(meeting)
    else:
        meeting = await meet_leader(instance, rank, own.incarnation, SystemClock())
        store = await asyncio.to_thread(join_store, meeting.port)
    token, place = f"{meeting.leader.incarnation:016x}", Place.of(rank, *config.shape(role), config.stages(role))
    return meeting.leader, await asyncio.to_thread(Group, store, token, place, config.clocks.no_progress_s)


async def _endpoint(
    config: Config, engine: TorchEngine, network: Network, inbox: OnNotify, rank: int
) -> tuple[Endpoint, Offer]:
    clock = SystemClock()
    site = Site(
        host=own_host(config.cluster.bind_host),
        kernel=network.address.host,
        regions=engine.regions(),
        areas=engine.areas(),
        incarnation=network.address.incarnation,
        on_notify=inbox,
        loop=asyncio.get_running_loop(),
        now_s=clock.now_s,
        sleep=clock.sleep,
        device=rank,  # nothing else tells the ranks of a host apart while the engine has no device of its own
    )
    return await asyncio.to_thread(make_endpoint, config.transfer, site)


def _rank_info(role: str, instance: str, rank: int, config: Config, address: Address, engine: Engine) -> RankInfo:
    pages, tokens = engine.limits.pages, engine.limits.tokens
    tp, pp = config.shape(role)
    return RankInfo(
        instance=instance,
        role=role,
        address=address,
        layout=msgspec.structs.replace(engine.layout, policy=config.transfer.policy),
        tp_rank=rank % tp,
        tp_size=tp,
        pp_rank=rank // tp,
        pp_size=pp,
        stages=config.stages(role),
        pages=pages,
        max_prompt_tokens=tokens,
        max_total_tokens=tokens,
    )
