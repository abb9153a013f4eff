"""The second carrier of links: frames travel as arguments of Ray calls, and the awaited refs tell when a peer is gone.

A call runs `deliver` in the peer's process through `__ray_call__`, which every Ray actor has. So whoever has links need
only be a named actor: a Host, and a Serve replica too, which has no methods of ours and can't be given any. An actor of
its own that holds the mail of a replica would be one more process, and one more hop for every frame.

A path has one call on its way at a time, with every frame that waits for it. What comes during a call goes with the
next, so frames keep their order, a slow peer is called less often, and what it can't take fills our queue, which is
bounded. An endpoint names the actor and the carrier's own number: an actor that has been started again under the same
name has another carrier and takes nothing that was meant for the old one.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.exceptions import ActorDiedError, RayError

from kvferry.actors.carrier import CarrierHandler, Path
from kvferry.cluster.names import NAMESPACE

log = logging.getLogger("kvferry.links")

SCHEME = "ray://"
#: Where an actor of ours can be named: by us, or by Serve.
NAMESPACES = (NAMESPACE, "serve")
#: Frames that wait for a path's call; more are dropped, and their sessions send them again.
HIGH_WATER_FRAMES = 4096
#: What one call carries. Ray keeps arguments below 100 KB in the call itself; a single larger frame goes alone.
CALL_FRAMES, CALL_BYTES = 256, 64 * 1024
#: Calls whose frames the loop has not taken yet; the frames of further ones are dropped.
INBOX_CALLS = 64
#: How long a path that is given up still sends, and how long `close` waits for last words.
LAST_WORDS_S = 0.25

#: Begins the names of dialled paths; accepted ones begin with the dialler's endpoint.
_DIALLED = b"\0dialled "

#: The open carriers of this process, by number.
_carriers: dict[int, RayCarrier] = {}


def deliver(_actor: object, number: int, dialler: str, dial: int, frames: tuple[bytes, ...], last: bool) -> bool:
    """Runs in the receiving process. False: there is no such carrier or path here, and there never will be again.

    `dialler` is the endpoint of who dialled, or empty for frames that come back to it; `dial` is its number of the
    path; after the `last` frames the sender gives the path up.
    """
    carrier = _carriers.get(number)
    return carrier is not None and carrier.take(dialler, dial, frames, last)


@dataclass(frozen=True)
class _Endpoint:
    namespace: str
    actor: str
    number: int

    def __str__(self) -> str:
        return f"{SCHEME}{self.namespace}/{self.actor}/{self.number:016x}"

    @classmethod
    def parse(cls, text: str) -> _Endpoint:
        """Raises LookupError: nobody can be there."""
        namespace, _, rest = text.removeprefix(SCHEME).partition("/")
        actor, _, number = rest.rpartition("/")
        if not text.startswith(SCHEME) or not actor or not re.fullmatch("[0-9a-f]{16}", number):
            raise LookupError(f"{text!r} is no endpoint of this carrier")
        return cls(namespace, actor, int(number, 16))


@dataclass(eq=False)
class _Way:
    """Our direction of a path. `dialler` and `dial` are what `deliver` is told of it."""

    path: Path
    peer: str
    dialler: str
    dial: int
    queue: deque[bytes] = field(default_factory=deque)
    task: asyncio.Task[None] | None = None
    handle: Any = None
    up: bool = False  # the peer has taken a call
    leaving: bool = False  # given up: the frames that wait are the last

    def next_frames(self) -> tuple[bytes, ...]:
        frames: list[bytes] = []
        size_bytes = 0
        while self.queue and len(frames) < CALL_FRAMES:
            size_bytes += len(self.queue[0])
            if frames and size_bytes > CALL_BYTES:
                break
            frames.append(self.queue.popleft())
        return tuple(frames)


class RayCarrier:
    """`kvferry.actors.carrier.Carrier` by Ray calls. `counts` tells how many calls were made and what was dropped.

    Made inside a named actor, on the loop that will use it; `number` (64 random bits) must not be used twice. Raises
    RuntimeError in a process that nobody can call.
    """

    def __init__(self, number: int) -> None:
        self.counts: Counter[str] = Counter()
        self._endpoint = str(_Endpoint(*_own_name(), number))
        self._number = number
        self._loop = asyncio.get_running_loop()
        self._handler: CarrierHandler | None = None
        self._ways: dict[Path, _Way] = {}
        self._leaving: set[_Way] = set()
        self._inbox: deque[tuple[str, int, tuple[bytes, ...], bool]] = deque()
        self._dials = 0
        self._closed = False
        _carriers[number] = self

    @property
    def endpoint(self) -> str:
        return self._endpoint

    def start(self, handler: CarrierHandler) -> None:
        self._handler = handler
        self._loop.call_soon(self._drain)

    def connect(self, endpoint: str) -> Path:
        self._dials += 1
        path: Path = _DIALLED + b"%d" % self._dials
        self._ways[path] = _Way(path, endpoint, self._endpoint, self._dials)
        self._run(self._ways[path])  # a call without frames, so that a refusal shows
        return path

    def send(self, path: Path, data: bytes) -> None:
        way = self._ways.get(path)
        if way is None and not self._closed:
            way = self._accepted(path)
        if way is None or self._closed:
            self.counts["dropped_down"] += 1
        elif len(way.queue) >= HIGH_WATER_FRAMES:
            self.counts["dropped_full"] += 1
        else:
            way.queue.append(data)
            self._run(way)

    def disconnect(self, path: Path) -> None:
        way = self._ways.pop(path, None)
        if way is not None:
            self._leave(way, tell=way.path.startswith(_DIALLED))

    async def close(self) -> None:
        """Give the last words a moment, then call no more. Idempotent."""
        if self._closed:
            return
        self._closed = True
        _carriers.pop(self._number, None)
        for way in self._ways.values():
            self._leave(way, tell=True)
        self._ways.clear()
        tasks = [way.task for way in self._leaving if way.task is not None]
        if tasks:
            await asyncio.wait(tasks, timeout=LAST_WORDS_S)
        for task in tasks:
            task.cancel()

    # --- receiving -------------------------------------------------------------------------------------------

    def take(self, dialler: str, dial: int, frames: tuple[bytes, ...], last: bool) -> bool:
        """On the loop that runs Ray's calls, which in a Serve replica is another thread's than ours."""
        if self._closed or (not dialler and _dialled(dial) not in self._ways):
            return False
        if len(self._inbox) < INBOX_CALLS:
            self._inbox.append((dialler, dial, frames, last))
            self._loop.call_soon_threadsafe(self._drain)
        else:
            self.counts["inbox_full"] += 1  # a key that no other thread writes
        return True

    def _drain(self) -> None:
        handler = self._handler
        while self._inbox and handler is not None:
            dialler, dial, frames, last = self._inbox.popleft()
            path = _accepted_path(dialler, dial) if dialler else _dialled(dial)
            for data in frames:
                if not self._closed and (dialler or path in self._ways):
                    handler.on_bytes(path, data)
            way = self._ways.pop(path, None) if last else None
            if way is not None and not self._closed:
                _stop(way)
                handler.on_path_down(path, False)

    # --- sending ---------------------------------------------------------------------------------------------

    def _accepted(self, path: Path) -> _Way | None:
        """Our direction of a path that somebody else has dialled, made when we first use it."""
        if path.startswith(_DIALLED):
            return None
        dialler, _, dial = path.rpartition(b" ")
        way = self._ways[path] = _Way(path, dialler.decode(), "", int(dial))
        return way

    def _run(self, way: _Way) -> None:
        if way.task is None:
            way.task = self._loop.create_task(self._pump(way), name=f"calls to {way.peer}")

    async def _pump(self, way: _Way) -> None:
        """Calls, one after another, until nothing waits."""
        refused = False
        try:
            while await self._call(way):
                if not way.queue and not way.leaving:
                    way.task = None
                    return
            refused = not way.up
        except (LookupError, ActorDiedError):
            refused = not way.up
        except RayError as error:
            # The actor may come back, or it can't run `deliver`: the path is down, and nobody has refused it.
            log.debug("call to %s failed: %s", way.peer, error)
            self.counts["calls_failed"] += 1
        finally:
            self._leaving.discard(way)
        if self._ways.get(way.path) is way:
            del self._ways[way.path]
            if self._handler is not None and not self._closed:
                self._handler.on_path_down(way.path, refused)

    async def _call(self, way: _Way) -> bool:
        """One call with what waits. True when the peer has taken it and the path goes on."""
        peer = _Endpoint.parse(way.peer)
        if way.handle is None:
            way.handle = await asyncio.to_thread(_find, peer)
        frames = way.next_frames()
        last = way.leaving and not way.queue
        self.counts["calls"] += 1
        taken: bool = await way.handle.__ray_call__.remote(deliver, peer.number, way.dialler, way.dial, frames, last)
        way.up = way.up or taken
        return taken and not last

    def _leave(self, way: _Way, tell: bool) -> None:
        """Send what waits, and, to `tell`, that it was the last: also to a peer whose first call is on its way."""
        way.leaving = tell
        self._leaving.add(way)
        if tell or way.queue:
            self._run(way)
        if way.task is None:
            self._leaving.discard(way)
        else:
            self._loop.call_later(LAST_WORDS_S, _stop, way)


def _stop(way: _Way) -> None:
    if way.task is not None:
        way.task.cancel()


def _dialled(dial: int) -> Path:
    return _DIALLED + b"%d" % dial


def _accepted_path(dialler: str, dial: int) -> Path:
    return b"%s %d" % (dialler.encode(), dial)


def _find(peer: _Endpoint) -> Any:
    """The actor's handle. Blocks for a round trip to Ray's control service; raises LookupError when there is none."""
    try:
        return ray.get_actor(peer.actor, namespace=peer.namespace)
    except ValueError as error:
        raise LookupError(f"{peer}: {error}") from None


def _own_name() -> tuple[str, str]:
    """Our actor's namespace and name. Ray tells the name only, so it is looked up where ours are."""
    # Asked of a process without Ray, the runtime context would look for a cluster and join it.
    context = ray.get_runtime_context() if ray.is_initialized() else None
    own_id = context.get_actor_id() if context is not None else None
    name = context.get_actor_name() if context is not None and own_id is not None else None
    if context is None or not name:
        raise RuntimeError("links.carrier is 'ray': this process is no named Ray actor, so nobody could call it")
    for namespace in (*NAMESPACES, context.namespace):
        try:
            if ray.get_actor(name, namespace=namespace)._actor_id.hex() == own_id:
                return namespace, name
        except ValueError:
            continue
    raise RuntimeError(f"links.carrier is 'ray': actor {name} is in none of the namespaces {NAMESPACES}")
