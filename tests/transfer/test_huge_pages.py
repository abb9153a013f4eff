"""All memory that is asked for in huge pages is there without them too."""

import errno
import mmap

import numpy as np
import pytest
import torch

from kvferry.engine.kv_pool import Arena
from kvferry.transfer import huge_pages
from kvferry.transfer.shared import Area
from kvferry.transfer.staging.copies import host_memory


class Without(mmap.mmap):
    """As of a kernel that has none."""

    asked = 0

    def madvise(self, *_):
        Without.asked += 1
        raise OSError(errno.EINVAL, "Invalid argument")


@pytest.mark.parametrize(
    "bytes_of",
    [
        lambda size: np.frombuffer(huge_pages.private(size), np.uint8),
        lambda size: np.frombuffer(Area(size).buffer, np.uint8),
        lambda size: Arena(size).take((size,), torch.uint8).numpy(),
        lambda size: host_memory((), size).staging.numpy(),
    ],
)
def test_a_kernel_without_huge_pages_gives_small_ones(monkeypatch, bytes_of):
    monkeypatch.setattr(mmap, "mmap", Without)
    before = Without.asked
    found = bytes_of(12_345)
    assert Without.asked == before + 1 and found.size == 12_345 and not found.any()
    found[:] = 7
    assert found.sum() == 7 * 12_345
