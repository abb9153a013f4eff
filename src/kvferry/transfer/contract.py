"""The contract of the data plane (one-sided, in the shape of the article's KVArgs).

Register regions once; accept a writer and hand it the `Descriptor` that is its own; connect to the one that a target
has handed to us; write spans; when a write's handle has ended *flushed*, its bytes lie at the target; notify travels
after them on the same path. The caller keeps the source memory unchanged until the handle has ended, however it ended.

Each pair of processes has agents of its own at both ends, so that destroying one ends what passes between those two
and nothing else: the receiving agent, and nothing of that writer's lands any more; the sending agent, and nothing of
what was posted to that target is read any more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from typing import TYPE_CHECKING, Annotated, Protocol

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from kvferry.protocol.offer import NOTHING_SAID, Offer

if TYPE_CHECKING:
    from kvferry.transfer.work import Work

#: What a peer's word is held to: no process has higher addresses, and no model so many layers or heads.
_ADDRESSES, _MOST = 2**62, 2**20


#: The `part` of the region that is behind the others where data paths are tried; no plan touches it.
SELF_TEST = "self-test"


class RegionKind(Enum):
    """What a region's items are; the values are part of the wire format and never change."""

    PAGES = "pages"  # pages of one layer: `tokens` tokens each
    ROWS = "rows"  # per-request rows (metadata, recurrent state)
    RINGS = "rings"  # per-request rings of `tokens` slots: position p lies in slot p % tokens

    __hash__ = object.__hash__  # each exists once, so there is no need for Enum's own, which is Python code


_Count = Annotated[int, Meta(ge=0, le=_MOST)]
_AtLeastOne = Annotated[int, Meta(ge=1, le=_MOST)]
_Bytes = Annotated[int, Meta(ge=1, le=_ADDRESSES)]
_Name = Annotated[str, Meta(max_length=64)]


class Segment(msgspec.Struct, frozen=True, array_like=True):
    """A run of a row: heads (or head groups) [first_head, first_head + heads), `head_bytes` each, one after the other.

    `heads` 0: not divided, `head_bytes` long. `replica` and `replicas` as in `Region`.
    """

    first_head: _Count
    heads: _Count
    head_bytes: _Bytes
    replica: _Count = 0
    replicas: _AtLeastOne = 1


class Region(msgspec.Struct, frozen=True, omit_defaults=True):
    """One registered memory area: `items` items of `item_bytes` each, contiguous from address `base`.

    What an item holds:

    * `part`: "k", "v", "latent", "k_scale", "v_scale", "index", "conv", "ssm", "metadata", ...; of `layer`, the global
      layer id (-1 for rows without one); of `stack`, "" for the model itself, "draft" for its draft model, whose layers
      count from 0 too.
    * heads [first_head, first_head + heads) of that part. 0 heads: not divided by heads, every rank of a TP group has
      all of it (latent, index).
    * Pages and rings have `tokens` tokens (slots), and lie token by token: [tokens / entry_tokens, heads, head_bytes].
      `entry_tokens` is above 1 for what exists once per so many tokens: a scale per page and head, a compressed index.
      `tokens` 0 in pages: not said, such an item is copied whole or not at all.
    * Rows lie in `segments`, one after the other; without any, a row is one segment of `heads` heads.
    * `window`: only the last so many tokens of a prompt are of use (0: all). Rings have one.

    `replica` is this region's number among the `replicas` that the instance's ranks have of the same content: TP above
    the number of heads, or what is not divided by heads. Only one of a source's replicas writes to a target's.

    `device`: the number of the CUDA device that the memory lies in; -1: host memory. `dtype` of its numbers, by torch's
    name ("" = not said).

    `pool`: regions of one pool have the same page numbers (slots); "" is the main one, and in rows and rings the part's
    own.
    """

    kind: RegionKind
    part: _Name
    layer: Annotated[int, Meta(ge=-1, le=_MOST)]
    base: Annotated[int, Meta(ge=0, le=_ADDRESSES)]
    item_bytes: _Bytes
    items: Annotated[int, Meta(ge=0, le=_ADDRESSES)]
    first_head: _Count = 0
    heads: _Count = 0
    tokens: _Count = 0
    entry_tokens: _AtLeastOne = 1
    window: _Count = 0
    stack: _Name = ""
    pool: _Name = ""
    replica: _Count = 0
    replicas: _AtLeastOne = 1
    segments: Annotated[tuple[Segment, ...], Meta(max_length=16)] = ()
    device: Annotated[int, Meta(ge=-1, le=_MOST)] = -1
    dtype: _Name = ""


