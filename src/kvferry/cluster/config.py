"""The configuration: one YAML file in the shape of Ray Serve's own, read into strict structs.

    http_options: {host, port}
    applications:
      - name: kvferry
        import_path: kvferry.serve.deployment:build
        route_prefix: /
        args: {model, prefill, decode, unified, router, transfer, clocks, links, api, cluster, registry}

`serve deploy` takes the same file. Everything under `args` is ours and is checked to the last key; at Serve's own
levels only the names of keys are checked. The first value that is not acceptable raises ConfigError with its path,
the value, and what is allowed.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import yaml  # type: ignore[import-untyped]

from kvferry.actors.settings import (
    ClockSettings,
    DecodeSettings,
    LinkSettings,
    ModelSettings,
    PrefillSettings,
    RouterSettings,
    Settings,
    TransferSettings,
    UnifiedSettings,
)
from kvferry.cluster.config_rules import HIDDEN, check
from kvferry.protocol.errors import ConfigError

IMPORT_PATH = "kvferry.serve.deployment:build"

#: Keys that Ray Serve 2.60 knows at its own levels.
SERVE_KEYS = (
    "proxy_location", "http_options", "grpc_options", "controller_options", "logging_config", "tracing_config",
    "applications", "target_capacity",
)  # fmt: skip
HTTP_KEYS = (
    "host", "port", "root_path", "request_timeout_s", "keep_alive_timeout_s", "ssl_keyfile", "ssl_certfile",
    "ssl_keyfile_password", "ssl_ca_certs",
)  # fmt: skip
APPLICATION_KEYS = (
    "name", "route_prefix", "import_path", "runtime_env", "host", "port", "deployments", "autoscaling_policy",
    "args", "logging_config", "external_scaler_enabled",
)  # fmt: skip

S = TypeVar("S", bound=Settings)


class HttpSettings(Settings, frozen=True):
    """Where Serve's ingress listens."""

    host: str = "127.0.0.1"
    port: int = 8000


class ApiSettings(Settings, frozen=True):
    """`default_max_tokens` bounds an answer whose request names no limit (less where the context is shorter).

    `served_model_name`: the name clients use; None = `model.model`. A request whose room or decode is lost goes on in
    its next attempt: at most `max_attempts` in a row without a new token, and at most `recovery_s` seconds.

    With `keys`, or a `keys_file` that the front reads (one key a line), clients must show one. `/ready` believes a
    handoff for `ready_fresh_s`; its own, which it makes when there was none, may take `ready_limit_s`.
    """

    default_max_tokens: int = 512
    max_body_bytes: int = 4 * 1024 * 1024
    served_model_name: str | None = None
    max_attempts: int = 3
    recovery_s: float = 30.0
    keys: list[str] = msgspec.field(default_factory=list)
    keys_file: str | None = None
    ready_fresh_s: float = 5.0
    ready_limit_s: float = 5.0


class ClusterSettings(Settings, frozen=True):
    """`slot_resource`: the custom Ray resource of which every rank takes one; `slots`: how many of them
    `kvferry serve` gives its local cluster (0: two per core, and what the configuration needs). `bind_host`: where
    links listen, and where KV goes over tcp: an address, or "node" for the one by which Ray knows each node.
    `ingress`: what `kvferry serve` puts in front of the front, Serve's own proxy or HAProxy. `drain_s`: what an
    instance that leaves may take to finish, before it hands over. `secret_file`: where each host has the cluster's
    secret; None = `kvferry/cluster_secret` below the user's configuration folder. `insecure`: start on an address that
    other hosts reach also where something there is open to all of them.
    """

    slot_resource: str = "kvferry_slot"
    slots: int = 0
    bind_host: str = "127.0.0.1"
    ingress: str = "serve"
    drain_s: float = 60.0
    secret_file: str | None = None
    insecure: bool = False


class RegistrySettings(Settings, frozen=True):
    """The registry's HTTP routes, on `http_host`; `http_port` 0: none. A room's dp rank is remembered for `room_s`
    seconds, of at most `rooms` rooms.
    """

    http_host: str = "127.0.0.1"
    http_port: int = 0
    rooms: int = 65_536
    room_s: float = 120.0


