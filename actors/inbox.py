"""Lets an endpoint be made before the actor that takes its notifications."""

from __future__ import annotations

from kvferry.transfer.contract import OnNotify


class Inbox:
    """Given to the endpoint as its `on_notify`. What comes before `deliver` is set is for no room of ours."""

    deliver: OnNotify | None = None

    def __call__(self, agent: str, payload: bytes) -> None:
        if self.deliver is not None:
            self.deliver(agent, payload)
