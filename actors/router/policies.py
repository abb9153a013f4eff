"""The policies that choose a pair; pure: equal candidates, request and random bits give an equal choice.

predicted     The pair with the shortest predicted time to the first token, then the decode with most headroom.
              The default: it knows long prompts from short ones, and queues, so the unlucky wait less.
power_of_two  The less busy of two prefills drawn at random, and the same for decodes.
              For many routers: with reports a little old, the best instance of all would be everybody's choice.
round_robin   Each in its turn, whatever it has to do.
              For instances and requests that are all alike, and to compare with.
random        Any, with equal chances.
              Knows nothing and can't be wrong about it: to compare with, and to spread load on purpose.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

from kvferry.actors.ports import Random
from kvferry.actors.router.view import Ask, Candidates, DecodeView, PrefillView

Pair = tuple[PrefillView, DecodeView]
T = TypeVar("T")
V = TypeVar("V", PrefillView, DecodeView)


class Policy(Protocol):
    def choose(self, candidates: Candidates, ask: Ask, random: Random) -> Pair:
        """One of the pairs in `candidates`, which are not empty."""
        ...


class Predicted:
    """By `predicted_s`. Equals (decode's wait may hide prefill's): the one with less to do, then in turn."""

    def choose(self, candidates: Candidates, ask: Ask, random: Random) -> Pair:
        def soonest(prefill: PrefillView) -> tuple[float, float, int]:
            first_token_s = min(predicted_s(prefill, decode, ask) for decode in candidates.decodes(prefill))
            return first_token_s, prefill.wait_s, prefill.turn

        prefill = min(candidates.prefills, key=soonest)
        decodes = candidates.decodes(prefill)
        return prefill, min(decodes, key=lambda d: (predicted_s(prefill, d, ask), -d.headroom, d.turn))


class PowerOfTwo:
    def choose(self, candidates: Candidates, ask: Ask, random: Random) -> Pair:
        prefill = _idler_of_two(candidates.prefills, random)
        return prefill, _idler_of_two(candidates.decodes(prefill), random)


class RoundRobin:
    def choose(self, candidates: Candidates, ask: Ask, random: Random) -> Pair:
        prefill = min(candidates.prefills, key=lambda p: p.turn)
        return prefill, min(candidates.decodes(prefill), key=lambda d: d.turn)


class AtRandom:
    def choose(self, candidates: Candidates, ask: Ask, random: Random) -> Pair:
        prefill = _draw(candidates.prefills, random)
        return prefill, _draw(candidates.decodes(prefill), random)


POLICIES: dict[str, Policy] = {
    "predicted": Predicted(), "power_of_two": PowerOfTwo(), "round_robin": RoundRobin(), "random": AtRandom(),
}  # fmt: skip


def predicted_s(prefill: PrefillView, decode: DecodeView, ask: Ask) -> float:
    """Seconds to the first token. Prefill computes once decode has admitted the request; what is queued there is worked
    off meanwhile, so the longer of the two waits counts, and then the prompt itself. Where prefill computes first, the
    first token waits for nobody, and the seconds are those to the second: decode's queue is worked off until then.
    """
    compute_s = ask.tokens_to_compute(prefill.info) / prefill.tokens_per_s
    if prefill.info.computes_first:
        return max(prefill.wait_s + compute_s, decode.wait_s(ask))
    return max(prefill.wait_s, decode.wait_s(ask)) + compute_s


def _idler_of_two(choices: Sequence[V], random: Random) -> V:
    """Two different ones are drawn if there are two."""
    first = _draw(choices, random)
    others = [choice for choice in choices if choice is not first]
    return min((first, _draw(others, random)), key=lambda v: v.busy) if others else first


def _draw(choices: Sequence[T], random: Random) -> T:
    """32 bits scaled to the number of choices: the bias is below 2^-25 for a hundred of them."""
    return choices[random.bits(32) * len(choices) >> 32]
