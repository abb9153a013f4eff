"""Log-probabilities in the two shapes that OpenAI's routes give them.

Every generated token has its entry, once: also the one that ended the answer, and those whose text a stop string cut
off, so that there are as many entries as `usage.completion_tokens` says. The values are those of the model's own
distribution, before temperature, filters, biases and penalties.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from kvferry.engine.token_pieces import TokenPiece
from kvferry.protocol.messages import Logprobs, Token

#: What one token stands for.
Pieces = Callable[[int], TokenPiece]

#: JSON has no -inf; OpenAI's stand-in for it.
LEAST = -9999.0


class ChatTop(msgspec.Struct, frozen=True):
    token: str
    logprob: float
    bytes: tuple[int, ...] | None


class ChatEntry(msgspec.Struct, frozen=True):
    """`bytes` of consecutive entries make up the text, also where a character is cut into several tokens; None for
    a special token, which has no text."""

    token: str
    logprob: float
    bytes: tuple[int, ...] | None
    top_logprobs: tuple[ChatTop, ...]


class ChatLogprobs(msgspec.Struct, frozen=True):
    content: tuple[ChatEntry, ...]
    refusal: None = None


def chat_logprobs(tokens: list[Token], pieces: Pieces) -> ChatLogprobs:
    return ChatLogprobs(tuple(_chat_entry(token, pieces) for token in tokens))


def _chat_entry(token: Token, pieces: Pieces) -> ChatEntry:
    known = _known(token)
    top = tuple(ChatTop(*_shown(pieces(token_id), logprob)) for token_id, logprob in known.top)
    return ChatEntry(*_shown(pieces(token.token_id), known.logprob), top)


def _shown(piece: TokenPiece, logprob: float) -> tuple[str, float, tuple[int, ...] | None]:
    return piece.text, max(logprob, LEAST), None if piece.data is None else tuple(piece.data)


class TextLogprobs(msgspec.Struct, frozen=True):
    """Lists of equal length. `top_logprobs` has the chosen token too, so up to one more than was asked for.

    `text_offset` counts characters of the choice's text: where the token begins, or the character begins of which it
    is a part.
    """

    tokens: tuple[str, ...]
    token_logprobs: tuple[float, ...]
    top_logprobs: tuple[dict[str, float], ...]
    text_offset: tuple[int, ...]


class TextEntries:
    """Makes the entries of one choice of /v1/completions, batch by batch."""

    def __init__(self, pieces: Pieces) -> None:
        self._pieces = pieces
        self._characters = 0  # begun so far

    def of(self, tokens: list[Token]) -> TextLogprobs:
        names, logprobs, tops, offsets = [], [], [], []
        for token in tokens:
            known, piece = _known(token), self._pieces(token.token_id)
            name, logprob = _name(piece), max(known.logprob, LEAST)
            top: dict[str, float] = {}
            for token_id, other in known.top:
                top.setdefault(_name(self._pieces(token_id)), max(other, LEAST))  # of two with one name the likelier
            top.setdefault(name, logprob)
            names.append(name)
            logprobs.append(logprob)
            tops.append(top)
            offsets.append(self._offset(piece.data or b""))
        return TextLogprobs(tuple(names), tuple(logprobs), tuple(tops), tuple(offsets))

    def _offset(self, data: bytes) -> int:
        """In UTF-8 every byte but those of the form 10xxxxxx begins a character."""
        at = self._characters
        if at and data and _continues(data[0]):
            at -= 1
        self._characters += sum(not _continues(byte) for byte in data)
        return at


def _continues(byte: int) -> bool:
    return byte & 0xC0 == 0x80


def _name(piece: TokenPiece) -> str:
    """The text, or, as there is no other place for its bytes here, OpenAI's notation for parts of characters."""
    try:
        return piece.text if piece.data is None else piece.data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece.data or b"")


def _known(token: Token) -> Logprobs:
    """Raises RuntimeError: a leader has not kept to the request."""
    if token.logprobs is None:
        raise RuntimeError(f"token {token.index} of room {token.room} came without its log-probabilities")
    return token.logprobs
