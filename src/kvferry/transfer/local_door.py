"""How two processes of one host come to share memory: the writer knocks at a socket of the target's, says for which
agent it comes, and gets the memory itself (its file descriptors) as the answer.

The connection stays. Notifications travel on it, each a packet; and when either process ends, or the target takes the
agent back, the kernel says so to the other. The socket's name is in no file system: nothing is left of it afterwards.

All of it happens on the endpoint's loop, and nothing here polls.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import struct
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Annotated

import msgspec
from msgspec import Meta

from kvferry.transfer.contract import Descriptor, TransferError
from kvferry.transfer.shared import Area, Window, host_identity

#: What a notification may have; far below what a socket takes at once.
MOST_BYTES = 32 * 1024
#: Memory areas of one process; the kernel passes at most 253 descriptors at a time.
MOST_AREAS = 64
#: Packets that one turn of the loop takes from one connection.
_PACKETS = 64
#: First byte of a packet with a notification, so that none is empty: an empty read is the end.
_NOTE = b"n"

_log = logging.getLogger(__name__)


class LocalMetadata(msgspec.Struct, frozen=True):
    """`Descriptor.metadata` of this backend. `areas`: (address, bytes) in the target's process, in the order in which
    their descriptors come.
    """

    host: Annotated[str, Meta(max_length=256)]
    pid: int
    uid: int
    door: Annotated[bytes, Meta(max_length=100)]
    areas: Annotated[tuple[tuple[int, int], ...], Meta(max_length=MOST_AREAS)]


class Hello(msgspec.Struct, frozen=True):
    """Writer -> target, first of all: who comes for which agent, and the name of the sending one."""

    agent: Annotated[str, Meta(max_length=256)]
    writer: int
    name: Annotated[str, Meta(max_length=256)]


class Welcome(msgspec.Struct, frozen=True):
    """Target -> writer, with the descriptors of its areas; or why not."""

    error: str = ""


_encode = msgspec.msgpack.Encoder().encode
_metadata = msgspec.msgpack.Decoder(LocalMetadata)
_hello = msgspec.msgpack.Decoder(Hello)
_welcome = msgspec.msgpack.Decoder(Welcome)


class Door:
    """The target's side. `admit(hello)` says why not ("" = come in); `on_note(name, payload)` gets notifications."""

    def __init__(
        self,
        incarnation: int,
        areas: Sequence[Area],
        loop: asyncio.AbstractEventLoop,
        admit: Callable[[Hello], str],
        on_note: Callable[[str, bytes], None],
    ) -> None:
        """Raises OSError when there can be no socket."""
        self._areas, self._loop, self._admit, self._on_note = areas, loop, admit, on_note
        self._guests: dict[socket.socket, Hello | None] = {}  # None: it has not said yet what it comes for
        name = b"\0kvferry-%016x-%d" % (incarnation, os.getpid())
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        try:
            self._socket.bind(name)
            self._socket.listen(128)
        except OSError:
            self._socket.close()
            raise
        places = tuple((area.base, area.size_bytes) for area in areas)
        self.metadata = _encode(LocalMetadata(host_identity(), os.getpid(), os.geteuid(), name, places))
        self._closed = False
        loop.call_soon_threadsafe(self._open)  # an endpoint may be made in another thread

    def _open(self) -> None:
        if not self._closed:
            self._loop.add_reader(self._socket.fileno(), self._knocked)

    def turn_out(self, agent: str) -> None:
        """Everybody who came for that agent."""
        for connection, hello in list(self._guests.items()):
            if hello is not None and hello.agent == agent:
                self._drop(connection)

    def close(self) -> None:
        self._closed = True
        self._loop.remove_reader(self._socket.fileno())
        self._socket.close()
        for connection in list(self._guests):
            self._drop(connection)

    def _knocked(self) -> None:
        try:
            connection, _ = self._socket.accept()
        except OSError as error:  # it has gone again, or there are no descriptors left: it will be told nothing
            _log.warning("a writer of this host could not be let in: %s", error)
            return
        connection.setblocking(False)
        self._guests[connection] = None
        self._loop.add_reader(connection.fileno(), self._read, connection)

    def _read(self, connection: socket.socket) -> None:
        for _ in range(_PACKETS):
            try:
                packet = connection.recv(MOST_BYTES + 1)
            except BlockingIOError:
                return
            except OSError:
                packet = b""
            if not packet:
                self._drop(connection)
                return
            hello = self._guests[connection]
            if hello is None:
                if not self._greet(connection, packet):
                    self._drop(connection)
                    return
            elif packet[:1] == _NOTE:
                self._on_note(hello.name, packet[1:])

    def _greet(self, connection: socket.socket, packet: bytes) -> bool:
        pid, uid = credentials(connection)
        try:
            hello = _hello.decode(packet)
            error = self._admit(hello)
        except msgspec.DecodeError as failure:
            hello, error = None, f"it does not say what it comes for: {failure}"
        if uid != os.geteuid():
            error = f"process {pid} runs as user {uid}, this one as {os.geteuid()}"
        try:
            fds = [] if error else [area.fd for area in self._areas]
            socket.send_fds(connection, [_encode(Welcome(error))], fds)
        except OSError as failure:
            error = str(failure)
        if error or hello is None:
            _log.warning("process %d may not write here: %s", pid, error)
            return False
        self._guests[connection] = hello
        return True

    def _drop(self, connection: socket.socket) -> None:
        self._guests.pop(connection, None)
        self._loop.remove_reader(connection.fileno())
        connection.close()


