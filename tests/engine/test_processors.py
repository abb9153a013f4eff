"""Bias, penalties, min_tokens and min-p, against transformers' own processors and tables worked out by hand."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from kvferry.engine.contract import EngineLimits, History, Sequence, StepPlan
from kvferry.engine.history import Past, looks_back
from kvferry.engine.processors import processed
from kvferry.engine.rules import check_plan
from kvferry.engine.sampler import filtered, sample
from kvferry.protocol.address import Address
from kvferry.protocol.request import RequestSpec, Sampling

VOCAB = 60
NOBODY = Address("test", "", 0, "", 0)


def row_of(seed, scale=3.0):
    return np.random.default_rng(seed).normal(scale=scale, size=VOCAB).astype(np.float32)


def theirs(processors, ids, row):
    return LogitsProcessorList(processors)(torch.tensor([ids]), torch.tensor(row)[None].clone())[0].numpy()


def draw(row, sampling, history=None, position=5, eos=()):
    return sample(torch.tensor(np.array(row))[None], [Sequence(1, (0,), position - 1, (0,), sampling, history)], eos)[0]


def test_a_request_that_asks_for_nothing_gets_its_row_untouched():
    row = row_of(0)
    assert processed(row, Sampling(5, temperature=0.7, top_k=3, min_p=0.1), None, (2,)) is row
    assert not looks_back(Sampling(5, logit_bias=((1, 2.0),), logprobs=3, ignore_eos=True))


@pytest.mark.parametrize("penalty", [0.5, 1.1, 1.3, 2.0])
@pytest.mark.parametrize("seed", range(5))
def test_the_repetition_penalty_is_that_of_transformers(penalty, seed):
    """Over prompt and generated tokens, once however often a token came; 0 logits stay 0."""
    row = row_of(seed)
    row[:3] = 0.0
    ids = np.random.default_rng(seed).integers(0, VOCAB, 30).tolist()
    history = History(tuple(ids[:20]), tuple(ids[20:]))
    found = processed(row, Sampling(5, repetition_penalty=penalty), history, ())
    assert np.allclose(found, theirs([RepetitionPenaltyLogitsProcessor(penalty)], ids, row), rtol=1e-6, atol=0)


def test_frequency_and_presence_by_hand():
    """logit - count * frequency - (count > 0) * presence; the prompt's tokens do not count."""
    row = np.array([1.0, 2.0, 3.0, 4.0, -1.0], dtype=np.float32)
    history = History((3, 3, 3), (1, 2, 1, 4, 1))
    cases = [
        (Sampling(9, frequency_penalty=0.5), [1.0, 0.5, 2.5, 4.0, -1.5]),
        (Sampling(9, presence_penalty=0.25), [1.0, 1.75, 2.75, 4.0, -1.25]),
        (Sampling(9, frequency_penalty=-0.5, presence_penalty=2.0), [1.0, 1.5, 1.5, 4.0, -2.5]),
        (Sampling(9, frequency_penalty=2.0, presence_penalty=-1.0), [1.0, -3.0, 2.0, 4.0, -2.0]),
    ]
    for sampling, expected in cases:
        assert processed(row, sampling, history, ()).tolist() == expected
    assert processed(row, cases[0][0], History((3, 3)), ()).tolist() == row.tolist()


def test_the_bias_is_added_and_ids_outside_the_vocabulary_have_none():
    row = row_of(3)
    bias = ((5, 4.0), (7, -100.0), (VOCAB - 1, 0.5))
    reference = theirs([SequenceBiasLogitsProcessor([[[i], value] for i, value in bias])], [1, 2], row)
    assert np.allclose(processed(row, Sampling(5, logit_bias=bias), None, ()), reference, rtol=1e-6)
    assert processed(row, Sampling(5, logit_bias=((VOCAB, 9.0), (-1, 9.0))), None, ()).tolist() == row.tolist()


