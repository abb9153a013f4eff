"""Which way is chosen for a pair of ranks by what both offer, against a table made by hand."""

import msgspec
import pytest

from kvferry.protocol.offer import CUDA, HOST, NOTHING_SAID, SHARED, Nic, Offer
from kvferry.transfer.contract import TransferError
from kvferry.transfer.ways import backend_of, choose, ways_of

IB, ROCE = Nic("mlx5_0:1", "InfiniBand"), Nic("mlx5_4:1", "Ethernet")
ALL = ("local", "ucx/rdma", "ucx/tcp")


def offer(host="a", memory=SHARED, nics=(), ways=ALL):
    return Offer(tuple(ways), memory, tuple(nics), host)


@pytest.mark.parametrize(
    ("backend", "transports", "ways"),
    [
        ("auto", "host", ["local", "ucx/host"]),
        ("auto", "tcp", ["local", "ucx/tcp"]),
        ("auto", "rdma", ["local", "ucx/rdma"]),
        ("auto", "auto", ["local", "ucx/rdma", "ucx/tcp"]),
        ("auto", "rc,cuda_copy", ["local", "ucx/rc,cuda_copy"]),
        ("ucx", "auto", ["ucx/rdma", "ucx/tcp"]),
        ("ucx", "host", ["ucx/host"]),
        ("local", "host", ["local"]),
        ("ucxx", "tcp", ["ucxx/tcp"]),
        ("mooncake", "host", ["mooncake/host"]),
    ],
)
def test_the_settings_say_which_ways_there_may_be(backend, transports, ways):
    found = ways_of(backend, transports)
    assert list(found) == ways
    assert {backend_of(way) for way in found} <= {"local", "ucx", "ucxx", "mooncake"}


FAR = "the writer is on another host: UCX over"
NO_RDMA = "not ucx/rdma: the RDMA ports are"


@pytest.mark.parametrize(
    ("theirs", "ours", "way", "why"),
    [
        # One host: a mapped pool is best, whatever the network. The writer's own pool need not be shared for it.
        (offer(), offer(), "local", "the writer is on the same host, so the pool is mapped there: one copy, no wire"),
        (offer(nics=[IB]), offer(nics=[IB]), "local", "the writer is on the same host, so"),
        (offer(memory=HOST), offer(), "local", "the writer is on the same host, so"),
        # One host, but the pool can't be mapped, or the writer has no such backend.
        (offer(), offer(memory=HOST), "ucx/tcp", "on the same host: UCX over tcp; not local: the pool here is host"),
        (offer(ways=["ucx/tcp"]), offer(), "ucx/tcp", "UCX over tcp; not local: the writer has ucx/tcp"),
        # Two hosts.
        (offer("b"), offer(), "ucx/tcp", f"{FAR} tcp; not local: the writer is on another host; {NO_RDMA} none there"),
        (offer("b", nics=[IB]), offer(), "ucx/tcp", f"{NO_RDMA} mlx5_0:1 (InfiniBand) there, none here"),
        (offer("b"), offer(nics=[IB]), "ucx/tcp", f"{NO_RDMA} none there, mlx5_0:1 (InfiniBand) here"),
        (offer("b", nics=[IB]), offer(nics=[ROCE]), "ucx/tcp", f"{NO_RDMA} mlx5_0:1 (InfiniBand) there, mlx5_4:1 (Eth"),
        (offer("b", nics=[IB]), offer(nics=[IB]), "ucx/rdma", f"{FAR} rdma, InfiniBand, by mlx5_0:1 (InfiniBand) "),
        (offer("b", nics=[ROCE]), offer(nics=[IB, ROCE]), "ucx/rdma", f"{FAR} rdma, Ethernet, by mlx5_4:1 (Ethernet) "),
        (offer("b", nics=[IB], ways=["local", "ucx/tcp"]), offer(nics=[IB]), "ucx/tcp", "not ucx/rdma: the writer has"),
        # A device's memory: never mapped, over RDMA or tcp as host memory is; also where only one side's is.
        (offer("b", CUDA, [IB]), offer("a", CUDA, [IB]), "ucx/rdma", "; cuda memory there, cuda here; not local: "),
        (offer("b", CUDA), offer("a", CUDA), "ucx/tcp", f"{FAR} tcp; cuda memory there, cuda here"),
        (offer("a", CUDA), offer("a", CUDA), "ucx/tcp", "on the same host: UCX over tcp; cuda memory there, cuda here"),
        (offer("a", CUDA), offer(), "ucx/tcp", "not local: it moves host memory only; the pool is cuda memory there,"),
        (offer("a", HOST), offer("a", CUDA), "ucx/tcp", "not local: the pool here is cuda memory, which others can't"),
        # A writer that has not said: what it has is not known, nor where it is.
        (NOTHING_SAID, offer(nics=[IB]), "ucx/rdma", "on a host that is not known: UCX over rdma"),
        (Offer(host="a"), offer(), "local", "on the same host"),
    ],
)  # fmt: skip
def test_of_all_ways_the_best_that_both_have_is_chosen_and_the_reason_said(theirs, ours, way, why):
    choice = choose(ALL, ours, theirs, {})
    assert (choice.way, why in choice.why) == (way, True), choice.why


