"""Live actors as bytes and back, so that one state can be left by every event that it allows.

Pickled for this process alone: what never changes (messages, addresses, specs, code) is kept by reference and stays
shared. Functions that were made inside others are taken apart into code and cells.
"""

from __future__ import annotations

import io
import pickle
from types import CodeType, FunctionType, ModuleType
from typing import Any

import msgspec

from kvferry.protocol.address import Address
from kvferry.protocol.clocks import Limits
from kvferry.protocol.rank import Layout, RankInfo
from kvferry.protocol.request import RequestSpec, Sampling

_SHARED = (Address, Layout, Limits, RankInfo, RequestSpec, Sampling)
_kept: list[Any] = []
_index: dict[int, int] = {}


def _keep(value: Any) -> int:
    at = _index.get(id(value))
    if at is None:
        at = _index[id(value)] = len(_kept)
        _kept.append(value)
    return at


class _Freezer(pickle.Pickler):
    def persistent_id(self, value: Any) -> int | None:
        return _keep(value) if isinstance(value, _SHARED) else None

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, FunctionType) and value.__closure__ is not None:
            shape = _keep(value.__code__), _keep(value.__globals__), value.__name__, len(value.__closure__)
            state = [cell.cell_contents for cell in value.__closure__]
            return _function, shape, (state, value.__defaults__, value.__kwdefaults__), None, None, _fill
        if isinstance(value, ModuleType | CodeType):
            raise TypeError(f"{value!r} can't be part of a snapshot")
        return NotImplemented


class _Thawer(pickle.Unpickler):
    def persistent_load(self, pid: Any) -> Any:
        return _kept[pid]


def _function(code: int, variables: int, name: str, cells: int) -> FunctionType:
    """A function whose cells are still empty, since they may lead back to it."""
    from types import CellType

    return FunctionType(_kept[code], _kept[variables], name, None, tuple(CellType() for _ in range(cells)))


def _fill(made: FunctionType, state: tuple[list[Any], Any, Any]) -> None:
    contents, made.__defaults__, made.__kwdefaults__ = state
    assert made.__closure__ is not None
    for cell, content in zip(made.__closure__, contents, strict=True):
        cell.cell_contents = content


def freeze(value: Any) -> bytes:
    """A snapshot of `value` and of everything that it refers to."""
    out = io.BytesIO()
    _Freezer(out, protocol=pickle.HIGHEST_PROTOCOL).dump(value)
    return out.getvalue()


def thaw(frozen: bytes) -> Any:
    """A copy as it was when it was frozen, in this process."""
    return _Thawer(io.BytesIO(frozen)).load()


def is_plain(value: object) -> bool:
    """Immutable, and the same in every state that holds it."""
    return isinstance(value, msgspec.Struct) and bool(value.__struct_config__.frozen)
