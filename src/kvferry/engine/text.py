"""From token ids to the text a client may see, and the rules that end a request.

The rules are applied to the text as if it came one character at a time, so they do not depend on how the tokens
cut it: the stop string that is complete first ends the request, and neither it nor what follows is ever emitted.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, Protocol

from tokenizers.decoders import DecodeStream

from kvferry.engine.contract import Emission
from kvferry.engine.rules import end_ids
from kvferry.protocol.errors import ConfigError, InvalidRequest
from kvferry.protocol.request import Sampling

STOP, LENGTH = "stop", "length"


class Decoder(Protocol):
    """Incremental detokenisation: what `push` and one final `flush` return, joined, is the decoded text.

    `push` holds back what a later token may still change (half a character); `flush` gives it as it stands.
    """

    def push(self, token_id: int) -> str: ...
    def flush(self) -> str: ...


class TokenizerDecoder:
    """A `Decoder` over a `tokenizers.Tokenizer`; special tokens have no text."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._stream = DecodeStream(skip_special_tokens=True)
        self._ids: list[int] = []
        self._emitted = 0

    def push(self, token_id: int) -> str:
        self._ids.append(token_id)
        text: str = self._stream.step(self._tokenizer, token_id) or ""
        self._emitted += len(text)
        return text

    def flush(self) -> str:
        text: str = self._tokenizer.decode(self._ids, skip_special_tokens=True)
        return text[self._emitted :]


class StopStrings:
    """Splits incoming text into what may be emitted and what may be the beginning of a stop string."""

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._stops = stops
        self._held = ""

    def push(self, text: str, armed: bool = True) -> tuple[str, bool]:
        """The text that can be emitted now, and whether a stop string is complete (then nothing more comes).

        Without `armed`, one that this text completes is text like any other.
        """
        old = len(self._held)
        text = self._held + text
        ends = []
        if armed:
            places = ((stop, text.find(stop, max(0, old - len(stop) + 1))) for stop in self._stops)
            ends = [(at + len(stop), at) for stop, at in places if at >= 0]
        if ends:
            self._held = ""
            return text[: min(ends)[1]], True
        keep = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], False

    def flush(self) -> str:
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a proper beginning of `stop`."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0


class StoppingStream:
    """A `TextStream`: a decoder and the stop rules. Raises InvalidRequest for an empty stop string.

    An end token (EOS unless `ignore_eos`, or one of `stop_token_ids`) has no text and ends with "stop", even as the
    last token allowed. The first `min_tokens` tokens can neither be end tokens nor complete a stop string; one that
    begins in them and is completed later counts.
    """

    def __init__(self, decoder: Decoder, sampling: Sampling, eos_token_ids: Collection[int]) -> None:
        if "" in sampling.stop:
            raise InvalidRequest("stop: an empty string; every stop string needs at least 1 character", "stop")
        self._decoder = decoder
        self._stops = StopStrings(sampling.stop)
        self._end_ids = end_ids(sampling, eos_token_ids)
        self._left = sampling.max_tokens
        self._unarmed = sampling.min_tokens
        self._finished = False

    def push(self, token_id: int) -> Emission:
        """Raises RuntimeError after an emission with a finish_reason."""
        if self._finished:
            raise RuntimeError("the stream has finished; it takes no more tokens")
        self._left -= 1
        armed = self._unarmed <= 0
        self._unarmed -= 1
        if armed and token_id in self._end_ids:
            return self._finish("", STOP, armed)
        text, stopped = self._stops.push(self._decoder.push(token_id), armed)
        if stopped:
            self._finished = True
            return Emission(text, STOP)
        return self._finish(text, LENGTH, armed) if self._left <= 0 else Emission(text)

    def _finish(self, text: str, reason: str, armed: bool) -> Emission:
        """Give out what was held back. Half a character comes out as U+FFFD, which may complete a stop string."""
        self._finished = True
        last, stopped = self._stops.push(self._decoder.flush(), armed)
        if stopped:
            return Emission(text + last, STOP)
        return Emission(text + last + self._stops.flush(), reason)


class StoppingFactory:
    """A `TextFactory`: one decoder per stream, the same end ids for all."""

    def __init__(self, decoder: Callable[[], Decoder], eos_token_ids: Collection[int]) -> None:
        self._decoder, self._eos_token_ids = decoder, frozenset(eos_token_ids)

    def stream(self, sampling: Sampling, before: Collection[int] = ()) -> StoppingStream:
        """Raises RuntimeError when a stop rule holds within `before`: such a request is over."""
        stream = StoppingStream(self._decoder(), sampling, self._eos_token_ids)
        for token_id in before:
            stream.push(token_id)
        return stream


class TokenizerTexts(StoppingFactory):
    """The text streams of a transformers tokenizer. Raises ConfigError for one without a tokenizer.json."""

    def __init__(self, tokenizer: Any, eos_token_ids: Collection[int]) -> None:
        backend = backend_of(tokenizer)
        super().__init__(lambda: TokenizerDecoder(backend), eos_token_ids)


def backend_of(tokenizer: Any) -> Any:
    """The `tokenizers.Tokenizer` inside a transformers tokenizer. Raises ConfigError when there is none."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise ConfigError("model.model", type(tokenizer).__name__, "a model with a tokenizer.json")
    return backend
