"""What the ranks of one instance exchange while a forward runs: sums over a stage's ranks, rows from rank to rank.

Gloo over loopback: an instance's ranks share a host, so nobody on another one reaches what they say. Where they meet is
a store that the leader opens; each life of an instance has a store of its own. Every call here blocks, so it belongs on
the engine's thread. A peer whose process ends breaks its connections at once; one that stands still is given up after
the limit.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import msgspec
import torch
import torch.distributed

from kvferry.engine.contract import RanksLost

#: torch's stores and gloo groups have no types of their own.
_c10d: Any = torch.distributed
Store = Any

_LOOPBACK = "127.0.0.1"
#: How long the ranks of an instance may come apart: each of them loads its weights first.
MEET_S = 120.0
#: Tags of what passes between two ranks: hidden states to the next stage, and what the last one has for the leader.
HIDDEN, RESULT = 0, 1


class Place(msgspec.Struct, frozen=True):
    """Where a rank stands among the `tp_size` x `pp_size` ranks of its instance. Rank 0 is the leader. `stages`: layers
    of each stage, where they are not dealt out evenly.
    """

    tp_rank: int
    tp_size: int
    pp_rank: int
    pp_size: int
    stages: tuple[int, ...] = ()

    @classmethod
    def of(cls, rank: int, tp_size: int, pp_size: int, stages: tuple[int, ...] = ()) -> Place:
        return cls(rank % tp_size, tp_size, rank // tp_size, pp_size, stages)

    @property
    def rank(self) -> int:
        return self.pp_rank * self.tp_size + self.tp_rank

    @property
    def ranks(self) -> int:
        return self.tp_size * self.pp_size

    @property
    def is_first_stage(self) -> bool:
        return self.pp_rank == 0

    @property
    def is_last_stage(self) -> bool:
        return self.pp_rank == self.pp_size - 1


def open_store() -> tuple[Store, int]:
    """The leader's: a store that lives as long as the object, and its port on loopback."""
    with socket.socket() as listening:
        listening.bind((_LOOPBACK, 0))
        listening.listen(128)
        port = listening.getsockname()[1]
        # The store takes the descriptor over; by itself it would listen on every address of the host.
        store = _c10d.TCPStore(
            _LOOPBACK, port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach(),
            timeout=timedelta(seconds=MEET_S),
        )  # fmt: skip
    return store, port


def join_store(port: int) -> Store:
    """A follower's. Raises RanksLost when there is none (any more)."""
    try:
        socket.create_connection((_LOOPBACK, port), MEET_S).close()  # torch's own client goes on trying for minutes
    except OSError as error:
        raise RanksLost(f"the leader's store: {error}") from error
    with _lost("the leader's store"):
        return _c10d.TCPStore(
            _LOOPBACK, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=MEET_S)
        )


class Group:
    """All ranks of an instance. Made at every rank, it waits for the others: at most `MEET_S` seconds.

    `store` holds nothing else under `token`. Every call raises RanksLost when a peer it needs is gone, or has not done
    its part within `limit_s` seconds; after that the group is of no more use.
    """

    def __init__(self, store: Store, token: str, place: Place, limit_s: float) -> None:
        self.place = place
        with _lost("the other ranks"):
            self._all = _gloo(store, f"{token}/all", place.rank, place.ranks, limit_s)
            self._stage = None
            if place.tp_size > 1:
                name = f"{token}/stage{place.pp_rank}"
                self._stage = _gloo(store, name, place.tp_rank, place.tp_size, limit_s)

    def sum(self, part: torch.Tensor) -> torch.Tensor:
        """Add the parts of the stage's ranks up, in place."""
        if self._stage is not None:
            with _lost("a sum over the ranks of a stage"):
                self._stage.allreduce([part]).wait()
        return part

    def send(self, rows: torch.Tensor, rank: int, tag: int) -> None:
        with _lost(f"rank {rank}"):
            self._all.send([rows.contiguous()], rank, tag).wait()

    def receive(self, shape: tuple[int, ...], dtype: torch.dtype, rank: int, tag: int) -> torch.Tensor:
        rows = torch.empty(shape, dtype=dtype)
        with _lost(f"rank {rank}"):
            self._all.recv([rows], rank, tag).wait()
        return rows


def _gloo(store: Store, name: str, rank: int, size: int, limit_s: float) -> Any:
    options = _c10d.ProcessGroupGloo._Options()
    options._devices = [_c10d.ProcessGroupGloo.create_device(hostname=_LOOPBACK)]
    options._timeout = timedelta(seconds=MEET_S)
    options._threads = 1
    group = _c10d.ProcessGroupGloo(_c10d.PrefixStore(name, store), rank, size, options)
    group._set_default_timeout(timedelta(seconds=limit_s))
    return group


@contextmanager
def _lost(what: str) -> Iterator[None]:
    """torch says RuntimeError, in many words and several subclasses, whatever went wrong."""
    try:
        yield
    except RuntimeError as error:
        first = str(error).strip().partition("\n")[0]
        raise RanksLost(f"{what}: {first[:300]}") from error
