"""The torch twin against slices that are copied one by one, and the Triton kernel against the twin."""

import numpy as np
import pytest
import torch

from kvferry.kernels.strided_copy import Slices, gather_slices, scatter_slices


def one_by_one(slices):
    """(pair, first byte, last byte + 1) of every slice, in the order of the packed buffer."""
    for pair, (start, stride, width) in enumerate(zip(slices.start, slices.stride, slices.width, strict=True)):
        for at, count in zip(slices.at.tolist(), slices.count.tolist(), strict=True):
            for entry in range(at, at + count):
                first = start + stride * entry
                yield pair, first, first + width


def random_slices(random, unit):
    """Areas of one size and different entries; all numbers are multiples of `unit` bytes."""
    pairs, entries = int(random.integers(1, 4)), 48
    stride = [unit * int(random.integers(1, 9)) for _ in range(pairs)]
    start = [unit * int(random.integers(0, step // unit)) for step in stride]
    width = [
        unit * int(random.integers(1, (step - first) // unit + 1)) for step, first in zip(stride, start, strict=True)
    ]
    if random.random() < 0.5:  # whole entries, whose runs are copied as one
        start[0], width[0] = 0, stride[0]
    areas = [torch.randint(0, 256, (entries * step,), dtype=torch.uint8) for step in stride]
    each = int(random.choice([1, 2, 4]))
    at = random.permutation(entries // 4)[: int(random.integers(1, 8))] * 4
    count = random.integers(1, 4 // each + 1, len(at)) * each
    return Slices(areas, start, stride, width, at.astype(np.int64), count.astype(np.int64))


@pytest.mark.parametrize("unit", [1, 2, 4, 8, 12, 64])
def test_every_slice_is_copied_and_nothing_else(unit):
    random = np.random.default_rng(unit)
    torch.manual_seed(unit)
    for _ in range(50):
        slices = random_slices(random, unit)
        packed = torch.zeros(slices.entries * sum(slices.width), dtype=torch.uint8)
        gather_slices(slices, packed)
        expected = [slices.areas[pair][first:end] for pair, first, end in one_by_one(slices)]
        assert torch.equal(packed, torch.cat(expected))

        fresh = torch.randint(0, 256, packed.shape, dtype=torch.uint8)
        wanted, first_of = [area.clone() for area in slices.areas], 0
        for pair, first, end in one_by_one(slices):
            wanted[pair][first:end] = fresh[first_of : first_of + end - first]
            first_of += end - first
        scatter_slices(fresh, slices)
        assert all(torch.equal(area, want) for area, want in zip(slices.areas, wanted, strict=True))


def test_words_are_as_wide_as_everything_allows():
    area, one = torch.zeros(64, dtype=torch.uint8), np.array([0])
    packed = torch.zeros(8, dtype=torch.uint8)
    for start, width, word in ((0, 8, 8), (8, 4, 4), (4, 8, 4), (2, 8, 2), (1, 2, 1)):
        assert Slices([area], [start], [16], [width], one, one).word_bytes(packed) == word
    assert Slices([area[4:]], [0], [16], [8], one, one).word_bytes(packed) == 4


def test_the_triton_kernel_interpreted_equals_the_twin(printed_by):
    printed = printed_by("strided_interpreted.py", 200, TRITON_INTERPRET="1")
    assert printed.splitlines() == ["float32 4 8", "float16 2 4 8", "bytes 1 2 4 8"]
