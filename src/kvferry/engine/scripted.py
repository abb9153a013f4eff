"""An engine without a model, for simulations: real memory, and tokens that depend on every byte of it.

Each fed token fills its slot in every K and V page with words that tell the token, the position, the layer and the
part; the next token is a hash of a weighted sum of all slots as they are *read* from the pages in the order of the
block table. So KV that was lost, mixed up, cut short or written by a stranger changes the tokens. Where the sampling
looks back, the history is hashed too: a count that is off by one, or a frozen token taken for one of the prompt,
changes them as well.

The engines of several ranks have a slice of the layers and heads each; their sums add up to the whole's, as in an
all-reduce, so the tokens do not depend on how the model is sliced.
"""

from __future__ import annotations

import struct
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator
from functools import cache
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from kvferry.engine.contract import Drawn, EngineLimits, History, Sequence, StepPlan, StepResult
from kvferry.engine.history import looks_back
from kvferry.engine.rules import check_plan
from kvferry.engine.text import StoppingFactory
from kvferry.protocol.messages import Logprobs
from kvferry.protocol.metadata import MAX_TOP_LOGPROBS, ROW_BYTES
from kvferry.protocol.rank import Layout, Slice, whole
from kvferry.protocol.request import Sampling
from kvferry.transfer.contract import Region, RegionKind

_DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_PARTS = ("k", "v")
Words = NDArray[np.uint32]
Places = NDArray[np.int64]
_SUM = 2**64
#: Odd multipliers of what makes a word, so that a change of any of the five changes it.
_OF_ID, _OF_POSITION = np.uint32(0x9E3779B1), np.uint32(0x85EBCA77)
_OF_REGION, _OF_WORD = np.uint32(0xC2B2AE3D), np.uint32(0x165667B1)


@cache
def _weights(layers: int, tokens: int, width: int) -> NDArray[np.uint64]:
    """An odd number for each word that a sequence may have: uint64[layers, parts, tokens, width]. With odd weights, a
    change of any one word changes the sum.
    """
    count = layers * len(_PARTS) * tokens * width
    mixed = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)  # splitmix64
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    weights: NDArray[np.uint64] = (mixed ^ (mixed >> np.uint64(31))) | np.uint64(1)
    return weights.reshape(layers, len(_PARTS), tokens, width)