class Proofs(msgspec.Struct, frozen=True):
    """Which proofs of quiescence hold on a backend's transport (design §5). `exited` holds once `revoke` of that writer
    has answered, since what a dead writer announced may be put into its place until then (staging).
    """

    drained: bool
    exited: bool
    revoked: bool


class Descriptor(msgspec.Struct, frozen=True):
    """What one writer needs to write here. `generation` counts the agents of this incarnation, so each has a name that
    no other has or had. `proofs` are those that hold for what is written by it; `why` says, for people, why this way
    was picked for that writer, and `at` where it leads. `way` is the one that was picked ("" = there is only one).
    """

    backend: Annotated[str, Meta(max_length=64)]
    agent: Annotated[str, Meta(max_length=256)]
    incarnation: int
    generation: int
    metadata: bytes
    regions: tuple[Region, ...]
    proofs: Proofs = Proofs(drained=True, exited=False, revoked=False)
    why: Annotated[str, Meta(max_length=1024)] = ""
    at: Annotated[str, Meta(max_length=512)] = ""
    way: Annotated[str, Meta(max_length=64)] = ""

    @property
    def path(self) -> str:
        """For people: the backend, and what it goes over, e.g. "ucx/tcp+staging"."""
        backend, _, rest = self.backend.partition("+")
        return (self.way or backend) + (f"+{rest}" if rest else "")


class Revoked(msgspec.Struct, frozen=True):
    """The proof that nothing of process `writer` can land any more by the agent of that generation.

    Only an endpoint makes one, when that agent has been destroyed.
    """

    writer: int
    generation: int


#: One row per span: local region index, local offset, peer region index, peer offset, length; all in bytes.
SPAN_DTYPE = np.dtype(
    [
        ("source_region", np.int32),
        ("target_region", np.int32),
        ("source_offset", np.int64),
        ("target_offset", np.int64),
        ("length", np.int64),
    ]
)
Spans = NDArray[np.void]


class WriteOutcome(Enum):
    FLUSHED = "flushed"  # every byte is placed at the target
    CANCELLED = "cancelled"  # posting stopped; what had been posted is flushed, the rest never was posted
    BROKEN = "broken"  # the peer or the path failed; the backend can't say what landed, and will post no more


class WriteResult(msgspec.Struct, frozen=True):
    """`size_bytes` are flushed. `wire_s`: from the first post to the last flush, `wait_s`: from the call to the first
    post, by the endpoint's clock; `descriptors`: what was posted. None where a backend can't tell, or posted nothing.
    """

    outcome: WriteOutcome
    size_bytes: int
    wire_s: float | None
    error: str = ""
    wait_s: float | None = None
    descriptors: int | None = None


class WriteHandle(Protocol):
    """One write. It ends exactly once; `on_end` is called then, on the loop that made the endpoint."""

    @property
    def result(self) -> WriteResult | None: ...


class Peer(Protocol):
    """A connected peer: its descriptor as given to `connect`."""

    @property
    def descriptor(self) -> Descriptor: ...


