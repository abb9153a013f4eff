"""UCXX's worker as we use it: one for each agent, so that destroying one ends what passes by it and nothing else.

Tag messages go over tcp, on the loopback device ("host") or the one that has our address ("tcp"). Where UCX has to
report a peer's death, as here, it gives tag messages neither shared memory nor CMA (UCX 1.21).

A request that is dropped is cancelled, and that has ended processes: UCX goes on with it. Nor can a worker be destroyed
while one is under way: it stays, and so does its connection (UCXX 0.52). So the agent keeps each request with its
memory until it has completed, which it does when the peer takes part or has died, and is deleted only when none is
left.
"""

from __future__ import annotations

import ctypes
import importlib
import os
from collections import deque
from typing import Any

import numpy as np

from kvferry.transfer.contract import Proofs, TransferError
from kvferry.transfer.devices import device_of
from kvferry.transfer.pack import Bytes
from kvferry.transfer.ucxx_wire import CONTROL_BYTES, KIND_MASK, tag

BACKEND = "ucxx"

#: Only the target's thread writes into its regions, what a writer has announced: once that writer's agent is gone,
#: nothing of it lands. A dead writer's batches may still wait in our worker, so that its end alone is no proof.
PROOFS = Proofs(drained=True, exited=False, revoked=True)

#: Of UCX. From 16 KB on a message waits at its sender until it is received, and then comes in large segments.
_OPTIONS = {
    "TLS": "tcp",
    "RNDV_THRESH": "16K",
    "TCP_TX_SEG_SIZE": "128K",
    "TCP_RX_SEG_SIZE": "128K",
    "KEEPALIVE_INTERVAL": "1s",
}
TRANSPORTS = ("host", "tcp")

#: Steps of a worker in one turn: the others shall have theirs.
_STEPS = 64
_WHOLE_TAG = 2**64 - 1
#: What UCXX may take to close.
_CLOSE_NS = 10**9

#: Agents whose peers stood still when their endpoint was closed: dropping them would cancel what is under way.
_ABANDONED: list[UcxxAgent] = []


def load() -> Any:
    """UCXX's low-level module. Importing it sets options of UCX in the environment, where they would reach every other
    UCX of this process: they are taken back.
    """
    os.environ.setdefault("UCX_LOG_LEVEL", "fatal")  # errors reach us as exceptions
    before = set(os.environ)
    try:
        api = importlib.import_module("ucxx._lib.libucxx")
    except ImportError as error:
        raise TransferError(f"the backend ucxx is not installed (pip install kvferry[bench]): {error}") from error
    for name in set(os.environ) - before:
        del os.environ[name]
    return api


def make_context(transports: str, host: str) -> Any:
    """What workers are made in. Raises TransferError when there is no such transport or device."""
    if transports not in TRANSPORTS:
        raise TransferError(f"ucxx has the transports {', '.join(TRANSPORTS)}")
    api = load()
    device = "lo" if transports == "host" else device_of(host)
    return api.UCXContext(_OPTIONS | {"NET_DEVICES": device}, (api.Feature.TAG, api.Feature.WAKEUP))


