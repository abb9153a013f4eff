"""Run by `test_strided_copy.py` with TRITON_INTERPRET=1: prints each kind of word in which kernel and twin agree."""

import numpy as np
import torch

from kvferry.kernels.strided_copy import Slices, gather_slices, scatter_slices
from kvferry.kernels.strided_copy_triton import gather_slices_triton, scatter_slices_triton

#: By name: the dtype, and the shapes that are tried: (heads of an entry, first one, heads taken, values per head).
KINDS = {
    "float32": (torch.float32, [(8, 2, 2, 16), (3, 1, 1, 10), (3, 1, 1, 5)]),
    "float16": (torch.float16, [(8, 6, 2, 8), (3, 2, 1, 10), (3, 1, 1, 7)]),
    "bytes": (torch.uint8, [(4, 1, 2, 24), (3, 1, 1, 5), (5, 0, 5, 12), (3, 2, 1, 6)]),
}
random = np.random.default_rng(0)
torch.manual_seed(0)


def values(dtype, shape):
    if dtype == torch.uint8:
        return torch.randint(0, 256, shape, dtype=dtype)
    return torch.randn(shape).to(dtype)


for name, (dtype, shapes) in KINDS.items():
    words = set()
    for heads, first, taken, size in shapes:
        item = torch.empty(0, dtype=dtype).element_size()
        pages = [values(dtype, (40, heads, size)) for _ in range(3)]
        areas = [page.view(-1).view(torch.uint8) for page in pages]
        at = random.permutation(10)[:4] * 4
        count = random.integers(1, 5, 4)
        start, stride, width = first * size * item, heads * size * item, taken * size * item
        sides = [
            Slices(a, [start] * 3, [stride] * 3, [width] * 3, at, count) for a in (areas, [a.clone() for a in areas])
        ]
        length = sides[0].entries * 3 * width
        packed, expected = torch.zeros(length, dtype=torch.uint8), torch.zeros(length, dtype=torch.uint8)
        gather_slices(sides[0], expected)
        gather_slices_triton(sides[0], packed)
        assert torch.equal(packed, expected)
        words.add(sides[0].word_bytes(packed))
        shuffled = expected.flip(0).contiguous()
        scatter_slices(shuffled, sides[0])
        scatter_slices_triton(shuffled, sides[1])
        for ours, theirs in zip(sides[0].areas, sides[1].areas, strict=True):
            assert torch.equal(ours, theirs)
    print(name, *sorted(words))
