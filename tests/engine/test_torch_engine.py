"""The engine as the roles see it: layout, regions, refusals, steps in order, an end."""

import asyncio
import ctypes
import itertools

import pytest
import torch

from kvferry.engine.contract import EngineLimits, Sequence, StepPlan
from kvferry.engine.torch_engine import TorchEngine
from kvferry.protocol.rank import Layout
from kvferry.protocol.request import Sampling

WANT = Sampling(max_tokens=1)


@pytest.fixture
def small(tiny):
    ticks = itertools.count()
    made = TorchEngine(
        tiny("Llama"), pages=8, page_size=4, metadata_rows=3, threads=1, now_s=lambda: next(ticks) * 0.25
    )
    yield made
    asyncio.run(made.close())


def plan(*sequences, step=0):
    return StepPlan(step, sequences)


async def test_layout_and_limits(small):
    assert small.layout == Layout("tiny-Llama", "1", "float32", page_size=4, layers=3, kv_heads=2, head_dim=16)
    assert small.limits == EngineLimits(pages=8, page_size=4, context_tokens=128, vocab_size=97)
    assert small.metadata_rows == 3
    regions = small.regions()
    assert len(regions) == 2 * 3 + 1
    assert {(r.items, r.item_bytes, r.heads) for r in regions[:-1]} == {(8, 4 * 2 * 16 * 4, 2)}
    assert small.regions() == regions
    small.metadata_row(2)[0] = 9


def test_the_longest_sequence_is_bounded_by_the_pool_and_by_the_model():
    assert EngineLimits(pages=10, page_size=16, context_tokens=1000, vocab_size=97).tokens == 160
    assert EngineLimits(pages=10, page_size=16, context_tokens=100, vocab_size=97).tokens == 100


async def test_a_result_answers_its_plan_in_order_and_times_by_the_given_clock(small):
    result = await small.step(
        plan(
            Sequence(1, (5, 6, 7), 0, (0,), WANT),
            Sequence(2, (8,), 0, (1,), None),
            Sequence(3, (9,), 0, (2,), WANT),
            Sequence(4, (3, 4), 0, (3,), None),
            step=41,
        )
    )
    assert (result.step, result.compute_s) == (41, 0.25)
    assert [drawn is not None for drawn in result.drawn] == [True, False, True, False]
    alone = await small.step(plan(Sequence(3, (9,), 0, (5,), WANT)))
    assert alone.drawn[0].token_id == result.drawn[2].token_id
    assert (await small.step(plan(Sequence(4, (3, 4), 0, (3,), None)))).drawn == (None,)


async def test_a_refused_plan_writes_nothing(small):
    before = [bytes_of(region) for region in small.regions()]
    with pytest.raises(ValueError, match="5 tokens in 1 pages of 4"):
        await small.step(plan(Sequence(1, (1, 2), 0, (0,), None), Sequence(2, (1, 2), 3, (1,), None)))
    with pytest.raises(ValueError, match="no sequences"):
        await small.step(plan())
    assert [bytes_of(region) for region in small.regions()] == before


async def test_a_step_writes_its_own_slots_only(small):
    await small.step(plan(Sequence(1, (1, 2), 3, (6, 2), None)))
    for region in small.regions()[:-1]:
        slots = torch.frombuffer(bytearray(bytes_of(region)), dtype=torch.float32).view(8 * 4, -1).abs().sum(1)
        assert slots.nonzero().flatten().tolist() == [2 * 4 + 0, 6 * 4 + 3]


async def test_steps_run_one_at_a_time_off_the_loops_thread(small):
    loop_ran = asyncio.Event()
    asyncio.get_running_loop().call_soon(loop_ran.set)
    plans = [plan(Sequence(1, (token,), 0, (0,), WANT), step=token) for token in range(5)]
    results = await asyncio.gather(*map(small.step, plans))
    assert loop_ran.is_set()
    assert [result.step for result in results] == list(range(5))


async def test_after_close_nothing_runs(tiny):
    engine = TorchEngine(tiny("Llama"), pages=1, page_size=4, metadata_rows=1, threads=1, now_s=lambda: 0.0)
    await engine.step(plan(Sequence(1, (1,), 0, (0,), None)))
    await engine.close()
    with pytest.raises(RuntimeError):
        await engine.step(plan(Sequence(1, (1,), 0, (0,), None)))


def bytes_of(region):
    return ctypes.string_at(region.base, region.items * region.item_bytes)
