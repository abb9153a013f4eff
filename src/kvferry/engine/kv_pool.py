"""The paged KV pool of one rank: the memory that peers write into, and the tensors the model reads.

K and V of each layer are one contiguous tensor [pages, page_size, heads, head_dim], so a page of one layer's K is one
item of one region. The metadata rows of requests lie in the same arena, as the last region.
"""

from __future__ import annotations

from math import prod

import torch

from kvferry.protocol.errors import ConfigError
from kvferry.protocol.metadata import ROW_BYTES
from kvferry.protocol.rank import Slice
from kvferry.transfer.contract import Region, RegionKind
from kvferry.transfer.huge_pages import private
from kvferry.transfer.shared import Area

_ALIGN_BYTES = 4096


class Arena:
    """Zeroed host memory, handed out in page-aligned pieces and never given back one by one.

    Private and anonymous, with huge pages asked for where the kernel has them; or `shared`: other processes may map
    `area`, and huge pages are rare. It lives as long as any tensor in it.
    """

    def __init__(self, size_bytes: int, shared: bool = False) -> None:
        self.area: Area | None = None
        if shared:
            self.area = Area(size_bytes)
            memory = self.area.buffer
        else:
            memory = private(max(size_bytes, 1))
        self._bytes = torch.frombuffer(memory, dtype=torch.uint8)
        self._used = 0

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A zeroed contiguous tensor on its own memory pages."""
        size = prod(shape) * dtype.itemsize
        piece = self._bytes[self._used : self._used + size]
        self._used += aligned(size)
        return piece.view(dtype).view(shape)


def aligned(size_bytes: int) -> int:
    return -(-size_bytes // _ALIGN_BYTES) * _ALIGN_BYTES


class KVPool:
    """`pages` usable pages (ids 0 .. pages - 1) of `page_size` tokens, and `metadata_rows` rows of `ROW_BYTES`; of the
    layers and heads in `part`.

    `k[at]`, `v[at]` of layer `first_layer + at`: [pages, page_size, heads, head_dim] of `dtype`. `shared`: other
    processes may map the memory, which is in `areas`. Raises ConfigError for a size below 1.
    """

    def __init__(
        self,
        *,
        part: Slice,
        pages: int,
        page_size: int,
        head_dim: int,
        dtype: torch.dtype,
        metadata_rows: int,
        shared: bool = False,
    ) -> None:
        for name, value in (("pages", pages), ("page_size", page_size), ("metadata_rows", metadata_rows)):
            if value < 1:
                raise ConfigError(f"pool.{name}", value, "at least 1")
        self.pages, self.page_size, self._part = pages, page_size, part
        shape = (pages, page_size, part.heads, head_dim)
        self.page_bytes = prod(shape[1:]) * dtype.itemsize
        row_bytes = metadata_rows * ROW_BYTES
        arena = Arena(2 * part.layers * aligned(pages * self.page_bytes) + aligned(row_bytes), shared)
        self.areas = () if arena.area is None else (arena.area,)
        self.k = [arena.take(shape, dtype) for _ in range(part.layers)]
        self.v = [arena.take(shape, dtype) for _ in range(part.layers)]
        self.metadata = arena.take((metadata_rows, ROW_BYTES), torch.uint8)

    @property
    def first_layer(self) -> int:
        return self._part.first_layer

    def regions(self) -> tuple[Region, ...]:
        """K and V of each layer, then the metadata rows. The memory stays where it is while the pool lives."""
        found = []
        for layer, pair in enumerate(zip(self.k, self.v, strict=True), self._part.first_layer):
            for part, tensor in zip(("k", "v"), pair, strict=True):
                found.append(
                    Region(
                        kind=RegionKind.PAGES,
                        part=part,
                        layer=layer,
                        base=tensor.data_ptr(),
                        item_bytes=self.page_bytes,
                        items=self.pages,
                        first_head=self._part.first_head,
                        heads=self._part.heads,
                        tokens=self.page_size,
                        replica=self._part.replica,
                        replicas=self._part.replicas,
                        dtype=str(tensor.dtype).removeprefix("torch."),
                    )
                )
        rows = Region(
            kind=RegionKind.ROWS,
            part="metadata",
            layer=-1,
            base=self.metadata.data_ptr(),
            item_bytes=ROW_BYTES,
            items=len(self.metadata),
        )
        return (*found, rows)

    def metadata_row(self, slot: int) -> memoryview:
        """A writable view of one row. Raises IndexError outside 0 .. metadata_rows - 1."""
        if not 0 <= slot < len(self.metadata):
            raise IndexError(f"metadata slot {slot}; the pool has {len(self.metadata)} rows")
        row: memoryview = self.metadata[slot].numpy().data
        return row
