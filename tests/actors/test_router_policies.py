"""Each policy on candidates whose predicted times are worked out by hand, and the rules around the choice."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from kvferry.actors.router.choice import Homes, View, choose, one_per_group
from kvferry.actors.router.policies import POLICIES, Policy, predicted_s
from kvferry.actors.router.view import Ask, Candidates, DecodeView, PrefillView
from kvferry.protocol.address import Address
from kvferry.protocol.rank import Layout, RankInfo
from kvferry.sim.loop import SeededRandom

LAYOUT = Layout("m", "1", "float32", 16, 1, 1, 8)


class Bits:
    """Random bits in the order given, as parts of 1."""

    def __init__(self, *parts: float) -> None:
        self._parts = list(parts)

    def bits(self, count: int) -> int:
        return int(self._parts.pop(0) * 2**count)


def info(role: str, number: int, dp_rank: int = 0, dp_size: int = 1) -> RankInfo:
    """Its incarnation is 100 + number for prefills, 200 + number for decodes."""
    incarnation = (100 if role == "prefill" else 200) + number
    name = f"{role}-{number if dp_size == 1 else 'group'}"
    address = Address(name, f"sim://{role}-{number}", incarnation, "h", number)
    return RankInfo(name, role, address, LAYOUT, dp_rank=dp_rank, dp_size=dp_size)


def prefill(number: int, queued: float = 0, tokens_per_s: float = 1000, turn: int = 0) -> PrefillView:
    return PrefillView(info("prefill", number), turn, queued, tokens_per_s)


def decode(
    number: int,
    waiting: int = 0,
    running: int = 0,
    pages: int = 100,
    places: int = 8,
    place_s: float = 1,
    turn: int = 0,
) -> DecodeView:  # fmt: skip
    return DecodeView(info("decode", number), turn, waiting, running, pages, 100, places, place_s)


def candidates(prefills: Sequence[PrefillView], decodes: Sequence[DecodeView]) -> Candidates:
    return Candidates(tuple(prefills), {p.incarnation: tuple(decodes) for p in prefills})


def chosen(
    policy: str, prefills: Sequence[PrefillView], decodes: Sequence[DecodeView], ask: Ask, random: object = None
) -> str:
    pair = POLICIES[policy].choose(candidates(prefills, decodes), ask, random or Bits())  # type: ignore[arg-type]
    return " ".join(view.info.instance for view in pair)


# --- predicted ---


@pytest.mark.parametrize(
    ("tokens", "seconds", "best"),
    [
        # 1000 tokens at 500 a second, or 100 at 100: 2 + 0.2 = 2.2 s against 1 + 1 = 2 s
        (100, (2.2, 2.0), "prefill-2"),
        # 2 + 0.6 = 2.6 s against 1 + 3 = 4 s
        (300, (2.6, 4.0), "prefill-1"),
    ],
)
def test_predicted_weighs_the_queue_and_the_prompt_by_each_ones_speed(
    tokens: int, seconds: tuple[float, float], best: str
) -> None:
    prefills, ask = [prefill(1, 1000, 500), prefill(2, 100, 100)], Ask(1, tokens)
    assert [predicted_s(p, decode(1), ask) for p in prefills] == pytest.approx(seconds)
    assert chosen("predicted", prefills, [decode(1)], ask) == f"{best} decode-1"


def test_predicted_counts_the_wait_for_a_place_at_decode() -> None:
    """Full both: (1 + 1) * 2 s / 4 running = 1 s against (0 + 1) * 1 s / 2 running = 0.5 s; then 100 tokens, 0.1 s."""
    full = [decode(1, waiting=1, running=4, places=0, place_s=2), decode(2, running=2, places=0)]
    ask = Ask(1, 100)
    assert [predicted_s(prefill(1), d, ask) for d in full] == pytest.approx([1.1, 0.6])
    assert chosen("predicted", [prefill(1)], full, ask) == "prefill-1 decode-2"


@pytest.mark.parametrize(("pages", "waits"), [(7, False), (6, True), (0, True)])
def test_pages_for_the_prompt_and_one_more_token_beside_one_for_each_running_request(pages: int, waits: bool) -> None:
    """64 tokens and one more are 5 pages of 16; two requests are running."""
    assert (decode(1, running=2, pages=pages).wait_s(Ask(1, 64)) > 0) == waits


def test_predicted_takes_the_longer_of_two_waits_and_then_the_decode_with_most_headroom() -> None:
    """Prefill's queue takes 2 s, so decode's wait of 1 s costs nothing; but the free one has the headroom. Of two free
    ones, 10 of 100 pages and 1 of 4 places are less than 50 pages and 2 of 4 places.
    """
    busy = prefill(1, queued=2000)
    waits_1_s, free = decode(1, running=1, places=0), decode(2)
    assert predicted_s(busy, waits_1_s, Ask(1, 100)) == predicted_s(busy, free, Ask(1, 100)) == pytest.approx(2.1)
    assert chosen("predicted", [busy], [waits_1_s, free], Ask(1, 100)) == "prefill-1 decode-2"
    scarce = decode(1, running=3, places=1, pages=10)
    assert scarce.headroom == pytest.approx(0.1) and decode(2, running=2, places=2, pages=50).headroom == 0.5
    assert chosen("predicted", [busy], [scarce, decode(2, running=2, places=2, pages=50)], Ask(1, 16)).endswith("-2")


def test_predicted_takes_equals_in_turn() -> None:
    prefills, decodes = [prefill(1, turn=7), prefill(2, turn=3)], [decode(1, turn=3), decode(2, turn=2)]
    assert chosen("predicted", prefills, decodes, Ask(1, 100)) == "prefill-2 decode-2"


def test_a_siblings_prompt_is_a_page_of_work_at_most() -> None:
    """900 tokens queued: 0.9 s, and 16 of the sibling's 1000 tokens; elsewhere nothing is queued, and 1 s of work."""
    at_home, elsewhere = prefill(1, queued=900), prefill(2)
    sibling, stranger = Ask(1, 1000, home=101), Ask(1, 1000)
    assert predicted_s(at_home, decode(1), sibling) == pytest.approx(0.916)
    assert predicted_s(elsewhere, decode(1), sibling) == pytest.approx(1.0)
    assert chosen("predicted", [at_home, elsewhere], [decode(1)], stranger) == "prefill-2 decode-1"


