"""A model cut into ranks: the logits and the pages of the whole one, and what happens when a rank is missing.

The ranks are threads of this process here, each with its own model, pool and end of the group; nothing but the group
connects them. Over processes, and with the real model: tests/real/test_layouts.py.
"""

import asyncio
import ctypes
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import count

import pytest
import torch

from kvferry.engine.adapter import Adapter, check_split, cut, layout_of
from kvferry.engine.batch import build
from kvferry.engine.contract import RanksLost, Sequence, StepPlan
from kvferry.engine.group import Group, Place, join_store, open_store
from kvferry.engine.patches import apply_cpu_patches
from kvferry.engine.torch_engine import TorchEngine
from kvferry.protocol.errors import ConfigError
from kvferry.protocol.rank import Slice, share, slice_of
from kvferry.protocol.request import Sampling
from kvferry.transfer.pairing import check_given, pair_common
from kvferry.transfer.plan import plan_pages
from kvferry.transfer.ranks import routes
from kvferry.transfer.spans import addresses

WANT = Sampling(max_tokens=1)
TABLES = ((9, 2, 17, 5, 11, 14, 18), (0, 3, 8, 1, 6, 19, 16), (4, 7, 10, 12, 13, 15))
PAGES, PAGE_SIZE = 20, 4
SIZES = {"pages": PAGES, "page_size": PAGE_SIZE, "metadata_rows": 1, "threads": 1, "now_s": lambda: 0.0}
#: Tokens that each of three sequences feeds in each forward: chunks first, of unequal lengths, then one by one.
TURNS = ((9, 8, 1), (4, 0, 0), (8, 0, 0), (1, 1, 1), (1, 1, 1), (1, 1, 1))
_tokens = count()


def stages_of(pp):
    """A number of stages, or the layers of each of them: how many there are, and their layers where they are given."""
    return (pp, ()) if isinstance(pp, int) else (len(pp), pp)


def on_ranks(tp, pp, work, limit_s=20.0):
    """`work(group)` in a thread for each rank; what each gives, the leader's first."""
    store, port = open_store()
    token, (pp, stages) = str(next(_tokens)), stages_of(pp)

    def rank(number):
        mine = store if number == 0 else join_store(port)
        return work(Group(mine, token, Place.of(number, tp, pp, stages), limit_s))

    with ThreadPoolExecutor(tp * pp) as pool:
        return [done.result() for done in [pool.submit(rank, number) for number in range(tp * pp)]]


def sequences():
    random = torch.Generator().manual_seed(1)
    lengths = [sum(turn[key] for turn in TURNS) for key in range(3)]
    return [torch.randint(97, (length,), generator=random).tolist() for length in lengths]


def plans():
    fed = [0, 0, 0]
    for step, turn in enumerate(TURNS, 1):
        parts = []
        for key, (ids, tokens) in enumerate(zip(sequences(), turn, strict=True)):
            if tokens:
                chunk = tuple(ids[fed[key] : fed[key] + tokens])
                parts.append(Sequence(key, chunk, fed[key], TABLES[key], WANT))
                fed[key] += tokens
        yield StepPlan(step, tuple(parts))


@torch.inference_mode()
def dense(loaded):
    """By transformers alone: the logits of each sequence, and K and V [layers, tokens, heads, D] of each."""
    logits, kv = [], []
    for ids in sequences():
        output = loaded.model(input_ids=torch.tensor([ids]), use_cache=True)
        logits.append(output.logits[0])
        parts = ([layer.keys for layer in output.cache.layers], [layer.values for layer in output.cache.layers])
        kv.append([torch.stack([part[0].transpose(0, 1) for part in each]) for each in parts])
    return logits, kv


def run_rank(loaded, group, patched):
    """All forwards at one rank: ({(sequence, position): logits}, pool)."""
    shard = cut(loaded, group)
    if patched:
        apply_cpu_patches(loaded.model)
    adapter = Adapter(loaded, shard)
    pool = adapter.pool(pages=PAGES, page_size=PAGE_SIZE, metadata_rows=1)
    rows = {}
    for plan in plans():
        tensors = build(plan, PAGE_SIZE)
        logits = adapter.forward(tensors, pool)
        assert (logits is None) == (group.place.rank != 0)
        for row, wanted in zip(() if logits is None else logits, tensors.wanted, strict=logits is not None):
            sequence = plan.sequences[wanted]
            rows[sequence.key, sequence.position - 1] = row
    return rows, pool


