"""The receiving agent of the `ucxx` backend: what one writer sends is received aside, and put into its place here.

Nothing but `serve`, on the driver's thread, writes into the regions; so after `revoke` on that thread nothing of the
writer lands any more, whatever it does. What was under way still has to come, aside, before the agent can go.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np

from kvferry.transfer.contract import Region, Spans, TransferError
from kvferry.transfer.names import is_agent_of
from kvferry.transfer.pack import Bytes, RegionMemory
from kvferry.transfer.spans import check_side, total_bytes
from kvferry.transfer.ucxx_agent import UcxxAgent
from kvferry.transfer.ucxx_wire import (
    ANSWER,
    CONTROL,
    DATA,
    PIECES,
    Batch,
    Hello,
    Placed,
    decode_to_target,
    encoder,
    generation_of,
    spans_of,
    tag,
)

_REVOKED = "the receiving agent is revoked"

_log = logging.getLogger(__name__)


class UcxxTarget:
    """One writer's way in. A `Hello` begins a session, and ends the one before: the writer has a new agent. Serve it
    until it is `gone`, which it is some time after `revoke`: then its agent can be deleted.
    """

    def __init__(
        self,
        agent: UcxxAgent,
        writer: int,
        regions: tuple[Region, ...],
        piece_bytes: int,
        memory: RegionMemory,
        on_note: Callable[[str, bytes], None],
    ) -> None:
        """`on_note` gets (the sender's agent, payload)."""
        self.agent, self._writer = agent, writer
        self._regions, self._piece_bytes, self._memory, self._on_note = regions, piece_bytes, memory, on_note
        self._session: int | None = None  # the tag's generation of the agent that writes here now
        self._sender = ""
        self._announced: deque[tuple[int, Spans]] = deque()  # (number, spans) of what has not come yet, oldest first
        self._coming: deque[tuple[int, Spans, Any, Bytes]] = deque()  # (number, spans, request, bytes), oldest first
        self._revoked = self.gone = False
        self._free: list[Bytes] = []

    @property
    def busy(self) -> bool:
        """A writer is there, and something of it is coming."""
        return bool(self._coming)

    def serve(self) -> bool:
        """One turn. True when anything moved. A writer that fails or breaks the rules loses its session."""
        moved = self.agent.progress()
        try:
            self.agent.check()
            while (message := self.agent.message(CONTROL)) is not None:
                moved = True
                self._take(*message)
            while self._announced and self._receive(*self._announced[0]):
                moved = True
                self._announced.popleft()
            while self._coming and self._coming[0][2].completed:
                moved = True
                self._place(*self._coming.popleft())
        except (TransferError, self.agent.errors) as error:
            _log.info("%s: writer %s is gone: %s", self.agent.name, self._sender or f"{self._writer:016x}", error)
            self._end_session()
        self.gone = self._revoked and self._session is None and self.agent.idle
        return moved

    def revoke(self) -> None:
        """Place nothing more, and say so to the writer, who then goes."""
        self._revoked = True
        if self._session is not None:
            self._answer(Placed(0, _REVOKED))

    def _take(self, value: int, data: bytes) -> None:
        message = decode_to_target(data)
        if isinstance(message, Hello):
            self._begin_session(generation_of(value), message)
        elif generation_of(value) == self._session:  # else it is from a session that is over
            if isinstance(message, Batch):
                self._announce(message)
            else:
                self._on_note(self._sender, message.payload)

    def _begin_session(self, generation: int, hello: Hello) -> None:
        self._end_session()
        if not is_agent_of(hello.agent, self._writer):
            raise TransferError(f"it is for {self._writer:016x}, not for {hello.agent}")
        self.agent.open_peer(hello.address)
        self._session, self._sender = generation, hello.agent

    def _announce(self, batch: Batch) -> None:
        assert self._session is not None
        try:
            spans = spans_of(batch)
            check_side(spans, self._regions, "target")
            size_bytes = total_bytes(spans)
            others = len(self._announced) + len(self._coming)
            if size_bytes > self._piece_bytes or others >= PIECES:
                limit = f"at most {PIECES} of {self._piece_bytes} bytes"
                raise TransferError(f"batch {batch.number}: {size_bytes} bytes beside {others}; {limit}")
        except TransferError as error:
            self._answer(Placed(batch.number, str(error)))
            raise
        self._announced.append((batch.number, spans))

    def _receive(self, number: int, spans: Spans) -> bool:
        """Whether its bytes have come, or are coming now."""
        assert self._session is not None
        buffer = self._free.pop() if self._free else np.empty(self._piece_bytes, np.uint8)
        request = self.agent.receive(tag(DATA, self._session, number), buffer[: total_bytes(spans)])
        if request is None:
            self._free.append(buffer)
            return False
        self._coming.append((number, spans, request, buffer))
        return True

    def _place(self, number: int, spans: Spans, request: Any, buffer: Bytes) -> None:
        request.check_error()
        if not self._revoked:
            self._memory.scatter(spans, buffer)
        self._free.append(buffer)
        self._answer(Placed(number, _REVOKED if self._revoked else ""))

    def _answer(self, placed: Placed) -> None:
        assert self._session is not None
        self.agent.send_message(tag(ANSWER, self._session), encoder.encode(placed))

    def _end_session(self) -> None:
        """What is still coming goes nowhere: its memory is the agent's until it has come."""
        self._session, self._sender = None, ""
        self._announced.clear()
        self._coming.clear()
        self.agent.close_peer()