class Config(Settings, frozen=True):
    """Everything, with every default filled in."""

    http: HttpSettings = HttpSettings()
    model: ModelSettings = ModelSettings()
    prefill: PrefillSettings = PrefillSettings()
    decode: DecodeSettings = DecodeSettings()
    unified: UnifiedSettings = UnifiedSettings()
    router: RouterSettings = RouterSettings()
    transfer: TransferSettings = TransferSettings()
    clocks: ClockSettings = ClockSettings()
    links: LinkSettings = LinkSettings()
    api: ApiSettings = ApiSettings()
    cluster: ClusterSettings = ClusterSettings()
    registry: RegistrySettings = RegistrySettings()

    def served_name(self) -> str:
        return self.api.served_model_name or self.model.model

    def without_keys(self, shown: str | None = None) -> Config:
        """For everybody but the front: no API keys, or `shown` in the place of each."""
        keys = [] if shown is None else [shown] * len(self.api.keys)
        return msgspec.structs.replace(self, api=msgspec.structs.replace(self.api, keys=keys))

    def wanted(self) -> dict[str, int]:
        """How many of each role there are to be at first."""
        return {
            "prefill": self.prefill.instances,
            "decode": self.decode.instances,
            "unified": self.unified.instances,
            "router": self.router.instances,
        }

    def shape(self, role: str) -> tuple[int, int]:
        """(tp, pp) of an instance; roles that can't be cut have neither."""
        settings = getattr(self, role)
        return getattr(settings, "tp", 1), getattr(settings, "pp", 1)

    def stages(self, role: str) -> tuple[int, ...]:
        """Layers of each pipeline stage of an instance; none where they are dealt out evenly."""
        return tuple(getattr(getattr(self, role), "stages", ()))

    def page_size(self, role: str) -> int:
        """Tokens of a page of that role's pools."""
        own: int = getattr(self, role).page_size
        return own or self.model.page_size

    def ranks(self, role: str) -> int:
        """How many processes an instance of the role has."""
        tp, pp = self.shape(role)
        return tp * pp

    def slots(self) -> int:
        """How many slots the configured instances take: one for each rank."""
        return sum(number * self.ranks(role) for role, number in self.wanted().items() if role != "router")

    def to_bytes(self) -> bytes:
        return msgspec.json.encode(self)

    @staticmethod
    def from_bytes(data: bytes) -> Config:
        """Raises msgspec.DecodeError when `data` did not come from `to_bytes`."""
        return msgspec.json.decode(data, type=Config)


ARGS_KEYS = tuple(name for name in Config.__struct_fields__ if name != "http")


class _Places:
    """Where a section's values stand in the file, for error messages."""

    def __init__(self, application: int = 0) -> None:
        self.args = f"applications[{application}].args"

    def of(self, key: str) -> str:
        """`http.port` -> `http_options.port`; `prefill.tp` -> `applications[0].args.prefill.tp`."""
        section, _, rest = key.partition(".")
        return f"http_options.{rest}" if section == "http" else f"{self.args}.{key}"


def load(path: str | Path | None, overrides: Mapping[str, object] | None = None) -> Config:
    """The configuration in the file at `path` (None: all defaults), with `overrides` such as
    {"prefill.instances": 2, "http.port": 9000} put over it; an override of None is no override.

    Raises ConfigError.
    """
    raw = {} if path is None else _read(Path(path))
    places, sections = _sections(raw, str(path))
    for key, value in (overrides or {}).items():
        if value is not None:
            section, _, name = key.partition(".")
            sections.setdefault(section, {})
            if isinstance(sections[section], dict):
                sections[section] = {**sections[section], name: value}
    return _build(sections, places)


def from_args(args: Mapping[str, Any]) -> Config:
    """The configuration that Serve hands to the application builder. Raises ConfigError."""
    places = _Places()
    _known_keys(args, places.args, ARGS_KEYS)
    return _build(dict(args), places)


class _Loader(yaml.SafeLoader):  # type: ignore[misc]
    """YAML's own rule, which PyYAML leaves out: a key may stand only once in a mapping."""

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        keys = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        for key in keys:
            if keys.count(key) > 1:
                problem = f"the key {key} stands there twice"
                raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark)
        return super().construct_mapping(node, deep)


def _read(path: Path) -> Any:
    try:
        return yaml.load(path.read_bytes(), _Loader)  # a SafeLoader
    except OSError as error:
        raise ConfigError(str(path), error.strerror or "unreadable", "the path of a readable YAML file") from None
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(str(path), str(error), "a YAML file") from None


