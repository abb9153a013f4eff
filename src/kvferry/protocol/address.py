"""Where a process is, and which one it is."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

#: What a name or an endpoint may have; the longest real ones are Ray's, with less than half of it.
Text = Annotated[str, Meta(max_length=512)]


class Address(msgspec.Struct, frozen=True):
    """A process's place on the network. Two addresses are the same process iff `incarnation` is equal.

    `host` names the kernel and pid namespace (not the machine's name): equal hosts mean that a pidfd works.
    """

    name: Text
    endpoint: Text
    incarnation: Annotated[int, Meta(ge=0)]
    host: Text
    pid: Annotated[int, Meta(ge=0, le=2**31 - 1)]
