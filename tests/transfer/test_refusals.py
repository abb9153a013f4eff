"""Case 44: each combination of a source and a target that can't be copied is refused when the pair is formed, and the
refusal names both values. Every kind of region and every attribute has its line.
"""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from kvferry.protocol.rank import Slice
from kvferry.transfer.contract import (
    Descriptor,
    Region,
    RegionKind,
    Segment,
    TransferError,
    decode_descriptor,
    decode_regions,
    encode_descriptor,
    encode_regions,
)
from kvferry.transfer.pairing import check_given, check_wanted, pair, pair_common
from kvferry.transfer.ranks import pair_instances, routes

PAGES, ROWS, RINGS = RegionKind.PAGES, RegionKind.ROWS, RegionKind.RINGS


def region(part: str, kind: RegionKind, item_bytes: int, **more: Any) -> Region:
    return Region(kind, part, **({"layer": 0, "base": 0, "items": 8} | more), item_bytes=item_bytes)


# What an item of each kind may look like: 4 heads of 64 numbers in pages of 16 tokens, and so on.
K = region("k", PAGES, 16 * 4 * 128, heads=4, tokens=16, dtype="bfloat16")
LATENT = region("latent", PAGES, 16 * 1152, tokens=16, dtype="bfloat16")
SCALE = region("k_scale", PAGES, 16 * 4 * 4, heads=4, tokens=16, dtype="float32")
PAGE_SCALE = region("k_scale", PAGES, 4 * 4, heads=4, tokens=16, entry_tokens=16)
INDEX = region("index", PAGES, 4 * 132, tokens=16, entry_tokens=4)
SWA = region("k", PAGES, 16 * 4 * 128, heads=4, tokens=16, window=128, pool="swa")
RING = region("k", RINGS, 128 * 4 * 128, heads=4, tokens=128, window=128)
SSM = region("ssm", ROWS, 8 * 4096, heads=8, dtype="float32")
CONV = region("conv", ROWS, 8 * 96 + 2 * 48, segments=(Segment(0, 8, 96), Segment(0, 2, 48)))
OPAQUE = region("k", PAGES, 8192)


def but(of: Region, **changes: Any) -> Region:
    return msgspec.structs.replace(of, **changes)


BOTH = [
    # (source, target, what the refusal says of both)
    (K, but(K, dtype="float16"), "k of layer 0: dtype is bfloat16 at the source, float16 at the target"),
    (K, but(K, dtype="float8_e4m3fn", item_bytes=16 * 4 * 64), "bytes per head is 128 at the source, 64 at the target"),
    (K, but(K, item_bytes=16 * 4 * 256), "bytes per head is 128 at the source, 256 at the target"),  # head_dim
    (K, but(K, heads=0), "divided by heads is True at the source, False at the target"),
    (K, SWA, "window is 0 at the source, 128 at the target"),
    (SWA, but(SWA, window=64), "window is 128 at the source, 64 at the target"),
    (K, but(K, entry_tokens=16, item_bytes=4 * 128), "entry_tokens is 1 at the source, 16 at the target"),
    (K, RING, "kind is pages at the source, rings at the target"),
    (K, but(SSM, part="k"), "kind is pages at the source, rows at the target"),
    (K, but(OPAQUE, item_bytes=K.item_bytes, heads=4), "tokens is 16 at the source, 0 at the target"),
    (OPAQUE, but(OPAQUE, item_bytes=4096), "item_bytes is 8192 at the source, 4096 at the target"),
    (OPAQUE, but(OPAQUE, heads=4), "divided by heads is False at the source, True at the target"),
    (LATENT, but(LATENT, item_bytes=16 * 1088), "bytes per head is 1152 at the source, 1088 at the target"),
    (LATENT, but(LATENT, dtype="float16"), "dtype is bfloat16 at the source, float16 at the target"),
    (SCALE, but(SCALE, item_bytes=16 * 4 * 2), "bytes per head is 4 at the source, 2 at the target"),
    (SCALE, PAGE_SCALE, "entry_tokens is 1 at the source, 16 at the target"),
    (PAGE_SCALE, but(PAGE_SCALE, tokens=32, entry_tokens=32), "entry_tokens is 16 at the source, 32 at the target"),
    (INDEX, but(INDEX, entry_tokens=8, item_bytes=2 * 132), "index of layer 0: entry_tokens is 4 at the source, 8 at"),
    (INDEX, but(INDEX, item_bytes=4 * 264), "index of layer 0: bytes per head is 132 at the source, 264 at the target"),
    (RING, but(RING, window=96), "window is 128 at the source, 96 at the target"),
    (RING, but(RING, item_bytes=128 * 4 * 64), "bytes per head is 128 at the source, 64 at the target"),
    (RING, but(RING, dtype="float16"), None),  # one side has not said: no ground to refuse it
    (SSM, but(SSM, item_bytes=8 * 2048), "ssm of layer 0: bytes per head is 4096 at the source, 2048 at the target"),
    (SSM, but(SSM, dtype="bfloat16"), "dtype is float32 at the source, bfloat16 at the target"),
    (SSM, but(SSM, heads=0), "divided by heads is True at the source, False at the target"),
    (CONV, but(CONV, item_bytes=8 * 72 + 2 * 48, segments=(Segment(0, 8, 72), Segment(0, 2, 48))),
     "conv of layer 0: bytes per head is 96 at the source, 72 at the target"),
    (CONV, but(CONV, item_bytes=8 * 96 + 2 * 24, segments=(Segment(0, 8, 96), Segment(0, 2, 24))),
     "conv of layer 0, segment 1: bytes per head is 48 at the source, 24 at the target"),
]  # fmt: skip


