"""Every decoder of bytes that come from elsewhere, what it takes when all is well, and the one way it may refuse."""

from __future__ import annotations

import tempfile
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np

from kvferry.actors.decode.checks import OwnDigests
from kvferry.cluster.config import load
from kvferry.cluster.registry_routes import PutRoute, QueryRooms, RegisterRoom
from kvferry.cluster.secret import load_secret
from kvferry.protocol.address import Address
from kvferry.protocol.errors import Cause, ConfigError, RequestError
from kvferry.protocol.frames import Ack, Bye, Data, Frame, Hello, NotMe, Welcome, decode_frame, encode_frame
from kvferry.protocol.instance import (
    AbortConfirmed,
    Accept,
    Accepted,
    Arrived,
    CancelRoom,
    ConfirmAbort,
    Digested,
    Expect,
    Join,
    Joined,
    RankFailed,
    Revoke,
    RevokedAt,
    RunStep,
    Stepped,
    TakeDigest,
    WriteChunk,
    WriteTo,
    Wrote,
)
from kvferry.protocol.messages import (
    Abort,
    AbortAck,
    AbortTransfer,
    Admitted,
    BadFrame,
    Committed,
    DataPath,
    Destination,
    Distrust,
    Drained,
    Draining,
    Failed,
    Load,
    Logprobs,
    Message,
    OpenDecode,
    Opened,
    OpenPrefill,
    OverBudget,
    PrefillDone,
    Progress,
    Received,
    Reconcile,
    Register,
    RegisterDpRank,
    Registered,
    RegistrationRefused,
    Released,
    Retracted,
    Roster,
    Stop,
    Token,
    TokenBatch,
    UnknownRoom,
    Watch,
    decode,
    encode,
)
from kvferry.protocol.metadata import (
    ROW_BYTES,
    Introduction,
    Metadata,
    Notification,
    decode_notification,
    encode_notification,
)
from kvferry.protocol.rank import Layout, RankInfo
from kvferry.protocol.request import RequestSpec, Sampling
from kvferry.serve.schemas import parse_chat, parse_completion
from kvferry.transfer.contract import (
    Descriptor,
    Region,
    RegionKind,
    Segment,
    TransferError,
    decode_descriptor,
    encode_descriptor,
    encode_regions,
)
from kvferry.transfer.layout import slices_in
from kvferry.transfer.plan import Chunk, Held, pair, pair_common, plan, plan_pages, plan_row
from kvferry.transfer.ranks import routes
from kvferry.transfer.ucx_agent import UcxMetadata, add_peer

ROOM = (1 << 63) - 25
HERE = Address("prefill-7", "tcp://127.0.0.1:7001", 0xFEED_0000_0000_0001, "another host", 12)
LAYOUT = Layout("scripted", "1", "float32", 8, layers=3, kv_heads=2, head_dim=4)
INFO = RankInfo("prefill-7", "prefill", HERE, LAYOUT, pages=64, max_prompt_tokens=2048, max_total_tokens=2048)
SAMPLING = Sampling(8, 0.5, 0.9, 40, 3, ("\n", "\u2028"), (2, 7), logit_bias=((5, 1.5),))
SPEC = RequestSpec(1 << 62, (1, 2, 3), SAMPLING, HERE)
CAUSE = Cause("handoff_failed", "no", room=ROOM, because=Cause("peer_lost", "gone", leg="decode", rank=0))

