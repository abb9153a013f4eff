"""Endpoints by name, from the settings of the roles."""

import asyncio
import os
import time

import msgspec
import numpy as np
import pytest

from kvferry.actors.settings import FaultSettings, TransferSettings
from kvferry.cluster.config_rules import CHOICES
from kvferry.protocol.errors import ConfigError
from kvferry.protocol.offer import Nic, Offer
from kvferry.transfer.backends import BACKENDS, Site, make_endpoint
from kvferry.transfer.contract import Proofs, TransferError, WriteOutcome
from kvferry.transfer.faulty import FaultyEndpoint
from kvferry.transfer.nics import Devices
from kvferry.transfer.several import Several
from kvferry.transfer.spans import make_spans
from kvferry.transfer.ucx_agent import TRANSPORTS, transport

HERE = Offer(host="here")


def make(settings, tools, host="127.0.0.1", incarnation=7, memory=None, shared=True, on_notify=None, **more):
    return make_with_offer(settings, tools, host, incarnation, memory, shared, on_notify, **more)[0]


def make_with_offer(settings, tools, host="127.0.0.1", incarnation=7, memory=None, shared=True, on_notify=None, **more):
    memory = memory or tools.Memory()
    site = Site(
        host=host,
        kernel="here",
        regions=memory.regions,
        areas=[memory.area] if shared else [],
        incarnation=incarnation,
        on_notify=on_notify or (lambda agent, payload: None),
        loop=asyncio.get_running_loop(),
        now_s=time.monotonic,
        sleep=asyncio.sleep,
        **more,
    )
    return make_endpoint(settings, site)


@pytest.mark.parametrize(
    ("faults", "kind"),
    [
        (FaultSettings(), Several),
        (FaultSettings(delay_ms=5), FaultyEndpoint),
        (FaultSettings(stall_after=0), FaultyEndpoint),
        (FaultSettings(late_after_abort_ms=1), FaultyEndpoint),
    ],
)
async def test_ucx_and_its_faults(tools, no_survivors, faults, kind):
    endpoint = make(TransferSettings(backend="ucx", self_test_s=0, faults=faults), tools)
    assert isinstance(endpoint, kind) and endpoint.backend == "ucx"
    assert (await endpoint.accept(1, HERE)).agent == "kvferry-0000000000000007-0"
    await endpoint.close()


async def test_an_unknown_backend_is_refused(tools):
    with pytest.raises(ConfigError, match=r"transfer\.backend: 'carrier-pigeon' .* allowed: auto, local, ucx"):
        make(TransferSettings(backend="carrier-pigeon"), tools)


async def test_transports_that_ucx_can_not_use_are_refused_by_name(tools, no_survivors):
    with pytest.raises(TransferError, match="no agent over 'cma'"):
        make(TransferSettings(backend="ucx", transports="cma"), tools)


async def test_tcp_needs_an_address_of_this_host(tools, no_survivors):
    """192.0.2.0/24 is reserved for documentation: no machine has an address in it."""
    with pytest.raises(TransferError, match=r"no agent over 'tcp': .*no network device .* address 192\.0\.2\.1"):
        make(TransferSettings(backend="ucx", transports="tcp"), tools, "192.0.2.1")


async def test_tcp_takes_the_device_of_the_address_and_host_the_loopback_one(tools, no_survivors, monkeypatch):
    monkeypatch.setattr("kvferry.transfer.ucx_agent.device_of", {"10.0.0.7": "lo", "127.0.0.1": "unused"}.__getitem__)
    for transports, host in (("tcp", "10.0.0.7"), ("host", "10.0.0.7")):
        endpoint = make(TransferSettings(backend="ucx", transports=transports), tools, host)
        assert os.environ["UCX_NET_DEVICES"] == "lo"
        await endpoint.close()


def test_the_configuration_knows_the_backends_that_there_are():
    assert set(CHOICES["transfer.backend"]) == set(BACKENDS)


@pytest.mark.parametrize(
    ("shared", "mib", "paths"),
    [(True, 1, ("local", "local")), (False, 1, ("ucx/host", "ucx/host+staging")), (False, 0, ("ucx/host", "ucx/host"))],
)
async def test_on_one_host_auto_has_what_it_needs_and_no_more(tools, no_survivors, shared, mib, paths):
    endpoint = make(TransferSettings(backend="auto", staging_mib=mib), tools, shared=shared)
    assert endpoint.backend == "auto" and endpoint.inner.ways == (paths[0],)
    descriptor = await endpoint.accept(9, HERE)
    assert (descriptor.way, descriptor.path) == paths and "same host" in descriptor.why
    await endpoint.close()


