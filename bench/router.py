"""Time to first token by routing policy, under a skewed load: one prompt in ten is ten times longer.

Arrivals are Poisson, at about three quarters of what the prefill instances can compute; every policy gets the same
requests at the same moments. First in virtual time: the production actors, engine costs measured on this machine
before, many requests, several seeds. Then on real Ray with the real model, a few tiny requests: that shows that the
figures come about on the real thing too, not what they are (its processes share the machine's cores).

`predicted_vs_random_p95_ttft`, `predicted_vs_round_robin_p95_ttft`: 95th percentile under `predicted` over that under
the other, in virtual time. Below 1, `predicted` is better. The keys with `real_` are the same on the real actors.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import random
from collections.abc import Mapping, Sequence

from real_router import cluster
from real_router import ttfts_s as real_ttfts_s
from report import arguments, finish, table
from rich.progress import track
from virtual_router import Costs, Load, measured_costs, ttfts_s

OURS = "predicted"
POLICIES = (OURS, "power_of_two", "round_robin", "random")
PERCENTILES = (50, 95, 99)
REAL_UTILISATION = 0.4  # two prefills and two decodes share two cores


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that so many percent of them don't exceed."""
    return sorted(values)[max(0, math.ceil(len(values) * percent / 100) - 1)]


def virtual(load: Load, costs: Costs, seeds: int) -> dict[str, list[float]]:
    """All times to first token of each policy."""
    runs = [(policy, seed) for policy in POLICIES for seed in range(seeds)]
    found: dict[str, list[float]] = {policy: [] for policy in POLICIES}
    for policy, seed in track(runs, "virtual time", transient=True):
        found[policy] += ttfts_s(policy, load, costs, seed)
    return found


async def real(load: Load, costs: Costs, rounds: int) -> dict[str, list[float]]:
    """The same on real actors, the policies taking turns."""
    found: dict[str, list[float]] = {policy: [] for policy in POLICIES}
    async with cluster(POLICIES, load.prefills, load.decodes) as routers:
        for seed in range(rounds):
            turns = random.Random(seed).sample(POLICIES, len(POLICIES))
            for policy in turns:
                arrivals_s = load.arrivals_s(seed, costs)
                found[policy] += await real_ttfts_s(routers[policy], load.prompts(seed), arrivals_s, load.max_tokens)
    return found


def ratios(found: Mapping[str, Sequence[float]], prefix: str = "") -> dict[str, float]:
    """p95 under `predicted` over p95 under each other policy."""
    ours = percentile(found[OURS], 95)
    others = [policy for policy in POLICIES if policy != OURS]
    return {f"{prefix}{OURS}_vs_{other}_p95_ttft": round(ours / percentile(found[other], 95), 3) for other in others}


def show(title: str, found: Mapping[str, Sequence[float]]) -> None:
    p95 = percentile(found[OURS], 95)
    rows = [
        (policy, *(f"{percentile(times, p):.3f}" for p in PERCENTILES), f"{p95 / percentile(times, 95):.2f}")
        for policy, times in found.items()
    ]
    heads = ("policy", "p50 TTFT s", "p95 TTFT s", "p99 TTFT s", f"{OURS} / it, p95 (< 1: {OURS} is better)")
    table(title, heads, rows)


def show_costs(costs: Costs) -> None:
    rows = [("prefill, by tokens", *(f"{tokens}: {1000 * s:.0f}" for tokens, s in costs.prefill))]
    rows.append(("decode, by requests", *(f"{batch}: {1000 * s:.0f}" for batch, s in costs.decode), ""))
    table(
        "engine costs, measured (ms of one thread's time for one forward)",
        ("step", *(["ms"] * len(costs.prefill))),
        rows,
    )


def figures(found: Mapping[str, Sequence[float]], costs: Costs, load: Load, prefix: str = "") -> dict[str, object]:
    return {
        **ratios(found, prefix),
        **{
            f"{prefix}{policy}_ttft_s": {f"p{p}": round(percentile(times, p), 4) for p in PERCENTILES}
            for policy, times in found.items()
        },
        f"{prefix}requests": len(found[OURS]),
        f"{prefix}utilisation": load.utilisation,
    }


def options() -> argparse.Namespace:
    parser = arguments(__doc__)
    parser.add_argument("--requests", type=int, default=400, help="of each run in virtual time (default 400)")
    parser.add_argument("--seeds", type=int, default=5, help="runs of each policy in virtual time (default 5)")
    parser.add_argument("--instances", type=int, default=4, help="of each role in virtual time (default 4)")
    parser.add_argument("--routers", type=int, default=1, help="in virtual time (default 1)")
    parser.add_argument("--utilisation", type=float, default=0.75, help="of prefill in virtual time (default 0.75)")
    parser.add_argument("--real-requests", type=int, default=20, help="of each run on real actors; 0: none")
    parser.add_argument("--real-rounds", type=int, default=2, help="runs of each policy on real actors (default 2)")
    return parser.parse_args()


def main() -> None:
    asked = options()
    costs = asyncio.run(measured_costs())
    show_costs(costs)
    load = Load(asked.requests, asked.instances, asked.instances, asked.routers, asked.utilisation)
    found = virtual(load, costs, asked.seeds)
    size = f"{load.prefills} prefill + {load.decodes} decode"
    show(f"virtual time: {size}, {asked.seeds} x {load.requests} requests at {load.utilisation:.0%} of prefill", found)
    out = figures(found, costs, load)
    if asked.real_requests:
        small = Load(asked.real_requests, 2, 2, 1, REAL_UTILISATION, short_tokens=(12, 36), max_tokens=6)
        found = asyncio.run(real(small, costs, asked.real_rounds))
        show(f"real actors: 2 prefill + 2 decode, {asked.real_rounds} x {small.requests} requests", found)
        out |= figures(found, costs, small, "real_")
    out["prefill_step_ms"] = {str(tokens): round(1000 * s, 1) for tokens, s in costs.prefill}
    out["decode_step_ms"] = {str(batch): round(1000 * s, 1) for batch, s in costs.decode}
    finish(asked.json, out)


if __name__ == "__main__":
    main()