@pytest.mark.parametrize("generated", range(5))
def test_end_tokens_wait_for_min_tokens_as_in_transformers(generated):
    """EOS and stop_token_ids, until 3 tokens have been generated."""
    row, ids = row_of(4), list(range(10, 20 + generated))
    history = History(tuple(ids[:10]), tuple(ids[10:]))
    found = processed(row, Sampling(9, min_tokens=3, stop_token_ids=(7,)), history, (2, 4))
    reference = theirs([MinNewTokensLengthLogitsProcessor(10, 3, [2, 4, 7])], ids, row)
    assert np.array_equal(found.astype(np.float32), reference)
    kept = processed(row, Sampling(9, min_tokens=3, stop_token_ids=(7,), ignore_eos=True), history, (2, 4))
    assert np.array_equal(np.isfinite(kept), np.arange(VOCAB) != 7 if generated < 3 else np.ones(VOCAB, bool))


def test_the_order_is_bias_repetition_frequency_and_presence_end_tokens():
    """Of one token, by hand: (2 + 1) / 1.5 - 2 * 0.25 - 0.1 = 1.4; a masked end token stays masked."""
    row = np.array([2.0, -4.0, 1.0], dtype=np.float32)
    sampling = Sampling(
        9, logit_bias=((0, 1.0), (1, 1.0), (2, 100.0)), repetition_penalty=1.5, frequency_penalty=0.25,
        presence_penalty=0.1, min_tokens=5,
    )  # fmt: skip
    found = processed(row, sampling, History((1,), (0, 0)), (2,))
    assert found.tolist() == pytest.approx([1.4, -4.5, -math.inf])


def test_greedy_takes_the_best_of_what_is_left_and_tells_its_gap():
    row = [3.0, 2.5, 1.0, -2.0]
    penalised = draw(row, Sampling(9, frequency_penalty=1.0), History((), (0, 0)))
    assert (penalised.token_id, penalised.margin) == (1, 1.5)
    biased = draw(row, Sampling(9, logit_bias=((3, 5.25),)))
    assert (biased.token_id, biased.margin) == (3, 0.25)
    waiting = draw(row, Sampling(9, min_tokens=1), History((4,)), eos=(0, 1))
    assert (waiting.token_id, waiting.margin) == (2, 3.0)


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(9, repetition_penalty=5e-324),
        Sampling(9, repetition_penalty=1e308, temperature=1.0),
        Sampling(9, logit_bias=((1, 1e308), (1, 1e308), (2, -1e308), (2, -1e308))),
        Sampling(9, logit_bias=((1, math.inf), (1, -math.inf)), temperature=1.0),
        Sampling(9, frequency_penalty=-1e308, presence_penalty=-1e308, temperature=0.5),
        Sampling(9, repetition_penalty=0.0),
        Sampling(9, min_tokens=9, stop_token_ids=tuple(range(8))),
        Sampling(9, logit_bias=tuple((i, -math.inf) for i in range(8)), temperature=1.0),
    ],
)
def test_no_settings_leave_nothing_to_choose_from(sampling):
    """An engine must not fall for one request's numbers."""
    row = np.linspace(-2, 2, 8).astype(np.float32)
    assert 0 <= draw(row, sampling, History((1, 2, 3), (1, 1, 5))).token_id < 8