SIX = {"num_hidden_layers": 6}
EIGHT = {"num_attention_heads": 8, "num_key_value_heads": 4}
NINE = {"num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 144}
TWO = {"num_attention_heads": 8, "num_key_value_heads": 2}
FIFTEEN = {"num_hidden_layers": 15}
BIASED = {"attention_bias": True, "mlp_bias": True, "intermediate_size": 95}


@pytest.mark.parametrize(
    ("tp", "pp", "family", "changes", "patched"),
    [
        (3, 1, "Llama", NINE, True),
        (2, 1, "Llama", EIGHT | BIASED, True),
        (4, 1, "Llama", EIGHT | {"tie_word_embeddings": True}, False),
        (8, 1, "Llama", EIGHT, True),
        (1, 2, "Llama", {"tie_word_embeddings": True}, True),
        (1, 4, "Llama", SIX, False),
        (2, 2, "Llama", EIGHT, True),
        (2, 3, "Llama", EIGHT | BIASED, False),
        (1, (1, 4, 1), "Llama", SIX, False),
        (2, 1, "Qwen2", {}, True),
        (2, 2, "Qwen3", {}, True),
    ],
    ids=str,
)
def test_ranks_give_the_logits_and_the_pages_of_the_whole_model(tiny, tp, pp, family, changes, patched):
    expected, kv = dense(tiny(family, **changes))
    assert expected[0].std() > 0.5  # or the comparison would prove nothing
    models = iter([tiny(family, **changes) for _ in range(tp * stages_of(pp)[0])])
    found = on_ranks(tp, pp, lambda group: run_rank(next(models), group, patched))
    rows = found[0][0]
    assert len(rows) == sum(1 for turn in TURNS for tokens in turn if tokens)
    for (key, position), row in rows.items():
        torch.testing.assert_close(row, expected[key][position], atol=5e-4, rtol=0)
    regions = [(pool, region) for _, pool in found for region in pool.regions()[:-1]]
    for pool, region in regions:
        pages = (pool.k if region.part == "k" else pool.v)[region.layer - pool.first_layer].flatten(0, 1)
        heads = slice(region.first_head, region.first_head + region.heads)
        for key, table in enumerate(TABLES):
            right = kv[key][region.part == "v"][region.layer]
            slots = [table[at // PAGE_SIZE] * PAGE_SIZE + at % PAGE_SIZE for at in range(len(right))]
            torch.testing.assert_close(pages[slots], right[:, heads], atol=5e-4, rtol=0)
    layers, kv_heads = changes.get("num_hidden_layers", 3), changes.get("num_key_value_heads", 2)
    each = max(1, kv_heads // tp)
    assert {(region.part, region.layer, region.first_head, region.heads) for _, region in regions} == {
        (part, layer, first, each) for part in "kv" for layer in range(layers) for first in range(0, kv_heads, each)
    }


def forward(adapters, pools, sequence):
    """The leader's logits of one forward of all ranks."""
    tensors = build(StepPlan(1, (sequence,)), PAGE_SIZE)
    with ThreadPoolExecutor(len(adapters)) as pool:
        return next(iter(pool.map(lambda rank: rank[0].forward(tensors, rank[1]), zip(adapters, pools, strict=True))))


@pytest.mark.parametrize(
    ("changes", "prefill", "decode"),
    [
        (EIGHT | SIX, (2, 1), (4, 1)),
        (EIGHT | SIX, (4, 1), (2, 1)),
        (EIGHT | SIX, (1, 1), (4, 1)),
        (EIGHT | SIX, (4, 1), (1, 1)),
        (EIGHT | SIX, (2, 1), (8, 1)),
        (EIGHT | SIX, (1, 3), (2, 2)),
        (TWO, (1, 1), (4, 1)),
        (TWO, (4, 1), (1, 1)),
        (TWO, (2, 1), (4, 1)),
        (FIFTEEN, (1, (7, 8)), (1, 1)),
        (FIFTEEN, (1, (7, 8)), (2, (3, 11, 1))),
    ],
    ids=str,
)
def test_cases_46_47_what_some_ranks_have_computed_others_go_on_with(tiny, changes, prefill, decode):
    """Case 46 with 2 KV heads and with 4, case 47 with 15 layers in stages of 7 and 8: the plan moves the prompt's KV,
    to other page numbers, and the logits of the tokens that follow are those of the whole model.
    """
    prompt, table, there = 21, TABLES[0], TABLES[1]
    ids = sequences()[0]
    expected = dense(tiny("Llama", **changes))[0][0]
    assert expected.std() > 0.5  # or the comparison would prove nothing

    def instance(shape):
        tp, (pp, stages) = shape[0], stages_of(shape[1])
        models = iter([tiny("Llama", **changes) for _ in range(tp * pp)])

        def rank(group):
            loaded = next(models)
            return Adapter(loaded, cut(loaded, group))

        adapters = on_ranks(*shape, rank)
        layout = layout_of(tiny("Llama", **changes), PAGE_SIZE)
        slices = [slice_of(layout, at % tp, tp, at // tp, pp, stages=stages) for at in range(len(adapters))]
        pools = [adapter.pool(pages=PAGES, page_size=PAGE_SIZE, metadata_rows=1) for adapter in adapters]
        return adapters, pools, {rank: (part,) for rank, part in enumerate(slices)}

    (givers, sources, given), (takers, targets, taken) = instance(prefill), instance(decode)
    first = forward(givers, sources, Sequence(1, tuple(ids[:prompt]), 0, table, WANT))
    torch.testing.assert_close(first[0], expected[prompt - 1], atol=5e-4, rtol=0)
    pages = -(-prompt // PAGE_SIZE)
    for source, ranks in routes(given, taken).items():
        ours = sources[source].regions()
        pairings = {target: pair_common(ours, targets[target].regions()) for target in ranks}
        check_given(ours, list(pairings.values()))
        for target, pairing in pairings.items():
            theirs, spans = targets[target].regions(), plan_pages(pairing, table[:pages], there[:pages])
            ends = (addresses(spans, theirs, "target"), addresses(spans, ours, "source"), spans["length"])
            for to, start, length in zip(*(column.tolist() for column in ends), strict=True):
                ctypes.memmove(to, start, length)
    for at in range(prompt, len(ids)):
        logits = forward(takers, targets, Sequence(1, (ids[at],), at, there, WANT))
        torch.testing.assert_close(logits[0], expected[at], atol=5e-4, rtol=0)


def test_a_rank_keeps_only_what_it_computes(tiny):
    """Weights by rank, of 2 x 2: half of each linear of its layers, and of the rest what its stage needs."""
    models = iter([tiny("Llama", **EIGHT, num_hidden_layers=4) for _ in range(4)])

    def kept(group):
        loaded = next(models)
        shard = cut(loaded, group)
        return shard.part, {name: tuple(weight.shape) for name, weight in loaded.model.named_parameters()}

    found = on_ranks(2, 2, kept)
    assert [part for part, _ in found] == [Slice(0, 2, 0, 2), Slice(0, 2, 2, 2), Slice(2, 2, 0, 2), Slice(2, 2, 2, 2)]
    layer = {
        "self_attn.q_proj.weight": (64, 96), "self_attn.k_proj.weight": (32, 96), "self_attn.v_proj.weight": (32, 96),
        "self_attn.o_proj.part.weight": (96, 64), "mlp.gate_proj.weight": (48, 96), "mlp.up_proj.weight": (48, 96),
        "mlp.down_proj.part.weight": (96, 48), "input_layernorm.weight": (96,),
        "post_attention_layernorm.weight": (96,),
    }  # fmt: skip
    layers = {f"model.layers.{at}.{name}": shape for at in range(2) for name, shape in layer.items()}
    embedding = {"model.embed_tokens.weight": (97, 96)}
    assert found[0][1] == layers | embedding | {"lm_head.weight": (97, 96)}
    assert found[1][1] == layers | embedding
    assert found[2][1] == found[3][1] == layers | {"model.norm.weight": (96,)}


def test_the_leader_draws_and_followers_follow(tiny):
    """Steps of whole engines: the tokens of the engine of one rank, in the leader's result alone."""
    whole = TorchEngine(tiny("Llama", **EIGHT), **SIZES)
    models = iter([tiny("Llama", **EIGHT) for _ in range(4)])
    engines = on_ranks(2, 2, lambda group: TorchEngine(next(models), **SIZES, group=group))

    async def steps():
        for plan in plans():
            right, *results = await asyncio.gather(*(engine.step(plan) for engine in (whole, *engines)))
            assert [r.step for r in results] == [plan.step] * 4
            assert [drawn.token_id for drawn in results[0].drawn] == [drawn.token_id for drawn in right.drawn]
            assert {result.drawn for result in results[1:]} == {(None,) * len(plan.sequences)}
        for engine in (whole, *engines):
            await engine.close()

    asyncio.run(steps())
    assert {engine.layout for engine in engines} == {whole.layout}
    assert {engine.limits for engine in engines} == {whole.limits}
    assert [len(engine.regions()) for engine in engines] == [2 * 2 + 1, 2 * 2 + 1, 2 * 1 + 1, 2 * 1 + 1]


def test_a_rank_that_stands_still_is_given_up_after_the_limit(tiny):
    models = iter([tiny("Llama") for _ in range(2)])
    engines = on_ranks(2, 1, lambda group: TorchEngine(next(models), **SIZES, group=group), limit_s=0.5)
    plan = next(plans())

    async def alone():
        with pytest.raises(RanksLost, match="a sum over the ranks of a stage"):
            await engines[0].step(plan)
        for engine in engines:
            await engine.close()

    asyncio.run(alone())


DOOMED = """
import os, signal, sys, torch
from kvferry.engine.group import Group, Place, join_store
group = Group(join_store(int(sys.argv[1])), "doomed", Place.of(1, 2, 1), 60.0)
group.sum(torch.ones(3))
print("ready", flush=True)
sys.stdin.read()
"""


def test_a_killed_rank_ends_the_sum_that_waits_for_it_at_once():
    """The limit is a minute and the test's own is less: only the broken connection can end it."""
    store, port = open_store()
    with subprocess.Popen(
        [sys.executable, "-c", DOOMED, str(port)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        group = Group(store, "doomed", Place.of(0, 2, 1), 60.0)
        assert group.sum(torch.ones(3)).tolist() == [2.0] * 3
        assert process.stdout.readline() == "ready\n"
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(group.sum, torch.ones(3))
            os.kill(process.pid, signal.SIGKILL)
            with pytest.raises(RanksLost, match="a sum over the ranks"):
                waiting.result(timeout=30)


def test_without_a_leader_there_is_no_store_to_join():
    store, port = open_store()
    del store
    with pytest.raises(RanksLost, match="the leader's store"):
        join_store(port)


@pytest.mark.parametrize(
    ("family", "changes", "tp", "pp", "message"),
    [
        ("Llama", NINE, 2, 1, "tp: 2 is not acceptable; allowed: what divides the 9 query heads, and"),
        ("Llama", EIGHT | {"num_key_value_heads": 8, "num_attention_heads": 12}, 6, 1, "divides the 8 KV heads or is"),
        ("Llama", {}, 1, 4, "pp: 4 is not acceptable; allowed: at most the model's 3 layers"),
        ("Phi3", {"pad_token_id": 0}, 2, 1, "tp: 2 is not acceptable; allowed: 1 for a model of type phi3"),
        ("Olmo2", {}, 1, 2, "pp: 2 is not acceptable; allowed: 1 for a model of type olmo2"),
    ],
)
def test_what_cannot_be_cut_is_refused_with_the_reason(tiny, family, changes, tp, pp, message):
    config = tiny(family, **changes).config
    with pytest.raises(ConfigError, match=message):
        check_split(config, tp, pp)
    with pytest.raises(ConfigError, match=r"^decode\.[tp]p: "):
        check_split(config, tp, pp, where="decode.")
    check_split(config, 1, 1)


@pytest.mark.parametrize("stages", [(1, 3), (3, 0), (1, 1, 1), (3,)], ids=str)
def test_stages_that_do_not_make_the_model_are_refused(tiny, stages):
    config = tiny("Llama").config
    with pytest.raises(ConfigError, match=r"^prefill.stages: \[.*allowed: none, or 2 of .* make the model's 3 layers"):
        check_split(config, 1, 2, stages, "prefill.")
    check_split(config, 1, 2, (1, 2))
    check_split(config, 1, 1, (3,))


def test_shares_are_in_order_and_differ_by_one_at_most():
    assert [share(95, rank, 2) for rank in range(2)] == [(0, 48), (48, 47)]
    assert [share(8, rank, 3) for rank in range(3)] == [(0, 3), (3, 3), (6, 2)]
    assert [share(2, rank, 3) for rank in range(3)] == [(0, 1), (1, 1), (2, 0)]
