"""A front that wants nothing more of an attempt, while its call is on its way to the router: without Ray."""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from typing import Any

import pytest
from ray.exceptions import RayActorError

from kvferry.cluster import client as client_module
from kvferry.cluster.client import RayBackend
from kvferry.cluster.config import Config
from kvferry.protocol.address import Address
from kvferry.protocol.request import RequestSpec, Sampling

SPEC = RequestSpec(7, (1, 2, 3), Sampling(4), Address("front", "", 1, "", 1))


class Reference:
    """As Ray's: who waits for it and is cancelled takes nothing from it."""

    def __init__(self, answer: asyncio.Future[Any]) -> None:
        self._answer = answer

    def __await__(self) -> Generator[Any, None, Any]:
        return asyncio.shield(self._answer).__await__()


class Routers:
    """In place of Ray and one router: a `submit` comes there when `arrive` is called, and ends when it is withdrawn."""

    def __init__(self) -> None:
        self.on_its_way: list[tuple[int, int]] = []
        self.open: dict[tuple[int, int], asyncio.Future[Any]] = {}
        self.withdrawals: list[bool] = []
        self.mute = 0  # withdrawals that get no answer

    def call(self, name: str, method: str, *args: Any) -> Reference:
        answer = asyncio.get_running_loop().create_future()
        if method == "submit":
            attempt = (args[0].request, args[1])
            self.on_its_way.append(attempt)
            self.open[attempt] = answer
        elif self.mute:
            self.mute -= 1
        else:
            known = args in self.open and args not in self.on_its_way
            self.withdrawals.append(known)
            answer.set_result(known)
            if known:
                self.open.pop(args).set_result(None)
        return Reference(answer)

    def arrive(self) -> None:
        self.on_its_way.clear()


@pytest.fixture
def routers(monkeypatch: pytest.MonkeyPatch) -> Routers:
    """Ray's own cancelling does nothing, as it is with a call that has not begun where it has come."""
    routers = Routers()
    monkeypatch.setattr(client_module.ray, "cancel", lambda _: None)
    monkeypatch.setattr(RayBackend, "_call", staticmethod(routers.call))
    monkeypatch.setattr(client_module, "WITHDRAW_AGAIN_S", 0.001, raising=False)
    monkeypatch.setattr(client_module, "CALL_TIMEOUT_S", 0.01)
    return routers


def nobody() -> Any:
    raise ValueError("no such actor")


async def leave(backend: RayBackend, attempt: int = 0) -> None:
    submission = asyncio.create_task(backend.submit(SPEC, attempt))
    await asyncio.sleep(0)
    submission.cancel()
    with pytest.raises(asyncio.CancelledError):
        await submission


async def until(condition: Any) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.001)


async def test_a_withdrawal_that_overtakes_its_attempt_is_told_again(routers: Routers) -> None:
    backend = RayBackend(nobody, Config())
    await leave(backend, 3)
    await until(lambda: len(routers.withdrawals) >= 3)
    assert (7, 3) in routers.open and not any(routers.withdrawals)
    routers.arrive()
    await until(lambda: not backend._withdrawing)
    assert not routers.open and routers.withdrawals[-1] and routers.withdrawals.count(True) == 1


async def test_a_router_that_stands_still_is_told_when_it_goes_on(routers: Routers) -> None:
    routers.mute = 2
    backend = RayBackend(nobody, Config())
    await leave(backend)
    routers.arrive()
    await until(lambda: not backend._withdrawing)
    assert routers.withdrawals == [True] and not routers.open


@pytest.mark.parametrize("outcome", [None, RayActorError()])
async def test_nobody_is_told_of_an_attempt_that_has_ended(routers: Routers, outcome: Exception | None) -> None:
    """By itself, or with its router."""
    backend = RayBackend(nobody, Config())
    await leave(backend)
    await until(lambda: bool(routers.withdrawals))
    call = routers.open.pop((7, 0))
    call.set_exception(outcome) if outcome else call.set_result(None)
    await until(lambda: not backend._withdrawing)
    assert not any(routers.withdrawals)


async def test_a_front_that_ends_leaves_no_task(routers: Routers) -> None:
    backend = RayBackend(nobody, Config())
    await leave(backend)
    await backend.close()
    await asyncio.sleep(0.01)
    assert not backend._withdrawing and len(routers.withdrawals) <= 1