# --- the others ---


def test_power_of_two_takes_the_idler_of_the_two_that_it_draws() -> None:
    """Of four prefills: the draws 0.3 and 0.9 are the second, and the last of the three others (the fourth). The idlest
    of all is not drawn. Of two decodes both are drawn always.
    """
    prefills = [prefill(1, queued=0), prefill(2, queued=500), prefill(3, queued=100), prefill(4, queued=400)]
    decodes = [decode(1, waiting=1), decode(2, pages=10)]
    assert chosen("power_of_two", prefills, decodes, Ask(1, 9), Bits(0.3, 0.9, 0.9, 0.0)) == "prefill-4 decode-2"
    assert chosen("power_of_two", prefills[:1], decodes[:1], Ask(1, 9), Bits(0.5, 0.5)) == "prefill-1 decode-1"


def test_round_robin_takes_whoever_has_waited_longest_whatever_they_do() -> None:
    turns, seen = {1: 0, 2: 0, 3: 0}, []
    for turn in range(1, 7):
        prefills = [prefill(n, queued=1000 * n, turn=turns[n]) for n in turns]
        seen.append(chosen("round_robin", prefills, [decode(1)], Ask(1, 9)).split()[0])
        turns[int(seen[-1][-1])] = turn
    assert seen == ["prefill-1", "prefill-2", "prefill-3"] * 2


def test_random_takes_each_with_equal_chances() -> None:
    prefills, decodes = [prefill(n) for n in range(4)], [decode(1), decode(2)]
    assert chosen("random", prefills, decodes, Ask(1, 9), Bits(0.0, 0.5)) == "prefill-0 decode-2"
    assert chosen("random", prefills, decodes, Ask(1, 9), Bits(0.99, 0.49)) == "prefill-3 decode-1"
    random = SeededRandom(1)
    drawn = [chosen("random", prefills, decodes, Ask(1, 9), random) for _ in range(800)]
    assert all(60 < drawn.count(f"prefill-{p} decode-{d}") < 140 for p in range(4) for d in (1, 2))  # 100 each, 4 sigma


# --- the rules around them ---


@pytest.mark.parametrize("policy", POLICIES.values())
def test_every_policy_keeps_to_the_pairs_that_it_is_given(policy: Policy) -> None:
    """Three of four pairs are blocked; the one that is left is the busiest."""
    view = View(
        [prefill(1), prefill(2, queued=9000)],
        [decode(1), decode(2, waiting=9)],
        frozenset({(101, 201), (101, 202), (102, 201)}),
    )
    pair = choose(view, Ask(1, 100), policy, "load", SeededRandom(1))
    assert pair is not None and [v.incarnation for v in pair] == [102, 202]
    everything = View(view.prefills, view.decodes, view.blocked | {(102, 202)})
    assert choose(everything, Ask(1, 100), policy, "load", SeededRandom(1)) is None
    assert choose(View([], view.decodes), Ask(1, 100), policy, "load", SeededRandom(1)) is None
    assert choose(View(view.prefills, []), Ask(1, 100), policy, "load", SeededRandom(1)) is None


def test_nobody_hands_over_to_a_unified_instance_even_where_it_is_the_only_decode_left() -> None:
    """A request that failed at the unified instance avoids it, and there is another prefill, but no other decode."""
    where = Address("unified-1", "sim://unified-1", 300, "h", 7)
    both = RankInfo("unified-1", "unified", where, LAYOUT)
    one = PrefillView(both, 0, 0, 1000)
    same = DecodeView(both, 0, 0, 0, 100, 100, 8, 1)
    view = View([prefill(1), one], [same])
    assert pick(view, Ask(1, 100)) == [300, 300]
    assert pick(view, Ask(1, 100, avoid=(300,))) == [300, 300]
    assert choose(View([prefill(1)], [same]), Ask(1, 100), POLICIES["predicted"], "load", Bits()) is None


