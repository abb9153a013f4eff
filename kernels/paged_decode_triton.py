"""Paged decode attention as a Triton kernel. Imported only where there is a GPU, or by its tests.

One program per sequence and KV head walks the sequence's pages with an online softmax (Milakov and Gimelshein,
2018; the form of FlashAttention's inner loop). The query heads that share the KV head are the rows of its products.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def paged_decode_kernel(  # type: ignore[no-untyped-def]
    q_ptr,  # [B, Hkv * GROUP, D]
    k_ptr,  # [P, PAGE, Hkv, D]
    v_ptr,  # [P, PAGE, Hkv, D]
    tables_ptr,  # [B, table_width] int64
    lengths_ptr,  # [B] int64
    out_ptr,  # [B, Hkv * GROUP, D]
    table_width,
    kv_heads,
    scale,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,  # GROUP, rounded up to what tl.dot takes
    PAGE: tl.constexpr,
    D: tl.constexpr,
    DIMS: tl.constexpr,  # D, rounded up to a power of two
    UPCAST: tl.constexpr,  # compute in float32 whatever is stored: the interpreter's bfloat16 arithmetic is wrong
):
    sequence = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    length = tl.load(lengths_ptr + sequence)

    rows = tl.arange(0, ROWS)
    dims = tl.arange(0, DIMS)
    slots = tl.arange(0, PAGE)
    q_offsets = ((sequence * kv_heads + head) * GROUP + rows)[:, None] * D + dims[None, :]
    asked = (rows[:, None] < GROUP) & (dims[None, :] < D)
    q = tl.load(q_ptr + q_offsets, mask=asked, other=0.0)
    if UPCAST:
        q = q.to(tl.float32)

    best = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, DIMS), tl.float32)
    for index in range(tl.cdiv(length, PAGE)):
        page = tl.load(tables_ptr + sequence * table_width + index)
        offsets = ((page * PAGE + slots) * kv_heads + head)[:, None] * D + dims[None, :]
        readable = index * PAGE + slots < length
        there = readable[:, None] & (dims[None, :] < D)
        k = tl.load(k_ptr + offsets, mask=there, other=0.0)
        v = tl.load(v_ptr + offsets, mask=there, other=0.0)
        if UPCAST:
            k = k.to(tl.float32)
            v = v.to(tl.float32)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        scores = tl.where(readable[None, :], scores, float("-inf"))
        higher = tl.maximum(best, tl.max(scores, 1))
        weights = tl.exp(scores - higher[:, None])
        shrink = tl.exp(best - higher)
        total = total * shrink + tl.sum(weights, 1)
        acc = acc * shrink[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        best = higher
    out = acc / total[:, None]
    tl.store(out_ptr + q_offsets, out.to(out_ptr.dtype.element_ty), mask=asked)


def paged_decode_triton(
    q: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    block_tables: torch.Tensor,
    lengths: torch.Tensor,
    scale: float,
    upcast: bool = False,
) -> torch.Tensor:
    """As `paged_attention.paged_decode`: same shapes and dtypes, all contiguous; the page size is a power of two,
    from 16 on.
    """
    batch, q_heads, head_dim = q.shape
    page_size, kv_heads = k_pages.shape[1], k_pages.shape[2]
    group = q_heads // kv_heads
    out = torch.empty_like(q)
    paged_decode_kernel[(batch, kv_heads)](
        q,
        k_pages,
        v_pages,
        block_tables,
        lengths,
        out,
        block_tables.shape[1],
        kv_heads,
        scale,
        GROUP=group,
        ROWS=max(16, triton.next_power_of_2(group)),
        PAGE=page_size,
        D=head_dim,
        DIMS=max(16, triton.next_power_of_2(head_dim)),
        UPCAST=upcast,
    )
    return out
