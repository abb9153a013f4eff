"""What Ray offers for the same jobs: an actor per room, and Serve's own ingress around a trivial application."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import Any

import httpx
import ray
from control_room import RoomProcess
from control_station import Meter, process_counts_calls, process_meter
from ray import serve


@dataclass(frozen=True)
class ProcessPerRoom:
    """`rooms_per_s_per_core` by the CPU seconds of the rooms' own processes, without Ray's daemons."""

    rooms_per_s: float
    rooms_per_s_per_core: float
    bytes_per_room: float


async def process_per_room(rooms: int, at_once: int) -> ProcessPerRoom:
    remote, results, left = ray.remote(RoomProcess), [], rooms
    start_s = time.perf_counter()

    async def caller() -> None:
        nonlocal left
        while left > 0:
            left -= 1
            actor = remote.options(num_cpus=0).remote()
            results.append(await actor.hand_over.remote(left + 1))
            ray.kill(actor)

    await asyncio.gather(*(caller() for _ in range(at_once)))
    wall_s = time.perf_counter() - start_s
    cpu_s = sum(result["cpu_s"] for result in results)
    return ProcessPerRoom(rooms / wall_s, rooms / cpu_s, sum(r["private_bytes"] for r in results) / rooms)


class Trivial:
    """A raw ASGI application: an answer of two bytes, or as many server-sent events as the path says."""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        while scope["type"] == "lifespan":
            event = (await receive())["type"]
            await send({"type": f"{event}.complete"})
            if event == "lifespan.shutdown":
                return
        count = int(scope["path"].strip("/") or 0)
        kind = b"text/event-stream" if count else b"application/json"
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", kind)]})
        for _ in range(count):
            await send({"type": "http.response.body", "body": b'data: {"content":" token"}\n\n', "more_body": True})
        await send({"type": "http.response.body", "body": b"" if count else b"{}", "more_body": False})


@dataclass(frozen=True)
class TrivialServe:
    """CPU of Serve's proxy and of the replica together; the client's is not counted."""

    requests_per_s: float
    us_per_request: float
    ray_calls_per_request: float
    us_per_token: float


class _Front:
    """What `serve.ingress` wraps."""


async def trivial_serve(port: int, requests: int, streams: int, tokens: int) -> TrivialServe:
    serve.start(http_options={"host": "127.0.0.1", "port": port, "location": "HeadOnly"})
    deployment: Any = serve.deployment(serve.ingress(Trivial())(_Front), ray_actor_options={"num_cpus": 0})
    serve.run(deployment.bind(), name="trivial", route_prefix="/")
    actors = [ray.get_actor(row["name"], namespace="serve") for row in _serve_actors()]
    await asyncio.gather(*(actor.__ray_call__.remote(process_counts_calls) for actor in actors))

    async def spent() -> list[Meter]:
        return list(await asyncio.gather(*(actor.__ray_call__.remote(process_meter) for actor in actors)))

    limits = httpx.Limits(max_connections=streams)
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=120.0, limits=limits) as http:
        await asyncio.gather(*(http.get("/") for _ in range(streams)))  # connections, and what is loaded once
        before, start_s = await spent(), time.perf_counter()
        await _many(http, "/", requests, streams)
        wall_s, plain = time.perf_counter() - start_s, _sum(await spent(), before)
        before = await spent()
        await _many(http, f"/{tokens}", streams, streams)
        streamed = _sum(await spent(), before)
    serve.shutdown()
    # The meters themselves come by `__ray_call__`, and are no call of these processes.
    calls = sum(plain.calls.values()) / requests
    return TrivialServe(requests / wall_s, plain.cpu_s / requests * 1e6, calls, streamed.cpu_s / streams / tokens * 1e6)


async def _many(http: httpx.AsyncClient, path: str, count: int, at_once: int) -> None:
    left = count

    async def client() -> None:
        nonlocal left
        while left > 0:
            left -= 1
            (await http.get(path)).raise_for_status()

    await asyncio.gather(*(client() for _ in range(at_once)))


def _serve_actors() -> list[dict[str, str]]:
    """Serve's proxy and the replica, by name."""
    named: list[dict[str, str]] = ray.util.list_named_actors(all_namespaces=True)
    return [row for row in named if row["name"].startswith(("SERVE_PROXY_ACTOR", "SERVE_REPLICA"))]


def _sum(after: list[Meter], before: list[Meter]) -> Meter:
    rows = [a.since(b) for a, b in zip(after, before, strict=True)]
    calls: dict[str, int] = {}
    for row in rows:
        for name, count in row.calls.items():
            calls[name] = calls.get(name, 0) + count
    return Meter(sum(row.cpu_s for row in rows), 0.0, calls, 0, 0)
