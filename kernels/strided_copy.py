"""Copies between strided slices of memory areas and one packed buffer, in plain torch and numpy: the CPU path, and the
twin of the Triton kernel in `strided_copy_triton`.

An area is an array of entries of `stride` bytes. Of pair p, the slice of entry e is the `width[p]` bytes from byte
`start[p] + stride[p] * e` of its area on. The packed buffer has them pair by pair, and within a pair in the order of
the runs of entries.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


@dataclass(frozen=True, eq=False)
class Slices:
    """`areas`: per pair, contiguous uint8 [bytes]; `start`, `stride`, `width`: per pair, in bytes; runs of entries
    [at, at + count), int64 [runs]. Slices of one pair must not overlap where they are written to.
    """

    areas: Sequence[torch.Tensor]
    start: Sequence[int]
    stride: Sequence[int]
    width: Sequence[int]
    at: NDArray[np.int64]
    count: NDArray[np.int64]

    @property
    def entries(self) -> int:
        return int(self.count.sum())

    def entry_list(self, each: int = 1) -> NDArray[np.int64]:
        """The number of every entry, int64 [entries / each]: in units of `each`, which must divide all runs."""
        at, count = self.at // each, self.count // each
        begins = np.cumsum(count) - count
        entries: NDArray[np.int64] = np.arange(count.sum()) + np.repeat(at - begins, count)
        return entries

    def word_bytes(self, packed: torch.Tensor) -> int:
        """The widest word (8, 4, 2 or 1 bytes) that every slice begins, ends and repeats on."""
        places = [packed.data_ptr(), *(area.data_ptr() for area in self.areas)]
        return math.gcd(8, *places, *self.start, *self.stride, *self.width)


def gather_slices(slices: Slices, packed: torch.Tensor) -> None:
    """Fill `packed`, uint8 [entries * sum(width)], on the CPU."""
    for area, part, index in _pairs(slices, packed):
        torch.index_select(area, 0, torch.from_numpy(index), out=part)


def scatter_slices(packed: torch.Tensor, slices: Slices) -> None:
    """Put `packed`, uint8 [entries * sum(width)], where the slices lie, on the CPU."""
    for area, part, index in _pairs(slices, packed):
        area.numpy()[index] = part.numpy()  # twice as fast as torch's index_copy_ into a strided view


def _pairs(slices: Slices, packed: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor, NDArray[np.int64]]]:
    """Per pair: its area as rows of words, its part of `packed` in the same form, and the rows to copy.

    Where slices are whole entries, those that always follow each other are one row: `each` of them.
    """
    word, entries = slices.word_bytes(packed), slices.entries
    each = int(np.gcd.reduce(np.concatenate([slices.at, slices.count]))) if entries else 1
    single = slices.entry_list()
    joined = slices.entry_list(each) if each > 1 else single
    found, first = [], 0
    for area, start, stride, width in zip(slices.areas, slices.start, slices.stride, slices.width, strict=True):
        whole = each if start == 0 and stride == width else 1
        row, step = width * whole, stride * whole
        rows = (len(area) - start - row) // step + 1
        words = area[: len(area) // word * word].view(_WORDS[word])
        view = words.as_strided((rows, row // word), (step // word, 1), words.storage_offset() + start // word)
        part = packed[first : first + entries * width].view(_WORDS[word]).view(-1, row // word)
        found.append((view, part, joined if whole > 1 else single))
        first += entries * width
    return found
