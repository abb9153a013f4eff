"""From the fleet to a pair: who may serve a request, and the policy's word; pure."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from kvferry.actors.ports import Random
from kvferry.actors.router.breaker import PairId
from kvferry.actors.router.policies import Pair, Policy, V
from kvferry.actors.router.view import Ask, Candidates, DecodeView, PrefillView

#: Groups of siblings whose prefill is remembered.
REMEMBERED_GROUPS = 4096


@dataclass(frozen=True)
class View:
    """All usable instances at one moment, and the pairs whose breakers let nothing pass."""

    prefills: Sequence[PrefillView]
    decodes: Sequence[DecodeView]
    blocked: frozenset[PairId] = frozenset()

    @property
    def waiting(self) -> int:
        """Requests that wait for a place, at all decodes."""
        return sum(decode.waiting for decode in self.decodes)

    def free_for(self, ask: Ask) -> View:
        """With those decodes only that take the request at once."""
        return View(self.prefills, [d for d in self.decodes if d.takes_at_once(ask)], self.blocked)

    def without(self, avoid: Collection[int]) -> View:
        """Without these incarnations, as far as others are left in each role."""
        prefills = [prefill for prefill in self.prefills if prefill.incarnation not in avoid]
        decodes = [decode for decode in self.decodes if decode.incarnation not in avoid]
        return View(prefills or self.prefills, decodes or self.decodes, self.blocked)

    @property
    def pairs(self) -> list[PairId]:
        """All that may serve together but for their breakers."""
        unblocked = View(self.prefills, self.decodes)
        return [(p.incarnation, d.incarnation) for p in self.prefills for d in self.decodes if unblocked.allows(p, d)]

    def allows(self, prefill: PrefillView, decode: DecodeView) -> bool:
        """A unified instance hands over to itself alone, and nobody else to it."""
        if (prefill.unified or decode.unified) and prefill.incarnation != decode.incarnation:
            return False
        return (prefill.incarnation, decode.incarnation) not in self.blocked

    @property
    def any_pair(self) -> bool:
        """Every prefill may serve with every decode."""
        return not self.blocked and not any(instance.unified for instance in (*self.prefills, *self.decodes))


def choose(view: View, ask: Ask, policy: Policy, dp_choice: str, random: Random) -> Pair | None:
    """A pair that may serve the request, or None. If the decode and the prefill that the request would rather have may
    not serve together, the decode counts. Where it has failed before it comes only if nobody else can serve it.
    """
    if ask.avoid and (pair := _choose(view.without(ask.avoid), ask, policy, dp_choice, random)) is not None:
        return pair
    return _choose(view, ask, policy, dp_choice, random)


def _choose(view: View, ask: Ask, policy: Policy, dp_choice: str, random: Random) -> Pair | None:
    preferred = [decode for decode in view.decodes if decode.incarnation == ask.prefer]
    candidates = _candidates(view, ask, preferred, dp_choice)
    if not candidates.prefills:
        candidates = _candidates(view, ask, view.decodes, dp_choice)
    if not candidates.prefills:
        return None
    home = tuple(prefill for prefill in candidates.prefills if prefill.incarnation == ask.home)
    prefills = home or tuple(one_per_group(candidates.prefills, ask, dp_choice))
    return policy.choose(Candidates(prefills, candidates.partners), ask, random)


def _candidates(view: View, ask: Ask, decodes: Sequence[DecodeView], dp_choice: str) -> Candidates:
    """Every prefill with the decodes that it may serve with, without those that have none."""
    if not decodes:
        return Candidates((), {})
    if view.any_pair:
        all_of_them = tuple(one_per_group(decodes, ask, dp_choice))
        return Candidates(tuple(view.prefills), {p.incarnation: all_of_them for p in view.prefills})
    partners = {}
    for prefill in view.prefills:
        allowed = [decode for decode in decodes if view.allows(prefill, decode)]
        if allowed:
            partners[prefill.incarnation] = tuple(one_per_group(allowed, ask, dp_choice))
    return Candidates(tuple(p for p in view.prefills if p.incarnation in partners), partners)


def one_per_group(ranks: Sequence[V], ask: Ask, dp_choice: str) -> list[V]:
    """Of each group of DP ranks the one that serves this room: "follow_bootstrap_room" takes rank room % dp_size, or
    the next one that is there; "load" the least busy.
    """
    groups: dict[str, list[V]] = {}
    for rank in ranks:
        groups.setdefault(rank.info.instance, []).append(rank)
    return [members[0] if len(members) == 1 else _of_group(members, ask, dp_choice) for members in groups.values()]


def _of_group(members: list[V], ask: Ask, dp_choice: str) -> V:
    if dp_choice == "load":
        return min(members, key=lambda rank: (rank.busy, rank.turn))
    size = members[0].info.dp_size
    return min(members, key=lambda rank: (rank.info.dp_rank - ask.room) % size)


class Homes:
    """Which prefill a group of siblings went to. Remembers the last `REMEMBERED_GROUPS` groups."""

    def __init__(self) -> None:
        self._homes: OrderedDict[int, int] = OrderedDict()

    def home(self, group: int) -> int:
        """The prefill's incarnation, or 0."""
        return self._homes.get(group, 0)

    def sent(self, group: int, prefill: int) -> None:
        if group:
            self._homes[group] = prefill
            self._homes.move_to_end(group)
            while len(self._homes) > REMEMBERED_GROUPS:
                self._homes.popitem(last=False)
