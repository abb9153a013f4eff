"""One rank as it registers: its place in its instance, its memory layout, its limits."""

from __future__ import annotations

import msgspec

from kvferry.protocol.address import Address

#: The policies of a handoff: decode allocates before prefill computes, or after it.
EARLY = "early"
PREFILL_COMPLETE = "prefill_complete"


class Layout(msgspec.Struct, frozen=True):
    """What two ranks must agree on before KV may pass between them."""

    model: str
    revision: str
    dtype: str
    page_size: int
    layers: int
    kv_heads: int
    head_dim: int
    policy: str = EARLY


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

    @property
    def computes_first(self) -> bool:
        """Prompts are computed before decode is asked for pages. A unified instance keeps to early's order: its prefill
        computes into the pages that its decode runs on, so there is nothing to compute into before these are allocated.
        """
        return self.layout.policy == PREFILL_COMPLETE and self.role != "unified"
