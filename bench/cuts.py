"""Cut network between two processes of this host, from outside: their connections lose every packet that comes in.

The kernel lets us borrow another process's socket (`pidfd_getfd`), and a filter on a socket drops packets before TCP
sees them. So nothing is closed and nobody is told, as when a cable is pulled; a connection that is made meanwhile is
cut as well. Needs Linux 5.6 and the right to trace the two processes (as their parent's user, or root).
"""

from __future__ import annotations

import ctypes
import os
import socket
import struct
from dataclasses import dataclass
from pathlib import Path

SYS_PIDFD_GETFD = 438
SO_ATTACH_FILTER, SO_DETACH_FILTER = 26, 27
ESTABLISHED, LISTEN = "01", "0A"

_libc = ctypes.CDLL(None, use_errno=True)
#: A program of one instruction, `return 0`: keep no byte of any packet.
_DROP = ctypes.create_string_buffer(struct.pack("HBBI", 0x06, 0, 0, 0))
_FILTER = struct.pack("HxxxxxxP", 1, ctypes.addressof(_DROP))


@dataclass(frozen=True)
class Socket:
    """A TCP socket as the process's table has it; `local` and `remote` are ports."""

    fd: int
    local: int
    remote: int
    state: str


def sockets_of(pid: int) -> list[Socket]:
    """Raises ProcessLookupError when the process has ended."""
    try:
        names = [(int(entry.name), str(entry.readlink())) for entry in _readable(Path(f"/proc/{pid}/fd"))]
        rows = [
            line.split()
            for table in ("tcp", "tcp6")
            for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]
        ]
    except FileNotFoundError:
        raise ProcessLookupError(f"process {pid} has ended") from None
    by_inode = {row[9]: row for row in rows}
    found = []
    for fd, name in names:
        row = by_inode.get(name.removeprefix("socket:[").removesuffix("]"))
        if row is not None:
            found.append(Socket(fd, _port(row[1]), _port(row[2]), row[3]))
    return found


def _readable(folder: Path) -> list[Path]:
    return [entry for entry in folder.iterdir() if entry.is_symlink()]


def _port(address: str) -> int:
    return int(address.rpartition(":")[2], 16)


class Cut:
    """One between processes `left` and `right`, at the connections to `port`, on which one of them listens. `hold` it
    again and again while it lasts; `heal` ends it. `connections` counts the connections that were cut.
    """

    def __init__(self, left: int, right: int, port: int) -> None:
        self._pids, self._port = (left, right), port
        self._cut: set[frozenset[int]] = set()  # the two ports of each connection

    @property
    def connections(self) -> int:
        return len(self._cut)

    def hold(self) -> None:
        """Cut what is connected now. Raises ProcessLookupError when a side has ended, and PermissionError."""
        left, right = (
            [s for s in sockets_of(pid) if s.state == ESTABLISHED and self._port in (s.local, s.remote)]
            for pid in self._pids
        )
        ends = {(s.remote, s.local): s for s in right}
        for one in left:
            other, key = ends.get((one.local, one.remote)), frozenset((one.local, one.remote))
            if other is not None and key not in self._cut:
                self._cut.add(key)
                _option(self._pids[0], one.fd, SO_ATTACH_FILTER, _FILTER)
                _option(self._pids[1], other.fd, SO_ATTACH_FILTER, _FILTER)

    def heal(self) -> None:
        """What is left of the connections works again: TCP sends what was lost once more."""
        for pid in self._pids:
            try:
                found = sockets_of(pid)
            except ProcessLookupError:
                continue
            for one in found:
                if frozenset((one.local, one.remote)) in self._cut:
                    _option(pid, one.fd, SO_DETACH_FILTER, struct.pack("i", 0))


def _option(pid: int, fd: int, option: int, value: bytes) -> None:
    """Set an option of another process's socket. One that is closed meanwhile needs none."""
    try:
        with socket.socket(fileno=_borrow(pid, fd)) as borrowed:
            borrowed.setsockopt(socket.SOL_SOCKET, option, value)
    except FileNotFoundError:  # there is no filter on it to take away
        return
    except OSError as error:
        if isinstance(error, PermissionError):
            raise


def _borrow(pid: int, fd: int) -> int:
    watch = os.pidfd_open(pid)
    try:
        borrowed = int(_libc.syscall(SYS_PIDFD_GETFD, watch, fd, 0))
        if borrowed < 0:
            number = ctypes.get_errno()
            raise OSError(number, f"socket {fd} of process {pid}: {os.strerror(number)}")
        return borrowed
    finally:
        os.close(watch)


def listening(pid: int) -> set[int]:
    """Ports on which the process listens."""
    return {found.local for found in sockets_of(pid) if found.state == LISTEN}
