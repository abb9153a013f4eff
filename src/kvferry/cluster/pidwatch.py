"""Processes of this host, as its kernel knows them: a pidfd per watched process."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path

from kvferry.protocol.address import Address


def host_id() -> str:
    """Names this kernel's boot and our pid namespace: where it is equal, a pid means the same process."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}:{Path('/proc/self/ns/pid').stat().st_ino}"


class PidfdWatch:
    """`kvferry.actors.carrier.PidWatch`. A pidfd is readable once every thread of its process has ended."""

    def __init__(self) -> None:
        self._open: set[int] = set()

    def watch(self, address: Address, on_exit: Callable[[], None]) -> bool:
        """False when there is no such process. Raises OSError when the kernel gives no pidfd for another reason."""
        try:
            fd = os.pidfd_open(address.pid)
        except ProcessLookupError:
            return False
        self._open.add(fd)
        asyncio.get_running_loop().add_reader(fd, self._ended, fd, on_exit)
        return True

    def close(self) -> None:
        """Watch nothing any more."""
        for fd in list(self._open):
            self._release(fd)

    def _ended(self, fd: int, on_exit: Callable[[], None]) -> None:
        self._release(fd)
        on_exit()

    def _release(self, fd: int) -> None:
        asyncio.get_running_loop().remove_reader(fd)
        self._open.discard(fd)
        os.close(fd)
