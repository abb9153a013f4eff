"""Settings of the roles: strict structs, one per noun. Ranges are checked by `kvferry.cluster.config`."""

from __future__ import annotations

import msgspec

from kvferry.protocol.clocks import Limits
from kvferry.protocol.rank import EARLY


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Base: an unknown key is an error."""


class ModelSettings(Settings, frozen=True):
    """`model` is "smollm2-135m" (the packaged default), a local directory or a hub id. `page_size`, in tokens, is that
    of roles that name no other.
    """

    model: str = "smollm2-135m"
    dtype: str = "float32"
    page_size: int = 16


class ClockSettings(Settings, frozen=True):
    """The limits of a room's clocks, in seconds (design §4)."""

    prefill_wait_s: float = 300.0
    transfer_wait_s: float = 300.0
    admission_wait_s: float = 120.0
    no_progress_s: float = 60.0

    def limits(self) -> Limits:
        """As the clocks of the protocol take them."""
        return Limits(self.admission_wait_s, self.prefill_wait_s, self.transfer_wait_s, self.no_progress_s)


class LinkSettings(Settings, frozen=True):
    """`carrier`: "zmq", or "ray" for calls between the actors. `encrypted`: over zmq, links use CURVE with keys from
    the cluster's secret, and nobody else may connect. `silence_s` of silence end a link; `mailbox` messages fit an
    actor's mailbox.
    """

    carrier: str = "zmq"
    encrypted: bool = True
    heartbeat_s: float = 1.0
    silence_s: float = 10.0
    resend_s: float = 0.5
    window: int = 4096
    mailbox: int = 8192


class FaultSettings(Settings, frozen=True):
    """Faults injected around the real backend, for fault runs only.

    Each write is held for `delay_ms` before it is posted; after `stall_after` writes (-1: never) one stalls for ever.
    A write that is aborted while it is held is posted all the same, `late_after_abort_ms` later (0: it is not). After
    `flip_after` writes (-1: never) one has a byte changed at its target once it lies there.
    """

    delay_ms: float = 0.0
    stall_after: int = -1
    late_after_abort_ms: float = 0.0
    flip_after: int = -1


class TransferSettings(Settings, frozen=True):
    """`policy` of a handoff: "early" (decode allocates, then prefill computes) or "prefill_complete" (prefill computes,
    then decode allocates). `backend`: "local" (one host, pools that both processes map), "ucx", "ucxx" (two-sided, so
    that *revoked* is proof on one host too; an extra to install), "mooncake" (Mooncake's engine over tcp; an extra), or
    "auto", which picks "local" or "ucx" for each pair of processes by what both offer (kvferry.transfer.ways).
    `transports` of UCX: "host" (CMA, and all processes are on one host), "tcp", "rdma", "auto" ("rdma" for pairs that
    both have a port of one kind, else "tcp"), or a list for UCX_TLS; ucxx and mooncake go by tcp, with "host" on the
    loopback device. `ib_device`: the network devices to take (kvferry.transfer.nics), but for those two; None = over
    tcp the one that has our address, over RDMA all active ports, of which UCX takes the nearest. `poll_busy_ms` and
    `poll_idle_ms`: how often ucx and mooncake look; the others are woken. A process has at most `max_agents` agents of
    the data plane, one for each peer.
    `staging_mib`: memory of a rank, beside its pool, in which small slices are gathered, sent as one write, and
    scattered, where TP differs and the backend is ucx or ucxx (0: slices go one by one). None is taken before a peer of
    another layout is there. With `checksum` decode commits only what has been compared, where it lies, with digests
    that prefill took of its source. Before a pair of agents is used first, a few bytes must get across within
    `self_test_s` seconds (0: not tried).
    """

    policy: str = EARLY
    backend: str = "auto"
    transports: str = "host"
    ib_device: str | list[str] | dict[str, str | list[str]] | None = None
    batch_bytes: int = 16 * 1024 * 1024
    poll_busy_ms: float = 1.0
    poll_idle_ms: float = 20.0
    max_agents: int = 256
    staging_mib: int = 128
    checksum: bool = True
    self_test_s: float = 10.0
    faults: FaultSettings = FaultSettings()

    @property
    def one_host(self) -> bool:
        """KV can't go from host to host."""
        return self.backend == "local" or self.transports == "host"

    @property
    def shares_memory(self) -> bool:
        """Pools lie in memory that other processes of the host may map."""
        return self.backend in ("auto", "local")


class PrefillSettings(Settings, frozen=True):
    """A chunk never exceeds `chunk_tokens`; a step takes chunks of several requests up to `batch_tokens`. `stages`: the
    layers of each of the `pp` stages; empty = dealt out evenly. `page_size` 0: the model's.
    """

    instances: int = 1
    tp: int = 1
    pp: int = 1
    stages: list[int] = msgspec.field(default_factory=list)
    page_size: int = 0
    pool_pages: int = 640
    chunk_tokens: int = 256
    batch_tokens: int = 512
    max_rooms: int = 256
    threads: int = 1


class DecodeSettings(Settings, frozen=True):
    """`max_running` requests decode together; at most `max_rooms` are held in all phases. A writer that has not
    said within `revoke_after_s` that an aborted room's writes have ended is shut out, where that is proof (over tcp).
    Where only its own end is, it is killed when more than `quarantine_budget` of the pool waits for proof, or a page
    has waited for `quarantine_s`. `stages` and `page_size` as in prefill.
    """

    instances: int = 1
    tp: int = 1
    pp: int = 1
    stages: list[int] = msgspec.field(default_factory=list)
    page_size: int = 0
    pool_pages: int = 1280
    max_running: int = 32
    max_rooms: int = 256
    threads: int = 1
    revoke_after_s: float = 10.0
    quarantine_budget: float = 0.25
    quarantine_s: float = 300.0


class UnifiedSettings(Settings, frozen=True):
    """Instances that are prefill and decode in one process. Sizes as in the two roles; a forward takes the running
    requests first, then chunks up to `batch_tokens`.
    """

    instances: int = 0
    page_size: int = 0
    pool_pages: int = 1280
    chunk_tokens: int = 256
    batch_tokens: int = 512
    max_running: int = 32
    max_rooms: int = 256
    threads: int = 1


class RouterSettings(Settings, frozen=True):
    """A pool of `instances` routers; in each, `max_requests` live at once and `journal_rooms` ended rooms keep their
    journal. At most `queue_limit` requests wait for a decode, counted over all of them.

    `policy` chooses the pair: "predicted", "power_of_two", "round_robin" or "random" (actors/router/policies.py);
    `dp_choice` the rank in a group of DP ranks: "follow_bootstrap_room" (room id % dp_size) or "load". A pair's breaker
    opens after `breaker_failures` failures in a row, for `breaker_open_s` seconds, twice as long each time that the
    probe fails too, up to `breaker_open_max_s`.
    """

    instances: int = 1
    max_requests: int = 256
    queue_limit: int = 128
    journal_rooms: int = 4096
    policy: str = "predicted"
    dp_choice: str = "follow_bootstrap_room"
    breaker_failures: int = 3
    breaker_open_s: float = 5.0
    breaker_open_max_s: float = 60.0
