"""What encrypting the links costs: the ZMQ carrier with and without CURVE, between two processes of this machine.

* round trip: one frame there and back, one at a time (median).
* frames per second: a stream of small frames there and back, many at once; and the CPU of one end for each.
* handshake: from a dial to the first frame that comes back (median).
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

from report import arguments, finish, table

from kvferry.cluster.secret import Secret
from kvferry.cluster.zmq_carrier import ZmqCarrier
from kvferry.cluster.zmq_curve import curve_keys

KEYS = curve_keys(Secret(b"curve bench: both of its ends..."))
SMALL, LARGE = bytes(100), bytes(64 * 1024)
IN_FLIGHT = 256

#: The other process: says each frame again.
ECHO = """
import asyncio, sys
sys.path[:0] = {path!r}
from curve import Ends, opened

async def main():
    ends = Ends()
    carrier = opened({curve!r}, ends)
    ends.take = carrier.send
    print(carrier.endpoint, flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await carrier.close()

asyncio.run(main())
"""


class Ends:
    """A CarrierHandler whose `take` may be changed."""

    def __init__(self) -> None:
        self.take: Callable[[bytes, bytes], object] = lambda path, data: None

    def on_bytes(self, path: bytes, data: bytes) -> None:
        self.take(path, data)

    def on_path_down(self, path: bytes, refused: bool) -> None:
        """The other end has what it came for."""


def opened(curve: bool, ends: Ends) -> ZmqCarrier:
    carrier = ZmqCarrier("127.0.0.1", keys=KEYS if curve else None)
    carrier.start(ends)
    return carrier


async def round_trips_s(carrier: ZmqCarrier, ends: Ends, path: bytes, data: bytes, count: int) -> list[float]:
    found, came = [], asyncio.Event()
    ends.take = lambda *_: came.set()
    for _ in range(count):
        came.clear()
        begun_s = time.perf_counter()
        carrier.send(path, data)
        await came.wait()
        found.append(time.perf_counter() - begun_s)
    return found


async def stream(carrier: ZmqCarrier, ends: Ends, path: bytes, data: bytes, count: int) -> tuple[float, float]:
    """There and back, each frame that comes back lets the next one go: frames per second, and us of this process's CPU
    per frame, all threads included."""
    left, back, done = count - IN_FLIGHT, 0, asyncio.Event()

    def take(*_: Any) -> None:
        nonlocal left, back
        back += 1
        if left > 0:
            left -= 1
            carrier.send(path, data)
        if back == count:
            done.set()

    ends.take = take
    begun_s, begun_cpu_s = time.perf_counter(), time.process_time()
    for _ in range(IN_FLIGHT):
        carrier.send(path, data)
    await done.wait()
    return count / (time.perf_counter() - begun_s), (time.process_time() - begun_cpu_s) / count * 1e6


async def handshakes_s(endpoint: str, curve: bool, count: int) -> list[float]:
    found = []
    for _ in range(count):
        ends, came = Ends(), asyncio.Event()
        carrier = opened(curve, ends)
        ends.take = lambda *_, came=came: came.set()  # type: ignore[misc]
        begun_s = time.perf_counter()
        carrier.send(carrier.connect(endpoint), SMALL)
        await came.wait()
        found.append(time.perf_counter() - begun_s)
        await carrier.close()
    return found


async def measured(curve: bool, rounds: int) -> dict[str, float]:
    code = ECHO.format(path=sys.path, curve=curve)
    pipes = {"stdin": asyncio.subprocess.PIPE, "stdout": asyncio.subprocess.PIPE}
    process: Any = await asyncio.create_subprocess_exec(sys.executable, "-c", code, **pipes)
    endpoint = (await process.stdout.readline()).decode().strip()
    ends = Ends()
    carrier = opened(curve, ends)
    path = carrier.connect(endpoint)
    await round_trips_s(carrier, ends, path, SMALL, 200)
    rate, cpu_us = await stream(carrier, ends, path, SMALL, 100 * rounds)
    found = {
        "round_trip_us": 1e6 * statistics.median(await round_trips_s(carrier, ends, path, SMALL, 10 * rounds)),
        "round_trip_64_kib_us": 1e6 * statistics.median(await round_trips_s(carrier, ends, path, LARGE, rounds)),
        "frames_per_s": rate,
        "cpu_us_per_frame": cpu_us,
        "handshake_ms": 1e3 * statistics.median(await handshakes_s(endpoint, curve, max(3, rounds // 10))),
    }
    await carrier.close()
    process.stdin.close()
    await process.wait()
    return found


async def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--rounds", type=int, default=300, help="how much of each (%(default)s)")
    options = parser.parse_args()
    runs = [(await measured(False, options.rounds), await measured(True, options.rounds)) for _ in range(3)]
    plain, curve = ({key: statistics.median(run[at][key] for run in runs) for key in runs[0][0]} for at in (0, 1))
    rows = [[key, f"{plain[key]:.4g}", f"{curve[key]:.4g}", f"{curve[key] / plain[key]:.2f}"] for key in plain]
    table("the ZMQ carrier, medians of three runs", ("", "plain", "CURVE", "ratio"), rows)
    finish(options.json, {"plain": plain, "curve": curve, "ratio": {key: curve[key] / plain[key] for key in plain}})
    return 0


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