class Endpoint(Protocol):
    """One process's end of the data plane. All methods are called from one asyncio loop and never block it.

    * `regions` are those given at construction: what `accept` offers, and what `write` reads.
    * `accept(writer, offer)`: the descriptor for that process (an incarnation), and for no other. It is the same one
      until `revoke`. `offer` is what that process has; only who chooses between ways looks at it. Raises TransferError
      when the backend can't have another receiving agent, or there is no way from that process to this one.
    * `revoke(writer)` destroys the receiving agent of that process, if there is one. Writes through it end BROKEN at
      the writer. It answers with the proof, or None where there was no agent, or where a writer may reach memory
      without us (`Descriptor.proofs`).
    * `writer_exited(writer)`: that process has ended, and `revoke` has answered since that was known. What was laid
      aside, because it might still have been written to, is of use again.
    * `connect` is idempotent per descriptor. Raises TransferError when the backend or the peer refuses.
    * `write` takes spans, or the blocks of a plan (`kvferry.transfer.work`). It posts in batches of bounded bytes, in
      order; several writes to one peer end in order. Raises TransferError if a span lies outside a region of either
      side (nothing is posted then).
    * `notify` is delivered to the peer's `on_notify` after all writes that had ended before the call.
    * `cancel` stops posting; the handle still ends, as CANCELLED or BROKEN (or FLUSHED if all was posted).
    * `expect(+1)` / `expect(-1)`: a room expects data / no longer; the backend polls fast while any does.
    * `disconnect` destroys the sending agent of a peer: its unfinished writes end BROKEN, and nothing reads their
      source any more.
    """

    @property
    def backend(self) -> str: ...
    @property
    def regions(self) -> tuple[Region, ...]: ...
    async def accept(self, writer: int, offer: Offer = NOTHING_SAID) -> Descriptor: ...
    async def revoke(self, writer: int) -> Revoked | None: ...
    def writer_exited(self, writer: int) -> None: ...
    async def connect(self, descriptor: Descriptor) -> Peer: ...
    def write(self, peer: Peer, work: Work, on_end: Callable[[WriteResult], None]) -> WriteHandle: ...
    def notify(self, peer: Peer, payload: bytes) -> None: ...
    def cancel(self, handle: WriteHandle) -> None: ...
    def expect(self, change: int) -> None: ...
    async def disconnect(self, peer: Peer) -> None: ...
    async def close(self) -> None: ...


#: Called on the endpoint's loop with (agent name of the sender, payload).
OnNotify = Callable[[str, bytes], None]


class TransferError(Exception):
    """The data plane refused or failed; the message names the agent, the region and the limit."""


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Descriptor)


_region_decoder = msgspec.msgpack.Decoder(tuple[Region, ...])


def encode_regions(regions: Sequence[Region]) -> bytes:
    return _encoder.encode(regions)


def decode_regions(data: bytes) -> tuple[Region, ...]:
    """What a source rank writes from. Raises TransferError when `data` is not that."""
    try:
        regions = _region_decoder.decode(data)
    except (msgspec.DecodeError, RecursionError) as error:
        raise TransferError(f"not a list of regions: {error}") from None
    _check_sizes(regions, "a source")
    return regions


def encode_descriptor(descriptor: Descriptor) -> bytes:
    return _encoder.encode(descriptor)


def decode_descriptor(data: bytes) -> Descriptor:
    """Raises TransferError when `data` is not a descriptor, or promises memory that no process has."""
    try:
        descriptor = _decoder.decode(data)
    except (msgspec.DecodeError, RecursionError) as error:
        raise TransferError(f"not a descriptor: {error}") from None
    _check_sizes(descriptor.regions, descriptor.agent)
    return descriptor


def _check_sizes(regions: tuple[Region, ...], of: str) -> None:
    for index, region in enumerate(regions):
        if region.base + region.items * region.item_bytes > _ADDRESSES:
            size = f"{region.items} items of {region.item_bytes} bytes"
            raise TransferError(f"region {index} of {of}: {size} from address {region.base} on")
