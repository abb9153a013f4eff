"""Which network devices a rank's KV goes by, where somebody has said so: `transfer.ib_device`.

It may be one name ("mlx5_0", or "mlx5_0:2" for its second port), several ("mlx5_0,mlx5_1", or a list), a map from the
rank's device to either ({"0": "mlx5_0"}, also as a JSON text), or the path of a JSON file with such a map. A rank that
has no device goes by its number within its instance.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from kvferry.protocol.errors import ConfigError
from kvferry.protocol.offer import Nic
from kvferry.transfer.ways import AUTO, HOST, RDMA, TCP

KEY = "transfer.ib_device"
#: Names, or a map from a device's number to names.
IbDevice = str | list[str] | dict[str, str | list[str]] | None

_NAME = re.compile(r"[A-Za-z0-9_.@-]+(:[1-9][0-9]?)?")
_FORMS = "a device's name, a list of names, a map from device numbers to names, or the path of a JSON file with one"


class Port(NamedTuple):
    """A port of an RDMA device, e.g. "mlx5_0:1"; `link` is its link layer, "InfiniBand" or "Ethernet" (RoCE)."""

    name: str
    link: str
    state: str

    @property
    def is_active(self) -> bool:
        return self.state == "ACTIVE"


class Devices(NamedTuple):
    """The devices of one rank: `net` for tcp ("" = nobody has said), and active ports for RDMA; `lacking` is to be said
    when there are none of these.
    """

    net: str
    rdma: Sequence[Port]
    lacking: str

    @property
    def nics(self) -> tuple[Nic, ...]:
        return tuple(Nic(port.name, port.link) for port in self.rdma)

    def over(self, transports: str) -> str:
        """UCX_NET_DEVICES. With a list of transports of one's own, UCX is told all that were named."""
        ports = ",".join(port.name for port in self.rdma)
        if transports in (HOST, TCP):
            return self.net
        return ports if transports == RDMA else ",".join(filter(None, (ports, self.net)))


def devices_for(value: IbDevice, device: int, transports: str, sysfs: Path = Path("/sys/class")) -> Devices:
    """The devices of this host (`sysfs`) for the rank on `device`: those that `value` names, and where it is None every
    active RDMA port, among which UCX takes the nearest by the host's topology.

    Raises ConfigError for what is not of one of the forms, for a device that the map leaves out, for one that this host
    does not have, and for one that `transports` have no use for.
    """
    net, ports = net_devices(sysfs), rdma_ports(sysfs)
    if value is None:
        found = [port for port in ports if port.is_active] if transports in (AUTO, RDMA) else []
        return Devices("", found, f"no active RDMA port on this host; there are {_shown(ports)}")
    of_net: list[str] = []
    of_rdma: list[Port] = []
    for name in names_for(value, device):
        port = next((port for port in ports if port.name == (name if ":" in name else f"{name}:1")), None)
        if transports == (RDMA if port is None else TCP) or (port is None and name not in net):
            raise ConfigError(KEY, name, _allowed(transports, net, ports))
        if port is None:
            of_net.append(name)
        else:
            of_rdma.append(port)
    active = [port for port in of_rdma if port.is_active]
    lacking = f"{KEY} names no active RDMA port, but {_shown(of_rdma)}" if of_rdma else f"{KEY} names no RDMA device"
    return Devices(",".join(of_net), active, lacking)


def net_devices(sysfs: Path = Path("/sys/class")) -> tuple[str, ...]:
    return tuple(sorted(entry.name for entry in _entries(sysfs / "net")))


def rdma_ports(sysfs: Path = Path("/sys/class")) -> tuple[Port, ...]:
    """The ports of all RDMA devices, as the kernel lists them (infiniband/DEVICE/ports/N/{link_layer,state})."""
    return tuple(
        Port(f"{device.name}:{port.name}", _text(port / "link_layer"), _text(port / "state").rpartition(": ")[2])
        for device in sorted(_entries(sysfs / "infiniband"))
        for port in sorted(_entries(device / "ports"), key=lambda port: (len(port.name), port.name))
    )


def _entries(folder: Path) -> list[Path]:
    return list(folder.iterdir()) if folder.is_dir() else []


def _text(path: Path) -> str:
    """A device may go while we look: it has no link then, and is not active."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _shown(ports: Sequence[Port]) -> str:
    return ", ".join(f"{port.name} ({port.link}, {port.state})" for port in ports) or "none"


def _allowed(transports: str, net: Sequence[str], ports: Sequence[Port]) -> str:
    """For the error: what may be named."""
    of_net = f"network devices of this host: {', '.join(net) or 'none'}"
    of_rdma = f"RDMA ports of this host: {_shown(ports)}"
    if transports == TCP:
        return f"{of_net}, as transfer.transports is tcp"
    if transports == RDMA:
        return f"{of_rdma}, as transfer.transports is rdma"
    return f"{of_net}; {of_rdma}"


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
