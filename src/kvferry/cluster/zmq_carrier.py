"""The ZMQ carrier of links: one ROUTER for those who dial us, one DEALER for each path that we dial.

Plain sockets, pumped from the asyncio loop by their file descriptors. A descriptor of ZMQ is edge triggered, and a
send may swallow its edge, so a socket is drained until it is empty, and looked at again after each send. Reconnecting
is left to the links: a DEALER connects once, and its monitor tells when the connection is refused or breaks. A ROUTER
names no peer when a connection breaks, so then it probes those it has sent to: a frame without bytes.

With keys every connection is encrypted, and both ends have shown that they are of this cluster (zmq_curve.py).
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable
from functools import partial

import zmq
from zmq.utils.monitor import parse_monitor_message

from kvferry.actors.carrier import CarrierHandler, Path
from kvferry.actors.complaints import Complaints
from kvferry.cluster.zmq_curve import OVERHEAD_BYTES, CurveKeys, open_gate
from kvferry.protocol.frames import MAX_FRAME_BYTES

#: Frames taken from one socket before the loop gets its turn.
DRAIN_FRAMES = 256
HIGH_WATER_FRAMES = 4096
#: How long a path that is given up still sends, and how long `close` waits for last words.
LAST_WORDS_S = 0.02
#: The probes after a broken connection: its pipe may still be there when the monitor speaks.
PROBE_AFTER_S = (0.0, 0.005, 0.05)

log = logging.getLogger("kvferry.links")

_FAILED = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
_BROKEN = zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED | _FAILED

#: Begins the names of dialled paths. No routing id begins so: with a leading 0 they have five bytes.
_DIALLED = b"\0dialled "


class _Pump:
    """Reads one plain socket from the loop and gives each message to `take`."""

    def __init__(self, socket: zmq.Socket[bytes], take: Callable[[list[bytes]], None]) -> None:
        self._socket, self._take = socket, take
        self._loop = asyncio.get_running_loop()
        self._fd = int(socket.getsockopt(zmq.FD))
        self._soon = False
        self._stopped = False
        self._loop.add_reader(self._fd, self._drain)
        self.look()

    def look(self) -> None:
        """Look at the socket in the loop's next turn: after a send, its edge may be gone."""
        if not self._soon and not self._stopped:
            self._soon = True
            self._loop.call_soon(self._drain)

    def stop(self) -> None:
        if not self._stopped:
            self._stopped = True
            self._loop.remove_reader(self._fd)

    def _drain(self) -> None:
        self._soon = False
        for _ in range(DRAIN_FRAMES):
            if self._stopped:
                return
            try:
                parts = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._take(parts)
        self.look()


class _Dialled:
    """One DEALER, its monitor and their pumps. Raises zmq.ZMQError for an endpoint that can't be one."""

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], endpoint: str, keys: CurveKeys | None,
        on_bytes: Callable[[list[bytes]], None], on_down: Callable[[bool, bool], None],
    ) -> None:  # fmt: skip
        self.socket = context.socket(zmq.DEALER)
        _limit(self.socket)
        self.socket.setsockopt(zmq.RECONNECT_IVL, -1)
        if keys is not None:
            keys.dial(self.socket)
        monitor = self.socket.get_monitor_socket(_BROKEN | zmq.EVENT_CONNECTED)
        try:
            self.socket.connect(endpoint)
        except zmq.ZMQError:
            self.socket.disable_monitor()
            self.socket.close(linger=0)
            raise
        self._on_down = on_down
        self._connected = False
        self.pump = _Pump(self.socket, on_bytes)
        self._monitor_pump = _Pump(monitor, self._news)

    def stop(self) -> None:
        """Read no more; the socket may still send until it is closed."""
        self.pump.stop()
        self._monitor_pump.stop()
        self.socket.disable_monitor()

    def _news(self, parts: list[bytes]) -> None:
        event = parse_monitor_message(parts)["event"]
        if event == zmq.EVENT_CONNECTED:
            self._connected = True
        else:
            self._on_down(not self._connected, bool(event & _FAILED))


