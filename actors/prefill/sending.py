"""What one source rank sends of a room: its record, and which blocks a write has.

A rank writes its part of each token to every target rank that it has something for; the leader also writes the metadata
row, to decode's leader, behind all else of its last write. Pages may have other sizes at the two ends: a write is for
tokens, and what it consists of is the plan's to say (transfer.plan). Not here: when a write is due (protocol.sender),
how it is posted (transfer).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from kvferry.engine.contract import Engine
from kvferry.protocol.messages import Measured
from kvferry.protocol.metadata import Metadata, Placed
from kvferry.protocol.rank import LEADER
from kvferry.transfer.contract import Descriptor, Peer, WriteHandle
from kvferry.transfer.layout import METADATA
from kvferry.transfer.pairing import Pairing, check_given, check_wanted, pair, pair_common
from kvferry.transfer.plan import Chunk, Held, plan
from kvferry.transfer.work import Blocks

#: Target rank -> the descriptor by which we write to it.
Targets = Mapping[int, Descriptor]


@dataclass
class Sending:
    """One rank's writes of one room. `owner` is the incarnation of decode's leader; `targets` are the ranks that are
    written to, with their ends of the data plane, once connected; `open` counts writes that have not ended. `placed`
    is what has been flushed, with its digest, by target rank; `measured` is about writes that have ended.
    """

    room: int
    owner: int
    targets: dict[int, Peer] = field(default_factory=dict)
    handles: list[WriteHandle] = field(default_factory=list)
    open: int = 0
    kv_bytes: int = 0
    metadata_bytes: int = 0
    placed: dict[int, list[Placed]] = field(default_factory=dict)
    measured: Measured = field(default_factory=Measured)

    @property
    def backend(self) -> str:
        """By which it writes; "" before its targets are connected."""
        return " and ".join(sorted({peer.descriptor.path for peer in self.targets.values()}))


@dataclass(frozen=True)
class Part:
    """What of the prompt a write has: the tokens of `tokens`, by the leader's `chunk`th order."""

    chunk: int
    tokens: Chunk


@dataclass(frozen=True)
class RankWrite:
    """A write to one target rank, and the bytes of each kind in it. No blocks: there is nothing to write."""

    target: int
    blocks: Blocks
    kv_bytes: int
    metadata_bytes: int = 0


class WritePlanner:
    """Plans the writes of one source rank. Pairings are made once per target process."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._regions, self._page_size = engine.regions(), engine.limits.page_size
        self._pairings: dict[int, Pairing] = {}  # by the target process's incarnation
        self._of_owner: dict[int, set[int]] = {}  # decode's leader -> the target processes of that instance
        self._given: dict[int, set[tuple[int, ...]]] = {}  # likewise: targets that are given all that we have

    def check(
        self,
        owner: int,
        targets: Targets,
        prompt_tokens: int,
        pages: Sequence[int],
        slot: int | None = None,
        alone: bool = False,
    ) -> None:
        """Raises TransferError, with the reason, when this rank's part of a prompt can't be written to the targets'
        `pages`.

        Pages and slot are the peer's word: they are tried here, so that a bad one fails this room and no more. `slot`
        None: no metadata is written. `alone`: there is one rank on either side, so each must have all.
        """
        pairings, meet = [], pair if alone else pair_common
        prompt = Chunk(0, prompt_tokens, prompt_tokens)
        for rank, target in targets.items():
            pairing = self._pairings.get(target.incarnation)
            if pairing is None:
                pairing = meet(self._regions, target.regions)
                check_wanted(self._regions, rank, target.regions, undivided=slot is not None)
                self._pairings[target.incarnation] = pairing
                self._of_owner.setdefault(owner, set()).add(target.incarnation)
            pairings.append(pairing)
            rows = (0, slot) if rank == LEADER and slot is not None else None
            every = range(prompt.pages_in(self._page_size).stop)  # any pages of ours
            _blocks(pairing, prompt, every, self._page_size, pages, rows)
        met, given = tuple(target.incarnation for target in targets.values()), self._given.setdefault(owner, set())
        if met not in given:
            check_given(self._regions, pairings)
            given.add(met)

    def writes(
        self,
        sending: Sending,
        tokens: Chunk,
        source: Sequence[int],
        target: Sequence[int],
        rows: tuple[int, int] | None = None,
    ) -> list[RankWrite]:
        """One for each target rank. `source`: our pages that the chunk's tokens lie in; `target`: the prompt's at the
        target, from its first one on. `rows`: of the leader's last write, the metadata's row here and there.

        Raises TransferError for page lists that don't fit the chunk.
        """
        writes = []
        for rank, peer in sending.targets.items():
            pairing = self._pairings[peer.descriptor.incarnation]
            size = pairing.page_size("target")
            there = target[tokens.pages_in(size)] if size else ()
            to_row = rows if rank == LEADER and tokens.last else None
            blocks = _blocks(pairing, tokens, source, self._page_size, there, to_row)
            kv_bytes, row_bytes = sum(block.size_bytes for block in blocks), 0
            if to_row is not None:
                row_bytes = sum(group.entry_width for group in pairing.rows[METADATA])
            writes.append(RankWrite(rank, blocks, kv_bytes - row_bytes, row_bytes))
        return writes

    def write_row(self, row: int, metadata: Metadata) -> None:
        """Into our metadata row, before the write that has it is posted."""
        metadata.pack_into(self._engine.metadata_row(row))

    def forget(self, owner: int) -> None:
        """That decode has ended."""
        self._given.pop(owner, None)
        for incarnation in self._of_owner.pop(owner, ()):
            self._pairings.pop(incarnation, None)


def _blocks(
    pairing: Pairing,
    tokens: Chunk,
    source: Sequence[int],
    source_size: int,
    target: Sequence[int],
    rows: tuple[int, int] | None,
) -> Blocks:
    """Of a chunk that lies in these pages of either side."""
    size = pairing.page_size("target")
    slots = [{METADATA: row} for row in rows] if rows is not None else [{}, {}]
    ours = Held(tokens.listed("source", source, source_size), slots[0])
    theirs = Held(tokens.listed("target", target, size) if size else (), slots[1])
    return plan(pairing, tokens, ours, theirs).blocks
