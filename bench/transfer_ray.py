"""Ray's own ways of moving a request's KV between two actors, for bench/transfer.py."""

from __future__ import annotations

import os
import time
from typing import Any

import numpy as np
import ray
import torch
from transfer_parts import LIMIT_S, Pool, Work


class Holder:
    """An actor with a pool."""

    def __init__(self) -> None:
        self.pool = Pool()
        self.pool.fill(os.getpid())

    def pid(self) -> int:
        return os.getpid()

    def blocks(self, pages: list[int], page_bytes: int) -> np.ndarray[Any, np.dtype[np.int64]]:
        from transfer_peers import blocks

        return blocks(pages, page_bytes)

    def gather(self, work: Work) -> Any:
        """What is sent: the pages in order, uint8[pages, page_bytes]."""
        return self.pool.bytes.reshape(-1, work.page_bytes)[self.blocks(work.source_pages, work.page_bytes)]

    @ray.method(tensor_transport="nixl")
    def gather_tensor(self, work: Work) -> torch.Tensor:
        return torch.from_numpy(self.gather(work))

    def scatter(self, work: Work, pages: Any) -> None:
        there = self.pool.bytes.reshape(-1, work.page_bytes)
        there[self.blocks(work.target_pages, work.page_bytes)] = np.asarray(pages)

    def stamp(self, round_number: int, page_bytes: int) -> None:
        self.pool.stamp(round_number, page_bytes)

    def digest(self, page_bytes: int, pages: list[int]) -> int:
        return self.pool.digest(page_bytes, pages)


class ObjectStore:
    """A `transfer_parts.Contender`: one actor returns what the other takes."""

    name = "Ray object store"
    path = "host"
    gather = "gather"

    def open(self) -> None:
        if not ray.is_initialized():
            paths = os.pathsep.join([os.path.dirname(__file__), os.environ.get("PYTHONPATH", "")])  # noqa: PTH120
            ray.init(
                address="local", num_cpus=4, include_dashboard=False, log_to_driver=False, logging_level="error",
                object_store_memory=2**30, runtime_env={"env_vars": {"PYTHONPATH": paths}},
            )  # fmt: skip
        kind = ray.remote(num_cpus=0, enable_tensor_transport=True)(Holder)
        self.source, self.target = kind.remote(), kind.remote()
        self._pids: tuple[int, int] = tuple(self._get([self.source.pid.remote(), self.target.pid.remote()]))

    def move(self, work: Work) -> float:
        began_s = time.monotonic()
        self._get(self.target.scatter.remote(work, getattr(self.source, self.gather).remote(work)))
        return time.monotonic() - began_s

    def is_right(self, work: Work, round_number: int) -> bool:
        self._get(self.source.stamp.remote(round_number, work.page_bytes))
        self.move(work)
        here = self.source.digest.remote(work.page_bytes, work.source_pages)
        there = self.target.digest.remote(work.page_bytes, work.target_pages)
        return bool(self._get(here) == self._get(there))

    def pids(self) -> tuple[int, int]:
        return self._pids

    def close(self) -> None:
        for actor in (self.source, self.target):
            ray.kill(actor)

    @staticmethod
    def _get(what: Any) -> Any:
        return ray.get(what, timeout=LIMIT_S)


class DirectTransport(ObjectStore):
    """The same with a tensor, which Ray hands over by NIXL."""

    name = "Ray Direct Transport"
    gather = "gather_tensor"
