"""The front's view of the pools, and the controller's answers, without Ray."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from kvferry.cluster import controller as controller_module
from kvferry.cluster.client import RayBackend, apply_user_config, tell_controller
from kvferry.cluster.config import Config, load
from kvferry.cluster.controller import Controller
from kvferry.protocol.address import Address
from kvferry.protocol.errors import InvalidRequest, PeerLost, Unavailable
from kvferry.protocol.request import RequestSpec, Sampling


class NoRoom:
    """A hosting in which nothing can be placed."""

    def __init__(self, *_: object) -> None:
        pass

    async def start(self, role: str, name: str) -> str | None:
        return "has no room"

    async def call(self, name: str, method: str, *args: Any) -> Any:
        raise LookupError(name)

    async def remove(self, name: str) -> bool:
        return True


class Remote:
    """As a Ray handle: `handle.method.remote(...)`."""

    def __init__(self, target: Any) -> None:
        self._target = target

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._target, name)

        class Call:
            remote = staticmethod(method)

        return Call


CONTROLLERS: list[Controller] = []


@pytest.fixture(autouse=True)
async def _no_ray(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[None]:
    monkeypatch.setattr(controller_module, "RayHosting", NoRoom)
    yield
    for controller in CONTROLLERS:
        controller._task.cancel()
    await asyncio.gather(*(controller._task for controller in CONTROLLERS), return_exceptions=True)
    CONTROLLERS.clear()


def new_controller() -> Controller:
    CONTROLLERS.append(Controller(Config().to_bytes()))
    return CONTROLLERS[-1]


async def test_a_new_controller_learns_from_a_front_what_was_wanted() -> None:
    present = [new_controller()]
    backend = RayBackend(lambda: Remote(present[0]), Config())
    first = await backend.pools()
    assert first["wanted"] == {"prefill": 1, "decode": 1, "unified": 0, "router": 1} and first["version"] == 0
    assert (await backend.scale({"decode": 3}))["wanted"]["decode"] == 3
    present[0] = new_controller()
    second = await backend.pools()
    assert second["controller"] != first["controller"]
    assert (second["wanted"]["decode"], second["version"]) == (3, 1)


async def test_a_front_with_older_news_changes_nothing() -> None:
    present = [new_controller()]
    front, other = (RayBackend(lambda: Remote(present[0]), Config()) for _ in range(2))
    await other.scale({"decode": 2})
    await front.pools()
    await other.scale({"decode": 5})
    present[0] = new_controller()
    assert (await front.pools())["wanted"]["decode"] == 2, "all that this front knew"
    assert (await other.pools())["wanted"]["decode"] == 5, "newer"
    assert (await front.pools())["wanted"]["decode"] == 5
    await front.scale({"decode": 1})
    assert (await other.pools())["wanted"]["decode"] == 1


async def test_serves_user_config_is_applied_when_it_changes() -> None:
    """A replica that starts again says the same; it does not undo what `kvferry scale` has asked for since."""
    present = [new_controller()]

    def find() -> Any:
        return Remote(present[0])

    backend = RayBackend(find, Config())
    assert (await tell_controller(find, "apply", {"decode": 3}))["wanted"]["decode"] == 3
    await backend.scale({"decode": 4})
    assert (await tell_controller(find, "apply", {"decode": 3}))["wanted"]["decode"] == 4
    present[0] = new_controller()
    assert (await backend.pools())["applied"] == {"decode": 3}
    assert (await tell_controller(find, "apply", {"decode": 3}))["wanted"]["decode"] == 4
    assert (await tell_controller(find, "apply", {"decode": 2, "prefill": 2}))["wanted"]["decode"] == 2
    with pytest.raises(InvalidRequest, match="router: 0"):
        await tell_controller(find, "apply", {"router": 0})
    for bad, told in (({"decode": 99}, "decode: 99 is not acceptable"), (["decode"], "a number for one or more of")):
        await apply_user_config(find, bad)
        refused = await backend.pools()
        assert refused["wanted"]["decode"] == 2 and told in refused["missing"][-1], "told, and nothing else happens"
    await apply_user_config(find, {"decode": 1})
    assert not any("user_config" in line for line in (await backend.pools())["missing"])


async def test_a_user_config_waits_for_the_controller(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvferry.cluster.client.LOOK_S", 0.01)
    present: list[Controller] = []

    def find() -> Any:
        if not present:
            raise ValueError("no such actor")
        return Remote(present[0])

    applying = asyncio.create_task(apply_user_config(find, {"decode": 3}))
    await asyncio.sleep(0.05)
    assert not applying.done()
    present.append(new_controller())
    await applying
    assert (await present[0].pools())["wanted"]["decode"] == 3


async def test_without_a_controller_the_last_known_names_stay() -> None:
    def find() -> Any:
        raise ValueError("no such actor")

    config = load(None, {"decode.instances": 2, "router.instances": 2})
    backend = RayBackend(find, config)
    with pytest.raises(Unavailable, match="the controller does not answer: no such actor"):
        await backend.pools()
    asked: list[str] = []

    async def ask(name: str, method: str, *_: Any) -> dict[str, Any] | None:
        asked.append(name)
        return {"id": name} if name == "decode-0" else None

    backend._ask = ask  # type: ignore[method-assign]
    status = await backend.status()
    assert sorted(asked) == ["decode-0", "decode-1", "prefill-0", "registry", "router-0", "router-1"]
    assert {row["id"] for row in status["instances"]} == {"decode-0", "decode-1", "prefill-0"}
    assert status["routers"] == [] and status["registry"] is None and status["rooms_live"] == 0


async def test_names_follow_the_controller_and_what_has_no_room_is_not_asked() -> None:
    controller = new_controller()
    backend = RayBackend(lambda: Remote(controller), Config())
    backend._known = await backend.pools() | {"instances": []}
    front = Address("front", "", 1, "", 1)
    with pytest.raises(PeerLost, match="there is no router yet"):
        await backend.submit(RequestSpec(1, (1,), Sampling(1), front), 0)
    await backend.pools()
    asked: list[str] = []

    async def ask(name: str, method: str, *_: Any) -> None:
        asked.append(name)

    backend._ask = ask  # type: ignore[method-assign]
    assert (await backend.status())["instances"] == [] and asked == ["registry"]
    answer = await backend.pools()
    assert answer["missing"][0] == "prefill: 1 wanted, 0 placed; prefill-0 has no room"
