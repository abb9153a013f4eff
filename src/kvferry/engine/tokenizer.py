"""Chat messages and text to token ids, by the tokenizer's own chat template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jinja2.exceptions import TemplateError

from kvferry.engine.text import backend_of
from kvferry.engine.token_pieces import TokenPiece, TokenPieces
from kvferry.protocol.errors import InvalidRequest


class ChatTokenizer:
    """Wraps a transformers tokenizer (a fast one; raises ConfigError otherwise).

    A template may add a system prompt of its own (SmolLM2's does when the messages bring none).
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._backend = backend_of(tokenizer)
        self._pieces = TokenPieces(self._backend)

    def render(self, messages: Sequence[Mapping[str, Any]]) -> tuple[int, ...]:
        """Token ids of a conversation, up to where the assistant's answer begins.

        Raises InvalidRequest, naming the message, when one is malformed or the template refuses them.
        """
        if not messages:
            raise InvalidRequest("messages: empty; at least 1 is needed", "messages")
        for at, message in enumerate(messages):
            for key in ("role", "content"):
                value = message.get(key)
                if not isinstance(value, str):
                    field = f"messages[{at}].{key}"
                    raise InvalidRequest(f"{field}: {value!r} is not acceptable; allowed: a string", field)
                _check_text(f"messages[{at}].{key}", value)
        if not self._tokenizer.chat_template:
            raise InvalidRequest("messages: this model has no chat template", "messages")
        try:
            text = self._tokenizer.apply_chat_template(
                [dict(message) for message in messages], tokenize=False, add_generation_prompt=True
            )
        except TemplateError as error:
            raise InvalidRequest(f"messages: the model's chat template refuses them: {error}", "messages") from error
        return self._encode(text, special=False)

    def encode(self, text: str) -> tuple[int, ...]:
        """Token ids of plain text, with the special tokens that the tokenizer adds. Raises InvalidRequest."""
        _check_text("text", text)
        return self._encode(text, special=True)

    def _encode(self, text: str, *, special: bool) -> tuple[int, ...]:
        return tuple(self._backend.encode(text, add_special_tokens=special).ids)

    def piece(self, token_id: int) -> TokenPiece:
        """What one token stands for. May be called while another thread encodes."""
        return self._pieces(token_id)

    def decode(self, token_ids: Sequence[int]) -> str:
        text: str = self._backend.decode(list(token_ids), skip_special_tokens=True)
        return text


def _check_text(field: str, text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(
            f"{field}: a lone surrogate at character {error.start}; allowed: valid Unicode text", field
        ) from error
