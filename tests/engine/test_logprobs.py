"""Log-probabilities: torch.log_softmax of the raw logits and a full sort, whatever the settings do to the draw."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.engine.contract import History, Sequence
from kvferry.engine.sampler import sample
from kvferry.protocol.messages import Logprobs
from kvferry.protocol.request import Sampling


def plain(row, token_id, count):
    """The token's, and the `count` most likely by a full sort; equals by id."""
    values = torch.log_softmax(torch.tensor(row), dim=-1).tolist()
    order = sorted(range(len(values)), key=lambda i: (-values[i], i))[:count]
    return Logprobs(values[token_id], tuple((i, values[i]) for i in order))


def ask(row, sampling, position=5, history=None):
    return sample(torch.tensor(np.array(row))[None], [Sequence(1, (0,), position - 1, (0,), sampling, history)])[0]


@given(
    st.lists(st.sampled_from([0.0, 1.0, 1.5, -3.0]) | st.floats(-9, 9, width=32), min_size=1, max_size=40),
    st.integers(0, 20),
    st.sampled_from([0.0, 1.0]),
)
@settings(max_examples=200, deadline=None)
def test_they_are_those_of_a_full_sort(values, count, temperature):
    row = np.array(values, dtype=np.float32)
    drawn = ask(row, Sampling(1, temperature, logprobs=count))
    assert drawn.logprobs == plain(row, drawn.token_id, count)


def test_they_are_of_the_models_own_distribution():
    """Bias, penalties, temperature and filters choose another token, and change no number."""
    row = np.random.default_rng(0).normal(scale=2, size=300).astype(np.float32)
    best = int(row.argmax())
    for sampling in (
        Sampling(1, logit_bias=((9, 100.0),), logprobs=3),
        Sampling(1, presence_penalty=50.0, logprobs=3),
        Sampling(1, temperature=1.9, seed=4, top_k=200, min_p=0.001, repetition_penalty=1.5, logprobs=3),
    ):
        drawn = ask(row, sampling, history=History((best,), (best,)))
        assert drawn.token_id != best and drawn.logprobs == plain(row, drawn.token_id, 3)
        assert drawn.logprobs.top[0][0] == best


def test_none_where_none_are_asked_for_and_at_most_20():
    rows = torch.randn(4, 100, generator=torch.Generator().manual_seed(0))
    counts = (-1, 0, 5, 99)
    sequences = [Sequence(i, (0,), 4, (0,), Sampling(1, logprobs=count)) for i, count in enumerate(counts)]
    drawn = sample(rows, sequences)
    assert drawn[0].logprobs is None
    for row, token, count in zip(rows.tolist()[1:], drawn[1:], (0, 5, 20), strict=True):
        assert token.logprobs == plain(np.array(row, dtype=np.float32), token.token_id, count)


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_asking_for_them_changes_no_token(temperature):
    rows = torch.randn(50, 100, generator=torch.Generator().manual_seed(1))
    with_them = [Sequence(i, (0,), i, (0,), Sampling(1, temperature, seed=i, logprobs=2)) for i in range(50)]
    without = [Sequence(i, (0,), i, (0,), Sampling(1, temperature, seed=i)) for i in range(50)]
    ids = [[(token.token_id, token.margin) for token in sample(rows, sequences)] for sequences in (with_them, without)]
    assert ids[0] == ids[1]
