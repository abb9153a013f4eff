"""What carries the frames of links: paths between endpoints, and news of processes that ended.

A carrier may lose, repeat and reorder what it is given (the session survives that), and never waits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from kvferry.protocol.address import Address

#: Names one way to a peer, dialled or accepted; opaque, unique within its carrier.
Path = bytes


class CarrierHandler(Protocol):
    """Called on the loop, never from inside a call into the carrier.

    `on_path_down` comes at most once per path, and not after `disconnect`. `refused`: the path never came up,
    because nobody listens there.
    """

    def on_bytes(self, path: Path, data: bytes) -> None: ...
    def on_path_down(self, path: Path, refused: bool) -> None: ...


class Carrier(Protocol):
    """One process's sockets.

    * `endpoint`: where others reach this carrier; it is bound from the carrier's making on.
    * `start(handler)`: begin to hand over what arrives.
    * `connect(endpoint)`: a new path to it, at once; whether it came up shows later.
    * `send(path, data)`: hand bytes over, or drop them when the path is down or full. Raises nothing.
    * `disconnect(path)`: give the path up; what was just sent is still tried for a moment.
    """

    @property
    def endpoint(self) -> str: ...
    def start(self, handler: CarrierHandler) -> None: ...
    def connect(self, endpoint: str) -> Path: ...
    def send(self, path: Path, data: bytes) -> None: ...
    def disconnect(self, path: Path) -> None: ...
    async def close(self) -> None: ...


class PidWatch(Protocol):
    """The kernel's word on the processes of this host.

    `watch(address, on_exit)` holds the process that now has the pid `address.pid` (a pidfd) and calls `on_exit`
    on the loop once that process has ended. It returns False, and calls nothing, when no process has this pid.
    `kill(address)` ends the process that `watch` holds for this address, and no other. Raises OSError when the kernel
    refuses.
    """

    def watch(self, address: Address, on_exit: Callable[[], None]) -> bool: ...
    def kill(self, address: Address) -> None: ...
    def close(self) -> None: ...
