"""Copies between addresses of this process, many at a time and without the GIL: by our own few lines of C (copy.c),
or, where those were not built, by the kernel; slices then by whoever wants them copied.

The C version stores past the caches and looks at its stop flag before each span. The kernel's copies about half as
fast, and can be stopped between batches.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvferry.transfer.native import native

#: (to, from, bytes): uint64[spans], uint64[spans] and int64[spans]; then the flag that stops it. Gives the number of
#: spans that lie at their place, all before the first that does not.
Copy = Callable[[NDArray[np.uint64], NDArray[np.uint64], NDArray[np.int64], "ctypes.c_int32"], int]

#: Of the kernel, in one call; and how many bytes go into one, so that the flag is looked at in between.
_IOV_MAX, _CALL_BYTES = 1024, 8 * 1024 * 1024


@cache
def copier() -> tuple[str, Copy]:
    """Its name and the fastest that there is: "native", or "kernel"."""
    found = native(_native)
    return ("kernel", by_kernel) if found is None else ("native", found)


class _Slices(ctypes.Structure):
    """struct slices."""

    _fields_ = (
        ("pairs", ctypes.c_int64), ("runs", ctypes.c_int64), ("start", ctypes.c_void_p), ("stride", ctypes.c_void_p),
        ("width", ctypes.c_void_p), ("at", ctypes.c_void_p), ("count", ctypes.c_void_p),
    )  # fmt: skip


class SliceCopier:
    """Slices to and from a packed buffer at an address. `start`, uint64 [pairs], are addresses; the rest is int64:
    `stride` and `width` [pairs], runs [at, at + count) of entries. `kvferry.kernels.strided_copy` says what they mean.
    Nothing is checked.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        self._gather, self._scatter = library.kvferry_gather, library.kvferry_scatter
        for call in (self._gather, self._scatter):
            call.argtypes, call.restype = (ctypes.c_void_p, ctypes.POINTER(_Slices)), None

    def gather(self, packed: int, start: NDArray[np.uint64], *columns: NDArray[np.int64]) -> None:
        self._call(self._gather, packed, start, columns)

    def scatter(self, packed: int, start: NDArray[np.uint64], *columns: NDArray[np.int64]) -> None:
        self._call(self._scatter, packed, start, columns)

    @staticmethod
    def _call(call: Any, packed: int, start: NDArray[np.uint64], columns: tuple[NDArray[np.int64], ...]) -> None:
        held = [np.ascontiguousarray(start, np.uint64), *(np.ascontiguousarray(c, np.int64) for c in columns)]
        slices = _Slices(len(held[0]), len(held[3]), *(column.ctypes.data for column in held))
        call(packed, ctypes.byref(slices))


@cache
def slice_copier() -> SliceCopier | None:
    """None where it was not built."""
    return native(SliceCopier)


def _native(library: ctypes.CDLL) -> Copy:
    call = library.kvferry_copy
    call.argtypes = (ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
    call.restype = ctypes.c_int64

    def copy(to: NDArray[np.uint64], source: NDArray[np.uint64], size: NDArray[np.int64], stop: ctypes.c_int32) -> int:
        columns = (column.ctypes.data for column in (to, source, size))
        return int(call(len(to), *columns, ctypes.addressof(stop)))

    return copy


def by_kernel(to: NDArray[np.uint64], source: NDArray[np.uint64], size: NDArray[np.int64], stop: ctypes.c_int32) -> int:
    """Raises OSError where the kernel does not let a process copy so, within itself."""
    libc: Any = ctypes.CDLL(None, use_errno=True)
    there, here = (np.stack([side, size.astype(np.uint64)], axis=1) for side in (to, source))  # struct iovec
    ends = np.cumsum(size)
    done = 0
    while done < len(to) and not stop.value:
        copied = int(ends[done - 1]) if done else 0
        after = int(np.searchsorted(ends, copied + _CALL_BYTES, side="right"))
        after = min(max(after, done + 1), done + _IOV_MAX, len(to))
        sides = ((side[done:].ctypes.data, after - done) for side in (here, there))
        (ours, count), (theirs, _) = ((ctypes.c_void_p(at), number) for at, number in sides)
        libc.process_vm_writev.restype = ctypes.c_ssize_t
        moved = libc.process_vm_writev(os.getpid(), ours, count, theirs, count, 0)
        if moved != int(ends[after - 1]) - copied:
            raise OSError(ctypes.get_errno(), f"process_vm_writev: {moved} of {int(ends[after - 1]) - copied} bytes")
        done = after
    return done
