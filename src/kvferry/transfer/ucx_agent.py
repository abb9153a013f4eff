"""NIXL's agent as we use it: its environment, its birth, what its descriptor carries, and its errors.

UCX picks transports by itself unless told, and the proofs of quiescence depend on the transport, so UCX_TLS and
the device are pinned here. "host" is CMA (one process copies into another's memory through the kernel) for the
bytes; notifications, connection set-up and failure detection go over tcp on the loopback device, because UCX's
shared-memory transports can't report the death of a peer and NIXL asks for that. "tcp" takes the device that has
the address on which this process is reached: with two devices UCX would spread each write over both, and a peer may
reach only one of them. "rdma" is all that UCX has for RDMA devices (rc, ud, dc, srd), on ports that are named; among
several UCX takes the nearest.
"""

from __future__ import annotations

import ctypes
import importlib
import os
from collections.abc import Sequence
from threading import Lock
from typing import Any

import msgspec
import numpy as np

from kvferry.transfer.contract import Descriptor, Proofs, Region, TransferError
from kvferry.transfer.devices import device_of
from kvferry.transfer.driver import describe
from kvferry.transfer.names import agent_name, metadata_of
from kvferry.transfer.spans import in_device, region_bytes

BACKEND = "ucx"


#: In place of a device: the one that has the endpoint's own address.
OWN_DEVICE = "own"


class Transport(msgspec.Struct, frozen=True):
    """UCX_TLS and UCX_NET_DEVICES ("" = not pinned, or `OWN_DEVICE`), what they can prove, and settings of UCX for this
    transport's agents alone. Where the environment has one, as UCX_…, that stands. `copies`: to post a write is to copy
    its bytes, so that it has ended when the call returns.
    """

    tls: str
    devices: str
    proofs: Proofs
    others: tuple[tuple[str, str], ...] = ()
    copies: bool = False


#: What is known of a transport that was not measured.
_DRAINED = Proofs(drained=True, exited=False, revoked=False)

#: Whole pages in a segment, sent from where they lie: a tenth faster than with UCX's own 8 and 64 KiB.
_TCP_OPTIONS = (("TCP_TX_SEG_SIZE", "256k"), ("TCP_RX_SEG_SIZE", "256k"), ("ZCOPY_THRESH", "0"))

#: A write's end is a flush of all that went to the peer before, by tcp too, so behind a message over tcp it needs the
#: peer's help. UCX would send one to each peer every 20 s, the first soon after an agent's making, to see whether it
#: lives. On one host its socket and the kernel tell that at once.
_HOST_OPTIONS = (("KEEPALIVE_INTERVAL", "inf"),)


#: Over CMA a stopped writer copies on when it continues, whatever became of our agent: revoking proves nothing.
#: Over tcp a dead writer's bytes may wait in our socket: its exit proves nothing until our agent is gone.
TRANSPORTS = {
    "host": Transport("cma,tcp,self", "lo", Proofs(drained=True, exited=True, revoked=False), _HOST_OPTIONS, True),
    "tcp": Transport("tcp", OWN_DEVICE, Proofs(drained=True, exited=False, revoked=True), _TCP_OPTIONS),
    "rdma": Transport("ib", "", _DRAINED),
}


class UcxMetadata(msgspec.Struct, frozen=True):
    """`Descriptor.metadata` of this backend. `agent` is NIXL's own metadata."""

    transports: str
    pid: int
    agent: bytes


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(UcxMetadata)
_environment = Lock()


def transport(name: str, of_device: bool = False) -> Transport:
    """A named transport, or `name` itself as UCX_TLS, of which nothing but drained is known. `of_device`: of regions in
    a CUDA device's memory, for which UCX needs its copies (cuda_copy, cuda_ipc and, where there is one, gdr_copy). A
    writer on the same host may then reach them by itself, so no more is known of these either.
    """
    found = TRANSPORTS.get(name) or Transport(name, "", _DRAINED)
    if of_device and name in TRANSPORTS:
        return msgspec.structs.replace(found, tls=f"{found.tls},cuda", proofs=_DRAINED, copies=False)
    return found


def nixl_errors() -> tuple[type[Exception], ...]:
    """NIXL's exceptions, which have no base class of their own."""
    bindings = vars(importlib.import_module("nixl_cu12._bindings"))
    return tuple(kind for kind in bindings.values() if isinstance(kind, type) and issubclass(kind, Exception))


class Agent:
    """One of our agents, with all regions registered. Made, driven and deleted on one thread. `metadata` is
    `Descriptor.metadata`.
    """

    def __init__(
        self,
        incarnation: int,
        generation: int,
        transports: str,
        host: str,
        regions: Sequence[Region],
        devices: str = "",
    ) -> None:
        """Raises whatever NIXL raises when UCX has no such transport."""
        self.generation = generation
        self.name = agent_name(incarnation, generation)
        self.nixl, self._registration, self.metadata = open_agent(self.name, transports, host, regions, devices)

    def notifications(self) -> list[tuple[str, bytes]]:
        """What has come, as (sender's agent, payload). Drives the agent."""
        return [
            (name.decode() if isinstance(name, bytes) else str(name), bytes(payload))
            for name, payloads in self.nixl.get_new_notifs().items()
            for payload in payloads
        ]

    def delete(self) -> None:
        """When this returns, UCX has let go: nothing lands by this agent, and nothing that it posted is read."""
        # NIXL's wrapper may be held by the traceback of an error somewhere; the agent itself must go now.
        if self.nixl is not None:
            self.nixl.agent = None
        self.nixl = self._registration = None


