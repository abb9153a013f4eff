"""Whether every page, room and request is accounted for, by the server's own recount (`/status`)."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from serving import Served


@dataclass(frozen=True)
class Account:
    """`unaccounted` pages are in no state, or in use though nothing runs; an instance that does not answer counts as
    one. `quarantined` ones have a reason in the status; `reasons` tells it. `live`: rooms, requests, rooms at leaders.
    """

    unaccounted: int
    quarantined: int
    reasons: tuple[str, ...]
    live: int

    @property
    def baseline(self) -> bool:
        return not (self.unaccounted or self.quarantined or self.live)

    @property
    def explained(self) -> bool:
        """At baseline, but for pages whose quarantine has a reason."""
        return not (self.unaccounted or self.live)


def account(status: Mapping[str, Any]) -> Account:
    """Of one status. A room at decode that only waits for proof is its pages' reason, and is not live."""
    unaccounted = quarantined = 0
    live = status["rooms_live"] + status["requests_live"]
    reasons = []
    for instance in status["instances"]:
        pages = instance["pages"]
        if not pages:
            unaccounted += 1
            continue
        rows = [row for row in instance.get("quarantined", ()) if row["waits_for"] and row["cause"]]
        held = len({page for row in rows for page in row["pages"]})
        quarantined += held
        unaccounted += pages["total"] - pages["free"] - pages["cached"] - held
        live += instance["queues"]["rooms"] - len(rows)
        reasons += [
            f"{instance['id']}: {len(row['pages'])} pages of room {row['room']} wait since {row['for_s']:.1f} s for "
            f"{' or '.join(row['waits_for'])} of {row['writer']}: {row['cause']}"
            for row in rows
        ]
    return Account(unaccounted, quarantined, tuple(reasons), live)


def settled(server: Served, limit_s: float) -> Account:
    """The account once it is at baseline; or after `limit_s`, for what may still be on its way."""
    end_s = time.monotonic() + limit_s
    while True:
        found = account(server.status())
        if found.baseline or time.monotonic() > end_s:
            return found
        time.sleep(0.2)
