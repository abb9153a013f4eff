"""The simulation's seeds of every day, the second half: two files, so that two processes share them."""

from __future__ import annotations

import pytest

from kvferry.sim.seeds import run_chunk

SEEDS = range(150, 300)


@pytest.mark.parametrize("first", SEEDS[::10])
def test_ten_seeds(first: int) -> None:
    """`kvferry sim --seed N --trace` shows one that fails."""
    failed = [report for report in run_chunk(range(first, first + 10)) if report.violations]
    assert not failed, [(report.seed, report.violations[0]) for report in failed]
