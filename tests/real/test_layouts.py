"""Instances of several ranks on real Ray, gloo and UCX: tokens of the real model against the reference.

SmolLM2 has 9 query heads, 3 KV heads and 30 layers. By default one pair of layouts is served, in which heads, layers
and pages are cut differently on the two sides at once, and the stages are uneven; `make test-full` serves every pair,
one after the other, each on a cluster of its own.
"""

from __future__ import annotations

import os
import signal
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from storm_clients import oracle

pytestmark = pytest.mark.real

KNOWN = oracle(tokens=32, lengths=(1, 16, 17, 65, 257))

#: tp and pp of prefill, and of decode.
Pair = tuple[tuple[int, int], tuple[int, int]]
MIXED: Pair = ((3, 1), (1, 2))
#: Layers of its two stages.
UNEVEN = [13, 17]
PAIRS: list[Pair] = [
    ((3, 1), (3, 1)),
    ((3, 1), (1, 1)),
    ((1, 1), (3, 1)),
    ((1, 2), (1, 1)),
    ((1, 1), (1, 2)),
]


#: Tokens of a page at prefill and at decode. The prompts end within pages of either side, and one is a token long.
PAGE_SIZES = [(32, 16), (16, 24), (24, 64)]


def named(pair: Pair) -> str:
    return "-to-".join(f"tp{tp}pp{pp}" for tp, pp in pair)


def asked(server: Any, pool: ThreadPoolExecutor) -> list[Future[httpx.Response]]:
    return [pool.submit(server.complete, known) for known in KNOWN]


def assert_right(server: Any, answers: list[Future[httpx.Response]]) -> None:
    """Equal to the reference, or first different at a tie; and no more than one tie among them."""
    equal = [server.assert_same(known, answer.result()) for known, answer in zip(KNOWN, answers, strict=True)]
    assert sum(equal) >= len(KNOWN) - 1


def pids(server: Any, name: str) -> dict[int, int]:
    return {rank["rank"]: rank["pid"] for rank in server.instance(name)["ranks"]}


def configured(pair: Pair, pages: tuple[int, int] = (16, 16)) -> dict[str, Any]:
    """Pools have as many tokens, whatever the size of a page; a chunk is whole pages."""
    args: dict[str, Any] = {
        role: {"tp": tp, "pp": pp, "page_size": size, "pool_pages": tokens // size}
        for role, (tp, pp), size, tokens in zip(("prefill", "decode"), pair, pages, (10_240, 20_480), strict=True)
    }
    args["prefill"]["chunk_tokens"] = 256 // pages[0] * pages[0]
    return args


def assert_pages(server: Any, pages: tuple[int, int]) -> None:
    assert tuple(server.instance(name)["page_size"] for name in ("prefill-0", "decode-0")) == pages


def assert_layout(server: Any, pair: Pair) -> None:
    for name, (tp, pp) in zip(("prefill-0", "decode-0"), pair, strict=True):
        assert sorted(pids(server, name)) == list(range(tp * pp))


def test_tp_3_to_pp_2_pages_of_16_to_64_and_the_death_of_a_rank(server_class: type[Any]) -> None:
    """The second answer to each prompt comes from instances of which one has lost a follower in mid-answer."""
    args = configured(MIXED, (16, 64))
    args["decode"]["stages"] = UNEVEN
    with server_class(args) as server, ThreadPoolExecutor(len(KNOWN)) as pool:
        assert_layout(server, MIXED)
        assert_pages(server, (16, 64))
        assert_right(server, asked(server, pool))
        server.wait_baseline()
        before = pids(server, "decode-0")
        answers = asked(server, pool)
        server.wait(lambda: server.instance("decode-0")["queues"]["running"] >= 3, 60, "three running requests")
        os.kill(before[1], signal.SIGKILL)
        assert_right(server, answers)
        assert not set(pids(server, "decode-0").values()) & set(before.values()), "it has started again as one"
        server.wait_baseline()


@pytest.mark.full
@pytest.mark.parametrize("pair", PAIRS, ids=named)
def test_every_pair_of_layouts(server_class: type[Any], pair: Pair) -> None:
    with server_class(configured(pair)) as server, ThreadPoolExecutor(len(KNOWN)) as pool:
        assert_layout(server, pair)
        assert_right(server, asked(server, pool))
        server.wait_baseline()


@pytest.mark.full
@pytest.mark.parametrize("pages", PAGE_SIZES)
def test_every_pair_of_page_sizes(server_class: type[Any], pages: tuple[int, int]) -> None:
    with server_class(configured(((1, 1), (1, 1)), pages)) as server, ThreadPoolExecutor(len(KNOWN)) as pool:
        assert_pages(server, pages)
        assert_right(server, asked(server, pool))
        server.wait_baseline()


@pytest.mark.full
def test_small_slices_are_staged_over_ucx(server_class: type[Any]) -> None:
    """Each of three source ranks has one of three heads, so each token is a slice, in 60 regions. They arrive in a few
    writes. Then a rank of prefill dies: decode's pages come back once it has ended what that may have left in its ring.
    """
    pair: Pair = ((3, 1), (1, 1))
    more = configured(pair) | {"transfer": {"backend": "ucx"}}
    with server_class(more) as server, ThreadPoolExecutor(len(KNOWN)) as pool:
        answers = asked(server, pool)
        assert_right(server, answers)
        server.wait_baseline()
        transfers = server.room(answers[-1].result())["transfers"]
        assert {transfer["backend"] for transfer in transfers} == {"ucx/host+staging"} and len(transfers) == 3
        # 257 tokens in 60 regions would be 15,420 descriptors each; so many are pages of two chunks, and the row.
        assert all(transfer["descriptors"] <= 10 for transfer in transfers)
        assert server.instance("decode-0")["data_paths"] == {"ucx/host+staging": 3}
        before = pids(server, "prefill-0")
        answers = asked(server, pool)
        server.wait(lambda: server.instance("decode-0")["queues"]["rooms"] >= 1, 60, "a room")
        os.kill(before[1], signal.SIGKILL)
        for known, answer in zip(KNOWN, answers, strict=True):  # who came when no prefill was there was told so
            assert answer.result().status_code == 503 or server.assert_same(known, answer.result()) is not None
        server.wait(lambda: not set(pids(server, "prefill-0").values()) & set(before.values()), 60, "another prefill")
        server.wait(lambda: server.instance("prefill-0")["registered"], 60, "its registration")
        server.wait_baseline()
        assert_right(server, asked(server, pool))
        server.wait_baseline()
