"""The virtual part of bench/router.py, small: what it measures is what the costs say."""

from __future__ import annotations

import pytest
import router as bench

#: 1 ms a token, but 10 ms at least for 10; decode steps of 20 ms; no attention.
COSTS = (((10, 0.01), (512, 0.512)), ((1, 0.02), (16, 0.02)), 0.0)


def test_one_request_takes_what_its_prompt_costs() -> None:
    costs, load = bench.Costs(*COSTS), bench.Load(requests=1, prefills=2, decodes=2)
    (tokens,) = load.prompts(seed=3)
    assert costs.prompt_s(tokens) == pytest.approx(tokens / 1000)
    assert bench.ttfts_s("predicted", load, costs, 3) == [pytest.approx(tokens / 1000, abs=0.005)]


def test_the_load_is_what_it_says() -> None:
    """A prompt costs 0.9 x 0.1 s + 0.1 x 1 s = 0.19 s; at 75 % of 4 instances 15.8 come a second."""
    costs, load = bench.Costs(*COSTS), bench.Load(requests=4000, prefills=4, decodes=4)
    prompts, arrivals_s = load.prompts(1), load.arrivals_s(1, costs)
    assert sum(tokens >= 500 for tokens in prompts) / 4000 == pytest.approx(0.1, abs=0.015)
    assert sum(map(costs.prompt_s, prompts)) / arrivals_s[-1] / 4 == pytest.approx(0.75, rel=0.08)


def test_predicted_is_better_on_a_skewed_load() -> None:
    costs, load = bench.Costs(*COSTS), bench.Load(requests=80, prefills=3, decodes=2)
    found = {policy: bench.ttfts_s(policy, load, costs, 2) for policy in bench.POLICIES}
    assert {len(times) for times in found.values()} == {80}
    assert bench.ratios(found)["predicted_vs_random_p95_ttft"] < 0.9
    assert found["predicted"] == bench.ttfts_s("predicted", load, costs, 2), "equal seeds, equal runs"


def test_percentiles_and_ratios() -> None:
    values = [float(value) for value in range(100, 0, -1)]
    assert [bench.percentile(values, p) for p in (50, 95, 99, 100)] == [50, 95, 99, 100]
    assert bench.percentile([7.0], 95) == 7.0
    found = {"predicted": [1.0], "power_of_two": [1.25], "round_robin": [2.0], "random": [4.0]}
    assert bench.ratios(found) == {
        "predicted_vs_power_of_two_p95_ttft": 0.8,
        "predicted_vs_round_robin_p95_ttft": 0.5,
        "predicted_vs_random_p95_ttft": 0.25,
    }
