"""The base of all messages."""

from __future__ import annotations

from typing import Annotated

import msgspec

#: A number that becomes an index into memory or a list: what doesn't fit 31 bits is none of ours.
Index = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]


class Message(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """The class name is the tag."""
