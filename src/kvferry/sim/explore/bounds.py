"""The words of a world: what a state consists of, the bounds of a model, the names of rooms and clients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from kvferry.protocol.address import Address

#: Status of one side of a link. DIAL: opened from here, the answer is awaited. BROKEN: over, and not told yet. NONE:
#: only what a new session brings is here.
NONE, DIAL, OPEN, BROKEN = range(4)
#: First thing that each side hears of a session.
UP = -1
ALIVE, DEAD = range(2)
#: Events that never have to happen.
FAULTS = ("cut", "crash", "halt", "path", "expire")
UNFAIR = frozenset({*FAULTS, "abort", "leave", "drain", "overdue"})
#: What a client is doing.
UNBORN, WAITING, ASKED_TO_ABORT, SERVED, LEFT, FAILED, CUT_OFF, GONE = range(8)

Client = tuple[int, int, int, int]
Side = tuple[int, tuple[int, ...], tuple[int, ...]]
Links = tuple[tuple[tuple[int, int], Side], ...]


class State(NamedTuple):
    """`locals`: the number of each process's state (-1: dead). `lives`: how often each has been started.
    `notes`: notifications on their way. `exits`: (who, whose end) that the kernel has still to tell. `clients`: (what
    it is doing, attempt, next token); `stops`: (leader, room) to be told that nobody wants more.
    """

    locals: tuple[int, ...]
    status: tuple[int, ...]
    lives: tuple[int, ...]
    links: Links
    notes: tuple[tuple[int, int, bytes], ...]
    exits: tuple[tuple[int, int], ...]
    clients: tuple[tuple[int, int, int, int], ...]
    stops: tuple[tuple[int, int], ...]
    faults: int


@dataclass(frozen=True)
class Bounds:
    """What a model is explored within. `faults`: at most so many; `kinds` of them. `prompt_tokens` of each request
    (a page holds one), `chunk_tokens` per forward; `pages` of decode's pool, `source_pages` of prefill's. `exits`: a
    process hears of the end of another, and it is proof. `revokes`: writes arrive by the target's agents, and the end
    of the agent is proof.
    """

    routers: int = 1
    requests: int = 2
    attempts: int = 1
    faults: int = 2
    kinds: tuple[str, ...] = ("break", "crash", "stop", "path", "clock")
    crashing: tuple[str, ...] = ("prefill", "decode")
    prompt_tokens: int = 1
    chunk_tokens: int = 1
    max_tokens: int = 2
    pages: int = 3
    source_pages: int = 1
    rows: int = 1
    exits: bool = True
    revokes: bool = False
    prompt: bool = False
    policy: str = "early"
    ranks: int = 1

    def text(self) -> str:
        return (
            f"{self.routers} router(s), prefill of {self.ranks} rank(s), decode; {self.requests} request(s) "
            f"of {self.prompt_tokens} page(s) in {self.attempts} attempt(s); "
            f"pools of {self.source_pages} and {self.pages} pages; "
            f"at most {self.faults} fault(s) of: {', '.join(self.kinds)}"
            + (f"; policy {self.policy}" if self.policy != "early" else "")
            + ("; writers arrive by an agent, which decode may end" if self.revokes else "")
            + ("; the router takes in what comes at once" if self.prompt else "")
        )


FRONT = Address("front", "", 0xF0, "host", 9)
#: Names of rooms and requests: numbers that occur nowhere else, so that two rooms can change names.
ROOM, REQUEST = 0xA0000, 0xB0000


def room_of(client: int, attempt: int) -> int:
    return ROOM + client * 16 + attempt + 1


def client_of(room: int) -> tuple[int, int]:
    return (room - ROOM) // 16, (room - ROOM) % 16 - 1
