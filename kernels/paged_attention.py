"""Attention over paged K and V in plain torch: the CPU path, and the oracle for the Triton kernel.

Shapes, here and in `paged_decode_triton`: pages [P, S, Hkv, D] (P pages of S tokens), queries [rows, Hq, D] with
Hq a multiple of Hkv; query head h reads KV head h // (Hq / Hkv). A sequence's position p lies in row p % S of the
page that its block table names at p // S.
"""

from __future__ import annotations

import torch
from torch.nn.functional import scaled_dot_product_attention as sdpa


def write_kv(
    k_pages: torch.Tensor, v_pages: torch.Tensor, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor
) -> None:
    """Put k and v [rows, Hkv, D] into token slots [rows] int64, slot = page * S + position % S."""
    k_pages.view(-1, *k_pages.shape[2:]).index_copy_(0, slots, k)
    v_pages.view(-1, *v_pages.shape[2:]).index_copy_(0, slots, v)


def gather_pages(pages: torch.Tensor, block_tables: torch.Tensor) -> torch.Tensor:
    """[P, S, Hkv, D] and block tables [B, N] int64 to contiguous tokens [B, N * S, Hkv, D]."""
    batch, width = block_tables.shape
    gathered = pages.index_select(0, block_tables.reshape(-1))
    return gathered.view(batch, width * pages.shape[1], *pages.shape[2:])


def paged_decode(
    q: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    block_tables: torch.Tensor,
    lengths: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """One query per sequence. q [B, Hq, D]; block_tables [B, N] int64, padded with any valid page; lengths [B]
    int64, the positions that each query reads (its own included, so at least 1). Returns [B, Hq, D].

    The query heads of one KV head become the rows of one small product, so K and V are read once.
    """
    batch, q_heads, head_dim = q.shape
    kv_heads = k_pages.shape[2]
    k = gather_pages(k_pages, block_tables).transpose(1, 2)
    v = gather_pages(v_pages, block_tables).transpose(1, 2)
    grouped = q.view(batch, kv_heads, q_heads // kv_heads, head_dim)
    positions = torch.arange(k.shape[2], device=q.device)
    mask = (positions < lengths[:, None])[:, None, None, :]
    return sdpa(grouped, k, v, attn_mask=mask, scale=scale).reshape(batch, q_heads, head_dim)


def paged_prefill(
    q: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    block_table: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
) -> torch.Tensor:
    """The queries q [T, Hq, D] of one sequence's chunk against all of its tokens so far.

    `mask` [T, L] bool (True = may read) for a chunk that does not start at position 0, where L is the sequence's
    length after the chunk; None for one that does (plain causal, L = T). `block_table` [N] int64 covers L.
    Returns [T, Hq, D].
    """
    length = q.shape[0] if mask is None else mask.shape[1]
    k = gather_pages(k_pages, block_table[None])[:, :length].transpose(1, 2)
    v = gather_pages(v_pages, block_table[None])[:, :length].transpose(1, 2)
    out = sdpa(q.transpose(0, 1)[None], k, v, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=True)
    return out[0].transpose(0, 1)


def causal_mask(start: int, tokens: int, device: torch.device) -> torch.Tensor | None:
    """The mask that `paged_prefill` wants for a chunk of `tokens` at positions start ..: [tokens, start + tokens]."""
    if start == 0:
        return None
    reads = torch.arange(start + tokens, device=device)
    return reads[None, :] <= reads[start:, None]
