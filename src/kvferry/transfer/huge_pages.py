"""Memory in huge pages, where the kernel has them: it copies between processes page by page."""

from __future__ import annotations

import mmap
from contextlib import suppress


def private(size_bytes: int) -> mmap.mmap:
    """Zeroed memory that no other process maps."""
    return preferred(mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))


def preferred(mapping: mmap.mmap) -> mmap.mmap:
    """Ask for them in a mapping that nobody has touched yet."""
    with suppress(OSError):  # a kernel without huge pages says EINVAL; small pages do as well
        mapping.madvise(mmap.MADV_HUGEPAGE)
    return mapping
