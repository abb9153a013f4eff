"""Tokens on their way to fronts: all of a turn leave in one message per front."""

from __future__ import annotations

from kvferry.actors.leg_room import LegRoom
from kvferry.actors.ports import Network
from kvferry.engine.contract import Emission
from kvferry.protocol.messages import Logprobs, Token, TokenBatch


class TokenOutbox:
    """Fronts are linked before a room opens, so a send that finds no link is for a front that is gone."""

    def __init__(self, network: Network, leg: str) -> None:
        self._network, self._leg = network, leg
        self._tokens: dict[int, list[Token]] = {}

    def put(self, room: LegRoom, index: int, token_id: int, emission: Emission, logprobs: Logprobs | None) -> None:
        token = Token(
            room.spec.request, room.attempt, room.room, index, token_id, emission.text, emission.finish_reason, logprobs
        )
        self._tokens.setdefault(room.spec.front.incarnation, []).append(token)

    def flush(self) -> None:
        for front, tokens in self._tokens.items():
            self._network.send(front, TokenBatch(self._leg, tuple(tokens)))
        self._tokens.clear()
