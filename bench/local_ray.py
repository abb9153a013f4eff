"""A Ray cluster of this machine for scripts that host actors of their own."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager

import ray


@contextmanager
def local_ray() -> Iterator[None]:
    """Without dashboard, and without what its processes log; gone at the end."""
    ray.init(
        address="local", num_cpus=max(2, os.cpu_count() or 2), include_dashboard=False, log_to_driver=False,
        logging_level=logging.ERROR,
    )  # fmt: skip
    try:
        yield
    finally:
        ray.shutdown()
