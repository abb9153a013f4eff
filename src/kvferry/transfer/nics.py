"""Which network devices a rank's KV goes by, where somebody has said so: `transfer.ib_device`.

It may be one name ("mlx5_0", or "mlx5_0:2" for its second port), several ("mlx5_0,mlx5_1", or a list), a map from the
rank's device to either ({"0": "mlx5_0"}, also as a JSON text), or the path of a JSON file with such a map.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvferry.protocol.errors import ConfigError

KEY = "transfer.ib_device"
#: Names, or a map from a device's number to names.
IbDevice = str | list[str] | dict[str, str | list[str]] | None

_NAME = re.compile(r"[A-Za-z0-9_.@-]+(:[1-9][0-9]?)?")
_FORMS = "a device's name, a list of names, a map from device numbers to names, or the path of a JSON file with one"


def ucx_devices(value: IbDevice, device: int, known: Mapping[str, bool] | None = None) -> str:
    """UCX_NET_DEVICES for the rank on `device` ("" = nobody has said). `known`: the devices of this host by name, and
    whether each is an RDMA device, for which UCX wants a port.

    Raises ConfigError for what is not of one of the forms, for a device that the map leaves out, and for names that
    this host does not have.
    """
    if value is None:
        return ""
    names, there = names_for(value, device), host_devices() if known is None else known
    for name in names:
        if name.partition(":")[0] not in there:
            have = ", ".join(sorted(there)) or "none"
            raise ConfigError(KEY, name, f"network devices of this host: {have}")
    return ",".join(f"{name}:1" if there[name.partition(":")[0]] and ":" not in name else name for name in names)


def check_form(value: IbDevice) -> str:
    """What is wrong with it, as far as that can be told without the host that it is for; "" when nothing is."""
    try:
        if isinstance(value, str) and _is_path(value):
            return ""
        found = _parsed(value)
        for names in found.values() if isinstance(found, dict) else [found]:
            _names(names, value)
    except ConfigError as error:
        return error.allowed
    return ""


def names_for(value: IbDevice, device: int) -> tuple[str, ...]:
    """The names that are meant for the rank on `device`. Raises ConfigError."""
    found = _parsed(value)
    if isinstance(found, dict):
        if str(device) not in found:
            raise ConfigError(KEY, value, f"a map with device {device} in it; it has {', '.join(sorted(found))}")
        found = found[str(device)]
    return _names(found, value)


def host_devices() -> dict[str, bool]:
    """The devices of this host: name -> whether it does RDMA."""
    found: dict[str, bool] = {}
    for kind, rdma in (("net", False), ("infiniband", True)):
        folder = Path("/sys/class") / kind
        found |= {entry.name: rdma for entry in folder.iterdir()} if folder.is_dir() else {}
    return found


def _parsed(value: Any) -> Any:
    """Names, or a map of them by the device's number."""
    if isinstance(value, str) and _is_path(value):
        try:
            text = Path(value).read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(KEY, value, f"the path of a readable JSON file: {error}") from None
        value = _json(text, value)
        if not isinstance(value, dict):
            raise ConfigError(KEY, value, "a map from device numbers to names, in the file")
    elif isinstance(value, str) and value.lstrip().startswith("{"):
        value = _json(value, value)
    if isinstance(value, dict):
        bad = [key for key in value if not re.fullmatch(r"0|[1-9][0-9]{0,4}", str(key))]
        if bad or not value:
            raise ConfigError(KEY, bad[0] if bad else value, "the number of a device, as the key of the map")
    return value


def _json(text: str, value: object) -> Any:
    try:
        return json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        raise ConfigError(KEY, value, f"a JSON map from device numbers to names: {error}") from None


def _is_path(value: str) -> bool:
    return "/" in value or (value.endswith(".json") and not value.lstrip().startswith("{"))


def _names(found: object, value: object) -> tuple[str, ...]:
    names = [name.strip() for name in found.split(",")] if isinstance(found, str) else found
    if not isinstance(names, Sequence) or isinstance(names, str) or not names:
        raise ConfigError(KEY, value, _FORMS)
    for name in names:
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise ConfigError(KEY, name, f"{_FORMS}; a name is like mlx5_0 or mlx5_0:1")
    if len(set(names)) != len(names):
        raise ConfigError(KEY, value, "each device once")
    return tuple(names)
