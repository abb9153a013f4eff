"""The front between fake leaders and a fake router."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from kvferry.actors.ports import LostReason
from kvferry.protocol.errors import Cause, HandoffFailed, Overloaded, PeerLost, Unavailable
from kvferry.protocol.messages import Retracted, Stop, Watch
from kvferry.protocol.outcome import Outcome
from kvferry.protocol.request import Sampling
from kvferry.serve.live import LiveRequest

SAMPLING = Sampling(max_tokens=8)


async def opened(world: Any) -> LiveRequest:
    live: LiveRequest = world.front.open((1, 2, 3), SAMPLING)
    await world.until(lambda: live.spec.request in world.backend.outcomes)
    return live


async def settled(world: Any, live: LiveRequest, outcome: Outcome | None = None) -> None:
    world.settle(live.spec, outcome)
    assert live.submission is not None
    await asyncio.wait({live.submission})
    await asyncio.sleep(0)


async def rest(live: LiveRequest) -> list[int]:
    """Indices up to the last token."""
    indices: list[int] = []
    while True:
        tokens = await live.take()
        indices += [token.index for token in tokens]
        if tokens[-1].finish_reason:
            return indices


async def test_prefill_sends_index_0_and_decode_repeats_it(world: Any) -> None:
    live = await opened(world)
    assert live.spec.front == world.network.address and 0 < live.spec.request < 2**63
    world.from_prefill(world.token(live.spec, 0))
    assert [token.index for token in await live.take()] == [0]
    await settled(world, live)
    world.from_decode(world.token(live.spec, 0), world.token(live.spec, 1))
    world.from_decode(world.token(live.spec, 2, finish="stop"))
    assert await rest(live) == [1, 2]
    world.front.close_request(live)
    assert world.network.sent == [] and world.backend.cancelled == 0


async def test_a_finish_at_index_0_ends_the_request_and_leaves_the_room_alone(world: Any) -> None:
    live = await opened(world)
    world.from_prefill(world.token(live.spec, 0, finish="length"))
    assert await rest(live) == [0]
    world.front.close_request(live)
    world.from_decode(world.token(live.spec, 0, finish="length"))  # the room goes on to its end
    assert world.network.stops() == []
    await settled(world, live)
    assert world.backend.cancelled == 0
    world.from_decode(world.token(live.spec, 0, finish="length"))  # now nobody remembers it
    assert world.network.stops() == [(7, Stop(live.spec.request, 0, world.room))]


async def test_unknown_requests_and_attempts_nobody_opened_are_told_to_stop_once_per_batch(world: Any) -> None:
    live = await opened(world)
    stray = live.spec.request ^ 1
    spec = type(live.spec)(stray, (), SAMPLING, live.spec.front)
    world.from_decode(
        world.token(spec, 4), world.token(spec, 5), world.token(live.spec, 0), world.token(live.spec, 0, attempt=3)
    )
    expected = [(7, Stop(stray, 0, world.room)), (7, Stop(live.spec.request, 3, world.room))]
    assert sorted(world.network.stops(), key=repr) == sorted(expected, key=repr)
    assert [token.index for token in await live.take()] == [0]


async def test_a_client_that_leaves_before_any_token_aborts_the_room(world: Any) -> None:
    live = await opened(world)
    world.front.close_request(live)
    await world.until(lambda: world.backend.cancelled == 1)
    world.front.close_request(live)
    assert world.network.sent == []
    assert world.metrics.live._value.get() == 0


async def test_a_client_that_leaves_mid_stream_stops_both_leaders(world: Any) -> None:
    live = await opened(world)
    world.from_prefill(world.token(live.spec, 0))
    await settled(world, live)
    world.front.close_request(live)
    stop = Stop(live.spec.request, 0, world.room)
    assert sorted(world.network.stops(), key=repr) == [(6, stop), (7, stop)]


async def test_losing_decode_in_mid_stream_fails_after_what_was_in_order(world: Any) -> None:
    live = await opened(world)
    await settled(world, live)
    world.from_decode(world.token(live.spec, 0), world.token(live.spec, 1))
    world.clock.time_s += 2.5
    world.front.on_link_lost(world.decode, LostReason.REFUSED)
    assert [token.index for token in await live.take()] == [0, 1]
    with pytest.raises(PeerLost) as caught:
        await live.take()
    cause = caught.value.cause
    assert (cause.leg, cause.peer, cause.room, cause.elapsed_s) == ("decode", "decode-0", world.room, 2.5)
    world.front.on_exited(world.decode)  # the same news again changes nothing
    assert live.stream.cause is cause


async def test_losing_decode_wakes_a_waiting_client(world: Any) -> None:
    live = await opened(world)
    await settled(world, live)
    waiter = asyncio.ensure_future(live.take())
    await asyncio.sleep(0)
    world.front.on_exited(world.decode)
    with pytest.raises(PeerLost, match="its process has ended"):
        await waiter


async def test_decode_seen_by_its_batch_counts_before_the_outcome_comes(world: Any) -> None:
    live = await opened(world)
    world.from_decode(world.token(live.spec, 0))
    world.front.on_link_lost(world.decode, LostReason.SILENT)
    assert [token.index for token in await live.take()] == [0]
    with pytest.raises(PeerLost):
        await live.take()
    await world.until(lambda: world.backend.cancelled == 1)


@pytest.mark.parametrize("back", [False, True])
async def test_an_outcome_that_names_a_decode_lost_meanwhile_fails_at_once(world: Any, back: bool) -> None:
    live = await opened(world)
    world.front.on_link_lost(world.decode, LostReason.REFUSED)
    if back:  # the link came back, but decode has dropped the requests of the old one
        world.front.on_link_up(world.decode)
    else:
        world.network.up.discard(7)
    await settled(world, live)
    with pytest.raises(PeerLost, match="before the handoff's outcome came"):
        await live.take()


async def test_a_loss_before_the_request_is_forgiven_when_the_link_is_back(world: Any) -> None:
    world.front.on_link_lost(world.decode, LostReason.SILENT)
    live = await opened(world)
    await settled(world, live)
    world.from_decode(world.token(live.spec, 0, finish="stop"))
    assert await rest(live) == [0]


async def test_losing_prefill_is_the_rooms_business(world: Any) -> None:
    live = await opened(world)
    world.from_prefill(world.token(live.spec, 0))
    world.front.on_exited(world.prefill)
    await settled(world, live)
    world.from_decode(world.token(live.spec, 1, finish="stop"))
    assert await rest(live) == [0, 1]


async def test_a_failed_outcome_is_the_clients_error_with_its_retry_time(world: Any) -> None:
    live = await opened(world)
    cause = Cause("overloaded", "256 requests are live", leg="router")
    await settled(world, live, Outcome(0, False, cause, retry_after_s=7.2))
    with pytest.raises(Overloaded) as caught:
        await live.take()
    assert caught.value.retry_after_s == 7.2 and caught.value.cause == cause


async def test_a_failed_outcome_after_the_last_token_changes_nothing(world: Any) -> None:
    live = await opened(world)
    world.from_prefill(world.token(live.spec, 0, finish="stop"))
    await settled(world, live, Outcome(world.room, False, Cause("handoff_failed", "decode said no")))
    assert await rest(live) == [0]


async def test_a_lost_router_ends_only_requests_that_decode_does_not_stream_yet(world: Any) -> None:
    early, streaming = await opened(world), await opened(world)
    world.from_decode(world.token(streaming.spec, 0))
    lost = PeerLost(Cause("peer_lost", "router is gone", leg="router"))
    for live in (early, streaming):
        world.backend.outcomes[live.spec.request].set_exception(lost)
    with pytest.raises(PeerLost, match="router is gone"):
        await early.take()
    world.from_decode(world.token(streaming.spec, 1, finish="stop"))
    assert await rest(streaming) == [0, 1]


async def test_an_unexpected_error_of_submit_is_an_error_of_the_router_leg(world: Any) -> None:
    live = await opened(world)
    world.backend.outcomes[live.spec.request].set_exception(RuntimeError("boom"))
    with pytest.raises(HandoffFailed, match="RuntimeError: boom") as caught:
        await live.take()
    assert caught.value.cause.leg == "router"


def retracted(world: Any, live: LiveRequest, attempt: int, next_index: int) -> None:
    assert world.front.on_message(world.decode, Retracted(live.spec.request, attempt, world.room, next_index))


async def test_a_retraction_opens_the_next_attempt_from_what_the_client_has(world: Any) -> None:
    """It is no failure: this front may open one attempt only. The room's outcome is no news any more."""
    live = await opened(world)
    first = world.backend.outcomes[live.spec.request]
    world.from_decode(world.token(live.spec, 0), world.token(live.spec, 1))
    retracted(world, live, attempt=0, next_index=2)
    await world.until(lambda: len(world.backend.specs) == 2)
    second = world.backend.specs[1]
    assert (second.frozen_ids, second.prefer, second.request) == ((100, 101), 7, live.spec.request)
    assert live.attempt == 1 and world.network.sent == [] and world.backend.cancelled == 0
    first.set_result(Outcome(world.room, True, None, world.prefill, world.decode))
    retracted(world, live, attempt=0, next_index=2)  # of an attempt that is over: nothing happens
    world.front.on_link_lost(world.decode, LostReason.EXITED)  # nobody of this attempt is known to have gone
    world.from_decode(world.token(live.spec, 2, attempt=1))
    retracted(world, live, attempt=1, next_index=3)
    await world.until(lambda: len(world.backend.specs) == 3)
    world.from_decode(world.token(live.spec, 3, finish="stop", attempt=2))
    assert await rest(live) == [0, 1, 2, 3]
    retracted(world, live, attempt=2, next_index=4)  # a finished request has no next attempt
    world.front.close_request(live)
    assert len(world.backend.specs) == 3
    metrics = world.metrics
    assert metrics.retractions._value.get() == 2 and metrics.tokens_dropped.labels("stale")._value.get() == 2
    assert [sample.value for sample in next(iter(metrics.attempts_failed.collect())).samples] == []


