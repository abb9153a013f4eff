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


class Slice(msgspec.Struct, frozen=True, array_like=True):
    """The part of a model's KV that one rank has: layers [first_layer, first_layer + layers) by global id, and KV heads
    [first_head, first_head + heads).
    """

    first_layer: int
    layers: int
    first_head: int
    heads: int


def whole(layout: Layout) -> Slice:
    """All of it: what an instance's only rank has."""
    return Slice(0, layout.layers, 0, layout.kv_heads)


def slice_of(layout: Layout, tp_rank: int, tp_size: int, pp_rank: int, pp_size: int) -> Slice:
    """What the rank at these coordinates has when layers and heads are dealt out evenly, in order; the first stages
    take one layer more where they don't divide.

    Raises ValueError when a stage would have no layer, or when the heads don't divide.
    """
    if layout.kv_heads % tp_size:
        raise ValueError(f"tp is {tp_size}; allowed: what divides the model's {layout.kv_heads} KV heads")
    if pp_size > layout.layers:
        raise ValueError(f"pp is {pp_size}; allowed: at most the model's {layout.layers} layers")
    least, more = divmod(layout.layers, pp_size)
    heads = layout.kv_heads // tp_size
    return Slice(pp_rank * least + min(pp_rank, more), least + (pp_rank < more), tp_rank * heads, heads)


class Member(msgspec.Struct, frozen=True):
    """A rank as its instance's leader names it to others: its number, its process, and what it has of the KV."""

    rank: int
    address: Address
    slice: Slice


class RankInfo(msgspec.Struct, frozen=True):
    """One rank of one instance. `instance` is its name; coordinates count from 0.

    `layout` is the whole model's, in every rank. `max_prompt_tokens` and `max_total_tokens` are the limits of this
    rank's pool and model. `draining`: it takes no new rooms, finishes those it has, and leaves. `members` are all ranks
    of an instance of several, as its leader registers them: they stay the same as long as the leader lives.
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

    members: tuple[Member, ...] = ()

    @property
    def rank(self) -> int:
        """The rank's number within its instance; 0 is the leader's."""
        return (self.cp_rank * self.pp_size + self.pp_rank) * self.tp_size + self.tp_rank

    @property
    def ranks(self) -> int:
        """How many ranks the instance has."""
        return self.cp_size * self.tp_size * self.pp_size

    @property
    def slice(self) -> Slice:
        return slice_of(self.layout, self.tp_rank, self.tp_size, self.pp_rank, self.pp_size)


#: The leader's number within its instance.
LEADER = 0
