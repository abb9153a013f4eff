"""Log-probabilities, penalties and min_tokens of the real model, against `reference_sampling.json`: plain
transformers with its own processors on the same weights.
"""

import json
from pathlib import Path

import pytest

from kvferry.engine.contract import Sequence, StepPlan
from kvferry.engine.history import Past
from kvferry.protocol.address import Address
from kvferry.protocol.request import RequestSpec, Sampling

HERE = Path(__file__).parent
REFERENCE = json.loads((HERE / "reference_sampling.json").read_text())
PROMPTS = {e["length"]: e["prompt_ids"] for e in json.loads((HERE / "reference.json").read_text())["prompts"]}
NOBODY = Address("test", "", 0, "", 0)
PAGES = tuple(range(40, 60))
TIE = 1e-3


async def answer(engine, prompt, sampling, count, frozen=(), chunk=48):
    """One attempt: prompt and frozen tokens in chunks, then token by token. What was drawn."""
    spec = RequestSpec(1, tuple(prompt), sampling, NOBODY, tuple(frozen))
    past, fed, start, drawn = Past(spec), spec.fed_ids, 0, []
    while len(drawn) < count:
        last = start + chunk >= len(fed)
        part = fed[start : start + chunk]
        sequence = Sequence(1, part, start, PAGES, sampling if last else None, past.history() if last else None)
        (token,) = (await engine.step(StepPlan(0, (sequence,)))).drawn
        start += len(part)
        if token is not None:
            drawn.append(token)
            past.add(token.token_id)
            fed += (token.token_id,)
    return drawn


def test_the_reference_is_of_this_model(loaded):
    assert (REFERENCE["model"], REFERENCE["revision"]) == (loaded.name, loaded.revision)


@pytest.mark.parametrize("entry", REFERENCE["prompts"], ids=lambda entry: f"{entry['length']} tokens")
async def test_logprobs_equal_those_of_transformers(engine, entry):
    """The first token's too; 1e-4 apart at most, in the same order."""
    drawn = await answer(engine, PROMPTS[entry["length"]], Sampling(5, logprobs=5), 5)
    for token, right in zip(drawn, entry["tokens"], strict=True):
        assert token.token_id == right["token"]
        assert token.logprobs.logprob == pytest.approx(right["logprob"], abs=1e-4)
        assert [i for i, _ in token.logprobs.top] == [i for i, _ in right["top"]]
        assert [v for _, v in token.logprobs.top] == pytest.approx([v for _, v in right["top"]], abs=1e-4)


@pytest.mark.parametrize("entry", REFERENCE["processed"], ids=lambda e: f"{e['length']} {e['repetition_penalty']}")
async def test_greedy_with_penalties_and_min_tokens_equals_transformers(engine, entry):
    """Up to ties; and a second attempt with 10 frozen tokens goes on as the first one did."""
    rules = {name: entry[name] for name in ("repetition_penalty", "min_tokens")}
    sampling = Sampling(24, stop_token_ids=tuple(entry["stop_token_ids"]), **rules)
    prompt, right = PROMPTS[entry["length"]], entry["output_ids"]
    drawn = await answer(engine, prompt, sampling, 24)
    ids = [token.token_id for token in drawn]
    for at, margin in enumerate(entry["margins"]):
        if ids[at] != right[at]:
            assert margin <= TIE, (at, ids, right)
            break
        assert drawn[at].margin == pytest.approx(margin, abs=TIE)
    again = await answer(engine, prompt, sampling, 14, frozen=ids[:10])
    assert [token.token_id for token in again] == ids[10:]


async def test_frequency_and_presence_go_on_across_attempts(engine):
    """They change the answer, keep it from repeating itself, and frozen tokens count as generated."""
    prompt, plain = PROMPTS[33], Sampling(24, temperature=0.7, seed=5)
    sampling = Sampling(24, temperature=0.7, seed=5, frequency_penalty=0.8, presence_penalty=0.6)
    whole = [token.token_id for token in await answer(engine, prompt, sampling, 16)]
    assert whole != [token.token_id for token in await answer(engine, prompt, plain, 16)]
    for cut in (1, 9):
        rest = await answer(engine, prompt, sampling, 16 - cut, frozen=whole[:cut])
        assert whole[:cut] + [token.token_id for token in rest] == whole
