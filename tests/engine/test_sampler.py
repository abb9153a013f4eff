"""Sampling: against distributions worked out by hand and a slow, plain inverse transform."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.engine.contract import Sequence
from kvferry.engine.sampler import filtered, sample, uniform
from kvferry.protocol.request import Sampling


def wanting(sampling, position=5):
    """A sequence whose next token is at `position`."""
    return Sequence(1, (0,), position - 1, (0,), sampling)


def draw(row, sampling, position=5):
    return sample(torch.tensor([row]), [wanting(sampling, position)])[0]


def plain_filter(probs, top_k, top_p):
    """Sort everything, keep k, renormalise, keep the shortest prefix that reaches p. The ids kept, as a set."""
    order = sorted(range(len(probs)), key=lambda i: (-probs[i], i))
    if top_k:
        order = order[:top_k]
    total = sum(probs[i] for i in order)
    kept, reached = [], 0.0
    for i in order:
        kept.append(i)
        reached += probs[i] / total
        if top_p < 1 and reached >= top_p:
            break
    return set(kept)


def test_greedy_takes_the_first_of_the_best_and_tells_the_gap():
    assert draw([0.5, 2.0, -1.0, 1.25], Sampling(1)).token_id == 1
    assert draw([0.5, 2.0, -1.0, 1.25], Sampling(1)).margin == 0.75
    tie = draw([3.0, 7.0, 7.0], Sampling(1))
    assert (tie.token_id, tie.margin) == (1, 0.0)


def test_the_variate_is_fixed_by_seed_and_position():
    assert uniform(1, 2) == uniform(1, 2)
    values = {uniform(seed, position) for seed in range(20) for position in range(50)}
    assert len(values) == 1000
    assert all(0 <= value < 1 for value in values)
    assert abs(np.mean(list(values)) - 0.5) < 0.03
    assert uniform(-1, 0) == uniform(2**128 - 1, 0)


def test_the_variate_is_philox_itself():
    generator = np.random.Generator(np.random.Philox(key=77, counter=1234))
    assert uniform(77, 1234) == generator.random()


def test_a_draw_inverts_the_cumulative_distribution_in_order_of_id():
    probs, sampling = [0.1, 0.2, 0.3, 0.4], Sampling(1, temperature=1.0, seed=3)
    row = [math.log(p) for p in probs]
    for position in range(1, 200):
        u, drawn = uniform(3, position), draw(row, sampling, position)
        edges = [0.0, 0.1, 0.3, 0.6, 1.0]
        expected = next(i for i in range(4) if edges[i] <= u < edges[i + 1])
        assert drawn.token_id == expected
        assert drawn.margin == pytest.approx(min(u - edges[expected], edges[expected + 1] - u), abs=1e-6)


def test_frequencies_follow_the_temperature():
    row, counts = [0.0, 1.0, 2.0], np.zeros(3)
    for position in range(1, 4001):
        counts[draw(row, Sampling(1, temperature=0.5, seed=11), position).token_id] += 1
    weights = np.exp([0.0, 2.0, 4.0])
    assert np.abs(counts / 4000 - weights / weights.sum()).max() < 0.02


@given(
    st.lists(st.sampled_from([0.5, 1.0, 2.0, 2.5, 3.0]) | st.floats(0.01, 9), min_size=1, max_size=30),
    st.integers(0, 8),
    st.sampled_from([1.0, 0.95, 0.7, 0.5, 0.1, 1e-9]),
)
@settings(max_examples=300, deadline=None)
def test_filters_keep_what_a_full_sort_keeps(weights, top_k, top_p):
    probs = np.array(weights) / sum(weights)
    kept, flips = filtered(probs, top_k, top_p)
    found = set(range(len(probs))) if kept is None else set(kept.tolist())
    if all(distance > 1e-9 for distance, _ in flips) or found == plain_filter(probs, top_k, top_p):
        assert found == plain_filter(probs, top_k, top_p)
    else:  # the sum reached top_p up to rounding: one token more or less is equally right
        assert len(found ^ plain_filter(probs, top_k, top_p)) <= 2
    assert found


@pytest.mark.parametrize("temperature", [1e-6, 1e-300, 5e-324])
def test_a_temperature_close_to_0_is_greedy(temperature):
    """As small as a client may write it: the quotient must not overflow into NaN."""
    for position in range(1, 21):
        drawn = draw([0.5, 900.0, -math.inf, 899.0], Sampling(1, temperature=temperature, seed=3), position)
        assert drawn.token_id == 1


def test_top_k_1_and_a_tiny_top_p_are_greedy():
    row = np.random.default_rng(0).normal(size=500).tolist()
    best = int(np.argmax(row))
    for sampling in (Sampling(1, temperature=2.0, top_k=1), Sampling(1, temperature=2.0, top_p=1e-6)):
        assert {draw(row, sampling, position).token_id for position in range(1, 31)} == {best}


@pytest.mark.parametrize("rules", [{}, {"top_p": 0.9}, {"top_k": 40}, {"top_k": 200, "top_p": 0.8}])
def test_noise_changes_a_draw_only_within_its_margin(rules):
    """What the oracle of the whole product relies on: logits that differ by rounding give the same token, unless
    the margin says that the decision was close."""
    random = np.random.default_rng(1)
    row = random.normal(scale=3.0, size=2000)
    row[1000:] = row[:1000]  # every logit twice, so that the order of equals changes with the noise
    for position in range(1, 301):
        sampling = Sampling(1, temperature=0.8, seed=5, **rules)
        plain = draw(row.tolist(), sampling, position)
        noisy = draw((row + random.normal(scale=3e-5, size=2000)).tolist(), sampling, position)
        assert plain.token_id == noisy.token_id or plain.margin < 1e-4


def test_rows_are_drawn_independently_of_their_neighbours():
    rows = torch.randn(3, 100, generator=torch.Generator().manual_seed(0))
    samplings = [Sampling(1, temperature=1.0, seed=1), Sampling(1), Sampling(1, temperature=0.7, seed=2, top_p=0.9)]
    sequences = [wanting(sampling, 3 + i) for i, sampling in enumerate(samplings)]
    together = sample(rows, sequences)
    alone = [sample(rows[i : i + 1], [sequences[i]])[0] for i in range(3)]
    assert together == alone


@pytest.mark.parametrize("bad", [[float("nan"), 1.0], [float("inf"), 1.0], [float("-inf")] * 2])
def test_logits_without_a_finite_maximum_are_an_error(bad):
    with pytest.raises(FloatingPointError, match="row 0"):
        draw(bad, Sampling(1))
