"""The scripted engine: its tokens follow from the bytes in its pages, wherever those came from."""

import ctypes
from typing import Any

import pytest

from kvferry.engine.contract import EngineLimits, History, Sequence, StepPlan, decode_plan, encode_plan
from kvferry.engine.scripted import ScriptedEngine, ScriptedTexts
from kvferry.protocol.rank import Layout, Slice
from kvferry.protocol.request import Sampling

GREEDY = Sampling(max_tokens=8)
PROMPT = tuple(range(100, 111))


def make(pages: int = 12, sleep: Any = None, part: Slice | None = None) -> ScriptedEngine:
    async def no_sleep(_: float) -> None: ...

    layout = Layout("scripted", "1", "float32", page_size=4, layers=2, kv_heads=2, head_dim=2)
    limits = EngineLimits(pages=pages, page_size=4, context_tokens=40, vocab_size=1000)
    return ScriptedEngine(
        layout,
        limits,
        metadata_rows=2,
        sleep=sleep or no_sleep,
        cost_s=lambda plan: 0.5 * len(plan.sequences),
        part=part,
    )


async def feed(engine, token_ids, start, pages, sampling=GREEDY):
    (drawn,) = (await engine.step(StepPlan(0, (Sequence(1, tuple(token_ids), start, pages, sampling),)))).drawn
    return drawn.token_id


async def generate(engine, pages, chunk, count=4):
    for start in range(0, len(PROMPT), chunk):
        token = await feed(engine, PROMPT[start : start + chunk], start, pages)
    tokens = [token]
    for position in range(len(PROMPT), len(PROMPT) + count - 1):
        tokens.append(await feed(engine, tokens[-1:], position, pages))
    return tuple(tokens)


@pytest.mark.parametrize("chunk", [1, 3, 4, 11])
async def test_tokens_depend_on_neither_chunks_nor_page_ids(chunk):
    engine = make()
    expected = engine.expected_tokens(PROMPT, 4)
    assert len(set(expected)) == 4
    assert await generate(engine, (9, 0, 5, 2), chunk) == expected


async def test_copying_the_regions_items_carries_the_tokens_over():
    source, target = make(), make(pages=20)
    source_pages, target_pages = (1, 7, 3), (19, 4, 8)
    first = await feed(source, PROMPT, 0, source_pages)
    for ours, theirs in zip(source.regions()[:-1], target.regions()[:-1], strict=True):
        assert (ours.part, ours.layer, ours.item_bytes) == (theirs.part, theirs.layer, theirs.item_bytes)
        for a, b in zip(source_pages, target_pages, strict=True):
            ctypes.memmove(theirs.base + b * theirs.item_bytes, ours.base + a * ours.item_bytes, ours.item_bytes)
    second = await feed(target, [first], len(PROMPT), target_pages)
    assert (first, second) == source.expected_tokens(PROMPT, 2)


async def test_one_changed_byte_in_any_region_changes_the_next_token():
    for region in range(4):
        engine = make()
        first = await feed(engine, PROMPT, 0, (1, 2, 3))
        place = engine.regions()[region].base + 2 * engine.regions()[region].item_bytes + 5
        ctypes.c_ubyte.from_address(place).value ^= 1
        assert await feed(engine, [first], len(PROMPT), (1, 2, 3)) != engine.expected_tokens(PROMPT, 2)[1]


async def test_pages_in_another_order_change_the_next_token():
    engine = make()
    first = await feed(engine, PROMPT, 0, (1, 2, 3))
    assert await feed(engine, [first], len(PROMPT), (2, 1, 3)) != engine.expected_tokens(PROMPT, 2)[1]


async def test_the_first_word_of_a_slot_is_the_token_id():
    engine = make()
    await feed(engine, PROMPT, 0, (1, 2, 3))
    region = engine.regions()[0]
    words = (ctypes.c_uint32 * 16).from_address(region.base + 2 * region.item_bytes)
    assert list(words)[::4] == list(PROMPT[4:8])