class ZmqCarrier:
    """`kvferry.actors.carrier.Carrier` over tcp. `counts` tells what was dropped, and whose handshake has failed.

    Binds `bind_host` at a random port (or `port`); `advertised_host` is what others are told, if not the same. Without
    `keys` nothing is encrypted, and everybody who reaches the port may connect. Made on the loop that will use it.
    Raises zmq.ZMQError (an OSError by errno) when it can't be bound.
    """

    def __init__(self, bind_host: str, port: int = 0, advertised_host: str = "", keys: CurveKeys | None = None) -> None:
        self.counts: Counter[str] = Counter()
        self._complain = Complaints(log, self.counts, asyncio.get_running_loop().time)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._keys, self._gate_pump = keys, None
        if keys is not None:
            gate, keeper = open_gate(self._context, keys)
            self._gate_pump = _Pump(gate, keeper.asked)
        self._router = self._context.socket(zmq.ROUTER)
        _limit(self._router)
        if keys is not None:
            keys.listen(self._router)
        self._router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._router.setsockopt(zmq.IPV6, int(":" in bind_host))
        try:
            self._router.bind(f"tcp://{_bracketed(bind_host)}:{port or '*'}")
        except zmq.ZMQError:
            self._stop_gate()
            self._context.destroy(linger=0)
            raise
        bound_port = self._router.getsockopt_string(zmq.LAST_ENDPOINT).rsplit(":", 1)[1]
        self._endpoint = f"tcp://{_bracketed(advertised_host or bind_host)}:{bound_port}"
        self._handler: CarrierHandler | None = None
        self._pumps: list[_Pump] = []
        self._dialled: dict[Path, _Dialled] = {}
        self._leaving: list[_Dialled] = []
        self._accepted: set[Path] = set()  # routing ids that we have sent to
        self._dials = 0
        self._probing = self._probe_again = False
        self._closed = False

    @property
    def endpoint(self) -> str:
        return self._endpoint

    def start(self, handler: CarrierHandler) -> None:
        self._handler = handler
        monitor = self._router.get_monitor_socket(zmq.EVENT_DISCONNECTED | _FAILED)
        self._pumps = [_Pump(self._router, self._take), _Pump(monitor, self._connection_news)]

    def connect(self, endpoint: str) -> Path:
        self._dials += 1
        path: Path = _DIALLED + b"%d" % self._dials
        try:
            if not endpoint.startswith("tcp://"):  # a peer's word must not lead to what else ZMQ can connect to
                raise zmq.ZMQError(zmq.EPROTONOSUPPORT)
            self._dialled[path] = _Dialled(
                self._context, endpoint, self._keys,
                partial(self._take_dialled, path), partial(self._dialled_down, path, endpoint),
            )  # fmt: skip
        except zmq.ZMQError as error:
            self._complain.about("bad_endpoints", "%.200r is no endpoint to dial: %s", endpoint, error)
            asyncio.get_running_loop().call_soon(self._path_down, path, True)
        return path

    def send(self, path: Path, data: bytes) -> None:
        dialled = self._dialled.get(path)
        if dialled is not None:
            try:
                dialled.socket.send(data, zmq.NOBLOCK)
            except zmq.Again:
                self.counts["dropped_full"] += 1
            dialled.pump.look()
        elif path.startswith(_DIALLED) or self._closed:
            self.counts["dropped_down"] += 1
        else:
            self._accepted.add(path)
            self._send_accepted(path, data)
            self._look()

    def disconnect(self, path: Path) -> None:
        self._accepted.discard(path)
        dialled = self._dialled.pop(path, None)
        if dialled is not None:
            dialled.stop()
            self._leaving.append(dialled)
            asyncio.get_running_loop().call_later(LAST_WORDS_S, self._leave, dialled)

    async def close(self) -> None:
        """Give the last words a moment, then free every socket. Idempotent."""
        if self._closed:
            return
        self._closed = True
        for pump in self._pumps:
            pump.stop()
        self._stop_gate()
        for dialled in self._dialled.values():
            dialled.stop()
        await asyncio.sleep(LAST_WORDS_S)
        if self._pumps:
            self._router.disable_monitor()
        self._leaving.clear()
        self._context.destroy(linger=0)

    # --- inside ---------------------------------------------------------------------------------------------

    def _arrived(self, path: Path, data: bytes) -> None:
        if self._handler is not None:
            self._handler.on_bytes(path, data)

    def _take(self, parts: list[bytes]) -> None:
        if len(parts) != 2:
            self._malformed(len(parts) - 1)
            return
        self._arrived(parts[0], parts[1])

    def _take_dialled(self, path: Path, parts: list[bytes]) -> None:
        if len(parts) != 1:
            self._malformed(len(parts))
        elif parts[0]:  # without bytes it is a probe
            self._arrived(path, parts[0])

    def _malformed(self, parts: int) -> None:
        self._complain.about("malformed", "%s: dropped a message of %d parts; a frame is one", self._endpoint, parts)

    def _dialled_down(self, path: Path, endpoint: str, refused: bool, unknown: bool) -> None:
        if path in self._dialled:
            if unknown:
                self._complain.about(
                    "handshakes_failed", "%s ended the handshake: has it the same cluster secret?", endpoint
                )
            self.disconnect(path)
            if self._handler is not None:
                self._handler.on_path_down(path, refused)

    def _leave(self, dialled: _Dialled) -> None:
        if dialled in self._leaving:  # else the context has closed it
            self._leaving.remove(dialled)
            dialled.socket.close(linger=0)

    def _look(self) -> None:
        if self._pumps:
            self._pumps[0].look()

    def _send_accepted(self, path: Path, data: bytes) -> None:
        try:
            self._router.send_multipart([path, data], zmq.NOBLOCK)
        except zmq.Again:
            self.counts["dropped_full"] += 1
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            self._accepted.discard(path)
            asyncio.get_running_loop().call_soon(self._path_down, path, False)

    def _path_down(self, path: Path, refused: bool) -> None:
        if self._handler is not None and not self._closed:
            self._handler.on_path_down(path, refused)

    def _connection_news(self, parts: list[bytes]) -> None:
        if parse_monitor_message(parts)["event"] & _FAILED:
            text = "%s: refused a connection from outside of the cluster, or with another cluster secret"
            self._complain.about("handshakes_failed", text, self._endpoint)
            return  # the end of the connection follows, as of all others
        self._probe_again = self._probing
        if not self._probing:
            self._probe_soon()

    def _probe_soon(self) -> None:
        """Once for all connections that break meanwhile: who connects and leaves all the time must not keep us busy."""
        self._probing, self._probe_again = True, False
        for delay_s in PROBE_AFTER_S:
            asyncio.get_running_loop().call_later(delay_s, self._probe, delay_s == PROBE_AFTER_S[-1])

    def _probe(self, last: bool) -> None:
        if self._closed:
            return
        for path in list(self._accepted):
            self._send_accepted(path, b"")
        self._look()
        if last:
            self._probing = False
            if self._probe_again:
                self._probe_soon()

    def _stop_gate(self) -> None:
        if self._gate_pump is not None:
            self._gate_pump.stop()


def _limit(socket: zmq.Socket[bytes]) -> None:
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.SNDHWM, HIGH_WATER_FRAMES)
    socket.setsockopt(zmq.RCVHWM, HIGH_WATER_FRAMES)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES + OVERHEAD_BYTES)  # ZMQ measures what is on the wire


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
