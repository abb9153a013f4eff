"""The front's slow path to the other actors, over their Ray handles (`kvferry.serve.gateway.Backend`)."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Any

import ray
from ray.exceptions import RayError

from kvferry.actors.pools import LIMITS, check_wanted, names_of, routers_of
from kvferry.cluster.config import Config
from kvferry.cluster.hosting import short
from kvferry.cluster.names import CONTROLLER, NAMESPACE, REGISTRY
from kvferry.protocol.errors import Cause, InvalidRequest, PeerLost, Unavailable
from kvferry.protocol.messages import Roster
from kvferry.protocol.outcome import Outcome
from kvferry.protocol.request import RequestSpec

log = logging.getLogger("kvferry.front")

CALL_TIMEOUT_S = 3.0
#: The controller is asked so often who is there. In between, one that leaves still answers, and refuses.
LOOK_S = 1.0

#: Between a router's "not here" and the next time that it is asked.
WITHDRAW_AGAIN_S = 0.05

#: Looks up the present controller's handle; raises ValueError or RayError while there is none.
FindController = Callable[[], Any]


class RayBackend:
    """Who is there is the controller's word, kept from one look to the next; across a restart of the controller the
    last known one stays in use, and the new one is told what was wanted of the old one. Handles are looked up by name
    at each use: a name outlives the process behind it.
    """

    def __init__(self, find_controller: FindController, config: Config) -> None:
        self._find_controller = find_controller
        self._known = _configured(config)
        self._turns = itertools.count()
        self._withdrawing: set[asyncio.Task[None]] = set()

    async def watch(self) -> None:
        """Look again and again; for ever."""
        while True:
            with suppress(Unavailable):
                await self.pools()
            await asyncio.sleep(LOOK_S)

    # --- requests ---

    async def submit(self, spec: RequestSpec, attempt: int) -> Outcome:
        """One call to a router, each in its turn; cancelling it aborts the room, soon. Raises PeerLost when it is lost.

        Siblings go to one router, which sends them to one prefill; their next attempts go to the next router.
        """
        names = routers_of(self._known)
        if not names:  # a controller that has only just begun
            raise PeerLost(Cause("peer_lost", "there is no router yet", "router"))
        name = names[(spec.group + attempt if spec.group else next(self._turns)) % len(names)]
        reference = self._call(name, "submit", spec, attempt)
        try:
            outcome: Outcome = await reference
        except asyncio.CancelledError:
            task = asyncio.get_running_loop().create_task(self._withdraw(name, reference, spec.request, attempt))
            self._withdrawing.add(task)
            task.add_done_callback(self._withdrawing.discard)
            raise
        except RayError as error:
            raise PeerLost(Cause("peer_lost", f"the router is gone: {short(error)}", "router", peer=name)) from None
        return outcome

    async def _withdraw(self, name: str, submitted: Any, request: int, attempt: int) -> None:
        """Tell the router until it knows of the attempt, or the call `submitted` has ended.

        The two calls may overtake each other. `ray.cancel` would not do: of a call that has come to a process and has
        not begun there, it is lost (ray-project/ray#52628), and the room went on until its first token came.
        """

        async def ended() -> None:
            with suppress(RayError):
                await submitted

        call = asyncio.get_running_loop().create_task(ended())
        try:
            while not call.done():
                known = False
                with suppress(TimeoutError):
                    async with asyncio.timeout(CALL_TIMEOUT_S):  # wait_for may swallow the end that `close` makes
                        known = await self._call(name, "withdraw", request, attempt)
                if known:
                    return
                await asyncio.wait({call}, timeout=WITHDRAW_AGAIN_S)
        except (PeerLost, RayError) as error:
            log.info("%s is gone, and with it attempt %d of request %016x: %s", name, attempt, request, short(error))
        finally:
            call.cancel()

    async def close(self) -> None:
        """Whatever is still to be withdrawn ends with this front: its links tell that."""
        left = tuple(self._withdrawing)
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)

    async def roster(self) -> Roster:
        """Raises Unavailable while the registry does not answer."""
        try:
            roster: Roster = await asyncio.wait_for(self._call(REGISTRY, "roster"), CALL_TIMEOUT_S)
        except (PeerLost, TimeoutError, RayError) as error:
            text = f"the registry does not answer: {short(error)}"
            raise Unavailable(Cause("unavailable", text, "router", peer=REGISTRY)) from None
        return roster

    async def room(self, room: int) -> dict[str, Any] | None:
        for _, name in names_of(self._known, ("router",)):
            journal = await self._ask(name, "journal", room)
            if journal is not None:
                found: dict[str, Any] = journal
                return found
        return None

    async def status(self) -> dict[str, Any]:
        """Every instance that there should be; one that does not answer has no numbers."""
        names = names_of(self._known, [role for role in LIMITS if role != "router"])
        routers = names_of(self._known, ("router",))
        answers = await asyncio.gather(
            *(self._ask(name, "status") for _, name in [*names, *routers, ("registry", REGISTRY)])
        )
        instances = [
            answer or {"id": name, "role": role, "incarnation": None, "ranks": [], "queues": {}, "pages": {}}
            for (role, name), answer in zip(names, answers, strict=False)
        ]
        live = [answer for answer in answers[len(names) : -1] if answer]
        return {
            "registry": answers[-1],
            "instances": instances,
            "routers": live,
            "rooms_live": sum(router["rooms_live"] for router in live),
        }

    # --- the pools ---

    async def pools(self) -> dict[str, Any]:
        """`Pools.progress`. Raises Unavailable while the controller does not answer."""
        answer = await tell_controller(self._find_controller, "pools")
        known = self._known
        if answer["controller"] != known["controller"] and known["version"] > answer["version"]:
            log.warning("the controller is new; it is told what was wanted of the one before: %s", known["wanted"])
            told = {key: known[key] for key in ("version", "wanted", "applied")}
            answer = await tell_controller(self._find_controller, "restore", told)
        self._known = answer
        return answer

    async def scale(self, numbers: Mapping[str, int]) -> dict[str, Any]:
        """Raises InvalidRequest, or Unavailable while the controller does not answer."""
        answer = await tell_controller(self._find_controller, "scale", check_wanted(numbers))
        self._known = answer
        return answer

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


async def tell_controller(find: FindController, method: str, *args: Any) -> dict[str, Any]:
    """One call. Raises InvalidRequest when the controller refuses, Unavailable while it does not answer."""
    try:
        answer: dict[str, Any] = await asyncio.wait_for(getattr(find(), method).remote(*args), CALL_TIMEOUT_S)
    except (ValueError, TimeoutError, RayError) as error:
        text = f"the controller does not answer: {short(error)}"
        raise Unavailable(Cause("unavailable", text, "front", peer=CONTROLLER)) from None
    if "refused" in answer:
        raise InvalidRequest(answer["refused"])
    return answer


async def apply_user_config(find: FindController, user_config: object) -> None:
    """Tell the controller what Serve says, as soon as there is one."""
    while True:
        try:
            await tell_controller(find, "apply", user_config)
        except Unavailable as error:
            log.warning("user_config is not applied yet: %s", error)
            await asyncio.sleep(LOOK_S)
            continue
        except InvalidRequest as error:
            log.error("user_config is refused: %s", error)
        return


def _configured(config: Config) -> dict[str, Any]:
    """What there will be when the controller has not been asked yet."""
    rows = [
        {"role": role, "name": f"{role}-{i}", "phase": "starting"}
        for role, number in config.wanted().items()
        for i in range(number)
    ]
    return {"controller": "", "version": 0, "wanted": config.wanted(), "applied": None, "instances": rows}


@asynccontextmanager
async def connect(find_controller: FindController, config: Config) -> AsyncIterator[RayBackend]:
    """The backend of a front on this Ray cluster, which watches the pools until the end."""
    backend = RayBackend(find_controller, config)
    watching = asyncio.get_running_loop().create_task(backend.watch())
    try:
        yield backend
    finally:
        watching.cancel()
        await backend.close()
