"""The bytes of many spans handed to a C function, in one call and without the GIL, by our own C (feed.c)."""

from __future__ import annotations

import ctypes
from functools import cache

import numpy as np
from numpy.typing import NDArray

from kvferry.transfer.native import native


class Feeder:
    """`take` is C's `int take(void *state, const void *bytes, size_t size)`, whose answer nobody looks at; it is called
    for the spans' bytes in their order, at most 1 KiB at a time. What comes next is fetched meanwhile, so that it
    matters less that spans lie far from each other.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        self._call = library.kvferry_feed
        self._call.argtypes, self._call.restype = (ctypes.c_int64, *(ctypes.c_void_p,) * 4), None

    def __call__(
        self, start: NDArray[np.uint64], size: NDArray[np.int64], take: ctypes.c_void_p, state: ctypes.c_void_p
    ) -> None:
        """Addresses and bytes of the spans, each of 1 byte or more. Nothing is checked."""
        start, size = np.ascontiguousarray(start, np.uint64), np.ascontiguousarray(size, np.int64)
        self._call(len(start), start.ctypes.data, size.ctypes.data, take, state)


@cache
def feeder() -> Feeder | None:
    """None where it was not built."""
    return native(Feeder)