def test_what_is_lacking_here_is_said():
    lacking = {"ucx/rdma": "no agent over 'rdma': NoDevice"}
    choice = choose(ALL, offer(), offer("b", nics=[IB]), lacking)
    assert choice.way == "ucx/tcp" and choice.why.endswith("; not ucx/rdma: no agent over 'rdma': NoDevice")


@pytest.mark.parametrize(
    ("wanted", "theirs", "ours", "words"),
    [
        (["local"], offer("b"), offer("a"), r"not local: the writer is on another host \(host b there, a here; "),
        (["local"], offer("a"), offer("a", HOST), "the pool here is host memory, .*memory shared there, host here"),
        (["local"], NOTHING_SAID, offer("a"), "not local: the writer is on a host that is not known"),
        (["local"], offer("a", CUDA), offer("a"), "host memory only; the pool is cuda memory there, shared here"),
        (["local"], offer("a", ways=["ucx/tcp"]), offer("a"), "the writer has ucx/tcp .*ways ucx/tcp there, local"),
        (["local", "ucx/host"], offer("b", ways=()), offer("a"),
         r"not ucx/host: the writer is on another host, and transfer\.transports is host; set it to auto or tcp"),
        (["ucx/host"], offer("a", CUDA, ways=()), offer("a"), "host memory only; the pool is cuda memory there"),
        (["ucxx/tcp"], offer("b", HOST, ways=()), offer("a", CUDA), "the pool is host memory there, cuda here"),
        (["mooncake/tcp"], offer("b", CUDA, ways=()), offer("a"), "the pool is cuda memory there, shared here"),
        (["ucx/rdma"], offer("b", nics=[IB]), offer("a", nics=[ROCE]),
         r"ports are mlx5_0:1 \(InfiniBand\) there, mlx5_4:1 \(Ethernet\) here .*RDMA mlx5_0:1 .* there, mlx5_4:1"),
        (["ucx/rdma"], offer("b"), offer("a", nics=[IB]), r"ports are none there, mlx5_0:1 \(InfiniBand\) here"),
        (["ucx/rc,ud"], offer("b"), offer("a"), "the writer has local, ucx/rdma, ucx/tcp"),
    ],
)  # fmt: skip
def test_a_pair_without_a_way_is_refused_with_what_both_have(wanted, theirs, ours, words):
    with pytest.raises(TransferError, match=words):
        choose(wanted, ours, theirs, {})


def test_long_lists_of_ports_are_cut_short():
    many = [Nic(f"mlx5_{number}:1", "InfiniBand") for number in range(12)]
    choice = choose(ALL, offer(nics=many), offer("b", nics=many), {})
    assert "mlx5_3:1 (InfiniBand) and 8 more there" in choice.why and "mlx5_4" not in choice.why


def test_an_offer_survives_the_wire():
    full = offer("a", CUDA, [IB, ROCE])
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(full), type=Offer) == full
    assert len(msgspec.msgpack.encode(NOTHING_SAID)) == 1
    shown = {"ways": list(ALL), "memory": "cuda", "nics": ["mlx5_0:1 (InfiniBand)", "mlx5_4:1 (Ethernet)"]}
    assert full.as_object() == shown
