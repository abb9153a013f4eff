"""What control costs: rooms, messages and tokens, without a model and without bytes; and beside them Ray's own ways.

The actors, rooms, links and the front are the production classes, hosted by Ray on this machine; the engine computes
nothing and the data plane copies within one process. CPU is that of whole processes, all their threads included.

* rooms per second per core: rooms from the front's call (made within the router's process) to the last release, over
  the CPU seconds of the process that runs the router, its rooms and their links. Leaders run in another process.
* Ray calls and messages per request: counted in the processes of the front, the router and the leaders, for streaming
  chats through the production front, router, prefill and decode. Calls that the clock makes, whatever the load (the
  front asks for the roster once a second), are listed apart; a served front also asks its controller once a second.
* us of CPU per token: decode's outbox and links in one process, the front with its chat route in another; from the
  token's entry into the outbox to the bytes that the ingress would send, at one message per step and front.
* bytes per parked room: memory of the router's process per room that waits for admission, its open call included.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections import Counter
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from control_front import RemoteFront, RemoteGenerators, RemotePump
from control_peers import ProcessPerRoom, TrivialServe, process_per_room, trivial_serve
from control_station import Meter, RemoteStation
from local_ray import local_ray
from report import arguments, finish, table

from kvferry.cluster.names import NAMESPACE
from kvferry.protocol.address import Address

LEADERS = ["registry", "prefill", "decode", "sink"]
PARKERS = ["registry", "parked-prefill", "parked-decode", "sink"]
STREAMS = 32
STEP_S = 0.005
#: Calls that come with time and not with requests.
BY_THE_CLOCK = ("roster",)


@dataclass(frozen=True)
class Rooms:
    """`each` leaders' CPU seconds per room too."""

    per_s_per_core: float
    us: float
    us_leaders: float
    messages: float


@dataclass(frozen=True)
class Requests:
    """Per request."""

    ray_calls: float
    calls: dict[str, int]
    by_the_clock: dict[str, int]
    messages: float
    frames: float
    us: float


@dataclass(frozen=True)
class Tokens:
    """us of CPU per token, at the sender and at the front."""

    sender_us: float
    front_us: float

    @property
    def us(self) -> float:
        return self.sender_us + self.front_us


class Stage:
    """Named actors of one part of the run, ended with it."""

    def __init__(self) -> None:
        self._actors: dict[str, Any] = {}

    async def __aenter__(self) -> Stage:
        return self

    async def __aexit__(self, *_: object) -> None:
        for actor in self._actors.values():
            ray.kill(actor)
        while self._actors.keys() & {row["name"] for row in ray.util.list_named_actors(all_namespaces=True)}:
            await asyncio.sleep(0.05)

    async def put(self, remote: Any, name: str, *args: Any) -> Any:
        """An actor that has started."""
        options = {"name": name, "namespace": NAMESPACE, "num_cpus": 0, "max_concurrency": 1 << 16}
        actor = self._actors[name] = remote.options(**options).remote(*args)
        await actor.start.remote()
        return actor

    async def system(self, carrier: str, roles: list[str]) -> tuple[Any, Any, Address]:
        """The leaders' station, a router's that knows them, and the address of the last of `roles`."""
        leaders = await self.put(RemoteStation, "registry", carrier, roles)
        router = await self.put(RemoteStation, "router-0", carrier, ["router"])
        await router.ready.remote()
        return leaders, router, (await leaders.addresses.remote())[-1]


