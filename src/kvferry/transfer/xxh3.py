"""XXH3 (64 bits) of bytes that lie at many addresses: by the very functions of the package xxhash, which its extension
module exports under the names of their C library, called from C (feed.c) instead of one by one from Python.

No more than speed hangs on it: where one of the two is missing, `kvferry.transfer.digest` asks the package in Python.
"""

from __future__ import annotations

import ctypes
from functools import cache
from importlib import import_module

import numpy as np
from numpy.typing import NDArray

from kvferry.transfer.feeding import Feeder, feeder


class Xxh3:
    """Raises AttributeError for a library that has no XXH3."""

    def __init__(self, feed: Feeder, library: ctypes.CDLL) -> None:
        self._feed = feed
        self._create, self._free = library.XXH3_createState, library.XXH3_freeState
        self._reset, self._digest = library.XXH3_64bits_reset, library.XXH3_64bits_digest
        # On x86 the one of that name uses the vector units that there are, as the package itself does.
        update = getattr(library, "XXH3_64bits_update_dispatch", None) or library.XXH3_64bits_update
        self._update = ctypes.cast(update, ctypes.c_void_p)
        self._create.restype, self._digest.restype = ctypes.c_void_p, ctypes.c_uint64

    def __call__(self, start: NDArray[np.uint64], size: NDArray[np.int64]) -> int:
        """Of the spans' bytes, one after the other. The addresses, and bytes of 1 or more, are not checked."""
        state = ctypes.c_void_p(self._create())
        if not state:
            raise MemoryError("no memory for the state of a digest")
        try:
            self._reset(state)
            self._feed(start, size, self._update, state)
            return int(self._digest(state))
        finally:
            self._free(state)


@cache
def native_xxh3() -> Xxh3 | None:
    """None where our C was not built, or the package exports nothing."""
    feed, path = feeder(), import_module("xxhash._xxhash").__file__
    try:
        return Xxh3(feed, ctypes.CDLL(path)) if feed is not None and path is not None else None
    except (OSError, AttributeError):
        return None
