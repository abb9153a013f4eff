"""The front's slow path to the other actors, over their Ray handles (`kvferry.serve.gateway.Backend`)."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import ray
from ray.exceptions import RayError

from kvferry.cluster.config import Config
from kvferry.cluster.names import NAMESPACE, REGISTRY, instance_names, router_names
from kvferry.protocol.errors import Cause, PeerLost, Unavailable
from kvferry.protocol.messages import RequestSpec, Roster
from kvferry.protocol.outcome import Outcome

CALL_TIMEOUT_S = 3.0


class RayBackend:
    """Handles are looked up by name at each use: a name outlives the process behind it."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._turn = itertools.cycle(router_names(config))

    async def submit(self, spec: RequestSpec, attempt: int) -> Outcome:
        """One call to a router, each in its turn; cancelling it aborts the room. Raises PeerLost when it is lost.

        Siblings go to one router, which sends them to one prefill; their next attempts go to the next router.
        """
        routers = router_names(self._config)
        name = routers[(spec.group + attempt) % len(routers)] if spec.group else next(self._turn)
        reference = self._call(name, "submit", spec, attempt)
        try:
            outcome: Outcome = await reference
        except asyncio.CancelledError:
            ray.cancel(reference)
            raise
        except RayError as error:
            raise PeerLost(Cause("peer_lost", f"the router is gone: {_short(error)}", "router", peer=name)) from None
        return outcome

    async def roster(self) -> Roster:
        """Raises Unavailable while the registry does not answer."""
        try:
            roster: Roster = await asyncio.wait_for(self._call(REGISTRY, "roster"), CALL_TIMEOUT_S)
        except (PeerLost, TimeoutError, RayError) as error:
            text = f"the registry does not answer: {_short(error)}"
            raise Unavailable(Cause("unavailable", text, "router", peer=REGISTRY)) from None
        return roster

    async def room(self, room: int) -> dict[str, Any] | None:
        for name in router_names(self._config):
            journal = await self._ask(name, "journal", room)
            if journal is not None:
                found: dict[str, Any] = journal
                return found
        return None

    async def status(self) -> dict[str, Any]:
        """Every instance that answers; one that does not is listed with the error instead of its numbers."""
        names = instance_names(self._config)
        routers = router_names(self._config)
        answers = await asyncio.gather(
            *(self._ask(name, "status") for _, name in names), *(self._ask(name, "status") for name in routers)
        )
        instances = [
            answer or {"id": name, "role": role, "incarnation": None, "ranks": [], "queues": {}, "pages": {}}
            for (role, name), answer in zip(names, answers, strict=False)
        ]
        live = [answer or {} for answer in answers[len(names) :]]
        return {
            "instances": instances,
            "routers": [router for router in live if router],
            "rooms_live": sum(router.get("rooms_live", 0) for router in live),
            "requests_live": sum(router.get("attempts_open", 0) for router in live),
        }

    async def _ask(self, name: str, method: str, *args: Any) -> dict[str, Any] | None:
        """The answer, or None from an actor that is down or too slow."""
        try:
            answer: dict[str, Any] | None = await asyncio.wait_for(self._call(name, method, *args), CALL_TIMEOUT_S)
        except (PeerLost, TimeoutError, RayError):
            return None
        return answer

    @staticmethod
    def _call(name: str, method: str, *args: Any) -> Any:
        try:
            handle = ray.get_actor(name, namespace=NAMESPACE)
        except ValueError:
            raise PeerLost(Cause("peer_lost", f"there is no actor {name}", "router", peer=name)) from None
        return handle.call.remote(method, *args)


def _short(error: BaseException) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__


def connect(config: Config) -> RayBackend:
    """The backend of a front on this Ray cluster."""
    return RayBackend(config)
