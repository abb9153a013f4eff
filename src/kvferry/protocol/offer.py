"""What a rank's process offers its peers for moving bytes; with two such offers the way between them is chosen."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from kvferry.protocol.address import Text

_Name = Annotated[str, Meta(max_length=64)]

#: The kinds of memory that a pool may lie in: this process's own, what others of the host may map, and a CUDA device's.
HOST, SHARED, CUDA = "host", "shared", "cuda"


class Nic(msgspec.Struct, frozen=True, array_like=True):
    """An active port of an RDMA device: "mlx5_0:1", and its link layer, "InfiniBand" or "Ethernet"."""

    name: _Name
    link: _Name


class Offer(msgspec.Struct, frozen=True, omit_defaults=True):
    """`ways` that this process has (`kvferry.transfer.ways`), the best first; none: it has not said. `memory` of its
    pool: "host", "shared" or "cuda"; `nics` are its RDMA ports; `host` as in `Address` ("" = not known).
    """

    ways: Annotated[tuple[_Name, ...], Meta(max_length=16)] = ()
    memory: _Name = HOST
    nics: Annotated[tuple[Nic, ...], Meta(max_length=256)] = ()
    host: Text = ""

    def as_object(self) -> dict[str, Any]:
        """For `kvferry status`, which names the host of each rank anyway."""
        nics = [f"{nic.name} ({nic.link})" for nic in self.nics]
        return {"ways": list(self.ways), "memory": self.memory, "nics": nics}


NOTHING_SAID = Offer()
