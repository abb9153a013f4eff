"""What a single token stands for: its bytes, also where it is a part of a character.

Decoding one token alone gives U+FFFD for half a character, so the bytes are taken from the vocabulary's own spelling:
byte-level BPE spells each byte as a printable character, byte fallback as `<0xNN>`, SentencePiece a space as `▁`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import msgspec

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>\Z")


class TokenPiece(msgspec.Struct, frozen=True):
    """`text` as decoded alone, with U+FFFD for what is no whole character; `data` its true bytes, None for a special
    token, which has a name but no text.
    """

    text: str
    data: bytes | None


class TokenPieces:
    """The pieces of a `tokenizers.Tokenizer`'s tokens, each made once. May be used from any thread."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend
        self._added = backend.get_added_tokens_decoder()
        steps = list(_steps(json.loads(backend.decoder.__getstate__()))) if backend.decoder is not None else []
        kinds = {step["type"] for step in steps}
        self._byte_of = _byte_level_alphabet() if "ByteLevel" in kinds else None
        self._byte_fallback = "ByteFallback" in kinds
        self._replacements = [
            (step["replacement"], " ") if step["type"] == "Metaspace" else (step["pattern"]["String"], step["content"])
            for step in steps
            if step["type"] == "Metaspace" or (step["type"] == "Replace" and "String" in step["pattern"])
        ]
        self._known: dict[int, TokenPiece] = {}

    def __call__(self, token_id: int) -> TokenPiece:
        """An id of the model's padding, which the tokenizer doesn't know, is an empty piece."""
        piece = self._known.get(token_id)
        if piece is None:
            piece = self._known[token_id] = self._make(token_id)
        return piece

    def _make(self, token_id: int) -> TokenPiece:
        added = self._added.get(token_id)
        if added is not None:
            return TokenPiece(added.content, None if added.special else added.content.encode())
        data = self._bytes(self._backend.id_to_token(token_id) or "")
        return TokenPiece(data.decode("utf-8", "replace"), data)

    def _bytes(self, spelling: str) -> bytes:
        if self._byte_of is not None:
            return b"".join(self._byte_of.get(char, char.encode()) for char in spelling)
        if self._byte_fallback and (byte := _BYTE_TOKEN.match(spelling)):
            return bytes([int(byte.group(1), 16)])
        for pattern, content in self._replacements:
            spelling = spelling.replace(pattern, content)
        return spelling.encode()


def _steps(decoder: dict[str, Any]) -> Iterator[dict[str, Any]]:
    if decoder["type"] == "Sequence":
        for step in decoder["decoders"]:
            yield from _steps(step)
    else:
        yield decoder


def _byte_level_alphabet() -> dict[str, bytes]:
    """GPT-2's spelling of bytes: printable Latin-1 stands for itself, the others for U+0100 and up, in order."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): bytes([byte]) for byte in printable} | {
        chr(0x100 + at): bytes([byte]) for at, byte in enumerate(others)
    }