def pick(view: View, ask: Ask) -> list[int]:
    pair = choose(view, ask, POLICIES["predicted"], "load", Bits())
    assert pair is not None
    return [v.incarnation for v in pair]


def test_a_preferred_decode_and_the_siblings_prefill_are_taken_while_they_are_usable() -> None:
    view = View([prefill(1, queued=9000), prefill(2)], [decode(1, waiting=9), decode(2)])
    assert pick(view, Ask(1, 100)) == [102, 202]
    assert pick(view, Ask(1, 100, prefer=201)) == [102, 201]
    assert pick(view, Ask(1, 100, home=101)) == [101, 202]
    assert pick(view, Ask(1, 100, prefer=201, home=101)) == [101, 201]
    assert pick(view, Ask(1, 100, prefer=999, home=999)) == [102, 202], "gone: as if nothing had been asked for"
    blocked = View(view.prefills, view.decodes, frozenset({(101, 201)}))
    assert pick(blocked, Ask(1, 100, prefer=201, home=101)) == [102, 201], "decode has the older claim"
    alone = View(view.prefills, view.decodes, frozenset({(101, 201), (102, 201)}))
    assert pick(alone, Ask(1, 100, prefer=201)) == [102, 202]


def test_where_a_request_has_failed_it_goes_only_if_nobody_else_can_serve_it() -> None:
    view = View([prefill(1), prefill(2, queued=9000)], [decode(1), decode(2, waiting=9)])
    assert pick(view, Ask(1, 100)) == [101, 201]
    assert pick(view, Ask(1, 100, avoid=(101, 201))) == [102, 202]
    assert pick(view, Ask(1, 100, avoid=(101, 202))) == [102, 201]
    assert pick(view, Ask(1, 100, prefer=201, home=101, avoid=(101, 201))) == [102, 202], "its own claims end there"
    one = View(view.prefills[:1], view.decodes)
    assert pick(one, Ask(1, 100, avoid=(101, 201))) == [101, 202], "as far as others are left in each role"
    assert pick(view, Ask(1, 100, avoid=(101, 102, 201, 202))) == [101, 201], "everybody"
    blocked = View(view.prefills, view.decodes, frozenset({(102, 202)}))
    assert pick(blocked, Ask(1, 100, avoid=(101, 201))) == [101, 201], "the others are blocked"


def group(queued: dict[int, int]) -> list[PrefillView]:
    """DP ranks of a group of four, with what is queued at each."""
    return [PrefillView(info("prefill", n, dp_rank=n, dp_size=4), 0, tokens, 1000) for n, tokens in queued.items()]


@pytest.mark.parametrize(
    ("dp_choice", "there", "rank"),
    [
        ("follow_bootstrap_room", {0: 0, 1: 0, 2: 900, 3: 0}, 2),  # 4002 % 4 = 2, however busy
        ("follow_bootstrap_room", {0: 0, 1: 0, 3: 900}, 3),  # it is not there: the next one
        ("follow_bootstrap_room", {0: 5, 1: 0}, 0),  # nor is that: once around
        ("load", {0: 70, 1: 60, 2: 50, 3: 80}, 2),
        ("load", {0: 70, 1: 60, 3: 80}, 1),
    ],
)
def test_of_a_group_of_dp_ranks_one_serves_the_room(dp_choice: str, there: dict[int, int], rank: int) -> None:
    chosen = one_per_group(group(there), Ask(4002, 9), dp_choice)
    assert [view.info.dp_rank for view in chosen] == [rank]


def test_a_policy_chooses_among_groups_and_single_instances_alike() -> None:
    """Group of four whose rank for the room has 100 tokens queued, and an instance of its own with 50."""
    ranks = [*group({0: 0, 1: 0, 2: 100, 3: 0}), prefill(9, queued=50)]
    view = View(ranks, [decode(1)])
    for dp_choice, expected in (("follow_bootstrap_room", 109), ("load", 100)):
        pair = choose(view, Ask(4002, 9), POLICIES["predicted"], dp_choice, Bits())
        assert pair is not None and pair[0].incarnation == expected


def test_a_rank_whose_pairs_are_all_blocked_does_not_hide_the_rest_of_its_group() -> None:
    """Rank 1 is the idlest since nobody may use it."""
    view = View(group({0: 70, 1: 0}), [decode(1)], frozenset({(101, 201)}))
    assert pick(view, Ask(1, 9)) == [100, 201]


def test_homes_of_siblings_are_remembered_within_bounds() -> None:
    homes = Homes()
    homes.sent(0, 5)
    assert homes.home(0) == 0, "0 is no group"
    for number in range(1, 4098):
        homes.sent(number, number + 1000)
    assert [homes.home(number) for number in (1, 2, 4097)] == [0, 1002, 5097], "4096 are kept"
    homes.sent(2, 77)
    homes.sent(9999, 1)
    assert (homes.home(2), homes.home(3)) == (77, 0), "the one least recently used has gone"