def _sections(raw: Any, path: str) -> tuple[_Places, dict[str, Any]]:
    """Our sections out of the file's tree; Serve's levels are checked on the way."""
    if raw is None or raw == {}:
        return _Places(), {}
    top = _mapping(raw, path)
    _known_keys(top, "", SERVE_KEYS)
    http = _section(top, "http_options", "http_options")
    _known_keys(http, "http_options", HTTP_KEYS)
    own_http = {key: value for key, value in http.items() if key in HttpSettings.__struct_fields__}
    index, application = _application(top.get("applications"))
    places = _Places(index)
    args = _section(application, "args", places.args)
    _known_keys(args, places.args, ARGS_KEYS)
    return places, {**args, "http": own_http}


def _application(applications: Any) -> tuple[int, dict[str, Any]]:
    """The one entry of `applications` that is ours; the file may deploy others beside it."""
    if not isinstance(applications, list):
        raise ConfigError("applications", applications, f"a list with one entry whose import_path is {IMPORT_PATH}")
    ours = []
    for index, entry in enumerate(applications):
        application = _mapping(entry, f"applications[{index}]")
        _known_keys(application, f"applications[{index}]", APPLICATION_KEYS)
        if application.get("import_path") == IMPORT_PATH:
            ours.append((index, application))
    if len(ours) != 1:
        found = [entry.get("import_path") for entry in applications]
        raise ConfigError("applications", found, f"exactly one entry whose import_path is {IMPORT_PATH}")
    return ours[0]


def _section(raw: dict[str, Any], key: str, path: str) -> dict[str, Any]:
    """The mapping under `key`; nothing, or a key with nothing below it, is an empty one."""
    value = raw.get(key)
    return {} if value is None else _mapping(value, path)


def _mapping(value: Any, path: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ConfigError(path, value, "a mapping of keys to values")
    return value


def _known_keys(raw: Mapping[Any, Any], path: str, allowed: tuple[str, ...]) -> None:
    for key in raw:
        if key not in allowed:
            raise _unknown_key(path, str(key), raw[key], allowed)


def _unknown_key(path: str, key: str, value: object, allowed: tuple[str, ...]) -> ConfigError:
    if "key" in key.lower():
        value = HIDDEN  # `key:` for `keys:` is a mistake, too, and what stands there is a secret
    close = difflib.get_close_matches(key, allowed, 1)
    hint = f" (did you mean {close[0]}?)" if close else ""
    return ConfigError(f"{path}.{key}".lstrip("."), value, f"no such key{hint}; the keys here are {', '.join(allowed)}")


def _build(sections: dict[str, Any], places: _Places) -> Config:
    built: dict[str, Settings] = {}
    for field in msgspec.structs.fields(Config):
        raw = sections.get(field.name)
        if raw is None:  # `router:` with nothing below it
            raw = {}
        built[field.name] = _convert(raw, field.type, places.of(field.name).rstrip("."))
    config = Config(**built)  # type: ignore[arg-type]
    for key, value, allowed in check(config):
        raise ConfigError(places.of(key), value, allowed)
    return config


def _convert(raw: Any, struct: type[S], path: str) -> S:
    """`raw` as `struct`. Raises ConfigError for unknown keys and wrong types, at any depth."""
    _known_in(raw, struct, path)
    try:
        return msgspec.convert(raw, struct)
    except msgspec.ValidationError as error:
        text, _, where = str(error).partition(" - at `$")
        steps = where.rstrip("`")
        value = raw
        if re.match(r"\.keys\b", steps):
            value = HIDDEN
        else:
            for step in re.findall(r"\w+", steps):
                value = value[int(step)] if isinstance(value, list) else value[step]
        expected = re.search(r"Expected `([^`]+)`", text)
        raise ConfigError(path + steps, value, _type_name(expected.group(1)) if expected else text) from None


def _known_in(raw: Any, struct: type[msgspec.Struct], path: str) -> None:
    if not isinstance(raw, dict):
        return  # the conversion says so, with the type
    _known_keys(raw, path, struct.__struct_fields__)
    for field in msgspec.structs.fields(struct):
        if isinstance(field.type, type) and issubclass(field.type, msgspec.Struct):
            _known_in(raw.get(field.name), field.type, f"{path}.{field.name}")


def _type_name(name: str) -> str:
    names = {"int": "a whole number", "float": "a number", "str": "a string", "bool": "true or false"}
    names |= {"object": "a mapping of keys to values", "str | null": "a string, or null", "array": "a list"}
    return names.get(name, name)
