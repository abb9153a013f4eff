"""What the transfer bench moves, and what it makes of rates."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from transfer import CASES, Runs, figures, ratio
from transfer_parts import POOL_BYTES, REGION_BYTES, REQUEST_BYTES, Pool, work
from transfer_peers import merged
from transfer_report import write_report


@pytest.mark.parametrize(("page_tokens", "scattered"), CASES)
def test_a_request_is_128_mib_of_pages_that_the_pool_has(page_tokens: int, scattered: bool) -> None:
    todo = work(page_tokens, scattered, seed=3)
    assert todo.page_bytes == page_tokens * 2048 and len(todo.source_pages) * todo.page_bytes * 64 == 128 * 1024 * 1024
    for pages in (todo.source_pages, todo.target_pages):
        assert (
            len(set(pages)) == len(pages) and min(pages) >= 0 and (max(pages) + 1) * todo.page_bytes <= 4 * 1024 * 1024
        )
        assert (pages == list(range(pages[0], pages[0] + len(pages)))) is not scattered


def test_pages_that_lie_elsewhere_or_are_of_another_round_have_another_digest() -> None:
    pool, other = (Pool(np.zeros(POOL_BYTES, np.uint8)) for _ in range(2))
    pool.stamp(7, 32768)
    moved, stale = [3, 5], [5, 3]
    assert pool.digest(32768, moved) != pool.digest(32768, stale)
    for region in range(64):
        other.pages(region, 32768)[[0, 1]] = pool.pages(region, 32768)[moved]
    assert other.digest(32768, [0, 1]) == pool.digest(32768, moved)
    pool.stamp(8, 32768)
    assert other.digest(32768, [0, 1]) != pool.digest(32768, moved)
    assert pool.base(63) - pool.base(0) == 63 * REGION_BYTES == POOL_BYTES - REQUEST_BYTES // 32


def test_ratios_are_of_the_same_round_and_peers_are_who_is_neither_ours_nor_a_limit() -> None:
    runs = Runs([], 3)
    runs.paths = {"NIXL": "host", "UCXX": "host", "NIXL tcp": "tcp", "Mooncake": "tcp", "UCXX tcp": "tcp"}
    runs.rates[16, True] = {
        "local": [8.0, 2.0, 6.0], "memmove": [4.0, 2.0, 4.0], "ucx": [3.0, 1.0, 3.0], "ucx tcp": [1.0, 1.0, 1.0],
        "raw socket": [2.0, 2.0, 2.0], "NIXL": [2.0, 1.0, 2.0], "UCXX": [4.0, 4.0, 4.0], "NIXL tcp": [0.5, 0.5, 0.5],
        "Mooncake": [0.25, 0.25, 0.25], "ucxx": [0.5, 0.25, 0.75], "UCXX tcp": [0.25, 0.25, 0.25],
        "mooncake": [0.5, 0.5, 1.0],
    }  # fmt: skip
    assert ratio(runs.rates[16, True], "local", "memmove") == 1.5, "the median of 2, 1 and 1.5"
    assert figures(runs) == {
        "local_scattered_vs_memmove": 1.5, "local_scattered_vs_best_peer": 1.5, "ucx_scattered_vs_nixl_api": 1.5,
        "tcp_scattered_vs_best_peer": 2.0, "tcp_scattered_vs_raw_socket": 0.5, "best_peer": "UCXX",
        "best_tcp_peer": "NIXL tcp", "ucxx_scattered_vs_ucxx_api": 2.0, "mooncake_scattered_vs_mooncake_api": 2.0,
    }  # fmt: skip
    runs.out["UCXX"] = "it ended"
    assert figures(runs)["best_peer"] == "NIXL"


def test_neighbours_are_merged_where_they_follow_each_other_on_both_sides() -> None:
    page = 2**19
    source, target = [0, page, 2 * page, 9 * page, 10 * page], [page, 2 * page, 3 * page, 4 * page, 7 * page]
    assert list(merged(source, target, page)) == [
        (0, page, 2 * page), (2 * page, 3 * page, page), (9 * page, 4 * page, page), (10 * page, 7 * page, page),
    ]  # fmt: skip


def test_the_report_has_the_rates_the_figures_and_who_dropped_out(tmp_path: Path) -> None:
    rates = {"ucx": {"scattered_16": 1.5, "contiguous_16": 2.5}, "memmove": {"scattered_16": 3.0}}
    write_report(tmp_path, rates, {"local_scattered_vs_memmove": 0.5, "best_peer": "NIXL"}, {"Ray": "it ended"}, 7)
    text = (tmp_path / "transfer.md").read_text()
    assert "| ucx | 1.50 | 2.50 | - | - |" in text and "| `local_scattered_vs_memmove` | 0.50 |" in text
    assert "Ray dropped out: it ended" in text and (tmp_path / "transfer.png").read_bytes().startswith(b"\x89PNG")
