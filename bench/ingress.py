"""What stands in front of the front: Ray Serve's own proxy and HAProxy, one after the other on the same machine.

Requests per second of routes that do next to nothing, and what a streamed chat pays before its first token: the time
to it at the client, less the time to it that the front itself measures. The load generator runs on the same cores.

    python bench/ingress.py [--seconds 3] [--chats 24] [--json]
"""

from __future__ import annotations

import asyncio
import json
import time

from report import arguments, finish, table
from serving import Served

from kvferry.engine.packaged import PACKAGED_MODEL

HOST, CONCURRENT = "127.0.0.1", 16
FIRST_TOKEN = "kvferry_time_to_first_token_seconds"


class Connection:
    """One kept-alive HTTP/1.1 connection, with as little of a client as will do."""

    def __init__(self, port: int) -> None:
        self._port = port

    async def __aenter__(self) -> Connection:
        self._reader, self._writer = await asyncio.open_connection(HOST, self._port)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._writer.close()

    async def get(self, path: str) -> bytes:
        self._writer.write(f"GET {path} HTTP/1.1\r\nHost: {HOST}\r\n\r\n".encode())
        head = await self._reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200"), head
        for line in head.lower().split(b"\r\n"):
            if line.startswith(b"content-length:"):
                return await self._reader.readexactly(int(line.split(b":")[1]))
        parts = []
        while size := int(await self._reader.readline(), 16):
            parts.append(await self._reader.readexactly(size))
            await self._reader.readline()
        await self._reader.readline()
        return b"".join(parts)

    async def first_token_s(self, body: bytes) -> float:
        """Of a streamed chat, which is read to its end."""
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {HOST}\r\nContent-Type: application/json\r\n"
        began_s = time.perf_counter()
        self._writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        await self._reader.readuntil(b'"content":"')
        first_s = time.perf_counter() - began_s
        await self._reader.readuntil(b"data: [DONE]")
        await self._reader.readuntil(b"0\r\n\r\n")
        return first_s


async def rate(port: int, path: str, concurrent: int, seconds: float) -> float:
    """Requests per second over `concurrent` connections."""
    end_s = time.perf_counter() + seconds

    async def ask() -> int:
        count = 0
        async with Connection(port) as connection:
            while time.perf_counter() < end_s:
                await connection.get(path)
                count += 1
        return count

    return sum(await asyncio.gather(*(ask() for _ in range(concurrent)))) / seconds


async def first_token_overhead_ms(port: int, chats: int) -> float:
    """Mean over `chats` streamed answers of 8 tokens, one after the other."""
    message = {"role": "user", "content": "What is the capital of France?"}
    options = {"model": PACKAGED_MODEL, "stream": True, "max_tokens": 8, "temperature": 0}
    body = json.dumps(options | {"messages": [message]})
    async with Connection(port) as connection:
        await connection.first_token_s(body.encode())
        before = await _front_sum_s(connection)
        spent_s = [await connection.first_token_s(body.encode()) for _ in range(chats)]
        inside_s = await _front_sum_s(connection) - before
    return (sum(spent_s) - inside_s) / chats * 1000


async def _front_sum_s(connection: Connection) -> float:
    lines = (await connection.get("/metrics")).decode().splitlines()
    return float(next(line.split()[1] for line in lines if line.startswith(f"{FIRST_TOKEN}_sum")))


async def measure(port: int, seconds: float, chats: int) -> dict[str, float]:
    await rate(port, "/health", CONCURRENT, 1.0)  # warm
    return {
        "health_per_s_1": await rate(port, "/health", 1, seconds),
        f"health_per_s_{CONCURRENT}": await rate(port, "/health", CONCURRENT, seconds),
        "models_per_s_1": await rate(port, "/v1/models", 1, seconds),
        f"models_per_s_{CONCURRENT}": await rate(port, "/v1/models", CONCURRENT, seconds),
        "first_token_overhead_ms": await first_token_overhead_ms(port, chats),
    }


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--seconds", type=float, default=3.0, help="of each rate")
    parser.add_argument("--chats", type=int, default=24)
    args = parser.parse_args()
    found = {}
    for ingress in ("serve", "haproxy"):
        with Served({"cluster": {"ingress": ingress}}) as server:
            found[ingress] = asyncio.run(measure(server.port, args.seconds, args.chats))
    serve, haproxy = found["serve"], found["haproxy"]
    ratios = {name: haproxy[name] / serve[name] for name in serve}
    rows = [[name, f"{serve[name]:.2f}", f"{haproxy[name]:.2f}", f"{ratios[name]:.2f}"] for name in serve]
    table("ingress", ["", "serve", "haproxy", "haproxy / serve"], rows)
    finish(args.json, {f"{name}_haproxy_vs_serve": round(ratio, 3) for name, ratio in ratios.items()})


if __name__ == "__main__":
    main()
