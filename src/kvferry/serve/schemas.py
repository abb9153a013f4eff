"""What a client may send to /v1/chat/completions, and how a body becomes a `ChatRequest`.

Nothing is ignored in silence: a field that does not exist is refused by name, one that exists in OpenAI's API
(or in common extensions of it) but has no effect here is refused by name unless its value asks for nothing.
The one opaque field is `user`: it is accepted, and neither read nor kept.
"""

from __future__ import annotations

import difflib
import re
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from kvferry.protocol.errors import InvalidRequest
from kvferry.serve.errors import UnknownParameter, UnsupportedParameter

MAX_STOPS = 16
MAX_STOP_TOKEN_IDS = 64

StopString = Annotated[str, Meta(min_length=1, max_length=1024)]
TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]
TokenCount = Annotated[int, Meta(ge=1, le=2**31 - 1)]


class TextPart(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    type: Literal["text"]
    text: str


class ChatMessage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    role: Literal["system", "user", "assistant"]
    content: str | list[TextPart]

    def text(self) -> str:
        """The content as one string; parts follow each other with nothing between."""
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class StreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    include_usage: bool | None = None


class ChatRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Fields and ranges of the request; None means "not given". Defaults are filled in by `prepare`."""

    model: Annotated[str, Meta(min_length=1)]
    messages: Annotated[list[ChatMessage], Meta(min_length=1)]
    temperature: Annotated[float, Meta(ge=0.0, le=2.0)] | None = None
    top_p: Annotated[float, Meta(gt=0.0, le=1.0)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    seed: Annotated[int, Meta(ge=0, le=2**63 - 1)] | None = None
    max_tokens: TokenCount | None = None
    max_completion_tokens: TokenCount | None = None
    stop: StopString | Annotated[list[StopString], Meta(max_length=MAX_STOPS)] | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=MAX_STOP_TOKEN_IDS)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = None
    user: str | None = None

    def stops(self) -> tuple[str, ...]:
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    def wants_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)


#: Fields that have no effect here -> the values, besides null, that ask for nothing.
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "audio": (), "best_of": (1,), "echo": (False,), "frequency_penalty": (0,), "function_call": ("none",),
    "functions": ([],), "ignore_eos": (False,), "logit_bias": ({},), "logprobs": (False,), "metadata": ({},),
    "min_p": (0,), "min_tokens": (0,), "modalities": (["text"],), "moderation": (),
    "parallel_tool_calls": (True, False), "prediction": (), "presence_penalty": (0,), "prompt_cache_key": (),
    "prompt_cache_retention": (), "prompt_logprobs": (), "reasoning_effort": (), "repetition_penalty": (1,),
    "response_format": ({"type": "text"},), "safety_identifier": (), "service_tier": ("auto", "default"),
    "store": (False,), "tool_choice": ("none", "auto"), "tools": ([],), "top_logprobs": (0,), "verbosity": (),
    "web_search_options": (),
}  # fmt: skip

#: The same for fields of a message: what OpenAI's own replies carry must be acceptable as history.
UNSUPPORTED_IN_MESSAGE: dict[str, tuple[Any, ...]] = {
    "annotations": ([],), "audio": (), "function_call": (), "name": (), "reasoning_content": (), "refusal": (),
    "tool_call_id": (), "tool_calls": ([],),
}  # fmt: skip

_PATH = re.compile(r" - at `\$\.?([^`]*)`$")


def parse_chat(body: bytes) -> ChatRequest:
    """The request in `body`. Raises InvalidRequest (or a subclass) that names field, value and limit."""
    try:
        raw = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"the body is not JSON: {error}") from None
    except RecursionError:
        raise InvalidRequest("the body is nested too deeply") from None
    if not isinstance(raw, dict):
        raise InvalidRequest(f"the body must be a JSON object, not {_kind(raw)}")
    fields = _known_only(raw, "", ChatRequest, UNSUPPORTED)
    if isinstance(messages := fields.get("messages"), list):
        fields["messages"] = [
            _known_only(message, f"messages[{i}].", ChatMessage, UNSUPPORTED_IN_MESSAGE)
            if isinstance(message, dict) else message
            for i, message in enumerate(messages)
        ]  # fmt: skip
    try:
        chat = msgspec.convert(fields, ChatRequest)
    except msgspec.ValidationError as error:
        raise _named(str(error), fields) from None
    _check_together(chat)
    return chat


def _check_together(chat: ChatRequest) -> None:
    """What one field's own type can't say."""
    if chat.n not in (None, 1):
        raise UnsupportedParameter(f"n: {chat.n} is not supported; allowed: 1", "n")
    if None not in (chat.max_tokens, chat.max_completion_tokens) and chat.max_tokens != chat.max_completion_tokens:
        raise InvalidRequest(
            f"max_tokens ({chat.max_tokens}) and max_completion_tokens ({chat.max_completion_tokens}) are two names "
            "of one limit and differ", "max_tokens",
        )  # fmt: skip
    if chat.stream_options is not None and not chat.stream:
        raise InvalidRequest("stream_options is only allowed with stream: true", "stream_options")


def _known_only(
    raw: dict[str, Any], prefix: str, struct: type[msgspec.Struct], unsupported: dict[str, tuple[Any, ...]]
) -> dict[str, Any]:
    """`raw` without the unsupported fields that ask for nothing. Raises for the others, and for unknown ones."""
    known = {field.name for field in msgspec.structs.fields(struct)}
    kept = {}
    for name, value in raw.items():
        if name in known:
            kept[name] = value
        elif name in unsupported:
            if value is not None and not any(_same(value, neutral) for neutral in unsupported[name]):
                raise UnsupportedParameter(f"{prefix}{name} is not supported (got {_short(value)})", f"{prefix}{name}")
        else:
            close = difflib.get_close_matches(name, known, 1)
            hint = f"; did you mean {close[0]}?" if close else ""
            raise UnknownParameter(f"unknown field {prefix}{name[:100]}{hint}", f"{prefix}{name[:100]}")
    return kept


def _same(value: Any, neutral: Any) -> bool:
    """Equal, and not merely because Python takes False for 0."""
    return bool(value == neutral) and isinstance(value, bool) == isinstance(neutral, bool)


def _named(text: str, raw: dict[str, Any]) -> InvalidRequest:
    """msgspec says what it expected and where; add the value that stood there."""
    match = _PATH.search(text)
    expected = text[: match.start()] if match else text
    path = match.group(1) if match else ""
    missing = re.match(r"Object missing required field `([^`]+)`$", expected)
    if missing:
        param = f"{path}.{missing.group(1)}".lstrip(".")
        return InvalidRequest(f"{param} is required", param)
    unknown = re.match(r"Object contains unknown field `([^`]+)`$", expected)
    if unknown:
        param = f"{path}.{unknown.group(1)[:100]}"
        return UnknownParameter(f"unknown field {param}", param)
    value = _short(_look_up(raw, path))
    return InvalidRequest(f"{path or 'body'}: {value} is not acceptable: {_plain(expected, path)}", path or None)


def _plain(expected: str, path: str) -> str:
    """What is allowed, where msgspec's own words do not list it."""
    if path.endswith("].role"):
        return "allowed roles are system, user, assistant"
    if path.endswith("].type"):
        return "only parts of type text are supported"
    return expected[0].lower() + expected[1:]


def _look_up(raw: Any, path: str) -> Any:
    for step in re.findall(r"\w+|\[\d+\]|\[\.\.\.\]", path):
        try:
            raw = raw[int(step[1:-1])] if step[0] == "[" else raw[step]
        except (KeyError, IndexError, TypeError, ValueError):
            break
    return raw


def _short(value: Any) -> str:
    text = msgspec.json.encode(value).decode()
    return text if len(text) <= 100 else f"{text[:100]}…"


def _kind(value: Any) -> str:
    return {list: "an array", str: "a string", bool: "a boolean", type(None): "null"}.get(type(value), "a number")