@pytest.fixture
def rdma_host(tmp_path):
    """`sysfs` of a host with one active RDMA port."""
    port = tmp_path / "infiniband" / "mlx5_0" / "ports" / "1"
    port.mkdir(parents=True)
    (port / "link_layer").write_text("InfiniBand\n")
    (port / "state").write_text("4: ACTIVE\n")
    return tmp_path


@pytest.mark.parametrize(("rdma", "lacks"), [(False, "no active RDMA port"), (True, "no agent over 'rdma'")])
async def test_auto_goes_by_tcp_where_rdma_is_not_to_be_had(tools, no_survivors, rdma_host, tmp_path, rdma, lacks):
    """No port, or one that UCX can't open, as in a container that was not given the device."""
    sysfs = rdma_host if rdma else tmp_path / "none"
    endpoint, offer = make_with_offer(TransferSettings(transports="auto"), tools, sysfs=sysfs)
    assert offer == Offer(("local", "ucx/tcp"), "shared", (), "here")
    descriptor = await endpoint.accept(9, Offer(host="there"))
    assert descriptor.way == "ucx/tcp"
    assert "; not ucx/rdma: " in descriptor.why and lacks in descriptor.why
    await endpoint.close()


async def test_rdma_that_is_asked_for_and_not_there_is_an_error(tools, no_survivors, rdma_host, tmp_path):
    with pytest.raises(TransferError, match="no active RDMA port on this host; there are none"):
        make(TransferSettings(backend="ucx", transports="rdma"), tools, sysfs=tmp_path / "none")
    with pytest.raises(TransferError, match="no agent over 'rdma'"):
        make(TransferSettings(backend="ucx", transports="rdma"), tools, sysfs=rdma_host)
    with pytest.raises(ConfigError, match=r"transfer\.ib_device: 'mlx5_1'.*RDMA ports of this host: mlx5_0:1"):
        make(TransferSettings(transports="auto", ib_device="mlx5_1"), tools, sysfs=rdma_host)


async def test_rdma_and_tcp_are_in_one_process(tools, no_survivors, rdma_host, monkeypatch):
    """Tcp on the loopback device stands for RDMA. Each pair has agents of its own way, whose names never meet."""
    monkeypatch.setitem(TRANSPORTS, "rdma", TRANSPORTS["tcp"])
    monkeypatch.setattr(Devices, "over", lambda self, transports: "lo")
    settings = TransferSettings(transports="auto", staging_mib=0)
    memories = [tools.Memory(seed=1), tools.Memory(seed=2), tools.Memory()]
    near, far, target = [
        make_with_offer(settings, tools, incarnation=number, memory=memory, shared=False, sysfs=rdma_host)
        for number, memory in enumerate(memories, 1)
    ]
    assert target[1] == Offer(("ucx/rdma", "ucx/tcp"), "host", (Nic("mlx5_0:1", "InfiniBand"),), "here")
    ways = await target[0].accept(1, near[1]), await target[0].accept(2, msgspec.structs.replace(far[1], nics=()))
    assert [way.path for way in ways] == ["ucx/rdma", "ucx/tcp"]
    assert [way.agent.rpartition("-")[2] for way in ways] == [str(1 << 20), "0"]
    for source, way, region in ((near[0], ways[0], 0), (far[0], ways[1], 1)):
        peer, outcome = await source.connect(way), tools.Outcome()
        source.write(peer, make_spans(region, region, 0, 0, [tools.REGION_BYTES]), outcome)
        assert (await outcome).outcome is WriteOutcome.FLUSHED
        assert np.array_equal(memories[2].arrays[region], memories[region].arrays[region])
    for endpoint, _ in (near, far, target):
        await endpoint.close()


def test_ucx_is_told_of_a_devices_memory_and_promises_less(tools):
    drained = Proofs(drained=True, exited=False, revoked=False)
    told = {(name, device): transport(name, device) for name in ("tcp", "rdma", "rc,ud") for device in (False, True)}
    assert {key: found.tls for key, found in told.items()} == {
        ("tcp", False): "tcp", ("tcp", True): "tcp,cuda", ("rdma", False): "ib", ("rdma", True): "ib,cuda",
        ("rc,ud", False): "rc,ud", ("rc,ud", True): "rc,ud",
    }  # fmt: skip
    assert {key for key, found in told.items() if found.proofs != drained} == {("tcp", False)}


