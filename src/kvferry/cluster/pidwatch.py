"""Processes of this host, as its kernel knows them: a pidfd per watched process."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable

from kvferry.protocol.address import Address


class PidfdWatch:
    """`kvferry.actors.carrier.PidWatch`. A pidfd is readable once every thread of its process has ended."""

    def __init__(self) -> None:
        self._open: dict[int, int] = {}  # by incarnation

    def watch(self, address: Address, on_exit: Callable[[], None]) -> bool:
        """False when there is no such process. Raises OSError when the kernel gives no pidfd for another reason."""
        try:
            fd = os.pidfd_open(address.pid)
        except ProcessLookupError:
            return False
        self._release(address.incarnation)
        self._open[address.incarnation] = fd
        asyncio.get_running_loop().add_reader(fd, self._ended, address.incarnation, on_exit)
        return True

    def kill(self, address: Address) -> None:
        """SIGKILL, which also ends a process that is stopped. By the pidfd, so it can't hit one that has taken its pid.

        Raises OSError when the kernel refuses (it runs as another user).
        """
        fd = self._open.get(address.incarnation)
        if fd is not None:
            try:
                signal.pidfd_send_signal(fd, signal.SIGKILL)
            except ProcessLookupError:
                return  # it has ended, and the loop is about to say so

    def close(self) -> None:
        """Watch nothing any more."""
        for incarnation in list(self._open):
            self._release(incarnation)

    def _ended(self, incarnation: int, on_exit: Callable[[], None]) -> None:
        self._release(incarnation)
        on_exit()

    def _release(self, incarnation: int) -> None:
        fd = self._open.pop(incarnation, None)
        if fd is not None:
            asyncio.get_running_loop().remove_reader(fd)
            os.close(fd)