MESSAGES: tuple[Message, ...] = (
    OpenPrefill(ROOM, 0, SPEC, HERE), OpenDecode(ROOM, 0, SPEC, HERE), Opened(ROOM, "prefill"), Admitted(ROOM, 9),
    Progress(ROOM, "prefill", "computed", 2, 3, 4, 5, 6, 0.25), PrefillDone(ROOM, 3, 0.5), Received(ROOM, 0),
    Committed(ROOM), Failed(ROOM, "decode", CAUSE), Abort(ROOM, CAUSE, stop_running=True), AbortAck(ROOM, "prefill", 1),
    UnknownRoom(ROOM, "router"), Destination(ROOM, (7, 0, 3), 0, 2, b"\x00\xff", 1, (0, 1)), AbortTransfer(ROOM, CAUSE),
    Drained(ROOM, 0, True, 1 << 40, 256), Stop(1, 0, ROOM), Retracted(1, 0, ROOM, 17),
    TokenBatch("decode", (Token(1, 0, ROOM, 0, 42, "é", "stop", Logprobs(-0.25, ((42, -0.25),))),)),
    Load("decode", waiting=1, running=2, free_pages=3, total_pages=64, free_places=4, place_s=1.5), Register(INFO),
    Registered(3), RegistrationRefused("held", True), RegisterDpRank(ROOM, 1, "prefill-7"), Watch("router-7"),
    Roster(4, (INFO,), False, ("decode: 0 of 1 instances are complete",)), Reconcile((ROOM, 3)),
    Draining(ROOM, 1, broken=True), Released(ROOM, "drained and exited", 3, 1.5), OverBudget("prefill-7", 7, 9, 60.5),
    Join(INFO), Joined(1), RunStep(b"\x92\x07\x90"), Stepped(7, b"\x01"), WriteChunk(ROOM, 1, 24, 9, (7, 0)),
    WriteTo(ROOM, HERE, 20, (7, 0, 3), (0, 1), (b"\x00\xff", b"")), Wrote(ROOM, 1, False, 1 << 40, "gone"),
    CancelRoom(ROOM, CAUSE), RankFailed(ROOM, CAUSE), ConfirmAbort(ROOM, CAUSE), AbortConfirmed(ROOM), Accept(7, 1),
    Accepted(7, 1, b"\x00\xff", "no"), Revoke(7), RevokedAt(7, -1), Expect(-1), Arrived(ROOM, 1, 1 << 63),
    TakeDigest(ROOM, 1, 1 << 63, 32, 24, 99, (3, 1, 2)), Digested(ROOM, 1, 4, (1 << 64) - 1), Distrust(7),
    DataPath(ROOM, "local", "the writer is on the same host"),
)  # fmt: skip
PAYLOADS = tuple(map(encode, MESSAGES))
FRAMES: tuple[Frame, ...] = (
    Hello(1 << 63, HERE, 7, 1), Welcome(1 << 63, HERE, 1), NotMe(1 << 63, 7), Data(1 << 63, 3, 9, PAYLOADS[:3]),
    Ack(1 << 63, 3, 4, 5), Bye(1 << 63, "closed"),
)  # fmt: skip

NOTIFICATION = encode_notification(Notification(ROOM, 0, 1 << 63))

REGIONS = (
    Region(RegionKind.PAGES, "k", 0, 1 << 46, 512, 640, 0, 4, tokens=8),
    Region(RegionKind.PAGES, "v", 0, 1 << 45, 512, 640, 0, 4, tokens=8),
    Region(RegionKind.PAGES, "k", 1, 1 << 43, 512, 640, 0, 4, tokens=8, window=12),
    Region(RegionKind.RINGS, "v", 1, 1 << 42, 512, 8, 0, 4, tokens=16, window=12),
    Region(RegionKind.ROWS, "conv", 2, 1 << 41, 36, 8, segments=(Segment(0, 4, 8), Segment(0, 0, 4, 1, 2))),
    Region(RegionKind.ROWS, "metadata", -1, 1 << 44, ROW_BYTES, 256),
)  # fmt: skip
UCX = msgspec.msgpack.encode(UcxMetadata("tcp", 4321, b"an agent's own" * 8))
DESCRIPTOR = Descriptor("ucx", "kvferry-00000000000000fe-0", 0xFE, 0, UCX, REGIONS)


@dataclass(frozen=True)
class Target:
    """`take` returns for whatever bytes; what it raises is a finding. `weight`: its part of all frames."""

    name: str
    weight: float
    corpus: Sequence[bytes]
    take: Callable[[bytes], Awaitable[None] | None]


def _refusing(call: Callable[[bytes], object], *refusals: type[Exception]) -> Callable[[bytes], None]:
    def take(data: bytes) -> None:
        try:
            call(data)
        except refusals:
            return

    return take


def _row(data: bytes) -> object:
    """Rows have one length; whatever lies there is read, and then judged."""
    row = memoryview(data[:ROW_BYTES].ljust(ROW_BYTES, b"\0"))
    return Metadata.unpack(row).token_problem(3, 50_000)


def _destination(data: bytes) -> object:
    """What prefill makes of a peer's descriptor before it believes it."""
    descriptor = decode_descriptor(data)
    pairing = pair(REGIONS, descriptor.regions)
    pairing.page_size("target")
    plan_row(pairing, "metadata", 0, 255)
    plan_pages(pairing, np.arange(4), np.asarray((7, 0, 3, 639)))
    routes({0: slices_in(REGIONS)}, {0: slices_in(descriptor.regions)})
    ours, theirs = (Held((7, 0, 3, 639), dict.fromkeys(("conv", "v"), 7)) for _ in range(2))
    return plan(pair_common(REGIONS, descriptor.regions), Chunk(3, 29, 29), ours, theirs).spans


class _NoDigests:
    """The regions are no memory."""

    async def of(self, _work: object, _side: str) -> int:
        return 0

    async def close(self) -> None: ...


def _introduction(data: bytes) -> object:
    """What decode makes of a source's regions: the blocks of a chunk that has come from them, within pages of its own.
    The request's rings and rows would come with its last chunk, and no room has slots for them.
    """
    engine: Any = SimpleNamespace(regions=lambda: REGIONS, limits=SimpleNamespace(page_size=8))
    own = OwnDigests(engine, _NoDigests())
    own.introduced(Introduction(7, data))
    try:
        own.take(7, Chunk(12, 30, 99), (7, 0, 3)).send(None)
    except StopIteration as ended:
        return ended.value
    raise AssertionError("nothing here waits")


