"""Ray's own ways of moving a request's KV between two actors, for bench/transfer.py."""

from __future__ import annotations

import importlib
import os
import sys
import time
from typing import Any

import ray
import torch
from ray.experimental import register_nixl_memory, set_target_for_ref
from transfer_parts import LIMIT_S, REQUEST_BYTES, Pool, Work


class Holder:
    """An actor with a pool."""

    def __init__(self) -> None:
        self.pool = Pool()
        self.pool.fill(os.getpid())

    def pid(self) -> int:
        return os.getpid()

    def stamp(self, round_number: int, page_bytes: int) -> None:
        self.pool.stamp(round_number, page_bytes)

    def digest(self, page_bytes: int, pages: list[int]) -> int:
        return self.pool.digest(page_bytes, pages)

    def _rows(self, pages: list[int], page_bytes: int) -> tuple[Any, Any]:
        """The pool as rows of a page each, and the numbers of these pages of every region."""
        from transfer_peers import blocks

        return self.pool.bytes.reshape(-1, page_bytes), blocks(pages, page_bytes)

    def gather(self, work: Work) -> Any:
        """What is sent: the pages in order, uint8[pages, page_bytes]."""
        rows, numbers = self._rows(work.source_pages, work.page_bytes)
        return rows[numbers]

    def scatter(self, work: Work, pages: Any) -> None:
        rows, numbers = self._rows(work.target_pages, work.page_bytes)
        rows[numbers] = pages


class NixlHolder(Holder):
    """With Ray's Direct Transport by NIXL; all that it hands over is registered once."""

    def __init__(self) -> None:
        super().__init__()
        # Ray asks for the package `nixl`, which is another name for the build of one version of CUDA.
        for name in ("", "._api"):
            sys.modules[f"nixl{name}"] = importlib.import_module(f"nixl_cu12{name}")
        self.tensor = torch.from_numpy(self.pool.bytes)
        self.buffer = torch.zeros(REQUEST_BYTES, dtype=torch.uint8)
        for tensor in (self.tensor, self.buffer):
            register_nixl_memory(tensor)

    def views(self, pages: list[int], page_bytes: int) -> list[torch.Tensor]:
        """Each page, where it lies."""
        _, numbers = self._rows(pages, page_bytes)
        rows = self.tensor.view(-1, page_bytes)
        return [rows[number] for number in numbers.tolist()]

    @ray.method(tensor_transport="nixl")
    def source_gathered(self, work: Work) -> list[torch.Tensor]:
        _, numbers = self._rows(work.source_pages, work.page_bytes)
        rows, out = self.tensor.view(-1, work.page_bytes), self.buffer.view(-1, work.page_bytes)
        torch.index_select(rows, 0, torch.from_numpy(numbers), out=out)
        return [self.buffer]

    @ray.method(tensor_transport="nixl")
    def source_in_place(self, work: Work) -> list[torch.Tensor]:
        return self.views(work.source_pages, work.page_bytes)

    def pull_gathered(self, work: Work, source: Any) -> None:
        self._pull(source.source_gathered.remote(work), [self.buffer])
        _, numbers = self._rows(work.target_pages, work.page_bytes)
        self.tensor.view(-1, work.page_bytes)[torch.from_numpy(numbers)] = self.buffer.view(-1, work.page_bytes)

    def pull_in_place(self, work: Work, source: Any) -> None:
        self._pull(source.source_in_place.remote(work), self.views(work.target_pages, work.page_bytes))

    @staticmethod
    def _pull(what: Any, into: list[torch.Tensor]) -> None:
        set_target_for_ref(what, into)  # held by weak references only: `into` lives until all is there
        ray.get(what, timeout=LIMIT_S)


class ObjectStore:
    """A `transfer_parts.Contender`: one actor returns what the other takes."""

    name = "Ray object store"
    path = "host"
    spins = False
    holder: type[Holder] = Holder

    def open(self) -> None:
        if not ray.is_initialized():
            paths = os.pathsep.join([os.path.dirname(__file__), os.environ.get("PYTHONPATH", "")])  # noqa: PTH120
            ray.init(
                address="local", num_cpus=4, include_dashboard=False, log_to_driver=False, logging_level="error",
                object_store_memory=2**30, runtime_env={"env_vars": {"PYTHONPATH": paths}},
                _system_config={"worker_niceness": 0},  # of 15 by itself: it would get nothing beside the others
            )  # fmt: skip
        kind = ray.remote(num_cpus=0, enable_tensor_transport=True)(self.holder)
        self.source, self.target = kind.remote(), kind.remote()
        self._pids: tuple[int, int] = tuple(self._get([self.source.pid.remote(), self.target.pid.remote()]))

    def begin(self, work: Work) -> Any:
        """Start one round; the reference ends with it."""
        return self.target.scatter.remote(work, self.source.gather.remote(work))

    def move(self, work: Work) -> float:
        began_s = time.monotonic()
        self._get(self.begin(work))
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
    """The target pulls one tensor, which the source has gathered, and scatters it."""

    name = "Ray Direct gathered"
    spins = True  # Ray has NIXL's progress thread on
    holder = NixlHolder

    def begin(self, work: Work) -> Any:
        return self.target.pull_gathered.remote(work, self.source)


class DirectInPlace(DirectTransport):
    """The target pulls a list of tensors, one for each page, from where they lie to where they shall lie."""

    name = "Ray Direct in place"

    def begin(self, work: Work) -> Any:
        return self.target.pull_in_place.remote(work, self.source)
