"""Damages good bytes: seeded, so that a number names each damaged frame for ever."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from random import Random
from typing import Any

import msgspec

#: Bytes with a meaning in msgpack: limits of small numbers, the empty and the largest containers, absent things.
TELLING = bytes([0x00, 0x01, 0x7F, 0x80, 0x8F, 0x90, 0x9F, 0xA0, 0xBF, *range(0xC0, 0xE0), 0xFF])
#: msgpack numbers at the ends of their ranges, NaN, a container that promises more than there is; the like in text.
PIECES = (
    b"\xcf" + b"\xff" * 8, b"\xd3\x80" + b"\x00" * 7, b"\xcf\x80" + b"\x00" * 7, b"\xcb\x7f\xf8" + b"\x00" * 6,
    b"\xcb\x7f\xf0" + b"\x00" * 6, b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff",
    b"\xdb\x7f\xff\xff\xff", b"\xd9\x02\xff\xfe", b"\xc1", b"\xd4\x01\x00", b"\xd7\xff" + b"\xff" * 8,
    b"1e999", b"-1", b"18446744073709551616", b"null", b"[]", b"{}", b'"\\ud800"', b"\x00", b"\xff\xfe", b"!!python/x ",
    b"&a [*a]", b"\n- ", b": ",
)  # fmt: skip
#: What may stand in the place of a value, in msgpack that is whole.
VALUES: tuple[Any, ...] = (
    0, 1, -1, 2**31, 2**63 - 1, 2**63, 2**64 - 1, -(2**63), 1e308, float("nan"), float("inf"), "", "x" * 600, "prefill",
    b"", b"\x00" * 40, None, True, [], {}, [[]], [0] * 300, {"a": 1},
)  # fmt: skip
LARGEST_GARBAGE, DEEPEST = 512, 60_000


class Mutator:
    """`corpus`: the good ones. Equal seeds give equal bytes."""

    def __init__(self, seed: int) -> None:
        self._random = Random(seed)
        self._ways: tuple[Callable[[bytearray, Sequence[bytes]], None], ...] = (
            self._flip, self._flip, self._set, self._set, self._piece, self._cut, self._repeat, self._splice,
            self._swap,
        )  # fmt: skip

    def damaged(self, corpus: Sequence[bytes]) -> bytes:
        """One of the corpus with one to six damages; now and then mere garbage, or nesting without end. Of msgpack a
        third stays whole, with other values in it: so it comes past the decoder more often."""
        draw = self._random.random()
        if 0.3 < draw < 0.65 and (whole := self._with_other_values(self._random.choice(corpus))) is not None:
            return whole
        if draw < 0.02:
            return self._random.randbytes(self._random.randrange(LARGEST_GARBAGE))
        data = bytearray(self._random.choice(corpus))
        for _ in range(self._random.randint(1, 6)):
            self._random.choice(self._ways)(data, corpus)
        if draw > 0.9995:
            at, opening = self._place(data), self._random.choice((b"\x91", b"\x81\xa1x", b"[", b'{"x":'))
            data[at:at] = opening * self._random.randrange(DEEPEST)
        return bytes(data)

    def _with_other_values(self, data: bytes) -> bytes | None:
        """None where it is not msgpack."""
        try:
            tree = msgspec.msgpack.decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError):
            return None
        if not isinstance(tree, dict | list):
            return None
        for _ in range(self._random.choice((0, 1, 1, 1, 2, 3))):
            self._replace(tree)
        return msgspec.msgpack.encode(tree)

    def _replace(self, tree: Any) -> None:
        """One value somewhere below `tree`; sometimes the value is taken out, or another is added."""
        keys: list[Any] = list(tree) if isinstance(tree, dict) else list(range(len(tree)))
        if not keys:
            return
        key = self._random.choice(keys)
        if isinstance(tree[key], dict | list) and tree[key] and self._random.random() < 0.8:
            self._replace(tree[key])
        elif self._random.random() < 0.1:
            del tree[key]
        else:
            tree[key] = deepcopy(self._random.choice(VALUES))

    def _place(self, data: bytearray) -> int:
        return self._random.randrange(len(data) + 1)

    def _flip(self, data: bytearray, _: Sequence[bytes]) -> None:
        if data:
            data[self._random.randrange(len(data))] ^= 1 << self._random.randrange(8)

    def _set(self, data: bytearray, _: Sequence[bytes]) -> None:
        if data:
            data[self._random.randrange(len(data))] = self._random.choice(TELLING)

    def _piece(self, data: bytearray, _: Sequence[bytes]) -> None:
        at = self._place(data)
        data[at : at + self._random.choice((0, 1, 9))] = self._random.choice(PIECES)

    def _cut(self, data: bytearray, _: Sequence[bytes]) -> None:
        at = self._place(data)
        del data[at : at + self._random.choice((1, 2, 8, len(data)))]

    def _repeat(self, data: bytearray, _: Sequence[bytes]) -> None:
        at = self._place(data)
        data[at:at] = data[at : at + self._random.choice((1, 4, 16))] * self._random.choice((1, 2, 64))

    def _splice(self, data: bytearray, corpus: Sequence[bytes]) -> None:
        """The rest is another one's."""
        other = self._random.choice(corpus)
        data[self._place(data) :] = other[self._random.randrange(len(other) + 1) :]

    def _swap(self, data: bytearray, _: Sequence[bytes]) -> None:
        a, b = sorted((self._place(data), self._place(data)))
        data[:] = data[b:] + data[a:b] + data[:a]
