"""What the router believes of each instance at one moment: what its policies choose by. Plain data, no clock."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvferry.memory.admission import pages_needed
from kvferry.protocol.rank import RankInfo

#: The role of instances that are prefill and decode in one process; such a one serves with itself only.
UNIFIED = "unified"

#: Taken for an instance's speed, or for how long a request keeps its place, until one has been measured.
ASSUMED_TOKENS_PER_S = 1000.0
ASSUMED_PLACE_S = 1.0


@dataclass(frozen=True)
class Ask:
    """What must be known of a request to choose for it: its room, the tokens that prefill is fed, and two incarnations
    that are taken while they are usable, 0 for none: `prefer` is a decode that remembers the request, `home` the
    prefill of its siblings. Those in `avoid`, where it has failed, are taken only where there is nobody else.
    """

    room: int
    fed_tokens: int
    prefer: int = 0
    home: int = 0
    avoid: tuple[int, ...] = ()

    def tokens_to_compute(self, rank: RankInfo) -> int:
        """The tokens fed, without what that prefill has or is computing already: a sibling leaves at most a page of its
        prompt to do. (Whatever a prefix cache is known to hold belongs here too.)
        """
        if rank.address.incarnation == self.home:
            return min(self.fed_tokens, rank.layout.page_size)
        return self.fed_tokens


@dataclass(frozen=True)
class Rank:
    """`turn` rises with each room that the router opens; an instance keeps that of its last one."""

    info: RankInfo
    turn: int

    @property
    def incarnation(self) -> int:
        return self.info.address.incarnation

    @property
    def unified(self) -> bool:
        return self.info.role == UNIFIED


@dataclass(frozen=True)
class PrefillView(Rank):
    """`queued_tokens`: of prompts ahead of a new one. `tokens_per_s` is above 0."""

    queued_tokens: float
    tokens_per_s: float

    @property
    def wait_s(self) -> float:
        return self.queued_tokens / self.tokens_per_s

    @property
    def busy(self) -> tuple[float, ...]:
        """Orders prefills, the idlest first."""
        return (self.wait_s,)


@dataclass(frozen=True)
class DecodeView(Rank):
    """As in `Load`, with the rooms that it can't know yet counted in. `place_s` is above 0."""

    waiting: int
    running: int
    free_pages: int
    total_pages: int
    free_places: int
    place_s: float

    def takes_at_once(self, ask: Ask) -> bool:
        """A place is free, and pages for what prefill is fed and one token more, beside one for each running request
        (the design's rule for admission, as far as it can be known here)."""
        pages = pages_needed(ask.fed_tokens + 1, self.info.layout.page_size)
        return not self.waiting and self.free_places > 0 and self.free_pages >= pages + self.running

    def wait_s(self, ask: Ask) -> float:
        """0, or until those that wait and this one have places: by Little's law `running / place_s` end a second."""
        if self.takes_at_once(ask):
            return 0.0
        return (self.waiting + 1) * self.place_s / max(1, self.running)

    @property
    def headroom(self) -> float:
        """The scarcer of free places and free pages, as a part of all."""
        places = self.free_places / max(1, self.free_places + self.running)
        return min(places, self.free_pages / max(1, self.total_pages))

    @property
    def busy(self) -> tuple[float, ...]:
        """Orders decodes, the idlest first."""
        return (self.waiting, -self.headroom)


@dataclass(frozen=True)
class Candidates:
    """What a policy chooses from. Each of `prefills` has at least one decode in `partners` (by its incarnation)."""

    prefills: tuple[PrefillView, ...]
    partners: Mapping[int, tuple[DecodeView, ...]]

    def decodes(self, prefill: PrefillView) -> tuple[DecodeView, ...]:
        return self.partners[prefill.incarnation]
