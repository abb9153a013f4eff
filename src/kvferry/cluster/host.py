"""The Ray host of one actor, or of one rank: builds it in this process, runs it, passes calls on, and dies with it."""

from __future__ import annotations

import asyncio
import inspect
import logging
import os
from typing import Any

import msgspec
import ray

from kvferry.actors.actor import Actor
from kvferry.actors.leader import Leader
from kvferry.actors.ranks.names import instance_of
from kvferry.cluster.config import Config
from kvferry.cluster.meeting import Meeting, MeetingPoint
from kvferry.cluster.names import NAMESPACE, REGISTRY
from kvferry.protocol.address import Address

log = logging.getLogger("kvferry.host")

REPORT_TIMEOUT_S = 5.0

#: Methods of the actors that may be called through Ray.
CALLS = frozenset(
    {
        "submit", "withdraw", "journal", "status", "roster", "start_failed", "want", "over_budget", "drain", "drained",
        "end_writer",
    }
)  # fmt: skip


class Host:
    """A plain class: Ray wraps it on a separate line (see `hosting`).

    An actor that fails takes its process with it: Ray then starts a new one, with a new incarnation and new memory.
    """

    def __init__(self, role: str, name: str, config: bytes) -> None:
        """`name` is that of the process, which for an instance's leader is the instance's."""
        self._role, self._name = role, name
        self._config = Config.from_bytes(config)
        self._point = MeetingPoint()
        self._actor: asyncio.Future[Actor] = asyncio.get_running_loop().create_future()
        self._task = asyncio.get_running_loop().create_task(self._live())

    async def address(self) -> Address:
        """Where its links are, with its incarnation; waits until the actor has been built."""
        return (await self._built()).network.address

    async def call(self, method: str, *args: Any) -> Any:
        """One of `CALLS` on the actor."""
        if method not in CALLS:
            raise ValueError(f"method is {method!r}; allowed: {', '.join(sorted(CALLS))}")
        result = getattr(await self._built(), method)(*args)
        return await result if inspect.isawaitable(result) else result

    async def meet(self, rank: int, incarnation: int) -> Meeting:
        """Asked of a leader by a follower's host, which asks again if there is no answer. Raises LookupError where the
        instance must start again first, since that rank was another process before.
        """
        meeting = await self._point.where()
        if self._point.is_replaced(rank, incarnation):
            log.warning("%s: rank %d has been started again, and so the instance will be", self._name, rank)
            if not self._actor.done():
                os._exit(1)
            actor = await self._built()
            assert isinstance(actor, Leader)
            await actor.replaced(rank)
            raise LookupError(f"{self._name} is on its way out")
        return meeting

    def pid(self) -> int:
        """Names this process; answers also while the actor is built."""
        return os.getpid()

    async def leave(self) -> dict[str, Any]:
        """End the actor, with its links and its memory, and give the last recount of its pages (none: {}). Peers take
        it for a goodbye. The process is for the caller to end.
        """
        actor = await self._built()
        pages: dict[str, Any] = {}
        if isinstance(actor, Leader):
            pages = msgspec.to_builtins(actor.ledger.audit(actor.block_tables()))
        self._task.cancel()
        await asyncio.wait({self._task})
        return pages

    async def _built(self) -> Actor:
        return await asyncio.shield(self._actor)

    async def _live(self) -> None:
        try:
            # It brings torch and the data plane; who only starts hosts needs neither.
            from kvferry.cluster.roles import build_role

            actor = await build_role(self._role, self._name, self._config, self._point)
            self._actor.set_result(actor)
            await actor.run()
        except Exception as error:
            log.exception("%s: the %s actor failed; its process ends", self._name, self._role)
            if not self._actor.done() and self._role != "registry":
                await self._report(error)
            os._exit(1)

    async def _report(self, error: Exception) -> None:
        """An instance that can't start is started again and again; the registry tells why it is missing."""
        instance, _ = instance_of(self._name)
        text = f"{type(error).__name__}: {error}".splitlines()[0][:500]
        try:
            registry = ray.get_actor(REGISTRY, namespace=NAMESPACE)
            await asyncio.wait_for(registry.call.remote("start_failed", instance, text), REPORT_TIMEOUT_S)
        except (ValueError, TimeoutError, ray.exceptions.RayError) as unheard:
            log.error("%s: the registry was not told: %s", self._name, unheard)
