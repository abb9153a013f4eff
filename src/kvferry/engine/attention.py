"""Picks an attention backend by device, and runs it over one layer's pages for a whole step."""

from __future__ import annotations

from collections.abc import Callable

import torch

from kvferry.engine.batch import StepTensors
from kvferry.kernels.paged_attention import paged_decode, paged_prefill, write_kv

Decode = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, float], torch.Tensor]


def decode_backend(device: torch.device) -> Decode:
    """The torch twin on a CPU, the Triton kernel on a GPU (Triton is imported only there)."""
    if device.type == "cpu":
        return paged_decode
    from kvferry.kernels.paged_decode_triton import paged_decode_triton

    return paged_decode_triton


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    step: StepTensors,
    scale: float,
) -> torch.Tensor:
    """Store this step's k and v [T, Hkv, D] in the layer's pages, then attend. q and the result are [T, Hq, D]."""
    write_kv(k_pages, v_pages, k, v, step.slots)
    out = torch.empty_like(q)
    decode = decode_backend(q.device)
    for group in step.decodes:
        rows = slice(group.first, group.first + len(group.lengths))
        out[rows] = decode(q[rows], k_pages, v_pages, group.block_tables, group.lengths, scale)
    for chunk in step.chunks:
        rows = slice(chunk.first, chunk.first + chunk.tokens)
        out[rows] = paged_prefill(q[rows], k_pages, v_pages, chunk.block_table, chunk.mask, scale)
    return out