async def test_a_devices_memory_is_offered_as_such_and_never_mapped(tools, no_survivors):
    """A backend for host memory is not asked to: the pair is refused."""
    memory = tools.Memory()
    memory.regions = tuple(msgspec.structs.replace(region, device=0) for region in memory.regions)
    endpoint, offer = make_with_offer(TransferSettings(backend="local"), tools, memory=memory)
    assert offer.memory == "cuda"
    with pytest.raises(TransferError, match=r"the pool here is cuda memory.*memory shared there, cuda here"):
        await endpoint.accept(9, Offer(("local",), "shared", (), "here"))
    await endpoint.close()


async def test_auto_serves_a_pair_of_one_host_and_one_of_two_at_the_same_time(tools, no_survivors):
    """Each by its own backend and with its own proofs; to write, cancel, disconnect and shut out is the right one's."""
    settings = TransferSettings(backend="auto", transports="tcp", batch_bytes=256 * 1024)
    memories, notes = [tools.Memory(seed=1), tools.Memory(seed=2), tools.Memory()], []
    near, far, target = [
        make(settings, tools, incarnation=number, memory=memory, on_notify=lambda agent, note: notes.append(note))
        for number, memory in enumerate(memories, 1)
    ]
    target.expect(+1)
    ways = await target.accept(1, HERE), await target.accept(2, Offer(host="there"))
    assert [way.backend for way in ways] == ["local", "ucx+staging"]
    assert ways[1].why == (
        "the writer is on another host: UCX over tcp; not local: the writer is on another host; small slices are staged"
    )
    assert [(way.proofs.exited, way.proofs.revoked) for way in ways] == [(True, False), (False, True)]
    for source, way, region in ((near, ways[0], 0), (far, ways[1], 1)):
        peer = await source.connect(way)
        assert await source.connect(way) is peer
        outcome, long = tools.Outcome(), tools.Outcome()
        source.write(peer, make_spans(region, region, 0, 0, [tools.REGION_BYTES]), outcome)
        assert (await outcome).outcome is WriteOutcome.FLUSHED
        source.notify(peer, bytes([region]))
        source.cancel(source.write(peer, tools.rounds(4096), long))
        assert (await long).outcome is WriteOutcome.CANCELLED
    await tools.soon(lambda: sorted(notes) == [b"\0", b"\1"])
    assert np.array_equal(memories[2].arrays[1], memories[1].arrays[1])
    assert (await target.revoke(1), (await target.revoke(2)).writer) == (None, 2)
    with pytest.raises(TransferError, match="the way is 'fake' there; here there are 'local' and 'ucx/tcp'"):
        await near.connect(msgspec.structs.replace(ways[0], way="fake"))
    for endpoint in (near, far, target):
        await endpoint.close()


@pytest.mark.parametrize("transports", ["host", "tcp"])
async def test_ucxx_is_tried_and_says_what_it_took_and_what_proves_its_end(tools, no_survivors, transports):
    settings = TransferSettings(backend="ucxx", transports=transports, batch_bytes=256 * 1024)
    memories, notes = [tools.Memory(seed=1), tools.Memory()], []
    source, target = [
        make(settings, tools, incarnation=number, memory=memory, on_notify=lambda agent, note: notes.append(note))
        for number, memory in enumerate(memories, 1)
    ]
    descriptor = await target.accept(1, HERE)
    assert descriptor.backend == "ucxx+staging" and descriptor.at == "127.0.0.1"
    assert (descriptor.proofs.drained, descriptor.proofs.exited, descriptor.proofs.revoked) == (True, False, True)
    peer, outcome = await source.connect(descriptor), tools.Outcome()
    source.write(peer, make_spans(1, 1, np.array([0, 8192]), np.array([0, 8192]), [4096, 64]), outcome)
    result = await outcome
    assert (result.outcome, result.size_bytes, result.descriptors) == (WriteOutcome.FLUSHED, 4160, 2)
    assert result.wait_s is not None and result.wire_s is not None
    source.notify(peer, b"all")
    await tools.soon(lambda: notes == [b"all"] and (target.passed, target.failed) == (1, 0))
    assert np.array_equal(memories[1].arrays[1][:4096], memories[0].arrays[1][:4096])
    for endpoint in (source, target):
        await endpoint.close()