def credentials(connection: socket.socket) -> tuple[int, int]:
    """Process and user at the other end, by the kernel's word."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid, uid, _ = struct.unpack("3i", raw)
    return pid, uid


def decode_metadata(descriptor: Descriptor) -> LocalMetadata:
    """Raises TransferError where this process can't share memory with that one, and says why."""
    name = descriptor.agent
    try:
        metadata = _metadata.decode(descriptor.metadata)
    except (msgspec.DecodeError, RecursionError) as error:
        raise TransferError(f"{name}: metadata does not decode: {error}") from None
    if metadata.host != host_identity():
        raise TransferError(
            f"{name}: runs on another host, or in another namespace of pids or networks: {metadata.host} there, "
            f"{host_identity()} here"
        )
    if metadata.uid != os.geteuid():
        raise TransferError(f"{name}: its process runs as user {metadata.uid}, this one as {os.geteuid()}")
    return metadata


async def knock(
    loop: asyncio.AbstractEventLoop, metadata: LocalMetadata, hello: Hello
) -> tuple[socket.socket, list[Window]]:
    """The connection, and the target's memory, mapped. Waits for the target's loop, not longer than it lives.

    Raises TransferError when the target refuses, has ended, or is not who it says.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
    try:
        try:
            connection.connect(metadata.door)
        except OSError as error:
            raise TransferError(f"{hello.agent}: process {metadata.pid} does not answer: {error}") from None
        pid, uid = credentials(connection)
        if (pid, uid) != (metadata.pid, metadata.uid):
            there = f"process {metadata.pid} of user {metadata.uid}"
            raise TransferError(f"{hello.agent}: {there} should answer; it is process {pid} of user {uid}")
        connection.send(_encode(hello))
        await _readable(loop, connection)
        return connection, _windows(connection, metadata, hello.agent)
    except BaseException:
        connection.close()
        raise


async def _readable(loop: asyncio.AbstractEventLoop, connection: socket.socket) -> None:
    came = asyncio.Event()
    loop.add_reader(connection.fileno(), came.set)
    try:
        await came.wait()
    finally:
        loop.remove_reader(connection.fileno())


def _windows(connection: socket.socket, metadata: LocalMetadata, agent: str) -> list[Window]:
    fds: list[int] = []
    windows: list[Window] = []
    try:
        packet, fds, _, _ = socket.recv_fds(connection, MOST_BYTES, MOST_AREAS, socket.MSG_CMSG_CLOEXEC)
        welcome = _welcome.decode(packet) if packet else Welcome("it has ended")
        if not welcome.error and len(fds) != len(metadata.areas):
            welcome = Welcome(f"{len(metadata.areas)} areas were promised, {len(fds)} came")
        if welcome.error:
            raise TransferError(welcome.error)
        for fd, (there, size_bytes) in zip(fds, metadata.areas, strict=True):
            windows.append(Window(fd, there, size_bytes))
    except (TransferError, OSError, msgspec.DecodeError) as error:
        for window in windows:
            window.close()
        raise TransferError(f"{agent}: the memory of process {metadata.pid} can't be had: {error}") from None
    finally:
        for fd in fds:
            with suppress(OSError):
                os.close(fd)
    return windows


def note(payload: bytes) -> bytes:
    """A notification's packet. Raises TransferError when it is too long."""
    if len(payload) >= MOST_BYTES:
        raise TransferError(f"a notification of {len(payload)} bytes; the most is {MOST_BYTES - 1}")
    return _NOTE + payload
