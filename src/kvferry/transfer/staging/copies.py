"""The copies into and out of staging memory, on the device where the regions are."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from kvferry.kernels.strided_copy import Slices, gather_slices, scatter_slices
from kvferry.transfer.blocks import Ints, Side
from kvferry.transfer.contract import Region, RegionKind
from kvferry.transfer.copying import SliceCopier, slice_copier
from kvferry.transfer.huge_pages import private

_HUGE = 2 << 20

Gather = Callable[[Slices, torch.Tensor], None]
ScatterCopy = Callable[[torch.Tensor, Slices], None]


class Memory:
    """Staging memory, and the regions beside it as tensors. `staging` is uint8 [bytes], on the regions' device."""

    def __init__(
        self,
        regions: Sequence[Region],
        staging: torch.Tensor,
        area_of: Callable[[Region], torch.Tensor],
        gather: Gather,
        scatter: ScatterCopy,
    ) -> None:
        self.staging = staging
        self._areas = [area_of(region) for region in regions]
        self._gather, self._scatter = gather, scatter

    @property
    def region(self) -> Region:
        size = self.staging.numel()
        return Region(RegionKind.ROWS, "staging", -1, self.staging.data_ptr(), max(size, 1), int(size > 0))

    def gather(self, side: Side, offset: int, size_bytes: int) -> None:
        """Slices of the regions to staging memory at `offset`."""
        self._gather(self._slices(side), self.staging[offset : offset + size_bytes])

    def scatter(self, offset: int, size_bytes: int, side: Side) -> None:
        """Staging memory at `offset` to slices of the regions."""
        self._scatter(self.staging[offset : offset + size_bytes], self._slices(side))

    def _slices(self, side: Side) -> Slices:
        areas = [self._areas[index] for index in side.region.tolist()]
        return Slices(areas, side.start.tolist(), side.stride.tolist(), side.width.tolist(), side.at, side.count)


class HostMemory(Memory):
    """Of this process: copied by our own lines of C."""

    def __init__(self, copier: SliceCopier, regions: Sequence[Region], staging: torch.Tensor) -> None:
        super().__init__(regions, staging, host_area, gather_slices, scatter_slices)
        self._copier = copier
        self._bases = np.array([region.base for region in regions], np.uint64)

    def gather(self, side: Side, offset: int, size_bytes: int) -> None:
        self._copier.gather(self.staging.data_ptr() + offset, *self._columns(side))

    def scatter(self, offset: int, size_bytes: int, side: Side) -> None:
        self._copier.scatter(self.staging.data_ptr() + offset, *self._columns(side))

    def _columns(self, side: Side) -> tuple[NDArray[np.uint64], Ints, Ints, Ints, Ints]:
        start = self._bases[side.region] + side.start.astype(np.uint64)
        return start, side.stride, side.width, side.at, side.count


def host_memory(regions: Sequence[Region], staging_bytes: int) -> Memory:
    """For regions in this process's memory, which must stay mapped. Staging memory takes none until it is used."""
    staging = torch.empty(0, dtype=torch.uint8)
    if staging_bytes:
        area = private(-(-staging_bytes // _HUGE) * _HUGE)
        staging = torch.frombuffer(area, dtype=torch.uint8)[:staging_bytes]
    copier = slice_copier()
    if copier is not None:
        return HostMemory(copier, regions, staging)
    return Memory(regions, staging, host_area, gather_slices, scatter_slices)


def host_area(region: Region) -> torch.Tensor:
    """The memory of a region of this process, uint8 [bytes]."""
    size = region.item_bytes * region.items
    if not size:
        return torch.empty(0, dtype=torch.uint8)
    return torch.from_numpy(np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(region.base)))
