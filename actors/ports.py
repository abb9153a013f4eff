"""What an actor is given instead of reaching for it: a clock, a network, randomness."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from enum import Enum
from typing import Protocol

from kvferry.protocol.address import Address
from kvferry.protocol.messages import Message


class Timer(Protocol):
    """A call that has been set. Cancelling it is fine at any time, also afterwards."""

    def cancel(self) -> None: ...


class Clock(Protocol):
    """Local monotonic time. No time of another process is ever compared with it.

    `call_later` calls `do` on the running loop in `delay_s`, in a turn of its own.
    """

    def now_s(self) -> float: ...
    async def sleep(self, duration_s: float) -> None: ...
    def call_later(self, delay_s: float, do: Callable[[], None]) -> Timer: ...


class Random(Protocol):
    """`bits(n)`: an integer of n random bits (the operating system's in production, seeded in simulations)."""

    def bits(self, count: int) -> int: ...


class LostReason(Enum):
    """Why a session is over."""

    EXITED = "exited"  # the kernel of this host says that the process has ended
    REPLACED = "replaced"  # another incarnation answers at the address
    REFUSED = "refused"  # nobody listens at the address
    SILENT = "silent"  # nothing heard for the heartbeat limit
    OVERFLOW = "overflow"  # a mailbox or a window was full
    CLOSED = "closed"  # the peer or we closed it

    @property
    def ended(self) -> bool:
        """The process is certainly gone, by its kernel's word or because another has its address."""
        return self in (LostReason.EXITED, LostReason.REPLACED)


class LinkHandler(Protocol):
    """An actor's side of its links; called on the actor's loop, never concurrently.

    `on_message` returns False when the mailbox is full: the session then ends with OVERFLOW at both sides.
    `on_link_lost` comes once per session. `on_exited` comes at most once per incarnation, only for a peer on this
    host, and is proof that the process has ended; it may come long after `on_link_lost`. `on_failure`: the links have
    met an error that nobody expected; they go on, as far as they can.
    """

    def on_link_up(self, peer: Address) -> None: ...
    def on_message(self, peer: Address, message: Message) -> bool: ...
    def on_link_lost(self, peer: Address, reason: LostReason) -> None: ...
    def on_exited(self, peer: Address) -> None: ...
    def on_failure(self, error: Exception) -> None: ...


class Network(Protocol):
    """The links of one process. Sending never waits and never fails loudly: what can't be delivered is
    followed by `on_link_lost`.

    * `dial(address)` opens a session if there is none (idempotent); `on_link_up` or `on_link_lost` follows.
    * `send(incarnation, message)` queues on the open or connecting session; False if there is none.
    * `is_up(incarnation)`: a session is open now. `session_of(incarnation)`: which, the same number at both ends;
      0 when none is.
    * `drop(incarnation)` ends a session from this side.
    * `kill(incarnation)` ends that very process, as SIGKILL does, where the kernel of this host lets us: its successor
      is never hit. False when we can't be sure whose process it would be; `on_exited` follows otherwise.
    """

    @property
    def address(self) -> Address: ...
    async def start(self, handler: LinkHandler) -> None: ...
    def dial(self, address: Address) -> None: ...
    def send(self, incarnation: int, message: Message) -> bool: ...
    def is_up(self, incarnation: int) -> bool: ...
    def session_of(self, incarnation: int) -> int: ...
    def drop(self, incarnation: int) -> None: ...
    def kill(self, incarnation: int) -> bool: ...
    async def close(self) -> None: ...


#: Looks a named actor's address up by the slow path (Ray); raises LookupError while there is none.
Resolve = Callable[[str], Awaitable[Address]]
