"""How the `ucx` backend's bytes get to one target: by an agent, whose calls are made on one thread."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvferry.transfer.contract import Descriptor, Region, Spans
from kvferry.transfer.driver import describe
from kvferry.transfer.spans import addresses, total_bytes
from kvferry.transfer.ucx_agent import Agent, kind_of, nixl_errors

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Post:
    """What became of a piece: it is there; `handle` is under way, and whoever gets this owns it; or `error` says why it
    failed, and a handle that is there all the same has to be ended.
    """

    size_bytes: int
    descriptors: int
    handle: Any = None
    error: str = ""


class Lane:
    """Everything is called on the thread of its agent."""

    def __init__(self, agent: Agent, descriptor: Descriptor, regions: tuple[Region, ...]) -> None:
        self.agent, self._descriptor, self._regions = agent, descriptor, regions
        self._errors = nixl_errors()
        self._byte = np.zeros(1, np.uint8)  # where the first one of the target's is read to
        self._probe: Any = None

    def stands(self) -> bool:
        """Whether the connection is made, for which the target's process has to run. Until then a post may have to wait
        for that, and afterwards, where a post copies by itself, none does. Call it again and again; raises what NIXL
        raises.
        """
        if not self._descriptor.regions:
            return True
        if self._probe is None:
            self._probe = self._read_byte()
        if not self.has_ended(self._probe):
            return False
        self.release(self._probe)
        self._probe = None
        return True

    def _read_byte(self) -> Any:
        nixl, there = self.agent.nixl, self._descriptor.regions[0]
        nixl.register_memory(_one_byte(self._byte.ctypes.data), "DRAM")
        source = nixl.get_xfer_descs(_one_byte(self._byte.ctypes.data), "DRAM")
        target = nixl.get_xfer_descs(_one_byte(there.base), kind_of(there))
        handle = nixl.initialize_xfer("READ", source, target, self._descriptor.agent)
        nixl.transfer(handle)
        return handle

    def close(self) -> None:
        """Delete the agent, which ends whatever is under way."""
        if self._probe is not None:
            self.release(self._probe)
        self._probe = None
        self.agent.delete()

    def post(self, piece: Spans) -> Post:
        """Of a table each of whose sides lies in one kind of memory."""
        nixl, handle = self.agent.nixl, None
        try:
            source = self._descriptors(piece, self._regions, "source")
            target = self._descriptors(piece, self._descriptor.regions, "target")
            handle = nixl.initialize_xfer("WRITE", source, target, self._descriptor.agent)
            ended, error = nixl.transfer(handle) == "DONE", ""
        except self._errors as raised:  # its traceback holds handles, and each of them the agent: only its text goes on
            ended, error = False, describe(raised)
        if ended:
            self.release(handle)
            handle = None
        return Post(total_bytes(piece), len(piece), handle, error)

    def has_ended(self, handle: Any) -> bool:
        """Drives the agent. Raises what NIXL raises when the write has failed."""
        return bool(self.agent.nixl.check_xfer_state(handle) == "DONE")

    def release(self, handle: Any) -> None:
        try:
            self.agent.nixl.release_xfer_handle(handle)
        except self._errors as error:
            _log.info("%s: a handle was not released: %s", self.agent.name, describe(error))

    def _descriptors(self, piece: Spans, regions: tuple[Region, ...], side: str) -> Any:
        rows = np.zeros((len(piece), 3), dtype=np.uint64)  # address, length, device
        rows[:, 0] = addresses(piece, regions, side)
        rows[:, 1] = piece["length"].astype(np.uint64)
        kind = kind_of(regions[piece[f"{side}_region"][0]])
        if kind != "DRAM":
            rows[:, 2] = np.array([max(region.device, 0) for region in regions])[piece[f"{side}_region"]]
        return self.agent.nixl.get_xfer_descs(rows, kind)


def _one_byte(at: int) -> np.ndarray[Any, np.dtype[np.uint64]]:
    return np.array([(at, 1, 0)], dtype=np.uint64)
