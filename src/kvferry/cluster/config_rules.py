"""What values a configuration may have: ranges of single values first, then values that contradict each other."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import msgspec

from kvferry.protocol.rank import EARLY, PREFILL_COMPLETE
from kvferry.transfer.nics import check_form

if TYPE_CHECKING:
    from kvferry.cluster.config import Config

#: Each open attempt is a Ray call that its router holds; the other half of what an actor takes at once
#: (`kvferry.cluster.hosting`) is for frames, where links travel by Ray calls.
ATTEMPTS_BESIDE_FRAMES = 2048

#: (key, value, what is allowed)
Complaint = tuple[str, object, str]


class Range(msgspec.Struct, frozen=True):
    """low <= value <= high; with `open_low`, low < value. A NaN lies in no range."""

    low: float
    high: float
    unit: str = ""
    open_low: bool = False

    def holds(self, value: float) -> bool:
        return (self.low < value if self.open_low else self.low <= value) and value <= self.high

    def text(self) -> str:
        low = f"above {self.low:g}" if self.open_low else f"at least {self.low:g}"
        unit = f" {self.unit}" if self.unit else ""
        return f"{low} and at most {int(self.high) if self.high == int(self.high) else self.high}{unit}"


_SECONDS = Range(0, 86_400, "seconds", open_low=True)
_POOL = Range(1, 2**24, "pages")
_PAGE = Range(0, 1024, "tokens (0: model.page_size)")

RANGES: dict[str, Range] = {
    "http.port": Range(0, 65_535),
    "model.page_size": Range(1, 1024, "tokens"),
    "prefill.instances": Range(0, 64),
    "prefill.tp": Range(1, 64),
    "prefill.pp": Range(1, 64),
    "prefill.page_size": _PAGE,
    "prefill.pool_pages": _POOL,
    "prefill.chunk_tokens": Range(1, 65_536, "tokens"),
    "prefill.batch_tokens": Range(1, 1_048_576, "tokens"),
    "prefill.max_rooms": Range(1, 65_536),
    "prefill.threads": Range(1, 1024),
    "decode.instances": Range(0, 64),
    "decode.tp": Range(1, 64),
    "decode.pp": Range(1, 64),
    "decode.page_size": _PAGE,
    "decode.pool_pages": _POOL,
    "decode.max_running": Range(1, 4096),
    "decode.max_rooms": Range(1, 65_536),
    "decode.threads": Range(1, 1024),
    "decode.revoke_after_s": _SECONDS,
    "decode.quarantine_budget": Range(0, 1, "of the pool"),
    "decode.quarantine_s": _SECONDS,
    "unified.instances": Range(0, 64),
    "unified.page_size": _PAGE,
    "unified.pool_pages": _POOL,
    "unified.chunk_tokens": Range(1, 65_536, "tokens"),
    "unified.batch_tokens": Range(1, 1_048_576, "tokens"),
    "unified.max_running": Range(1, 4096),
    "unified.max_rooms": Range(1, 65_536),
    "unified.threads": Range(1, 1024),
    "router.instances": Range(1, 64),
    "router.max_requests": Range(1, 65_536),
    "router.queue_limit": Range(0, 65_536),
    "router.journal_rooms": Range(0, 1_048_576),
    "router.breaker_failures": Range(1, 1000),
    "router.breaker_open_s": _SECONDS,
    "router.breaker_open_max_s": _SECONDS,
    "transfer.batch_bytes": Range(4096, 2**30, "bytes"),
    "transfer.poll_busy_ms": Range(0, 1000, "ms"),
    "transfer.poll_idle_ms": Range(0, 1000, "ms", open_low=True),
    "transfer.max_agents": Range(2, 65_536),
    "transfer.staging_mib": Range(0, 65_536, "MiB (0: slices go one by one)"),
    "transfer.self_test_s": Range(0, 86_400, "seconds (0: none)"),
    "transfer.faults.delay_ms": Range(0, 600_000, "ms"),
    "transfer.faults.stall_after": Range(-1, 2**31 - 1, "writes (-1: never)"),
    "transfer.faults.late_after_abort_ms": Range(0, 600_000, "ms (0: never)"),
    "transfer.faults.flip_after": Range(-1, 2**31 - 1, "writes (-1: never)"),
    "clocks.prefill_wait_s": _SECONDS,
    "clocks.transfer_wait_s": _SECONDS,
    "clocks.admission_wait_s": _SECONDS,
    "clocks.no_progress_s": _SECONDS,
    "links.heartbeat_s": _SECONDS,
    "links.silence_s": _SECONDS,
    "links.resend_s": _SECONDS,
    "links.window": Range(1, 2**20, "messages"),
    "links.mailbox": Range(1, 2**20, "messages"),
    "api.default_max_tokens": Range(1, 2**20, "tokens"),
    "api.max_body_bytes": Range(1024, 2**30, "bytes"),
    "api.max_attempts": Range(1, 100),
    "api.recovery_s": Range(0, 86_400, "seconds"),
    "api.ready_fresh_s": Range(0, 3600, "seconds"),
    "api.ready_limit_s": Range(0, 3600, "seconds", open_low=True),
    "cluster.slots": Range(0, 65_536, "(0: two per core)"),
    "cluster.drain_s": Range(0, 86_400, "seconds"),
    "registry.http_port": Range(0, 65_535, "(0: no HTTP)"),
    "registry.rooms": Range(1, 2**24),
    "registry.room_s": _SECONDS,
}

#: What fits behind `Bearer ` in a header.
API_KEY = re.compile(r"[!-~]{1,512}")
API_KEY_RULE = "1 to 512 visible ASCII characters without blanks"

#: Stands where a key would be shown.
HIDDEN = "(hidden)"

#: The only values of this version.
CHOICES: dict[str, tuple[object, ...]] = {
    "router.policy": ("predicted", "power_of_two", "round_robin", "random"),
    "router.dp_choice": ("follow_bootstrap_room", "load"),
    "transfer.policy": (EARLY, PREFILL_COMPLETE),
    "transfer.backend": ("auto", "local", "ucx", "ucxx", "mooncake"),
    "links.carrier": ("zmq", "ray"),
    "model.dtype": ("float32", "bfloat16", "float16"),
    "cluster.ingress": ("serve", "haproxy"),
}

#: Text that must look like something.
PATTERNS: dict[str, tuple[re.Pattern[str], str]] = {
    "http.host": (re.compile(r"\S+"), "a host name or an IP address"),
    "model.model": (re.compile(r".*\S.*"), "the packaged model's name, a local directory, or a hub id"),
    "cluster.slot_resource": (re.compile(r"[A-Za-z]\w*"), "the name of a Ray resource (letters, digits, _)"),
    # A peer could not dial a wildcard.
    "cluster.bind_host": (re.compile(r"(?!(0\.0\.0\.0|::|\*)$)\S+"), "node, or one address or name of this host"),
    "registry.http_host": (re.compile(r"\S+"), "a host name or an IP address"),
    "transfer.transports": (re.compile(r"\^?[a-z0-9_]+(,[a-z0-9_]+)*"), "auto, host, tcp, rdma, or a list for UCX_TLS"),
}


def value_at(config: Config, key: str) -> object:
    """`value_at(config, "transfer.faults.delay_ms")`."""
    value: object = config
    for step in key.split("."):
        value = getattr(value, step)
    return value


def check(config: Config) -> Iterator[Complaint]:
    """Everything that is wrong, single values first."""
    found = list(_single(config))
    yield from found
    if not found:
        for rule in CONTRADICTIONS:
            yield from rule(config)


def _single(config: Config) -> Iterator[Complaint]:
    for key, allowed in RANGES.items():
        value = value_at(config, key)
        assert isinstance(value, int | float)
        if not allowed.holds(value):
            yield key, value, allowed.text()
    for key, choices in CHOICES.items():
        if (choice := value_at(config, key)) not in choices:
            yield key, choice, f"{', '.join(map(str, choices))} (in this version)"
    for key, (pattern, meaning) in PATTERNS.items():
        if not pattern.fullmatch(str(text := value_at(config, key))):
            yield key, text, meaning
    if config.api.served_model_name is not None and not config.api.served_model_name.strip():
        yield "api.served_model_name", config.api.served_model_name, "a name, or null for model.model"
    for index, key in enumerate(config.api.keys):
        if not API_KEY.fullmatch(key):
            yield f"api.keys[{index}]", HIDDEN, API_KEY_RULE


def _wire(config: Config) -> Iterator[Complaint]:
    value, backend = config.transfer.ib_device, config.transfer.backend
    over_tcp = backend in ("ucxx", "mooncake")
    if over_tcp and config.transfer.transports not in ("host", "tcp"):
        yield "transfer.transports", config.transfer.transports, f"host or tcp, where transfer.backend is {backend}"
    if value is None:
        return
    if wrong := check_form(value):
        yield "transfer.ib_device", value, wrong
    elif config.transfer.one_host:
        yield "transfer.ib_device", value, "null, where transfer.transports is host: nothing goes by a network device"
    elif over_tcp:
        why = f"null, where transfer.backend is {backend}: it takes the one that has our address"
        yield "transfer.ib_device", value, why


def _chunk(config: Config) -> Iterator[Complaint]:
    for role, settings in (("prefill", config.prefill), ("unified", config.unified)):
        page, where = config.page_size(role), f"{role if settings.page_size else 'model'}.page_size"
        chunk, key = settings.chunk_tokens, f"{role}.chunk_tokens"
        if chunk % page:
            yield key, chunk, f"a multiple of {where} ({page})"
        if chunk > settings.batch_tokens:
            yield key, chunk, f"at most {role}.batch_tokens ({settings.batch_tokens})"
        if chunk > (tokens := settings.pool_pages * page):
            yield key, chunk, f"at most {role}.pool_pages * {where} ({tokens})"


def _running(config: Config) -> Iterator[Complaint]:
    for role, settings in (("decode", config.decode), ("unified", config.unified)):
        running, key = settings.max_running, f"{role}.max_running"
        if running > settings.max_rooms:
            yield key, running, f"at most {role}.max_rooms ({settings.max_rooms})"
        if running > settings.pool_pages:
            yield key, running, f"at most {role}.pool_pages ({settings.pool_pages})"
    # A forward takes one token of each that runs, and a page of the prompt that waits beside them: or it would wait
    # until one of them has finished, without any progress.
    tokens, page = config.unified.batch_tokens, config.page_size("unified")
    if config.unified.max_running - 1 + page > tokens:
        where = "unified" if config.unified.page_size else "model"
        allowed = f"at most unified.batch_tokens ({tokens}) - {where}.page_size ({page}) + 1"
        yield "unified.max_running", config.unified.max_running, allowed


def _somebody(config: Config) -> Iterator[Complaint]:
    """Who starts with nobody can't have meant it; pools may be scaled to nothing later."""
    if config.unified.instances or (config.prefill.instances and config.decode.instances):
        return
    role = "decode" if config.prefill.instances else "prefill"
    yield f"{role}.instances", 0, "at least 1, unless unified.instances is"


