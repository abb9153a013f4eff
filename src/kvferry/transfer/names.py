"""What the name of an agent says, and whether a descriptor holds to it."""

from __future__ import annotations

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
