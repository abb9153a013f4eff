"""The pool's regions are the memory that the tensors show."""

import ctypes

import pytest
import torch

from kvferry.engine.kv_pool import KVPool
from kvferry.protocol.errors import ConfigError
from kvferry.protocol.rank import Slice
from kvferry.transfer.contract import RegionKind


def make(**changes):
    sizes = {"part": Slice(0, 3, 0, 2), "pages": 5, "page_size": 4, "head_dim": 8, "metadata_rows": 6}
    return KVPool(**{**sizes, "dtype": torch.float32, **changes})


def test_regions_in_order_and_size():
    regions = make().regions()
    assert [(r.part, r.layer) for r in regions] == [
        ("k", 0), ("v", 0), ("k", 1), ("v", 1), ("k", 2), ("v", 2), ("metadata", -1),
    ]  # fmt: skip
    assert {(r.kind, r.items, r.item_bytes, r.first_head, r.heads) for r in regions[:-1]} == {
        (RegionKind.PAGES, 5, 4 * 2 * 8 * 4, 0, 2)
    }
    rows = regions[-1]
    assert (rows.kind, rows.items, rows.item_bytes, rows.heads) == (RegionKind.ROWS, 6, 256, 0)


def test_regions_of_a_part_are_named_by_global_layer_and_head():
    pool = make(part=Slice(first_layer=7, layers=2, first_head=3, heads=1))
    regions = pool.regions()[:-1]
    assert [(r.part, r.layer) for r in regions] == [("k", 7), ("v", 7), ("k", 8), ("v", 8)]
    assert {(r.item_bytes, r.first_head, r.heads) for r in regions} == {(4 * 1 * 8 * 4, 3, 1)}
    assert pool.first_layer == 7 and [r.base for r in regions] == [
        t.data_ptr() for t in (pool.k[0], pool.v[0], pool.k[1], pool.v[1])
    ]


def test_regions_are_page_aligned_and_apart():
    regions = sorted(make(dtype=torch.bfloat16).regions(), key=lambda r: r.base)
    assert all(r.base % 4096 == 0 for r in regions)
    ends = [r.base + r.items * r.item_bytes for r in regions]
    assert all(end <= after.base for end, after in zip(ends, regions[1:], strict=False))


def test_an_item_is_one_page_of_one_layers_k_or_v():
    pool = make()
    for region in pool.regions()[:-1]:
        pages = (pool.k if region.part == "k" else pool.v)[region.layer]
        values = (ctypes.c_float * 64).from_address(region.base + 3 * region.item_bytes)
        assert not any(values)
        pages[3] = torch.arange(64.0).view(4, 2, 8) + region.layer
        assert list(values) == [i + region.layer for i in range(64)]


def test_metadata_rows_are_writable_views():
    pool = make()
    row = pool.metadata_row(5)
    assert len(row) == 256 and bytes(row) == bytes(256)
    row[:2] = b"hi"
    assert ctypes.string_at(pool.regions()[-1].base + 5 * 256, 3) == b"hi\0"
    for slot in (-1, 6):
        with pytest.raises(IndexError, match="6 rows"):
            pool.metadata_row(slot)


def test_memory_outlives_the_pool_while_a_view_is_held():
    row = make().metadata_row(0)
    row[0] = 7
    assert row[0] == 7


@pytest.mark.parametrize("field", ["pages", "page_size", "metadata_rows"])
def test_empty_sizes_are_refused(field):
    with pytest.raises(ConfigError, match=rf"pool\.{field}: 0"):
        make(**{field: 0})