@pytest.mark.parametrize(("source", "target", "words"), BOTH)
def test_what_both_have_must_be_alike(source: Region, target: Region, words: str | None) -> None:
    """Whether a rank is alone, one of several, or all regions of all ranks are known."""
    lone = source.heads == target.heads
    for meet in (pair, pair_common) if lone else (pair_common,):
        if words is None:
            assert meet([source], [target]).groups
            continue
        with pytest.raises(TransferError, match=words):
            meet([source], [target])
    if words is not None and lone:
        with pytest.raises(TransferError, match=words):
            pair_instances({0: [source]}, {0: [target]})


def test_a_segment_that_only_one_side_divides() -> None:
    whole = but(CONV, item_bytes=8 * 96 + 96, segments=(Segment(0, 8, 96), Segment(0, 0, 96)))
    with pytest.raises(TransferError, match=r"conv of layer 0, segment 1: .* is \(0, 2\) at the source, \(0, 0\)"):
        pair([CONV], [whole])
    with pytest.raises(TransferError, match="segment 1: divided by heads is True at the source, False at the target"):
        pair_common([CONV], [whole])
    with pytest.raises(TransferError, match=r"conv/1: divided .*source: .*, heads 0 to 1; target: .*, not divided"):
        pair_instances({0: [CONV]}, {0: [whole]})


HALF = but(K, heads=2, item_bytes=16 * 2 * 128)
DRAFT = but(K, stack="draft")


@pytest.mark.parametrize(
    ("source", "target", "words"),
    [
        (K, HALF, r"\(first_head, heads\) is \(0, 4\) at the source, \(0, 2\) at the target"),
        (HALF, K, r"\(first_head, heads\) is \(0, 2\) at the source, \(0, 4\) at the target"),
        (
            SSM,
            but(SSM, heads=4, item_bytes=4 * 4096),
            r"ssm of layer 0: \(first_head, heads\) is \(0, 8\) at .*\(0, 4\)",
        ),
        (K, but(K, layer=1), "target lacks pages of k of layer 0: source has 1 parts of layers, target 1"),
    ],
)
def test_lone_ranks_have_the_same_heads_and_layers(source: Region, target: Region, words: str) -> None:
    with pytest.raises(TransferError, match=words):
        pair([source], [target])


ONE_SIDE = [
    # (beside what, what only one side has, its name in a refusal)
    ([K], SCALE, "pages of k_scale of layer 0"),  # quantised, or not
    ([K], INDEX, "pages of index of layer 0"),
    ([K], LATENT, "pages of latent of layer 0"),
    ([K], SSM, "rows of ssm of layer 0"),
    ([SSM], CONV, "rows of conv of layer 0"),
    ([LATENT], RING, "rings of k of layer 0"),
    ([CONV], but(K, part="what is that"), "pages of what is that of layer 0"),
]