async def rooms(leaders: Any, router: Any, sink: Address, count: int, at_once: int) -> Rooms:
    await router.hand_over.remote(max(1, count // 10), at_once, sink)
    before = await leaders.meter.remote()
    spent: Meter = await router.hand_over.remote(count, at_once, sink)
    others: Meter = (await leaders.meter.remote()).since(before)
    messages = (spent.messages + others.messages) / count
    return Rooms(count / spent.cpu_s, spent.cpu_s / count * 1e6, others.cpu_s / count * 1e6, messages)


async def requests(leaders: Any, router: Any, front: Any, count: int, at_once: int, max_tokens: int) -> Requests:
    await front.ask.remote(at_once, at_once, max_tokens)  # links come up
    before = [await leaders.meter.remote(), await router.meter.remote()]
    spent = [await front.ask.remote(count, at_once, max_tokens)]
    after = [await leaders.meter.remote(), await router.meter.remote()]
    spent += [b.since(a) for a, b in zip(before, after, strict=True)]
    calls: Counter[str] = sum((Counter(meter.calls) for meter in spent), Counter())
    timed = {name: calls.pop(name) for name in BY_THE_CLOCK if name in calls}
    return Requests(
        sum(calls.values()) / count, dict(calls), timed, sum(meter.messages for meter in spent) / count,
        sum(meter.frames for meter in spent) / count, sum(meter.cpu_s for meter in spent) / count * 1e6,
    )  # fmt: skip


async def tokens(pump: Any, front: Any, streams: int, count: int) -> Tokens:
    for steps in (max(2, count // 10), count):
        sent, received = await asyncio.gather(
            pump.run.remote(streams, steps, STEP_S), front.ask.remote(streams, streams, steps)
        )
    return Tokens(sent.cpu_s / streams / count * 1e6, received.cpu_s / streams / count * 1e6)


async def generators(source: Any, front: Any, streams: int, count: int) -> Tokens:
    await front.consume.remote(source, streams, 2)
    before = await source.meter.remote()
    received: Meter = await front.consume.remote(source, streams, count)
    sent: Meter = (await source.meter.remote()).since(before)
    return Tokens(sent.cpu_s / streams / count * 1e6, received.cpu_s / streams / count * 1e6)


@dataclass
class Results:
    rooms: Rooms
    rooms_alone: Rooms
    rooms_ray: Rooms
    requests: Requests
    requests_ray: Requests
    tokens: Tokens
    tokens_ray: Tokens
    tokens_generators: Tokens
    bytes_per_parked_room: float
    process: ProcessPerRoom
    serve: TrivialServe


def say(part: str) -> None:
    """A run takes minutes: which part it is at."""
    print(f"control: {part}", file=sys.stderr, flush=True)


async def measure(scale: float, port: int) -> Results:
    """`scale` 1 is the full run; less makes every count smaller."""

    def some(count: int, least: int) -> int:
        return max(least, int(count * scale))

    found: dict[str, Any] = {}
    say("rooms and requests over ZMQ")
    async with Stage() as stage:
        system = await stage.system("zmq", LEADERS)
        found["rooms"] = await rooms(*system, some(4000, 20), 64)
        found["rooms_alone"] = await rooms(*system, some(500, 5), 1)
        front = await stage.put(RemoteFront, "front-0", "zmq")
        found["requests"] = await requests(*system[:2], front, some(640, STREAMS), STREAMS, 8)
    say("rooms and requests over Ray calls")
    async with Stage() as stage:
        system = await stage.system("ray", LEADERS)
        found["rooms_ray"] = await rooms(*system, some(2000, 20), 64)
        front = await stage.put(RemoteFront, "front-0", "ray")
        found["requests_ray"] = await requests(*system[:2], front, some(320, STREAMS), STREAMS, 8)
    for carrier, name, count in (("zmq", "tokens", 600), ("ray", "tokens_ray", 300)):
        say(f"tokens over {carrier}")
        async with Stage() as stage:
            pump = await stage.put(RemotePump, "decode-0", carrier)
            front = await stage.put(RemoteFront, "front-0", carrier, pump)
            found[name] = await tokens(pump, front, STREAMS, some(count, 4))
    say("tokens over Ray streaming generators")
    async with Stage() as stage:
        source, front = await stage.put(RemoteGenerators, "decode-0"), await stage.put(RemoteFront, "front-0", "zmq")
        found["tokens_generators"] = await generators(source, front, STREAMS, some(60, 3))
    say("rooms that wait")
    async with Stage() as stage:
        _, router, sink = await stage.system("zmq", PARKERS)
        found["bytes_per_parked_room"] = await router.park.remote(some(6000, 50), sink)
    say("a Ray actor per room")
    found["process"] = await process_per_room(some(8, 1), 2)
    say("Serve with a trivial application")
    found["serve"] = await trivial_serve(port, some(600, STREAMS), STREAMS, some(100, 3))
    return Results(**found)


def show(found: Results) -> None:
    def room_row(name: str, row: Rooms) -> tuple[str, ...]:
        return name, f"{row.per_s_per_core:,.0f}", f"{row.us:,.0f}", f"{row.us_leaders:,.0f}", f"{row.messages:.1f}"

    process, alone = found.process, found.process.rooms_per_s_per_core
    table(
        "Rooms",
        ("", "rooms/s per core", "us CPU, router's process", "us CPU, leaders", "link messages"),
        [
            room_row("KVFerry, 64 at once", found.rooms),
            room_row("KVFerry, one at a time", found.rooms_alone),
            room_row("the same, Ray calls as the carrier", found.rooms_ray),
            ("a Ray actor per room", f"{alone:,.1f}", f"{1e6 / alone:,.0f}",
             "-", "-"),
        ],
    )  # fmt: skip
    table(
        "A room that waits",
        ("", "bytes"),
        [
            ("KVFerry", f"{found.bytes_per_parked_room:,.0f}"),
            ("a Ray actor per room", f"{process.bytes_per_room:,.0f}"),
        ],
    )

    def request_row(name: str, row: Requests) -> tuple[str, ...]:
        listed = ", ".join(f"{method} {count}" for method, count in sorted(row.by_the_clock.items())) or "none"
        return name, f"{row.ray_calls:.2f}", f"{row.messages:.1f}", f"{row.frames:.1f}", f"{row.us:,.0f}", listed

    table(
        "A request (8 tokens, 32 at once)",
        ("", "Ray calls", "link messages", "frames", "us CPU, all processes", "Ray calls by the clock, in all"),
        [
            request_row("KVFerry", found.requests),
            request_row("the same, Ray calls as the carrier", found.requests_ray),
            ("Serve with a trivial application", f"{found.serve.ray_calls_per_request:.2f}", "-", "-",
             f"{found.serve.us_per_request:,.0f}", "-"),
        ],
    )  # fmt: skip

    def token_row(name: str, row: Tokens) -> tuple[str, ...]:
        return name, f"{row.us:.1f}", f"{row.sender_us:.1f}", f"{row.front_us:.1f}"

    table(
        f"A token, {STREAMS} streams",
        ("", "us CPU", "sender", "front"),
        [
            token_row("KVFerry", found.tokens),
            token_row("the same, Ray calls as the carrier", found.tokens_ray),
            token_row("a Ray streaming generator per request", found.tokens_generators),
            ("Serve with a trivial application (ingress and replica)", f"{found.serve.us_per_token:.1f}", "-", "-"),
        ],
    )


def figures(found: Results) -> dict[str, object]:
    return {
        "rooms_per_s_per_core": round(found.rooms.per_s_per_core),
        "ray_calls_per_request": round(found.requests.ray_calls, 3),
        "us_per_token_32_streams": round(found.tokens.us, 2),
        "bytes_per_parked_room": round(found.bytes_per_parked_room),
        "us_per_room": round(found.rooms.us, 1),
        "us_per_room_leaders": round(found.rooms.us_leaders, 1),
        "messages_per_room": round(found.rooms.messages, 2),
        "rooms_per_s_per_core_one_at_a_time": round(found.rooms_alone.per_s_per_core),
        "rooms_per_s_per_core_ray_carrier": round(found.rooms_ray.per_s_per_core),
        "rooms_per_s_per_core_ray_actor_each": round(found.process.rooms_per_s_per_core, 2),
        "rooms_per_s_ray_actor_each": round(found.process.rooms_per_s, 2),
        "bytes_per_room_ray_actor_each": round(found.process.bytes_per_room),
        "ray_calls": found.requests.calls,
        "ray_calls_by_the_clock": found.requests.by_the_clock,
        "ray_calls_per_request_ray_carrier": round(found.requests_ray.ray_calls, 2),
        "ray_calls_per_request_trivial_serve": round(found.serve.ray_calls_per_request, 2),
        "messages_per_request": round(found.requests.messages, 2),
        "frames_per_request": round(found.requests.frames, 2),
        "us_per_request": round(found.requests.us),
        "us_per_request_trivial_serve": round(found.serve.us_per_request),
        "requests_per_s_trivial_serve": round(found.serve.requests_per_s, 1),
        "us_per_token_sender": round(found.tokens.sender_us, 2),
        "us_per_token_front": round(found.tokens.front_us, 2),
        "us_per_token_32_streams_ray_carrier": round(found.tokens_ray.us, 2),
        "us_per_token_32_streams_ray_generator": round(found.tokens_generators.us, 1),
        "us_per_token_32_streams_trivial_serve": round(found.serve.us_per_token, 1),
    }


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--scale", type=float, default=1.0, help="of the counts: 0.01 only shows that all of it runs")
    parser.add_argument("--port", type=int, default=8765, help="for Serve's trivial application")
    options = parser.parse_args()
    with redirect_stdout(sys.stderr):  # what Ray says of its processes is no figure
        os.environ.setdefault("RAY_SERVE_LOG_TO_STDERR", "0")
        # Serve's processes are not this driver's, and import what stands beside this script all the same.
        os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
        with local_ray():
            found = asyncio.run(measure(options.scale, options.port))
    show(found)
    finish(options.json, figures(found))


if __name__ == "__main__":
    main()
