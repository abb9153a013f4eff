"""How the ranks of an instance find each other before their engines can: without Ray, whose part is a handle."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from kvferry.cluster import meeting
from kvferry.cluster.meeting import Meeting, MeetingPoint, meet_leader
from kvferry.protocol.address import Address

LEADER = Address("prefill-0", "tcp://127.0.0.1:1", 7, "host", 1)


class Soon:
    """A clock on which nobody waits."""

    async def sleep(self, duration_s: float) -> None:
        await asyncio.sleep(0)


async def test_followers_are_told_once_the_leader_has_its_store() -> None:
    point = MeetingPoint()
    asked = [asyncio.create_task(point.where()) for _ in range(2)]
    await asyncio.sleep(0)
    asked[0].cancel()  # a call that was given up takes nothing with it
    point.open(Meeting(LEADER, 4711))
    assert await asked[1] == await point.where() == Meeting(LEADER, 4711)


async def test_a_rank_is_one_process_in_each_life_of_the_leader() -> None:
    point = MeetingPoint()
    assert not point.is_replaced(1, 11) and not point.is_replaced(2, 12)
    assert not point.is_replaced(1, 11), "it asks again"
    assert point.is_replaced(1, 13) and point.is_replaced(1, 13)
    assert not point.is_replaced(2, 12)


async def test_a_follower_asks_until_a_leader_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    answers: list[Any] = [ValueError("no such actor"), TimeoutError(), Meeting(LEADER, 4711)]
    asked: list[tuple[str, int, int]] = []

    class Method:
        @staticmethod
        async def remote(rank: int, incarnation: int) -> Meeting:
            asked.append(("prefill-0", rank, incarnation))
            answer = answers.pop(0)
            if isinstance(answer, Exception):
                raise answer
            return answer  # type: ignore[no-any-return]

    class Handle:
        meet = Method

    monkeypatch.setattr(meeting.ray, "get_actor", lambda name, namespace: Handle)
    assert await meet_leader("prefill-0", 2, 99, Soon()) == Meeting(LEADER, 4711)  # type: ignore[arg-type]
    assert asked == [("prefill-0", 2, 99)] * 3