def _stages(config: Config) -> Iterator[Complaint]:
    """Whether their sum is the model's number of layers shows where the model is known (`check_split`)."""
    for role, settings in (("prefill", config.prefill), ("decode", config.decode)):
        stages, pp = settings.stages, settings.pp
        if stages and (len(stages) != pp or min(stages) < 1):
            what = f"none, or {pp} of them, since {role}.pp is {pp}, each at least 1"
            yield f"{role}.stages", stages, what


def _silence(config: Config) -> Iterator[Complaint]:
    links = config.links
    if links.silence_s <= 2 * links.heartbeat_s:
        allowed = f"more than twice links.heartbeat_s ({links.heartbeat_s:g})"
        yield "links.silence_s", links.silence_s, allowed
    if links.resend_s >= links.silence_s:
        yield "links.resend_s", links.resend_s, f"less than links.silence_s ({links.silence_s:g})"


def _poll(config: Config) -> Iterator[Complaint]:
    transfer = config.transfer
    if transfer.poll_idle_ms < transfer.poll_busy_ms:
        yield "transfer.poll_idle_ms", transfer.poll_idle_ms, f"at least poll_busy_ms ({transfer.poll_busy_ms:g})"


def _breaker(config: Config) -> Iterator[Complaint]:
    router = config.router
    if router.breaker_open_max_s < router.breaker_open_s:
        allowed = f"at least router.breaker_open_s ({router.breaker_open_s:g})"
        yield "router.breaker_open_max_s", router.breaker_open_max_s, allowed


def _ingress(config: Config) -> Iterator[Complaint]:
    if config.cluster.ingress == "haproxy" and config.http.host == "::":
        yield "cluster.ingress", "haproxy", "serve, for http_options.host ::, which Ray makes IPv4 only for HAProxy"


def _slots(config: Config) -> Iterator[Complaint]:
    needed = config.slots()
    if 0 < config.cluster.slots < needed:
        yield "cluster.slots", config.cluster.slots, f"0, or at least the {needed} ranks of the configuration"


def _calls(config: Config) -> Iterator[Complaint]:
    requests = config.router.max_requests
    if config.links.carrier == "ray" and requests > ATTEMPTS_BESIDE_FRAMES:
        yield "router.max_requests", requests, f"at most {ATTEMPTS_BESIDE_FRAMES} where links.carrier is ray"


CONTRADICTIONS: tuple[Callable[[Config], Iterator[Complaint]], ...] = (
    _somebody, _stages, _chunk, _wire, _running, _breaker, _calls, _silence, _poll, _ingress, _slots,
)  # fmt: skip
