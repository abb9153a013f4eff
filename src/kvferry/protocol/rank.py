"""One rank as it registers: its place in its instance, its memory layout, its limits."""

from __future__ import annotations

import msgspec

from kvferry.protocol.address import Address
from kvferry.protocol.offer import Offer

#: The policies of a handoff: decode allocates before prefill computes, or after it.
EARLY = "early"
PREFILL_COMPLETE = "prefill_complete"


class Layout(msgspec.Struct, frozen=True):
    """What two ranks must agree on before KV may pass between them; but `page_size`, the tokens of a page, is each
    instance's own.
    """

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
    [first_head, first_head + heads); 0 heads: KV that is not divided by heads (MLA's latent), all of it.

    `replica` is its number among the `replicas` ranks that have the same heads of these layers. Of cp_size ranks that
    share out a prompt, it has the tokens of number cp_rank (`kvferry.transfer.chunk.cp_range`). `part`: "kv", or
    another part of the model's state that is dealt out in its own way.
    """

    first_layer: int
    layers: int
    first_head: int
    heads: int
    replica: int = 0
    replicas: int = 1
    cp_rank: int = 0
    cp_size: int = 1
    part: str = "kv"


def whole(layout: Layout) -> Slice:
    """All of it: what an instance's only rank has."""
    return Slice(0, layout.layers, 0, layout.kv_heads)


def slice_of(
    layout: Layout,
    tp_rank: int,
    tp_size: int,
    pp_rank: int,
    pp_size: int,
    cp_rank: int = 0,
    cp_size: int = 1,
    stages: tuple[int, ...] = (),
) -> Slice:
    """What the rank at these coordinates has when heads are dealt out evenly, in order. With more ranks than heads each
    head has as many replicas, on neighbouring ranks. Stages have `stages` layers, or as many each; the first ones take
    one more where they don't divide.

    Raises ValueError when a stage would have no layer, when the stages don't have the model's layers, or when neither
    of heads and ranks divides the other.
    """
    first_layer, layers = _stage_of(layout.layers, pp_rank, pp_size, stages)
    first_head, heads, replica, replicas = heads_of(layout.kv_heads, tp_rank, tp_size)
    return Slice(first_layer, layers, first_head, heads, replica, replicas, cp_rank, cp_size)


def heads_of(heads: int, tp_rank: int, tp_size: int) -> tuple[int, int, int, int]:
    """(first head, heads, replica, replicas) of one rank: `heads` of some part dealt out evenly to `tp_size` ranks. 0:
    not divided by heads. Raises ValueError when neither divides the other.
    """
    if heads == 0:
        return 0, 0, tp_rank, tp_size
    if heads % tp_size == 0:
        each = heads // tp_size
        return tp_rank * each, each, 0, 1
    if tp_size % heads == 0:
        replicas = tp_size // heads
        return tp_rank // replicas, 1, tp_rank % replicas, replicas
    raise ValueError(f"tp is {tp_size}; allowed: what divides the model's {heads} KV heads, or is a multiple of them")


def _stage_of(layers: int, pp_rank: int, pp_size: int, stages: tuple[int, ...]) -> tuple[int, int]:
    """(first layer, layers)."""
    if pp_size > layers:
        raise ValueError(f"pp is {pp_size}; allowed: at most the model's {layers} layers")
    if stages:
        if len(stages) != pp_size or sum(stages) != layers or min(stages) < 1:
            raise ValueError(f"stages are {stages}; wanted {pp_size} of at least 1 layer, {layers} layers in all")
        return sum(stages[:pp_rank]), stages[pp_rank]
    return share(layers, pp_rank, pp_size)


def share(size: int, rank: int, ranks: int) -> tuple[int, int]:
    """(first, count) of what a rank has of `size` things in order; the first ranks have one more if need be."""
    least, more = divmod(size, ranks)
    return rank * least + min(rank, more), least + (rank < more)


class Member(msgspec.Struct, frozen=True):
    """A rank as its instance's leader names it to others: its number, its process, what it has of the KV, and what it
    offers for moving it.
    """

    rank: int
    address: Address
    slice: Slice
    offer: Offer = Offer()


def with_host(member: Member) -> Offer:
    """What it offers, and the host that its address names."""
    return msgspec.structs.replace(member.offer, host=member.address.host)


class RankInfo(msgspec.Struct, frozen=True):
    """One rank of one instance. `instance` is its name; coordinates count from 0.

    `layout` is the whole model's, in every rank. `max_prompt_tokens` and `max_total_tokens` are the limits of this
    rank's pool and model. `draining`: it takes no new rooms, finishes those it has, and leaves. `members` are all ranks
    of an instance of several, as its leader registers them: they stay the same as long as the leader lives. `stages`:
    layers of each pipeline stage, where they are not dealt out evenly. `offer`: what this rank's process offers for
    moving KV.
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
    members: tuple[Member, ...] = ()
    stages: tuple[int, ...] = ()
    offer: Offer = Offer()

    @property
    def computes_first(self) -> bool:
        """Prompts are computed before decode is asked for pages. A unified instance keeps to early's order: its prefill
        computes into the pages that its decode runs on, so there is nothing to compute into before these are allocated.
        """
        return self.layout.policy == PREFILL_COMPLETE and self.role != "unified"

    @property
    def rank(self) -> int:
        """The rank's number within its instance; 0 is the leader's."""
        return (self.cp_rank * self.pp_size + self.pp_rank) * self.tp_size + self.tp_rank

    @property
    def ranks(self) -> int:
        """How many ranks the instance has."""
        return self.cp_size * self.tp_size * self.pp_size

    @property
    def sources(self) -> tuple[Member, ...]:
        """Its ranks as those that write see them. A lone rank that offers nothing is known by its address."""
        if self.members or self.offer == Offer():
            return self.members
        return (Member(self.rank, self.address, self.slice, self.offer),)

    @property
    def slice(self) -> Slice:
        return slice_of(
            self.layout, self.tp_rank, self.tp_size, self.pp_rank, self.pp_size, self.cp_rank, self.cp_size, self.stages
        )


#: The leader's number within its instance.
LEADER = 0
