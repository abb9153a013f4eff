"""The mailbox: bounded for others, never for its owner, and one task takes in order."""

from __future__ import annotations

import asyncio

import pytest

from kvferry.actors.mailbox import Mailbox


async def test_what_is_posted_is_taken_in_order_and_the_limit_holds() -> None:
    box: Mailbox[int] = Mailbox(2)
    assert [box.post(1), box.post(2), box.post(3)] == [True, True, False]
    box.put(4)
    assert await box.take() == [1, 2, 4] and len(box) == 0
    assert box.post(5)


async def test_take_waits_for_the_first_and_gets_all_of_the_turn() -> None:
    box: Mailbox[int] = Mailbox(9)
    taking = asyncio.create_task(box.take())
    await asyncio.sleep(0)
    box.put(1)
    box.put(2)
    assert await taking == [1, 2]


async def test_a_cancelled_take_loses_nothing() -> None:
    box: Mailbox[int] = Mailbox(9)
    taking = asyncio.create_task(box.take())
    await asyncio.sleep(0)
    box.put(1)
    taking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await taking
    box.put(2)
    assert await box.take() == [1, 2]


async def test_what_another_drains_first_is_not_taken_as_nothing() -> None:
    box: Mailbox[int] = Mailbox(9)
    taking = asyncio.create_task(box.take())
    await asyncio.sleep(0)
    box.put(1)
    assert box.drain() == [1]
    await asyncio.sleep(0)
    box.put(2)
    assert await taking == [2]
