"""From a body's bytes to a struct, refusing by name whatever is unknown, unsupported or out of range."""

from __future__ import annotations

import difflib
import re
from typing import Any, TypeVar

import msgspec

from kvferry.protocol.errors import InvalidRequest
from kvferry.serve.errors import UnknownParameter, UnsupportedParameter

#: Fields that have no effect here -> the values, besides null, that ask for nothing.
Unsupported = dict[str, tuple[Any, ...]]

StructT = TypeVar("StructT", bound=msgspec.Struct)

_PATH = re.compile(r" - at `\$\.?([^`]*)`$")


def decode_object(body: bytes) -> dict[str, Any]:
    """The JSON object in `body`. Raises InvalidRequest."""
    try:
        raw = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"the body is not JSON: {error}") from None
    except RecursionError:
        raise InvalidRequest("the body is nested too deeply") from None
    if not isinstance(raw, dict):
        raise InvalidRequest(f"the body must be a JSON object, not {_kind(raw)}")
    return raw


def convert(fields: dict[str, Any], struct: type[StructT]) -> StructT:
    """`fields` as a `struct`. Raises InvalidRequest with the field, its value and what is allowed."""
    try:
        return msgspec.convert(fields, struct)
    except msgspec.ValidationError as error:
        raise _named(str(error), fields) from None


def known_only(
    raw: dict[str, Any], prefix: str, struct: type[msgspec.Struct], unsupported: Unsupported
) -> dict[str, Any]:
    """`raw` without the unsupported fields that ask for nothing. Raises for the others, and for unknown ones."""
    known = {field.name for field in msgspec.structs.fields(struct)}
    kept = {}
    for name, value in raw.items():
        if name in known:
            kept[name] = value
        elif name in unsupported:
            if value is not None and not any(_same(value, neutral) for neutral in unsupported[name]):
                raise UnsupportedParameter(f"{prefix}{name} is not supported (got {short(value)})", f"{prefix}{name}")
        else:
            close = difflib.get_close_matches(name, known, 1)
            hint = f"; did you mean {close[0]}?" if close else ""
            raise UnknownParameter(f"unknown field {prefix}{name[:100]}{hint}", f"{prefix}{name[:100]}")
    return kept


#: Token ids that a request may name in `logit_bias`.
MAX_BIASES = 1024


def token_biases(raw: dict[str, Any]) -> tuple[tuple[int, float], ...]:
    """`logit_bias`: (token id, bias) each. Raises InvalidRequest; whether the model has the id is not known here."""
    if len(raw) > MAX_BIASES:
        raise InvalidRequest(f"logit_bias: {len(raw)} token ids; the limit is {MAX_BIASES}", "logit_bias")
    biases = []
    for key, value in raw.items():
        name = f"logit_bias.{key[:100]}"
        if not (key.isascii() and key.isdigit() and len(key) <= 10 and str(int(key)) == key):
            raise InvalidRequest(f"{name}: the key is not a token id; allowed: a number without leading zeros", name)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not -100 <= value <= 100:
            raise InvalidRequest(f"{name}: {short(value)} is not acceptable; allowed: -100 to 100", name)
        biases.append((int(key), float(value)))
    return tuple(biases)


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
    value = short(_look_up(raw, path))
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


def short(value: Any) -> str:
    text = msgspec.json.encode(value).decode()
    return text if len(text) <= 100 else f"{text[:100]}…"


def _kind(value: Any) -> str:
    return {list: "an array", str: "a string", bool: "a boolean", type(None): "null"}.get(type(value), "a number")