async def test_metadata_rows_are_the_memory_of_the_last_region():
    engine = make()
    engine.metadata_row(1)[:3] = b"abc"
    region = engine.regions()[-1]
    assert (region.part, region.layer, region.item_bytes, region.items) == ("metadata", -1, 256, 2)
    assert ctypes.string_at(region.base + 256, 3) == b"abc"
    with pytest.raises(IndexError, match="2 rows"):
        engine.metadata_row(2)


async def test_a_step_sleeps_its_cost_and_writes_until_its_end():
    slept = []

    async def sleep(duration_s: float) -> None:
        slept.append(duration_s)
        with pytest.raises(RuntimeError, match="another step"):
            await engine.step(StepPlan(1, (Sequence(2, (5,), 0, (1,), None),)))
        ctypes.memset(engine.regions()[0].base, 0, engine.regions()[0].item_bytes)

    engine = make(sleep=sleep)
    assert await feed(engine, PROMPT, 0, (0, 1, 2)) == engine.expected_tokens(PROMPT, 1)[0]
    assert slept == [0.5]


async def test_seeds_matter_for_draws_only():
    engine = make()
    draws = {engine.expected_tokens(PROMPT, 3, Sampling(3, temperature=1.0, seed=seed)) for seed in range(5)}
    assert len(draws) == 5
    assert engine.expected_tokens(PROMPT, 3, Sampling(3, seed=9)) == engine.expected_tokens(PROMPT, 3)


@pytest.mark.parametrize(
    ("sequence", "message"),
    [
        (Sequence(1, (), 0, (0,)), "0 tokens"),
        (Sequence(1, (1,) * 5, 0, (0,)), "5 tokens in 1 pages of 4"),
        (Sequence(1, (1,), 40, (0,) * 11), "context is 40"),
        (Sequence(1, (1,), 0, (12,)), "page outside 0 .. 11"),
        (Sequence(1, (1000,), 0, (0,)), "token id outside 0 .. 999"),
    ],
)
async def test_a_plan_that_leaves_its_pages_is_refused(sequence, message):
    with pytest.raises(ValueError, match=message):
        await make().step(StepPlan(0, (sequence,)))


def test_scripted_texts_share_the_stop_rules():
    stream = ScriptedTexts(eos_token_ids=(7,)).stream(Sampling(max_tokens=9, stop=("<5><6>",)))
    assert [stream.push(t).text for t in (4, 5, 5)] == ["<4>", "", "<5>"]
    last = stream.push(7)
    assert (last.text, last.finish_reason) == ("<5>", "stop")
    stream = ScriptedTexts().stream(Sampling(max_tokens=9, stop=("<5><6>",)))
    assert [stream.push(t) for t in (5, 6)][1].finish_reason == "stop"


@pytest.mark.parametrize(
    "parts",
    [
        (Slice(0, 1, 0, 2), Slice(1, 1, 0, 2)),
        (Slice(0, 2, 0, 1), Slice(0, 2, 1, 1)),
        (Slice(0, 2, 0, 2, 0, 2), Slice(0, 2, 0, 2, 1, 2)),
    ],
)
async def test_the_ranks_parts_make_the_tokens_of_the_whole(parts):
    """Each rank has its slice of the pool only; the leader adds up what all of them have read."""
    engines = [make(part=part) for part in parts]
    assert [(r.layer, r.first_head, r.heads) for r in engines[1].regions()[:1]] == [
        (parts[1].first_layer, parts[1].first_head, parts[1].heads)
    ]
    plan = StepPlan(1, (Sequence(1, PROMPT, 0, (3, 1, 2), GREEDY), Sequence(2, (7,), 0, (0,))))
    results = [await engine.step(plan) for engine in engines]
    assert [result.drawn for result in results] == [(None, None)] * 2
    drawn, none = engines[0].combine(plan, results[0], [results[1].part]).drawn
    assert none is None and (drawn.token_id,) == make().expected_tokens(PROMPT, 1)
    assert engines[0].combine(plan, results[0], [results[0].part]).drawn[0] != drawn, "the other rank's part matters"


async def test_a_plan_survives_the_wire():
    sampling = Sampling(4, presence_penalty=0.5)
    plan = StepPlan(3, (Sequence(1, (1, 2), 0, (3,), sampling, History((1,), (2,))), Sequence(2, (5,), 9, (1, 0))))
    assert decode_plan(encode_plan(plan)) == plan