@pytest.mark.parametrize(("beside", "more", "name"), [*ONE_SIDE, ([K], DRAFT, "pages of k of draft layer 0")])
def test_what_only_one_of_two_lone_ranks_has(beside: list[Region], more: Region, name: str) -> None:
    parts = [max(1, len(region.segments)) for region in (*beside, more)]
    counts = [sum(parts[:-1]), sum(parts)]
    with pytest.raises(TransferError, match=f"source lacks {name}.*source has {counts[0]} .*, target {counts[1]}"):
        pair(beside, [*beside, more])
    with pytest.raises(TransferError, match=f"target lacks {name}.*source has {counts[1]} .*, target {counts[0]}"):
        pair([*beside, more], beside)


@pytest.mark.parametrize(("beside", "more", "name"), ONE_SIDE)
def test_what_only_one_side_of_several_ranks_has(beside: list[Region], more: Region, name: str) -> None:
    """A source rank sees to it that what it has goes somewhere, and that it has its part of what a target has."""
    found = f"source lacks {name}.*target rank 3 has; of that layer the source has {beside[0].part}"
    with pytest.raises(TransferError, match=found):
        check_wanted(beside, 3, [*beside, more], undivided=True)
    if not more.heads and not more.segments:  # it may be another rank's to give
        check_wanted(beside, 3, [*beside, more], undivided=False)
    check_wanted(beside, 3, [*beside, but(more, layer=7)], undivided=True)  # that layer is another rank's
    pairing = pair_common([*beside, more], beside)
    with pytest.raises(TransferError, match=f"of {more.part} of layer 0 per entry, its targets have 0"):
        check_given([*beside, more], [pairing])
    check_given(beside, [pairing])


def test_draft_layers_that_no_target_has() -> None:
    with pytest.raises(TransferError, match="of draft/k of layer 0 per entry, its targets have 0"):
        check_given([K, DRAFT], [pair_common([K, DRAFT], [K])])


@pytest.mark.parametrize(
    ("source", "target", "words"),
    [
        (Slice(0, 2, 0, 4), Slice(0, 2, 0, 3), "heads 3 to 3 of kv .*source: .*heads 0 to 3; target: .*0 to 2"),
        (Slice(0, 2, 0, 4), Slice(0, 2, 0, 5), "heads 4 to 4 of kv .*source: .*heads 0 to 3; target: .*0 to 4"),
        (Slice(0, 2, 0, 4), Slice(0, 3, 0, 4), "kv of layer 2.*source: layers 0 to 1, .*target: layers 0 to 2, "),
        (Slice(0, 2, 0, 4), Slice(0, 2, 0, 0), "source: .*, heads 0 to 3; target: .*, not divided"),
        (Slice(0, 2, 0, 0), Slice(0, 2, 0, 4), "source: .*, not divided; target: .*, heads 0 to 3"),
    ],
)  # fmt: skip
def test_instances_have_the_same_heads_and_layers_in_all(source: Slice, target: Slice, words: str) -> None:
    """Among them MLA, which is not divided, and GQA."""
    with pytest.raises(TransferError, match=words):
        routes({0: (source,)}, {0: (target,)})


def test_a_kind_that_the_peer_does_not_know() -> None:
    for encode, decode in ((encode_regions, decode_regions), (_as_descriptor, decode_descriptor)):
        data = encode((K,)).replace(b"\xa5pages", b"\xa5blobs")
        with pytest.raises(TransferError, match="Invalid enum value 'blobs'"):
            decode(data)


def _as_descriptor(regions: tuple[Region, ...]) -> bytes:
    return encode_descriptor(Descriptor("fake", "agent", 1, 0, b"", regions))


@pytest.mark.parametrize(
    ("source", "target"),
    [
        (K, but(K, tokens=64, item_bytes=64 * 4 * 128)),  # other page sizes
        (SWA, but(SWA, tokens=64, item_bytes=64 * 4 * 128, pool="")),
        (RING, but(RING, tokens=160, item_bytes=160 * 4 * 128)),
        (INDEX, but(INDEX, tokens=64, item_bytes=16 * 132)),
        (but(K, dtype=""), K),
        (but(K, device=1), K),  # where it lies is the backend's matter
        (LATENT, but(LATENT, replica=1, replicas=2)),
    ],
)
def test_what_differs_and_can_be_copied(source: Region, target: Region) -> None:
    assert pair([source], [target]).groups
    check_wanted([source], 0, [target], undivided=True)