class _NoAgent:
    """Stands for NIXL's agent, which takes nothing: what comes before it is ours."""

    def add_remote_agent(self, _: bytes) -> str:
        return DESCRIPTOR.agent

    def remove_remote_agent(self, _: str) -> None: ...
    def prep_xfer_dlist(self, *_: Any) -> object:
        return object()

    def release_dlist_handle(self, _: object) -> None: ...


def _ucx(data: bytes) -> object:
    return add_peer(_NoAgent(), "tcp", msgspec.structs.replace(DESCRIPTOR, metadata=data))


def _file(name: str, read: Callable[[str], object]) -> Callable[[bytes], object]:
    path = Path(tempfile.mkdtemp(prefix="kvferry-fuzz-")) / name
    path.touch(0o600)

    def call(data: bytes) -> object:
        path.write_bytes(data)
        return read(str(path))

    return call


PUT = {
    "instance": "prefill-7", "role": "prefill", "incarnation": "00000000000000fe", "rank_ip": "127.0.0.1",
    "rank_port": 4000, "attn_tp_size": 1, "attn_tp_rank": 0, "pp_size": 1, "pp_rank": 0, "model": "scripted",
    "revision": "1", "kv_cache_dtype": "float32", "page_size": 8, "layers": 3, "kv_heads": 2, "head_dim": 4,
}  # fmt: skip
BODIES = tuple(
    msgspec.json.encode(body)
    for body in (PUT, {"bootstrap_room": ROOM, "dp_rank": 0}, {"bootstrap_rooms": [ROOM, 1, 2]})
)
CHAT = (
    b'{"model":"m","messages":[{"role":"user","content":"Hi \xc3\xa9"}],"max_tokens":5,"stop":["a"],"n":2,'
    b'"logit_bias":{"5":-1.5},"stream":true,"stream_options":{"include_usage":true},"temperature":0.5}'
)
COMPLETION = b'{"model":"m","prompt":["a",[1,2]],"max_tokens":5,"logprobs":3,"seed":1,"min_p":0.1,"stop_token_ids":[2]}'
INTERNAL = b'{"model":"m","prompt":"a","kv_transfer_params":{"tp_size":1000000000,"remote_host":"10.0.0.1","room":5}}'


def decoders() -> list[Target]:
    """Without actors: bytes in, a value or the one refusal out."""
    refused = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)  # what the routes answer with 400
    bodies = [_refusing(msgspec.json.Decoder(kind).decode, *refused) for kind in (RegisterRoom, QueryRooms)]
    bodies.append(_refusing(lambda data: msgspec.json.decode(data, type=PutRoute).rank(), *refused))

    def body(data: bytes) -> None:
        for decoder in bodies:
            decoder(data)

    return [
        Target("frames", 0.25, tuple(map(encode_frame, FRAMES)), _refusing(decode_frame, BadFrame)),
        Target("messages", 0.2, PAYLOADS, _refusing(decode, BadFrame)),
        Target("notifications", 0.03, (NOTIFICATION,), _no_refusal(decode_notification)),
        Target("introductions", 0.03, (encode_regions(REGIONS),), _refusing(_introduction, TransferError)),
        Target("metadata rows", 0.05, (_good_row(),), _no_refusal(_row)),
        Target("descriptors", 0.1, (encode_descriptor(DESCRIPTOR),), _refusing(_destination, TransferError)),
        Target("UCX metadata", 0.05, (UCX,), _refusing(_ucx, TransferError)),
        Target("bodies of the routes", 0.05, BODIES, body),
        Target("chat bodies", 0.04, (CHAT,), _refusing(parse_chat, RequestError)),
        Target("completion bodies", 0.04, (COMPLETION, INTERNAL), _refusing(parse_completion, RequestError)),
        Target("configurations", 0.0005, YAMLS, _refusing(_file("c.yaml", load), ConfigError)),
        Target("secret files", 0.0095, (b"0f" * 32 + b"\n",), _refusing(_file("secret", load_secret), ConfigError)),
    ]  # fmt: skip


SMALL_YAML = (
    b"http_options: {port: 9000}\napplications:\n- name: kvferry\n  import_path: kvferry.serve.deployment:build\n"
    b"  args: {prefill: {chunk_tokens: 64, instances: 2}, api: {keys: [abc]}, cluster: {bind_host: node}}\n"
)
YAMLS = ((Path(__file__).parents[1] / "serve.yaml").read_bytes(), SMALL_YAML)


def _no_refusal(call: Callable[[Any], object]) -> Callable[[bytes], None]:
    """It answers whatever it is given."""
    return lambda data: (call(data), None)[1]


def _good_row() -> bytes:
    row = bytearray(ROW_BYTES)
    Metadata(ROOM, 1 << 63, 100, 7, 1 << 33, Logprobs(-0.5, ((7, -0.5), (49, -2.0)))).pack_into(memoryview(row))
    return bytes(row)
