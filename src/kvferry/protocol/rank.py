"""One rank as it registers: its place in its instance, its memory layout, its limits."""

from __future__ import annotations

import msgspec

from kvferry.protocol.address import Address


class Layout(msgspec.Struct, frozen=True):
    """What two ranks must agree on before KV may pass between them."""

    model: str
    revision: str
    dtype: str
    page_size: int
    layers: int
    kv_heads: int
    head_dim: int
    policy: str = "early"


class RankInfo(msgspec.Struct, frozen=True):
    """One rank of one instance. `instance` is its name; coordinates count from 0.

    `max_prompt_tokens` and `max_total_tokens` are the limits of this rank's pool and model. `draining`: it takes no new
    rooms, finishes those it has, and leaves.
    """

    instance: str
    role: str
    address: Address
    layout: Layout
    dp_rank: int = 0
    dp_size: int = 1
    cp_rank: int = 0
    cp_size: int = 1
    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1
    pages: int = 0
    max_prompt_tokens: int = 0
    max_total_tokens: int = 0
    draining: bool = False
