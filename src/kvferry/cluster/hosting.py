"""`kvferry.actors.pools.Hosting` on Ray: per member a placement group, and in it a named actor for each
of its ranks, all owned by the controller.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from kvferry.actors.ranks.names import instance_of, process_names
from kvferry.cluster.config import Config
from kvferry.cluster.host import Host
from kvferry.cluster.names import NAMESPACE
from kvferry.cluster.placement import ON_HEAD, target_node

log = logging.getLogger("kvferry.controller")

#: A submit call stays open as long as its room: many calls per router at once.
CONCURRENT_CALLS = 4096
#: A call that was not answered by then. Loaded cores pause for seconds.
CALL_S = 10.0
#: Roles that hold no device and no pool, and take no slot.
SLOTLESS = ("registry", "router")

RemoteHost = ray.remote(Host)


class RayHosting:
    """Ray starts a process again that has died, under the same name, until `remove`: where its slot is, or on another
    host that has one free. The ranks of an instance share a host, whose loopback their engines use.
    """

    def __init__(self, config: bytes) -> None:
        self._data, self._config = config, Config.from_bytes(config)
        self._slot = self._config.cluster.slot_resource
        self._groups: dict[str, PlacementGroup] = {}
        self._nodes: dict[str, str] = {}  # where each one's slot is, or should be
        self._hosts: dict[str, list[Any]] = {}  # of each rank, the leader's first

    async def start(self, role: str, name: str) -> str | None:
        try:
            if role not in SLOTLESS and (missing := await asyncio.to_thread(self._place, role, name)) is not None:
                return missing
            hosts = self._hosts.setdefault(name, [])
            for process in process_names(name, self._config.ranks(role))[len(hosts) :]:
                hosts.append(self._host_actor(role, name, process))
        except ValueError:
            # Of the controller before us: its actors end with it, a moment later.
            return "waits for an actor of the same name that has not ended yet"
        except ray.exceptions.RayError as error:  # of Ray's own services: they may answer the next time
            return f"waits for Ray: {short(error)}"
        return None

    def _host_actor(self, role: str, name: str, process: str) -> Any:
        options: dict[str, Any] = {"resources": ON_HEAD}
        if role not in SLOTLESS:
            _, rank = instance_of(process)
            strategy = PlacementGroupSchedulingStrategy(self._groups[name], placement_group_bundle_index=rank)
            options = {"resources": {self._slot: 1}, "scheduling_strategy": strategy}
        return RemoteHost.options(
            name=process,
            namespace=NAMESPACE,
            num_cpus=0,
            max_restarts=-1,
            max_task_retries=0,
            max_concurrency=CONCURRENT_CALLS,
            **options,
        ).remote(role, process, self._data)

    def _place(self, role: str, name: str) -> str | None:
        """Reserve a slot for each rank, and say what is missing until they are there. Blocks for milliseconds."""
        ranks = self._config.ranks(role)
        if name not in self._groups:
            target = target_node(self._config, ray.nodes(), self._taken())
            self._groups[name] = placement_group(
                [{self._slot: 1}] * ranks, strategy="STRICT_PACK", name=name, _soft_target_node_id=target
            )
            self._nodes[name] = target or ""
        table = placement_group_table(self._groups[name])
        if table["state"] == "CREATED":
            self._nodes[name] = table["bundles_to_node_id"][0]
            return None
        offered = ray.cluster_resources().get(self._slot, 0.0)
        taken = offered - ray.available_resources().get(self._slot, 0.0)
        return f"needs {ranks} {self._slot}, the cluster offers {offered:g}, {taken:g} are taken"

    def _taken(self) -> Counter[str]:
        """Our slots, by node."""
        taken: Counter[str] = Counter()
        for name, node in self._nodes.items():
            taken[node] += self._groups[name].bundle_count
        return taken

    async def process(self, name: str) -> object:
        return await self._answer(name, self._host(name).pid.remote())

    async def call(self, name: str, method: str, *args: Any) -> Any:
        return await self._answer(name, self._host(name).call.remote(method, *args))

    async def leave(self, name: str) -> dict[str, Any]:
        pages: dict[str, Any] = await self._answer(name, self._host(name).leave.remote())
        return pages

    async def remove(self, name: str) -> bool:
        try:
            return await self._remove(name)
        except ray.exceptions.RayError as error:
            log.warning("%s could not be removed, which is tried again: %s", name, short(error))
            return False

    async def _remove(self, name: str) -> bool:
        handles, group = self._hosts.get(name, []), self._groups.get(name)
        for handle in handles:
            ray.kill(handle, no_restart=True)
        for process in process_names(name, len(handles)) if handles else ():
            if await asyncio.to_thread(_exists, process):
                return False  # Ray has not yet seen its end
        if group is not None:
            await asyncio.to_thread(remove_placement_group, group)
        for kept in (self._hosts, self._groups, self._nodes):
            kept.pop(name, None)
        return True

    def _host(self, name: str) -> Any:
        """Its leader's."""
        if not self._hosts.get(name):
            raise LookupError(f"there is no process {name}")
        return self._hosts[name][0]

    @staticmethod
    async def _answer(name: str, reference: Awaitable[Any]) -> Any:
        """Raises LookupError when the process is gone (or the method failed there), TimeoutError without an answer."""
        try:
            return await asyncio.wait_for(reference, CALL_S)
        except ray.exceptions.RayError as error:
            raise LookupError(f"{name}: {short(error)}") from None


def _exists(name: str) -> bool:
    try:
        ray.get_actor(name, namespace=NAMESPACE)
    except ValueError:
        return False
    return True


def short(error: BaseException) -> str:
    """The beginning of what Ray says, or the error's kind."""
    return str(error).strip().splitlines()[0][:200] if str(error).strip() else type(error).__name__
