"""Mooncake's TransferEngine as we use it: its environment, its birth, what its descriptor carries.

Every engine has a listener, connections and a thread of its own, and ends with its object: its thread is joined, so
nothing of what had come to it is placed any more and nothing of what it had to send is read. A target's engine has the
regions registered, and refuses what lies outside; a writer's has nothing registered, so that nobody can write by it.

A write has ended when the target has said that its last byte is placed (the acknowledged framing of 0.3.13); one that
has failed isn't read any more.
"""

from __future__ import annotations

import errno
import importlib
import os
import socket
from collections.abc import Sequence
from threading import Lock
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from kvferry.transfer.contract import Proofs, Region, TransferError
from kvferry.transfer.names import agent_name
from kvferry.transfer.spans import region_bytes

BACKEND = "mooncake"
TRANSPORTS = ("host", "tcp")

#: A dead writer's bytes may wait in our socket: its exit proves nothing until our engine is gone.
PROOFS = Proofs(drained=True, exited=False, revoked=True)

#: Read when engines are made. What stands still is for the rooms' clocks to judge, so nothing is to end by Mooncake's.
#: More connections and larger pieces than it has by itself are up to twice as fast here.
ENVIRONMENT = {
    "MC_FORCE_TCP": "1",
    "MC_LOG_LEVEL": "ERROR",
    "GLOG_minloglevel": "3",
    "MC_TCP_LANES_PER_PEER": "8",
    "MC_TCP_SLICE_SIZE": "1048576",
    "MC_TCP_PROGRESS_TIMEOUT_SEC": "1000000",
    "MC_TCP_STATUS_TIMEOUT_SEC": "1000000",
}
_environment = Lock()


class MooncakeMetadata(msgspec.Struct, frozen=True):
    """`Descriptor.metadata` of this backend. `server`: the engine's address; `mailbox`: that of mooncake_mail."""

    transports: str
    server: Annotated[str, Meta(min_length=1, max_length=256)]
    mailbox: Annotated[int, Meta(ge=0, le=2**62)]


encoder = msgspec.msgpack.Encoder()
metadata_decoder = msgspec.msgpack.Decoder(MooncakeMetadata)


def load() -> Any:
    """Mooncake's engine module. Raises TransferError when it is not there, or what it needs is not."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    try:
        return importlib.import_module("mooncake.engine")
    except ImportError as error:
        raise TransferError(
            f"the backend mooncake is not installed (pip install 'kvferry[mooncake]'; Debian's libibverbs1): {error}"
        ) from error


class MooncakeAgent:
    """One engine. Made, driven and deleted on one thread. `server` is its address."""

    def __init__(
        self, incarnation: int, generation: int, transports: str, host: str, memory: Sequence[tuple[int, int]]
    ) -> None:
        """`memory`: (address, bytes) of what may be written into. Raises TransferError when Mooncake refuses."""
        if transports not in TRANSPORTS:
            raise TransferError(f"mooncake has the transports {', '.join(TRANSPORTS)}")
        self.generation, self.name = generation, agent_name(incarnation, generation)
        address = "127.0.0.1" if transports == "host" else host
        module = load()
        with _environment:
            os.environ["MC_TCP_BIND_ADDRESS"] = address
            self.engine: Any = module.TransferEngine()
            _check(self.engine.initialize(address, "P2PHANDSHAKE", "tcp", ""), f"no engine at {address}")
        if memory:
            addresses, sizes = zip(*memory, strict=True)
            _check(self.engine.batch_register_memory(addresses, sizes), f"{len(memory)} areas are not registered")
        self.server = f"{address}:{self.engine.get_rpc_port()}"

    def delete(self) -> None:
        """When this returns, nothing lands by this engine, and nothing that it had to send is read."""
        if self.engine is None:
            return
        _wake(self.engine.get_rpc_port())
        self.engine = None


def _wake(port: int) -> None:
    """Shut what this process has open at that port of its own: an engine's thread looks there whether it shall end,
    once a second, or when the one who talks to it is done. Meanwhile destroying it would hold Python's lock.
    """
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208
        try:
            descriptor = os.dup(int(name))
        except OSError:  # closed meanwhile
            continue
        try:
            with socket.socket(fileno=descriptor) as found:
                if found.family in (socket.AF_INET, socket.AF_INET6) and found.getsockname()[1] == port:
                    found.shutdown(socket.SHUT_RDWR)
        except OSError as error:
            if error.errno == errno.ENOTSOCK:
                os.close(descriptor)


def _check(status: int, what: str) -> None:
    if status != 0:
        raise TransferError(f"Mooncake: {what}: status {status}")


def areas(regions: Sequence[Region]) -> list[tuple[int, int]]:
    """(address, bytes) of the regions; neighbours are one, because each request is looked for in all of them."""
    found: list[tuple[int, int]] = []
    for base, size in sorted(zip((r.base for r in regions), region_bytes(regions).tolist(), strict=True)):
        if found and base <= sum(found[-1]):
            found[-1] = found[-1][0], max(sum(found[-1]), base + size) - found[-1][0]
        elif size:
            found.append((base, size))
    return found