@given(
    st.integers(0, 10_000),
    st.sampled_from([0.3, 0.8, 1.0, 1.7]),
    st.sampled_from([0, 1, 5, 20]),
    st.sampled_from([1.0, 0.9, 0.5]),
    st.sampled_from([0.0, 1e-3, 0.05, 0.2, 1.0]),
)
@settings(max_examples=200, deadline=None)
def test_what_the_filters_keep_is_what_transformers_keeps(seed, temperature, top_k, top_p, min_p):
    """Temperature, top-k, top-p, min-p in this order; decisions closer than rounding may fall either way."""
    row = row_of(seed)
    warpers = [TemperatureLogitsWarper(temperature)]
    warpers += [TopKLogitsWarper(top_k)] if top_k else []
    warpers += [TopPLogitsWarper(top_p)] if top_p < 1 else []
    warpers += [MinPLogitsWarper(min_p)] if min_p else []
    expected = set(np.flatnonzero(np.isfinite(theirs(warpers, [0], row))).tolist())
    weights = np.exp((row.astype(np.float64) - row.max()) / temperature)
    kept, flips = filtered(weights / weights.sum(), top_k, top_p, min_p)
    found = set(range(VOCAB)) if kept is None else set(kept.tolist())
    assert found == expected or min(distance for distance, _ in flips) < 1e-6
    tokens = {draw(row, Sampling(1, temperature, top_p, top_k, seed, min_p=min_p), None, p).token_id for p in (1, 2, 3)}
    assert tokens <= found


@pytest.mark.parametrize(
    "rules",
    [
        {"min_p": 0.05},
        {"min_p": 0.3, "top_k": 40},
        {"repetition_penalty": 1.3},
        {"frequency_penalty": 0.4, "min_p": 1e-3},
    ],
)
def test_noise_changes_a_draw_only_within_its_margin(rules):
    """As in test_sampler, for the distribution that is left after penalties and min-p."""
    random = np.random.default_rng(1)
    row = random.normal(scale=3.0, size=2000)
    row[1000:] = row[:1000]
    history, changed = History((5, 6), (7, 8, 7, int(row.argmax()))), 0
    for position in range(1, 301):
        sampling = Sampling(1, temperature=0.8, seed=5, **rules)
        plain = draw(row.astype(np.float32), sampling, history, position)
        noisy = draw((row + random.normal(scale=3e-5, size=2000)).astype(np.float32), sampling, history, position)
        assert plain.token_id == noisy.token_id or plain.margin < 1e-4
        changed += plain.margin < 1e-4
    assert changed < 30  # or the margin would say nothing


def test_a_flip_of_min_p_shows_in_the_margin():
    """Ten equal tokens lie exactly at the limit: kept or not, half of the mass moves, and no margin may deny it."""
    row = np.log(np.array([0.5] + [0.05] * 10))
    _, flips = filtered(np.exp(row), 0, 1.0, 0.1)
    assert sum(distance < 1e-9 for distance, _ in flips) == 10
    assert max(moved for _, moved in flips) == pytest.approx(0.5)
    for position in range(1, 50):
        drawn = draw(row.astype(np.float32), Sampling(1, 1.0, seed=2, min_p=0.1), None, position)
        assert drawn.margin < 1e-6 or drawn.token_id == 0


def test_a_history_is_kept_only_where_it_is_looked_at():
    spec = RequestSpec(1, (5, 6), Sampling(9), NOBODY, frozen_ids=(7,))
    past = Past(spec)
    past.add(8)
    assert past.history() is None
    for field in ({"repetition_penalty": 1.1}, {"frequency_penalty": 0.1}, {"presence_penalty": -1}, {"min_tokens": 1}):
        past = Past(RequestSpec(1, (5, 6), Sampling(9, **field), NOBODY, frozen_ids=(7,)))
        assert past.history() == History((5, 6), (7,))
        past.add(8)
        assert past.history() == History((5, 6), (7, 8))


def test_a_plan_without_the_history_that_it_needs_is_refused():
    limits = EngineLimits(pages=4, page_size=4, context_tokens=16, vocab_size=10)
    bare = Sequence(3, (1,), 0, (0,), Sampling(4, min_tokens=2))
    with pytest.raises(ValueError, match="sequence 3: its sampling looks back at tokens, and no history came"):
        check_plan(StepPlan(0, (bare,)), limits)
    check_plan(StepPlan(0, (Sequence(3, (1,), 0, (0,), Sampling(4, min_tokens=2), History((1,))),)), limits)
