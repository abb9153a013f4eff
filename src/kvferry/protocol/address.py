"""Where a process is, and which one it is."""

from __future__ import annotations

import msgspec


class Address(msgspec.Struct, frozen=True):
    """A process's place on the network. Two addresses are the same process iff `incarnation` is equal.

    `host` names the kernel and pid namespace (not the machine's name): equal hosts mean that a pidfd works.
    """

    name: str
    endpoint: str
    incarnation: int
    host: str
    pid: int
