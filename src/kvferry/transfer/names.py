"""What a descriptor says of itself: its agent's name, its metadata; and whether they hold to what they must."""

from __future__ import annotations

from typing import Protocol, TypeVar

import msgspec

from kvferry.transfer.contract import Descriptor, TransferError


def agent_name(incarnation: int, generation: int, kind: str = "kvferry") -> str:
    """Of both kinds of agents. A replaced process has another name, so nothing that is meant for one ever reaches the
    other; `kind` keeps the backends of one process apart, which count their agents each by itself.
    """
    return f"{kind}-{incarnation:016x}-{generation}"


def is_agent_of(name: str, incarnation: int, kind: str = "kvferry") -> bool:
    """By its name, of whatever generation."""
    return name.startswith(f"{kind}-{incarnation:016x}-")


def check_descriptor(descriptor: Descriptor, backend: str, incarnation: int, kind: str = "kvferry") -> None:
    """Raises TransferError when process `incarnation` can't connect to it: it is another backend's, its name is not one
    of its process's, or that process is this one.
    """
    name = descriptor.agent
    if descriptor.backend != backend:
        raise TransferError(f"{name}: backend is {descriptor.backend!r} there, {backend!r} here")
    if name != agent_name(descriptor.incarnation, descriptor.generation, kind):
        raise TransferError(
            f"agent {name!r} does not belong to incarnation {descriptor.incarnation:016x}, "
            f"generation {descriptor.generation}"
        )
    if descriptor.incarnation == incarnation:
        raise TransferError(f"{name}: can't connect to itself")


class Metadata(Protocol):
    @property
    def transports(self) -> str: ...


M = TypeVar("M", bound=Metadata)


def metadata_of(descriptor: Descriptor, decoder: msgspec.msgpack.Decoder[M], transports: str) -> M:
    """Of a backend that both ends have to run over the same `transports`. Raises TransferError."""
    name = descriptor.agent
    try:
        metadata = decoder.decode(descriptor.metadata)
    except (msgspec.DecodeError, RecursionError) as error:
        raise TransferError(f"{name}: metadata does not decode: {error}") from None
    if metadata.transports != transports:
        raise TransferError(f"{name}: transports are {metadata.transports!r} there, {transports!r} here")
    return metadata
