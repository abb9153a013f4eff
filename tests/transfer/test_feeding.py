"""Bytes of many spans handed to a C function, and XXH3 taken so: nothing but speed hangs on it."""

import ctypes
from types import SimpleNamespace

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.transfer import digest, xxh3
from kvferry.transfer.contract import SPAN_DTYPE, Region, RegionKind, TransferError
from kvferry.transfer.digest import digest_of, span_by_span
from kvferry.transfer.feeding import feeder
from kvferry.transfer.native import native
from kvferry.transfer.xxh3 import Xxh3, native_xxh3

built = pytest.mark.skipif(feeder() is None, reason="our C was not built")
DATA = np.random.default_rng(8).integers(0, 256, 60_000, dtype=np.uint8)
REGIONS = tuple(
    Region(RegionKind.PAGES, "kv"[i], 0, DATA.ctypes.data + start, size, 1)
    for i, (start, size) in enumerate([(0, 40_000), (40_001, 19_999)])
)
#: (region, offset, bytes), from a single byte to many pieces, on no boundary of anything.
A_SPAN = st.integers(0, 1).flatmap(
    lambda i: st.integers(0, REGIONS[i].item_bytes - 1).flatmap(
        lambda at: st.tuples(st.just(i), st.just(at), st.integers(1, REGIONS[i].item_bytes - at))
    )
)


def table(*spans):
    made = np.zeros(len(spans), SPAN_DTYPE)
    for name, column in zip(("target_region", "target_offset", "length"), zip(*spans, strict=True), strict=True):
        made[name] = column
    return made


def bytes_of(spans):
    starts = [(0, 40_001)[region] + offset for region, offset, _ in spans]
    return b"".join(DATA[at : at + size].tobytes() for at, (_, _, size) in zip(starts, spans, strict=True))


@settings(deadline=None)
@given(spans=st.lists(A_SPAN, min_size=1, max_size=40))
def test_in_c_and_in_python_it_is_xxh3_of_the_bytes(spans):
    wanted = xxhash.xxh3_64_intdigest(bytes_of(spans))
    for taken in (digest_of, span_by_span):
        assert taken(table(*spans), REGIONS, "target") == wanted


@built
@pytest.mark.parametrize(
    ("sizes", "pieces"),
    [
        ((1,), [1]),
        ((1024, 1025, 1023), [1024, 1024, 1, 1023]),
        ((40_000, 7, 7), [1024] * 39 + [64, 7, 7]),
        ((3,) * 9000, [3] * 9000),
    ],
)
def test_every_byte_is_handed_over_once_and_in_order(sizes, pieces):
    """More spans, and a longer one, than are fetched ahead. The first ends where the memory does."""
    got, asked = [], []

    @ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
    def take(state, start, size):
        asked.append((state, size))
        got.append(ctypes.string_at(start, size))
        return 1

    ends = len(DATA) - 2 * np.arange(len(sizes))
    spans = [(int(end - size), int(end)) for end, size in zip(ends, sizes, strict=True)]
    addresses = np.array([DATA.ctypes.data + start for start, _ in spans], np.uint64)
    feeder()(addresses, np.array(sizes), ctypes.cast(take, ctypes.c_void_p), ctypes.c_void_p(77))
    assert b"".join(got) == b"".join(DATA[start:end].tobytes() for start, end in spans)
    assert asked == [(77, size) for size in pieces]


@pytest.mark.parametrize(
    ("span", "words"),
    [
        ((0, 39_999, 2), "span 1: target region 0 has 40000 bytes; offset 39999 with length 2 lies outside"),
        ((1, -1, 2), "offset -1"),
        ((2, 0, 1), "target region 2; there are 2"),
        ((0, 0, 0), "length 0 bytes; the least is 1"),
        ((0, 9, -5), "length -5"),
    ],
)
def test_what_lies_outside_is_not_read(span, words):
    with pytest.raises(TransferError, match=words):
        digest_of(table((0, 0, 5), span), REGIONS, "target")


class Without:
    """A library that lacks names which end so."""

    def __init__(self, library, end):
        self._library, self._end = library, end

    def __getattr__(self, name):
        if name.endswith(self._end):
            raise AttributeError(name)
        return getattr(self._library, name)


@built
def test_the_package_xxhash_exports_what_is_called():
    assert native_xxh3() is not None
    library = ctypes.CDLL(xxh3.import_module("xxhash._xxhash").__file__)
    start, size = np.array([DATA.ctypes.data], np.uint64), np.array([len(DATA)])
    plain = Xxh3(feeder(), Without(library, "_dispatch"))  # as on a processor that is no x86
    assert plain(start, size) == native_xxh3()(start, size) == xxhash.xxh3_64_intdigest(DATA)


@pytest.mark.parametrize("path", [None, "/nowhere/at/all.so", ctypes.__file__, "libc.so.6"])
def test_a_package_that_exports_nothing_is_asked_in_python(monkeypatch, path):
    """Built in, gone, no library, a library of something else."""
    monkeypatch.setattr(xxh3, "import_module", lambda _: SimpleNamespace(__file__=path))
    assert native_xxh3.__wrapped__() is None
    monkeypatch.setattr(digest, "native_xxh3", native_xxh3.__wrapped__)
    spans = [(0, 5, 30_000), (1, 0, 3)]
    assert digest_of(table(*spans), REGIONS, "target") == xxhash.xxh3_64_intdigest(bytes_of(spans))


def test_what_was_built_before_it_had_a_function_is_done_without(monkeypatch):
    assert native(lambda library: library.kvferry_none) is None
    monkeypatch.setattr(xxh3, "feeder", lambda: None)
    assert native_xxh3.__wrapped__() is None
