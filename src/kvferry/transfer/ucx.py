"""The `ucx` backend: one-sided UCX through NIXL's agent (docs/adr/0001). The agents are ucx_driver's."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import ClassVar, Unpack

from kvferry.transfer.contract import Peer, Spans, TransferError, WriteHandle, WriteResult
from kvferry.transfer.spans import check_spans
from kvferry.transfer.threaded import Options, ThreadedEndpoint
from kvferry.transfer.ucx_agent import BACKEND
from kvferry.transfer.ucx_driver import UcxDriver
from kvferry.transfer.ucx_peer import UcxPeer, UcxWrite


class UcxEndpoint(ThreadedEndpoint[UcxPeer, UcxWrite]):
    """`Endpoint` over UCX. Raises TransferError when UCX gives no agent over `transports`.

    Over tcp, peers reach it by the device that has the address `host`, or by `devices`. Each agent takes about 10 MB.

    Construction waits for the first agent to start, 0.1 to 1 s. A cancelled write that still waits behind others ends
    at once; all other writes to one peer end in order.
    """

    _backend: ClassVar[str] = BACKEND
    _peers: ClassVar[type[UcxPeer]] = UcxPeer
    _writes: ClassVar[type[UcxWrite]] = UcxWrite

    def __init__(
        self,
        *,
        devices: str = "",
        poll_busy_ms: float = 1.0,
        poll_idle_ms: float = 20.0,
        hands: int | None = None,
        **options: Unpack[Options],
    ) -> None:
        """`hands`: threads that copy, where a post copies by itself; None for two if this process may use two cores."""
        hands = min(2, len(os.sched_getaffinity(0))) if hands is None else hands
        driver = partial(UcxDriver, devices=devices, poll_busy_ms=poll_busy_ms, poll_idle_ms=poll_idle_ms, hands=hands)
        super().__init__(driver, **options)

    def write_gathered(
        self, peer: Peer, spans: Spans, gather: Callable[[], bool], on_end: Callable[[WriteResult], None]
    ) -> WriteHandle:
        """As `write`, of what `gather` fills the source with: whoever copies calls it right before, on its own thread,
        so that what it has filled is still in the caches. Nothing is written, and the write ends CANCELLED without
        descriptors, where it returns False. Raises TransferError where to write is not to copy.
        """
        if not self.copies:
            raise TransferError(f"{self._name}: only where a post copies by itself can what is written be gathered")
        self._check_open()
        known = self._known(peer)
        check_spans(spans, self._regions, peer.descriptor.regions)
        write = UcxWrite(spans, on_end, self._now_s())
        write.gather = gather
        self._driver.submit(known, write)
        return write