class ScriptedEngine:
    """Implements `kvferry.engine.contract.Engine` on the caller's loop.

    `sleep` is awaited once per step with `cost_s(plan)` seconds. The step writes its slots before and again after it,
    as a forward may write up to its end: pages that were handed on too early are damaged. Cancelling a step stops it.
    With `part`, the engine is that of one rank: its steps draw no token, and `combine` makes the leader's result.
    """

    def __init__(
        self,
        layout: Layout,
        limits: EngineLimits,
        *,
        metadata_rows: int,
        sleep: Callable[[float], Awaitable[None]],
        cost_s: Callable[[StepPlan], float],
        part: Slice | None = None,
    ) -> None:
        slot_bytes = layout.kv_heads * layout.head_dim * _DTYPE_BYTES[layout.dtype]
        if slot_bytes % 4 or layout.page_size != limits.page_size:
            raise ValueError(f"slots of {slot_bytes} bytes, pages of {layout.page_size} and {limits.page_size} tokens")
        self._layout, self._limits = layout, limits
        self._sleep, self._cost_s = sleep, cost_s
        self._whole = part is None or part == whole(layout)
        self._slice = part or whole(layout)
        self._width, per_head = slot_bytes // 4, slot_bytes // 4 // layout.kv_heads
        self._layers = slice(self._slice.first_layer, self._slice.first_layer + self._slice.layers)
        first = self._slice.first_head * per_head
        self._words = slice(first, first + self._slice.heads * per_head)
        shape = (self._slice.layers, len(_PARTS), limits.pages, limits.page_size, self._slice.heads * per_head)
        self._pool: Words = np.zeros(shape, dtype=np.uint32)
        self._places = self._pool.reshape(*shape[:2], -1, shape[-1])  # [layers, parts, pages * page_size, words]
        self._metadata = np.zeros((metadata_rows, ROW_BYTES), dtype=np.uint8)
        self._origin = _origin(layout.layers, self._width)
        self._weights = _weights(layout.layers, limits.context_tokens, self._width)
        self._own_weights = self._weights[self._layers, ..., self._words]
        self._regions = self._make_regions()
        self._running = False

    @property
    def layout(self) -> Layout:
        return self._layout

    @property
    def limits(self) -> EngineLimits:
        return self._limits

    @property
    def metadata_rows(self) -> int:
        return len(self._metadata)

    def regions(self) -> tuple[Region, ...]:
        return self._regions

    def _make_regions(self) -> tuple[Region, ...]:
        found = [
            Region(
                kind=RegionKind.PAGES,
                part=part,
                layer=self._slice.first_layer + layer,
                base=self._pool[layer, at].ctypes.data,
                item_bytes=self._pool[layer, at, 0].nbytes,
                items=self._limits.pages,
                first_head=self._slice.first_head,
                heads=self._slice.heads,
                tokens=self._limits.page_size,
                replica=self._slice.replica,
                replicas=self._slice.replicas,
            )
            for layer in range(self._slice.layers)
            for at, part in enumerate(_PARTS)
        ]
        base = self._metadata.ctypes.data
        rows = Region(RegionKind.ROWS, "metadata", -1, base, ROW_BYTES, len(self._metadata))
        return (*found, rows)

    def metadata_row(self, slot: int) -> memoryview:
        if not 0 <= slot < len(self._metadata):
            raise IndexError(f"metadata slot {slot}; the pool has {len(self._metadata)} rows")
        row: memoryview = self._metadata[slot].data
        return row

    async def step(self, plan: StepPlan) -> StepResult:
        """Raises ValueError for a plan that leaves its pages, RuntimeError while another step runs."""
        check_plan(plan, self._limits)
        if self._running:
            raise RuntimeError(f"step {plan.step}: another step is running")
        self._running = True
        try:
            cost_s, places = self._cost_s(plan), self._places_of(plan)
            self._write(plan, places)
            await self._sleep(cost_s)
            self._write(plan, places)
            sums = [self._read(sequence) for sequence in plan.sequences if sequence.sampling is not None]
            result = StepResult(plan.step, (None,) * len(plan.sequences), cost_s, struct.pack(f"<{len(sums)}Q", *sums))
            return self.combine(plan, result, ()) if self._whole else result
        finally:
            self._running = False

    def combine(self, plan: StepPlan, result: StepResult, parts: Iterable[bytes]) -> StepResult:
        """`kvferry.engine.contract.Combine`: the sums of all ranks, and what is drawn by them."""
        found = (struct.unpack(f"<{len(part) // 8}Q", part) for part in (result.part, *parts))
        sums: Iterator[int] = map(sum, zip(*found, strict=True))
        drawn = tuple(None if s.sampling is None else self._draw(s, next(sums)) for s in plan.sequences)
        return StepResult(result.step, drawn, result.compute_s)

    async def close(self) -> None:
        """Nothing to end."""

    def expected_tokens(
        self, prompt_ids: Collection[int], count: int, sampling: Sampling | None = None
    ) -> tuple[int, ...]:
        """The `count` tokens that follow a prompt when no byte is lost: worked out from the ids, without any page."""
        prompt, ids = tuple(prompt_ids), list(prompt_ids)
        total = _sum(self._slots(prompt, range(len(prompt))), self._weights[:, :, : len(prompt)])
        for position in range(len(prompt), len(prompt) + count):
            history = None
            if sampling is not None and looks_back(sampling):
                history = History(prompt, tuple(ids[len(prompt) :]))
            ids.append(self._next(total, sampling, history)[0])
            total += _sum(self._slots(ids[position:], (position,)), self._weights[:, :, position : position + 1])
        return tuple(ids[len(prompt) :])

    def _slots(self, token_ids: Collection[int], positions: Collection[int]) -> Words:
        """What the tokens leave in all pools: [layers, parts, tokens, words per slot]. The first word is the id."""
        ids = np.array(token_ids, dtype=np.uint32)
        slots = ids * _OF_ID + np.array(positions, dtype=np.uint32) * _OF_POSITION
        words: Words = self._origin + slots[:, None]
        words[..., 0] = ids
        return words

    def _places_of(self, plan: StepPlan) -> tuple[Places, Words]:
        """Of all fed tokens: where they lie in `self._places`, and what this rank's pool gets of them."""
        ids: list[int] = []
        positions: list[int] = []
        places: list[int] = []
        size = self._limits.page_size
        for sequence in plan.sequences:
            fed, pages = range(sequence.start, sequence.start + len(sequence.token_ids)), sequence.pages
            ids += sequence.token_ids
            positions += fed
            places += [pages[position // size] * size + position % size for position in fed]
        words = self._slots(ids, positions)[self._layers, :, :, self._words]
        return np.array(places, dtype=np.int64), words

    def _write(self, plan: StepPlan, places: tuple[Places, Words]) -> None:
        at, words = places
        self._places[:, :, at] = words

    def _read(self, sequence: Sequence) -> int:
        """This rank's sum over all that the sequence has in its pages; of n replicas, each adds up every n-th token."""
        size, end = self._limits.page_size, sequence.position
        pages = self._pool[:, :, list(sequence.pages[: -(-end // size)])]
        every = slice(self._slice.replica, end, self._slice.replicas)
        slots = pages.reshape(*pages.shape[:2], -1, pages.shape[-1])[:, :, every]
        return _sum(slots, self._own_weights[:, :, every])

    def _draw(self, sequence: Sequence, total: int) -> Drawn:
        sampling = sequence.sampling
        assert sampling is not None
        token_id, rest = self._next(total, sampling, sequence.history)
        return Drawn(token_id, 1.0, self._logprobs(token_id, rest, sampling.logprobs))

    def _next(self, total: int, sampling: Sampling | None, history: History | None) -> tuple[int, int]:
        """The token, and bits for its logprobs."""
        seed = sampling.seed if sampling is not None and sampling.temperature > 0 else 0
        salt = (seed % 2**64).to_bytes(8, "little")
        digest = blake2b((total % _SUM).to_bytes(8, "little"), digest_size=8, salt=salt)
        if history is not None:
            for ids in (history.prompt_ids, history.generated_ids):
                digest.update(struct.pack(f"<{len(ids) + 1}q", len(ids), *ids))
        word = int.from_bytes(digest.digest(), "little")
        return word % self._limits.vocab_size, word >> 32

    def _logprobs(self, token_id: int, bits: int, count: int) -> Logprobs | None:
        """Made up: the chosen token is the most likely, and each following id half as likely. Exact in float32."""
        if count < 0:
            return None
        best = -(1 + bits % 1024) / 256
        ranks = range(min(count, MAX_TOP_LOGPROBS, self._limits.vocab_size))
        return Logprobs(best, tuple(((token_id + at) % self._limits.vocab_size, best - at * 0.75) for at in ranks))


def _sum(slots: Words, weights: NDArray[np.uint64]) -> int:
    return int(np.add.reduce(slots * weights, axis=None))


def _origin(layers: int, width: int) -> Words:
    """What a word has of its layer, its part and its place in the slot: [layers, parts, 1, width]."""
    region = np.arange(layers * len(_PARTS), dtype=np.uint32).reshape(layers, len(_PARTS), 1, 1)
    made: Words = region * _OF_REGION + np.arange(width, dtype=np.uint32) * _OF_WORD
    return made


class _IdDecoder:
    def push(self, token_id: int) -> str:
        return f"<{token_id}>"

    def flush(self) -> str:
        return ""


class ScriptedTexts(StoppingFactory):
    """A `TextFactory` whose text for a token is its id in angle brackets; end ids have no text."""

    def __init__(self, eos_token_ids: Collection[int] = ()) -> None:
        super().__init__(_IdDecoder, eos_token_ids)