def open_agent(
    name: str, transports: str, host: str, regions: Sequence[Region], devices: str = ""
) -> tuple[Any, Any, bytes]:
    """A new agent with all regions registered: (agent, registration, `Descriptor.metadata`). `host` is the address on
    which peers reach this process; `devices` are UCX_NET_DEVICES, in place of the transport's own.

    Sets the process's environment for UCX, which reads it when the agent is made. A level of logging that is set
    already stays: errors reach us as exceptions, and UCX would print each of them as well.
    """
    with _environment:
        chosen = transport(transports, in_device(regions))
        os.environ["UCX_TLS"] = chosen.tls
        taken = devices or (device_of(host) if chosen.devices == OWN_DEVICE else chosen.devices)
        if taken:
            os.environ["UCX_NET_DEVICES"] = taken
        os.environ.setdefault("UCX_LOG_LEVEL", "fatal")
        os.environ.setdefault("NIXL_LOG_LEVEL", "FATAL")
        # Not `import nixl`: that imports torch and picks the build for the newest CUDA.
        api = importlib.import_module("nixl_cu12._api")
        agent = api.nixl_agent(name, api.nixl_agent_config(enable_prog_thread=False, backends=[]))
        agent.create_backend("UCX", {"engine_config": ",".join(f"{key}={value}" for key, value in chosen.others)})
    registration = [agent.register_memory(areas, kind) for kind, areas in _areas(regions)]
    metadata = UcxMetadata(transports, os.getpid(), bytes(agent.get_agent_metadata()))
    return agent, registration, _encoder.encode(metadata)


def add_peer(agent: Any, transports: str, descriptor: Descriptor) -> None:
    """Make a peer known to the agent. Raises TransferError, and then leaves nothing behind."""
    name = descriptor.agent
    metadata = metadata_of(descriptor, _decoder, transports)
    if transports == "host":  # which moves host memory only (kvferry.transfer.ways)
        _check_reach(name, metadata.pid, descriptor.regions)
    refused: tuple[type[Exception], ...] = (*nixl_errors(), UnicodeDecodeError)  # the last: the name in it is no text
    try:
        added = agent.add_remote_agent(metadata.agent)
        found = added.decode() if isinstance(added, bytes) else str(added)
    except refused as error:
        raise TransferError(f"{name}: the agent's metadata is refused: {describe(error)}") from error
    if found != name:
        agent.remove_remote_agent(found)
        raise TransferError(f"the descriptor names agent {name!r}, its metadata {found!r}")
    try:
        _check_registered(agent, descriptor)
    except TransferError:
        agent.remove_remote_agent(name)
        raise


def _areas(regions: Sequence[Region]) -> list[tuple[str, np.ndarray[Any, np.dtype[np.uint64]]]]:
    """(NIXL's kind of memory, areas of it) of all regions."""
    areas = np.zeros((len(regions), 3), dtype=np.uint64)  # address, length, device
    areas[:, 0] = [region.base for region in regions]
    areas[:, 1] = region_bytes(regions)
    areas[:, 2] = [max(region.device, 0) for region in regions]
    kinds = np.array([kind_of(region) for region in regions])
    return [(str(kind), areas[kinds == kind]) for kind in np.unique(kinds)]


def kind_of(region: Region) -> str:
    """NIXL's name for the memory that it lies in."""
    return "VRAM" if region.device >= 0 else "DRAM"


def _check_registered(agent: Any, descriptor: Descriptor) -> None:
    """The peer's metadata must cover every region that its descriptor promises."""
    for kind, areas in _areas(descriptor.regions):
        try:
            prepared = agent.prep_xfer_dlist(descriptor.agent, areas, kind)
        except nixl_errors() as error:
            count = len(descriptor.regions)
            raise TransferError(
                f"{descriptor.agent}: a region of its {count} is not registered there: {describe(error)}"
            ) from error
        agent.release_dlist_handle(prepared)


class _Area(ctypes.Structure):
    """struct iovec."""

    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


def _check_reach(name: str, pid: int, regions: Sequence[Region]) -> None:
    """Read one byte of the peer's memory the way CMA would.

    Where the kernel forbids it, UCX silently moves the bytes over tcp instead, and `exited` would be no proof.
    """
    if not regions:
        return
    byte = ctypes.create_string_buffer(1)
    here = _Area(ctypes.addressof(byte), 1)
    there = _Area(regions[0].base, 1)
    libc = ctypes.CDLL(None, use_errno=True)
    count = libc.process_vm_readv(pid, ctypes.byref(here), 1, ctypes.byref(there), 1, 0)
    if count != 1:
        reason = os.strerror(ctypes.get_errno())
        raise TransferError(f"{name}: CMA can't reach the memory of process {pid}: {reason}; use transports 'tcp'")
