"""Run by `test_paged_attention.py` with TRITON_INTERPRET=1: prints each dtype in which kernel and twin agree."""

import torch

from kvferry.kernels.paged_attention import paged_decode
from kvferry.kernels.paged_decode_triton import paged_decode_triton

torch.manual_seed(0)
lengths = torch.tensor([1, 16, 17, 40])
tables = torch.tensor([[3, 0, 0], [5, 0, 0], [2, 9, 0], [8, 1, 7]])
for dtype, tolerance in ((torch.float32, 2e-6), (torch.float16, 2e-3), (torch.bfloat16, 2e-2)):
    for q_heads, kv_heads, size in ((6, 2, 32), (2, 2, 32), (3, 1, 32), (2, 1, 80)):
        q = torch.randn(4, q_heads, size).to(dtype)
        k, v = torch.randn(2, 10, 16, kv_heads, size).to(dtype)
        expected = paged_decode(q.float(), k.float(), v.float(), tables, lengths, 0.2)
        out = paged_decode_triton(q, k, v, tables, lengths, 0.2, upcast=dtype != torch.float32)
        torch.testing.assert_close(out.float(), expected, atol=tolerance, rtol=tolerance)
    print(str(dtype).removeprefix("torch."))
