"""The engine against `reference.json`: greedy tokens of plain transformers on the same weights."""

import json
import random
from pathlib import Path

import pytest

from kvferry.engine.contract import Sequence, StepPlan
from kvferry.protocol.request import Sampling

REFERENCE = json.loads(Path(__file__).with_name("reference.json").read_text())
BY_LENGTH = {entry["length"]: entry for entry in REFERENCE["prompts"]}
PAGE, TOKENS, CHUNK, BUDGET, TIE = 16, 32, 256, 512, 1e-3


def scattered_pages(lengths, pages, seed):
    """Block tables with room for each prompt and its answer, their pages in random order."""
    ids = list(range(pages))
    random.Random(seed).shuffle(ids)
    return [tuple(ids.pop() for _ in range(-(-(length + TOKENS) // PAGE))) for length in lengths]


async def run(engine, prompts, chunk=CHUNK, sampling=None):
    """Chunked prefill, several prompts to a step, then all decode together. The tokens of each prompt."""
    sampling = sampling or Sampling(max_tokens=TOKENS)
    tables = scattered_pages([len(p) for p in prompts], engine.limits.pages, seed=len(prompts))
    fed, out = [0] * len(prompts), [[] for _ in prompts]
    while any(len(tokens) < TOKENS for tokens in out):
        parts, budget = [], BUDGET
        for key, prompt in enumerate(prompts):
            history = [*prompt, *out[key]]
            count = min(len(history) - fed[key], chunk, budget)
            if count < 1 or len(out[key]) == TOKENS:
                continue
            ids = tuple(history[fed[key] : fed[key] + count])
            last = fed[key] + count == len(history)
            parts.append(Sequence(key, ids, fed[key], tables[key], sampling if last else None))
            fed[key] += count
            budget -= count
        for part, drawn in zip(parts, (await engine.step(StepPlan(0, tuple(parts)))).drawn, strict=True):
            if drawn is not None:
                out[part.key].append(drawn.token_id)
    return out


def assert_same_up_to_ties(tokens, entry):
    """Tokens may differ first only where the reference's two best logits are within TIE."""
    differing = [at for at in range(TOKENS) if tokens[at] != entry["output_ids"][at]]
    if differing:
        assert entry["margins"][differing[0]] <= TIE, (entry["length"], differing[0], tokens, entry)


def test_the_reference_is_of_this_model_and_covers_the_edges(loaded):
    assert (REFERENCE["model"], REFERENCE["revision"]) == (loaded.name, loaded.revision)
    assert len(BY_LENGTH) == 30
    assert {1, 15, 16, 17, 31, 32, 33, 255, 256, 257, 511, 512, 513, 1500} <= set(BY_LENGTH)
    ties = sum(margin <= TIE for entry in BY_LENGTH.values() for margin in entry["margins"])
    assert ties < 5  # of 960, so that the comparison means something


def test_the_chat_references_render_to_their_lengths(chat):
    for entry in REFERENCE["chats"]:
        assert len(chat.render([{"role": "user", "content": entry["content"]}])) == entry["length"]


async def test_eight_prompts_in_parallel_equal_the_reference(engine):
    entries = [BY_LENGTH[length] for length in (1, 16, 17, 33, 129, 257, 513, 1500)]
    for tokens, entry in zip(await run(engine, [e["prompt_ids"] for e in entries]), entries, strict=True):
        assert_same_up_to_ties(tokens, entry)


@pytest.mark.parametrize(("length", "chunk"), [(31, 7), (255, 64)])
async def test_a_prompt_alone_in_other_chunks_equals_the_reference(engine, length, chunk):
    (tokens,) = await run(engine, [BY_LENGTH[length]["prompt_ids"]], chunk)
    assert_same_up_to_ties(tokens, BY_LENGTH[length])


async def test_seeded_draws_depend_on_neither_company_nor_chunks(engine):
    """As PD and unified will run it: the margins say where rounding might decide, and here it decides nowhere."""
    sampling = Sampling(max_tokens=TOKENS, temperature=0.8, top_p=0.95, top_k=50, seed=1234)
    prompts = [BY_LENGTH[length]["prompt_ids"] for length in (64, 32, 100)]
    together = await run(engine, prompts, sampling=sampling)
    (alone,) = await run(engine, prompts[:1], chunk=20, sampling=sampling)
    assert alone == together[0]
    assert alone != BY_LENGTH[64]["output_ids"]
