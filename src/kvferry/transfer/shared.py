"""Memory that other processes of this host may map: an anonymous file without a name, which ends with its last user.

A file of this kind has no path, so nothing is left of it when every process that has it is killed. It can't be made
shorter by anybody: whoever has mapped it can touch all of it for as long as it likes.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from kvferry.transfer.contract import Region, TransferError
from kvferry.transfer.huge_pages import preferred

#: What keeps the memory as long as it is, for everybody and for good.
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


def host_identity() -> str:
    """Names what two processes must have in common to share memory by a socket and to prove each other's end: the
    running kernel, the pid namespace and the network namespace.
    """
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    pids, nets = (Path(f"/proc/self/ns/{kind}").stat().st_ino for kind in ("pid", "net"))
    return f"{boot}:{pids}:{nets}"


class Area:
    """`size_bytes` of zeroed memory from address `base` on, mapped here; `fd` is what others map it by.

    `buffer` is the mapping. It lasts as long as anything uses it; huge pages are asked for, where the kernel has them
    for shared memory.
    """

    def __init__(self, size_bytes: int) -> None:
        fd = os.memfd_create("kvferry-pool", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, max(size_bytes, 1))
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
            self.buffer, self.base = _mapped(fd, max(size_bytes, 1))
        except BaseException:
            os.close(fd)
            raise
        self.fd, self.size_bytes = fd, max(size_bytes, 1)

    def __del__(self) -> None:
        fd = getattr(self, "fd", -1)
        if fd >= 0:
            os.close(fd)


class Window:
    """Another process's `Area`, mapped here: its addresses from `there` on are ours from `here` on."""

    def __init__(self, fd: int, there: int, size_bytes: int) -> None:
        """Raises TransferError when it is not what was promised. `fd` stays the caller's."""
        found = os.fstat(fd).st_size
        if found < size_bytes or size_bytes < 1:
            raise TransferError(f"an area of {size_bytes} bytes was promised; what came has {found}")
        try:
            sealed = fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK
        except OSError:
            sealed = 0
        if not sealed:
            raise TransferError("the area that came can be made shorter by its owner, under whoever writes to it")
        self.there, self.size_bytes = there, size_bytes
        self._buffer, self.here = _mapped(fd, size_bytes)

    def close(self) -> None:
        """Nobody may touch it any more."""
        self._buffer.close()


def _mapped(fd: int, size_bytes: int) -> tuple[mmap.mmap, int]:
    buffer = preferred(mmap.mmap(fd, size_bytes, flags=mmap.MAP_SHARED))
    return buffer, int(np.frombuffer(buffer, np.uint8).ctypes.data)


def outside(regions: Sequence[Region], areas: Sequence[tuple[int, int]]) -> int | None:
    """The first region that does not lie in one of `areas` (base, bytes), or None."""
    for index, region in enumerate(regions):
        end = region.base + region.item_bytes * region.items
        if not any(base <= region.base and end <= base + size for base, size in areas):
            return index
    return None
