"""The strided copies of `strided_copy` as a Triton kernel. Imported only where there is a GPU, or by its tests.

One program per pair and block of entries. Areas come as a table of addresses, so one launch copies between any number
of them. Bytes move as words of the widest size that fits, whatever their dtype is: nothing is converted.
"""

from __future__ import annotations

import numpy as np
import torch
import triton
import triton.language as tl

from kvferry.kernels.strided_copy import Slices

_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}
_BLOCK_BYTES = 16 * 1024


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def strided_copy_kernel(  # type: ignore[no-untyped-def]
    first_ptr,  # [pairs] int64, address of the slice of entry 0
    stride_ptr,  # [pairs] int64, words
    width_ptr,  # [pairs] int64, words
    packed_first_ptr,  # [pairs] int64, the word of `packed` where the pair begins
    entries_ptr,  # [entries] int64
    packed_ptr,  # words
    entries,
    GATHER: tl.constexpr,  # areas to packed; else packed to areas
    ENTRIES: tl.constexpr,  # of one program
    WORDS: tl.constexpr,  # of one step
):
    pair = tl.program_id(1)
    at = tl.program_id(0).to(tl.int64) * ENTRIES + tl.arange(0, ENTRIES)
    entry = tl.load(entries_ptr + at, mask=at < entries, other=0)
    width = tl.load(width_ptr + pair)
    area = tl.load(first_ptr + pair).to(tl.pointer_type(packed_ptr.dtype.element_ty))
    rows = area + (entry * tl.load(stride_ptr + pair))[:, None]
    packed_rows = packed_ptr + (tl.load(packed_first_ptr + pair) + at * width)[:, None]
    for first in range(0, width, WORDS):
        word = (first + tl.arange(0, WORDS))[None, :]
        inside = (at < entries)[:, None] & (word < width)
        if GATHER:
            tl.store(packed_rows + word, tl.load(rows + word, mask=inside), mask=inside)
        else:
            tl.store(rows + word, tl.load(packed_rows + word, mask=inside), mask=inside)


def gather_slices_triton(slices: Slices, packed: torch.Tensor) -> None:
    """As `strided_copy.gather_slices`; areas and `packed` on one device."""
    _launch(slices, packed, gather=True)


def scatter_slices_triton(packed: torch.Tensor, slices: Slices) -> None:
    """As `strided_copy.scatter_slices`; areas and `packed` on one device."""
    _launch(slices, packed, gather=False)


def block_of(width: int, word: int, entries: int) -> tuple[int, int]:
    """WORDS and ENTRIES for slices of at most `width` words of `word` bytes."""
    words = min(triton.next_power_of_2(width), 128)
    return words, min(max(1, _BLOCK_BYTES // (words * word)), triton.next_power_of_2(entries))


def _launch(slices: Slices, packed: torch.Tensor, gather: bool) -> None:
    entries, pairs = slices.entries, len(slices.areas)
    if not entries or not pairs:
        return
    word = slices.word_bytes(packed)
    width = np.array(slices.width, dtype=np.int64)
    first = [area.data_ptr() + start for area, start in zip(slices.areas, slices.start, strict=True)]
    packed_first = entries * (np.cumsum(width) - width) // word
    rows = [first, np.array(slices.stride) // word, width // word, packed_first]
    table = torch.from_numpy(np.array(rows, dtype=np.int64)).to(packed.device)
    words, block = block_of(int(width.max()) // word, word, entries)
    strided_copy_kernel[(triton.cdiv(entries, block), pairs)](
        *table,
        torch.from_numpy(slices.entry_list()).to(packed.device),
        packed.view(_WORDS[word]),
        entries,
        GATHER=gather,
        ENTRIES=block,
        WORDS=words,
    )