class UcxxAgent:
    """One worker, and its endpoint to the one peer that it talks to. Made, driven and deleted on one thread."""

    def __init__(self, context: Any, name: str, generation: int) -> None:
        self.name, self.generation = name, generation
        self._api = load()
        self._array = importlib.import_module("ucxx._lib.arr").Array
        self._worker = self._api.UCXWorker(context)
        self.fd = _event_descriptor(self._worker.handle)
        self.address = bytes(memoryview(self._worker.address))
        self._peer: Any = None
        self._held: list[tuple[Any, Bytes]] = []  # (request, its bytes) of what is under way
        self._coming: deque[tuple[Any, int, Bytes]] = deque()  # (request, tag, bytes) of messages, oldest first

    @property
    def errors(self) -> type[Exception]:
        """The base of all that UCXX raises."""
        kind: type[Exception] = self._api.UCXError
        return kind

    def open_peer(self, address: bytes) -> None:
        """Talk to the worker at `address`, and no longer to whoever it was. Raises one of `errors`."""
        self.close_peer()
        there = self._api.UCXAddress.create_from_buffer(np.frombuffer(address, np.uint8).copy())
        self._peer = self._api.UCXEndpoint.create_from_worker_address(self._worker, there, True)

    def check(self) -> None:
        """Raises one of `errors` when the peer is lost."""
        if self._peer is not None and not self._peer.alive:
            self._peer.raise_on_error()
            raise self._api.UCXConnectionResetError("the peer's worker is gone")

    def progress(self) -> bool:
        """Drive it; whether anything happened."""
        steps = 0
        while steps < _STEPS and self._worker.progress_once():
            steps += 1
        if self._held and steps:
            self._held = [held for held in self._held if not held[0].completed]
        return steps > 0

    def arm(self) -> bool:
        """Whether `fd` will become readable when something happens; otherwise something already has."""
        armed: bool = self._worker.arm()
        return armed

    def send(self, value: int, data: Bytes) -> Any:
        """A request. `data` must stay as it is until it has completed."""
        request = self._peer.tag_send(self._array(data), self._api.UCXXTag(value))
        self._held.append((request, data))
        return request

    def send_message(self, value: int, data: bytes) -> None:
        self.send(value, np.frombuffer(data, np.uint8).copy())

    def receive(self, value: int, data: Bytes) -> Any:
        """A request for the message of exactly that tag, which has begun to come; None while there is none. `data` is
        nobody else's until it has completed. It is not asked for earlier, since a request whose message is never sent,
        because its sender has died, never completes. Raises TransferError when its length is another.
        """
        found = self._worker.tag_probe(self._api.UCXXTag(value), self._api.UCXXTagMask(_WHOLE_TAG), True)
        if not found.matched:
            return None
        if found.length != len(data):
            raise TransferError(f"{self.name}: a message of {found.length} bytes; {len(data)} were announced")
        request = self._worker.tag_recv_with_handle(self._array(data), found)
        self._held.append((request, data))
        return request

    def message(self, kind: int) -> tuple[int, bytes] | None:
        """(tag, bytes) of the next message of that kind. Raises TransferError for one that is too long."""
        found = self._worker.tag_probe(self._api.UCXXTag(tag(kind, 0)), self._api.UCXXTagMask(KIND_MASK), True)
        if found.matched:
            if not 0 < found.length <= CONTROL_BYTES:
                raise TransferError(f"{self.name}: a message of {found.length} bytes; the limit is {CONTROL_BYTES}")
            data = np.empty(found.length, np.uint8)
            request = self._worker.tag_recv_with_handle(self._array(data), found)
            self._coming.append((request, found.sender_tag.value, data))
        if not self._coming or not self._coming[0][0].completed:
            return None
        request, value, data = self._coming.popleft()
        request.check_error()
        return value, data.tobytes()

    @property
    def idle(self) -> bool:
        """Nothing is under way."""
        return all(request.completed for request, _ in self._held)

    def delete(self) -> None:
        """The peer hears that its connection is lost. With something under way the agent is left as it is, for good;
        nobody drives it any more.
        """
        if self._worker is None:
            return
        if not self.idle:
            _ABANDONED.append(self)
            return
        # Also what has ended with an error is held by the worker until it is asked for: it would keep the worker.
        self._worker.cancel_inflight_requests(_CLOSE_NS, 1)
        self.close_peer()
        self._held.clear()
        self._coming.clear()
        self._worker = None

    def close_peer(self) -> None:
        """Talk to nobody any more."""
        peer, self._peer = self._peer, None
        if peer is not None:
            peer.close_blocking(_CLOSE_NS, 1)


def _event_descriptor(worker: int) -> int:
    """UCX's own for that worker. UCXX has it too, but in a mode in which closing sleeps until something happens."""
    descriptor = ctypes.c_int(-1)
    # UCXX has loaded the library; the loader finds it by its name.
    status = ctypes.CDLL("libucp.so.0").ucp_worker_get_efd(ctypes.c_void_p(worker), ctypes.byref(descriptor))
    if status != 0:
        raise TransferError(f"the worker has no event descriptor: UCX status {status}")
    return descriptor.value