async def test_a_retraction_that_nobody_waits_for_creates_nothing(world: Any) -> None:
    live = await opened(world)
    world.from_decode(world.token(live.spec, 0))
    world.front.close_request(live)
    retracted(world, live, attempt=0, next_index=1)
    await asyncio.sleep(0)
    assert len(world.backend.specs) == 1
    assert world.metrics.retractions._value.get() == 0


async def test_closing_the_front_ends_what_was_left_behind_by_a_retraction(world: Any) -> None:
    live = await opened(world)
    world.from_decode(world.token(live.spec, 0))
    retracted(world, live, attempt=0, next_index=1)
    await world.until(lambda: len(world.backend.specs) == 2)
    await world.front.close()
    assert world.backend.cancelled == 2
    assert [token.index for token in await live.take()] == [0]
    with pytest.raises(Unavailable, match="shutting down"):
        await live.take()


async def test_closing_the_front_fails_what_is_live(world: Any) -> None:
    live = await opened(world)
    await world.front.close()
    with pytest.raises(Unavailable, match="shutting down"):
        await live.take()
    assert world.backend.cancelled == 1 and world.network.closed


async def test_other_messages_create_nothing(world: Any) -> None:
    assert world.front.on_message(world.decode, Watch("x"))
    assert world.metrics.tokens_dropped.labels("not_a_batch")._value.get() == 1
    assert world.network.sent == []
