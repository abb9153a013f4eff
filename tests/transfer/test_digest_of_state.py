"""Checksums of all that a request has: state rows, a ring, pages and the metadata row. A byte of it that changes at the
target, at any place, changes the digest that the target takes; other bytes don't.
"""

from functools import partial

import numpy as np
import pytest

from kvferry.transfer.contract import Region, RegionKind, Segment
from kvferry.transfer.digest import ThreadDigests, digest_of
from kvferry.transfer.flip import flipping
from kvferry.transfer.plan import Chunk, Held, pair_common, plan

PAGES, ROWS, RINGS = RegionKind.PAGES, RegionKind.ROWS, RegionKind.RINGS
PROMPT = Chunk(0, 6, 6)
SOURCE = Held([3, 0], {"state": 2, "ring": 1, "metadata": 0})
TARGET = Held([1, 2], {"state": 1, "ring": 0, "metadata": 1})
#: What the target knows of the source: nothing but its regions. Any pages and slots do.
UNKNOWN = Held([0, 1], {"state": 0, "ring": 0, "metadata": 0})
PLACES = ("conv", "ssm", "ring", "k", "v", "metadata")


class Memory:
    """A rank's, of 4 heads or of some of them. A convolution's row: 3 bytes a head, 5 for each of 2 groups, and 7 that
    every rank has; a state's: 6 bytes a head. A ring of 4 slots for a window of 3, and pages of 4 tokens, both of 2
    bytes per head and token. Metadata of 16 bytes.
    """

    def __init__(self, first=0, heads=4, seed=None):
        rank, ranks, groups = first // heads, 4 // heads, heads // 2
        conv = (
            Segment(first, heads, 3), Segment(first // 2, groups, 5), Segment(0, 0, 7, rank, ranks)
        )  # fmt: skip
        of = {"first_head": first, "heads": heads}
        sizes = {
            "conv": (ROWS, 0, 3 * heads + 5 * groups + 7, 3, {"segments": conv, "pool": "state", **of}),
            "ssm": (ROWS, 0, 6 * heads, 3, {"pool": "state", **of}),
            "ring": (RINGS, 1, 4 * 2 * heads, 2, {"tokens": 4, "window": 3, "pool": "ring", **of}),
            "k": (PAGES, 2, 4 * 2 * heads, 4, {"tokens": 4, **of}),
            "v": (PAGES, 2, 4 * 2 * heads, 4, {"tokens": 4, **of}),
            "metadata": (ROWS, -1, 16, 2, {}),
        }
        random = np.random.default_rng(seed)
        self.arrays, regions = {}, []
        for part, (kind, layer, item, items, more) in sizes.items():
            filled = random.integers(1, 256, (items, item), dtype=np.uint8)
            array = self.arrays[part] = filled if seed is not None else np.zeros_like(filled)
            regions.append(Region(kind, part, layer, array.ctypes.data, item, items, **more))
        self.regions = tuple(regions)

    def held(self):
        """Which bytes are the request's: bool, as the arrays. Written out by hand from `TARGET`."""
        marks = {part: np.zeros(array.shape, bool) for part, array in self.arrays.items()}
        for part in ("conv", "ssm", "metadata"):
            marks[part][1] = True
        # Positions 3, 4 and 5 of the prompt: slots 3, 0 and 1.
        marks["ring"].reshape(2, 4, -1)[0, [3, 0, 1]] = True
        for part in ("k", "v"):
            marks[part][1] = True
            marks[part].reshape(4, 4, -1)[2, :2] = True
        return marks


#: Of source and target: (first head, heads).
LAYOUTS = [((0, 4), (0, 4)), ((0, 4), (0, 2)), ((0, 4), (2, 2)), ((2, 2), (2, 2))]


def moved(source, target):
    """What the source writes, and what the target takes its digest of."""
    pairing = pair_common(source.regions, target.regions)
    return plan(pairing, PROMPT, SOURCE, TARGET), plan(pairing, PROMPT, UNKNOWN, TARGET)


@pytest.mark.parametrize(("ours", "theirs"), LAYOUTS)
def test_exactly_the_bytes_of_the_request_count(ours, theirs):
    """Every bit of every byte of the target's memory, one after the other."""
    source, target = Memory(*ours, seed=1), Memory(*theirs, seed=2)
    written, checked = moved(source, target)
    by_number = [list(memory.arrays.values()) for memory in (source, target)]
    for index, to, start, end, size in written.spans.tolist():
        by_number[1][to].reshape(-1)[end : end + size] = by_number[0][index].reshape(-1)[start : start + size]
    wanted = digest_of(written.spans, source.regions, "source")
    assert digest_of(checked.spans, target.regions, "target") == wanted
    for part, marks in target.held().items():
        flat = target.arrays[part].reshape(-1)
        for at, counts in enumerate(marks.reshape(-1).tolist()):
            for bit in range(8):
                flat[at] ^= 1 << bit
                seen = digest_of(checked.spans, target.regions, "target") != wanted
                assert seen == counts, f"bit {bit} of byte {at} of {part}"
                flat[at] ^= 1 << bit
    assert digest_of(checked.spans, target.regions, "target") == wanted


@pytest.mark.parametrize("kind", ["fake", "ucx-host", "ucx-tcp"])
@pytest.mark.parametrize(("ours", "theirs"), [LAYOUTS[0], LAYOUTS[2]])
async def test_a_byte_that_a_backend_changes_behind_a_write_is_seen(make_site, tools, kind, ours, theirs):
    """Every byte of the request, each by a real write of one byte to where it lies."""
    source = await make_site(kind, 1, Memory(*ours, seed=1))
    target = await make_site(kind, 2, Memory(*theirs))
    peer = await source.endpoint.connect(await target.endpoint.accept(1))
    written, checked = moved(source.memory, target.memory)
    arrays, held = target.memory.arrays, target.memory.held()
    digests = ThreadDigests(target.memory.regions)

    write = partial(tools.landed, source, target, peer)
    await write(written.blocks)
    wanted = digest_of(written.spans, source.memory.regions, "source")
    assert await digests.of(checked.blocks, "target") == wanted
    placed = {part: array.copy() for part, array in arrays.items()}
    assert all(np.array_equal(array != 0, held[part]) for part, array in placed.items())
    hit = {part: np.zeros(array.shape, int) for part, array in arrays.items()}
    for at in range(written.size_bytes):
        await write(flipping(written.spans, source.memory.regions, at))
        assert await digests.of(checked.blocks, "target") != wanted, f"byte {at} of the write"
        for part, array in arrays.items():
            hit[part] += array != placed[part]
            array[:] = placed[part]
    await digests.close()
    for part in PLACES:
        assert np.array_equal(hit[part], held[part]), f"every byte of {part} has been changed once"
