"""The kernels on a real GPU against their twins on the CPU: `-m gpu` chooses them; see docs/gpu.md."""

import numpy as np
import pytest
import torch

from kvferry.kernels.paged_attention import paged_decode
from kvferry.kernels.strided_copy import Slices, gather_slices, scatter_slices

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def gpu():
    assert torch.cuda.is_available(), "torch finds no CUDA device here; `-m 'not gpu'` leaves these tests out"


@pytest.mark.parametrize("size", [32, 64, 80, 96, 128, 256])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.float16, 2e-3), (torch.bfloat16, 2e-2)])
def test_paged_decode(dtype, tolerance, size):
    from kvferry.kernels.paged_decode_triton import paged_decode_triton

    torch.manual_seed(0)
    lengths, tables = torch.tensor([1, 16, 17, 40]), torch.tensor([[3, 0, 0], [5, 0, 0], [2, 9, 0], [8, 1, 7]])
    q, (k, v) = torch.randn(4, 6, size).to(dtype), torch.randn(2, 10, 16, 2, size).to(dtype)
    expected = paged_decode(q.float(), k.float(), v.float(), tables, lengths, size**-0.5)
    out = paged_decode_triton(*(tensor.cuda() for tensor in (q, k, v, tables, lengths)), size**-0.5)
    torch.testing.assert_close(out.cpu().float(), expected, atol=tolerance, rtol=tolerance)


def timed_ms(work):
    work()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(20):
        work()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / 20


@pytest.mark.parametrize(("heads", "taken", "head_bytes"), [(8, 2, 256), (8, 1, 512), (3, 1, 128), (3, 2, 6)])
def test_strided_copies(heads, taken, head_bytes, capsys):
    """64 regions, 256 tokens in scattered pages of 16."""
    from kvferry.kernels.strided_copy_triton import gather_slices_triton, scatter_slices_triton

    torch.manual_seed(0)
    stride, width, pairs = heads * head_bytes, taken * head_bytes, 64
    areas = [torch.randint(0, 256, (1024 * stride,), dtype=torch.uint8) for _ in range(pairs)]
    at = np.random.default_rng(0).permutation(64)[:16] * 16

    def slices(where):
        return Slices(where, [head_bytes] * pairs, [stride] * pairs, [width] * pairs, at, np.full(16, 16))

    here, there = slices(areas), slices([area.cuda() for area in areas])
    packed = torch.zeros(here.entries * pairs * width, dtype=torch.uint8)
    on_gpu = packed.cuda()
    gather_slices(here, packed)
    gather_slices_triton(there, on_gpu)
    assert torch.equal(on_gpu.cpu(), packed)
    fresh = torch.randint(0, 256, packed.shape, dtype=torch.uint8)
    scatter_slices(fresh, here)
    scatter_slices_triton(fresh.cuda(), there)
    assert all(torch.equal(ours, theirs.cpu()) for ours, theirs in zip(here.areas, there.areas, strict=True))

    other, size_gb = torch.empty_like(on_gpu), packed.numel() / 1e6  # GB in a thousand times: per ms it is GB/s
    plain = size_gb / timed_ms(lambda: other.copy_(on_gpu))
    gather = size_gb / timed_ms(lambda: gather_slices_triton(there, on_gpu))
    scatter = size_gb / timed_ms(lambda: scatter_slices_triton(on_gpu, there))
    with capsys.disabled():
        print(f"\nslices of {width} bytes: gather {gather:.1f} GB/s, scatter {scatter:.1f}, plain copy {plain:.1f}")
