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
from kvferry.transfer.backends import BACKENDS, Site, chooser, make_endpoint
from kvferry.transfer.contract import TransferError, WriteOutcome
from kvferry.transfer.faulty import FaultyEndpoint
from kvferry.transfer.spans import make_spans
from kvferry.transfer.staging.endpoint import StagingEndpoint
from kvferry.transfer.ucx import UcxEndpoint


def make(settings, tools, host="127.0.0.1", incarnation=7, memory=None, shared=True, on_notify=None):
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
    )
    return make_endpoint(settings, site)


@pytest.mark.parametrize(
    ("faults", "kind"),
    [
        (FaultSettings(), StagingEndpoint),
        (FaultSettings(delay_ms=5), FaultyEndpoint),
        (FaultSettings(stall_after=0), FaultyEndpoint),
        (FaultSettings(late_after_abort_ms=1), FaultyEndpoint),
    ],
)
async def test_ucx_and_its_faults(tools, no_survivors, faults, kind):
    endpoint = make(TransferSettings(backend="ucx", self_test_s=0, faults=faults), tools)
    assert isinstance(endpoint, kind) and endpoint.backend == "ucx"
    assert faults != FaultSettings() or isinstance(endpoint.inner, UcxEndpoint)
    assert (await endpoint.accept(1)).agent == "kvferry-0000000000000007-0"
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
    ("host", "transports", "refused", "backend", "why"),
    [
        ("here", "host", "", "local", "on the same host, so the pool is mapped"),
        ("here", "tcp", "", "local", "on the same host, so the pool is mapped"),
        ("here", "host", "no socket", "ucx", "on the same host, but no socket: UCX over host"),
        ("there", "tcp", "", "ucx", "on another host: UCX over tcp"),
        ("there", "tcp", "no socket", "ucx", "on another host: UCX over tcp"),
        ("", "tcp", "", "ucx", "on a host that is not known: UCX over tcp"),
    ],
)
def test_auto_picks_by_where_the_writer_is_and_says_why(host, transports, refused, backend, why):
    choice = chooser("here", transports, refused)(host)
    assert choice.backend == backend and why in choice.why


def test_auto_refuses_a_writer_that_it_can_not_reach():
    with pytest.raises(TransferError, match=r"on another host, and transfer\.transports is host; set it to tcp"):
        chooser("here", "host", "")("there")


@pytest.mark.parametrize(
    ("shared", "mib", "backends"), [(True, 1, ("local",)), (False, 1, ("ucx+staging",)), (False, 0, ("ucx",))]
)
async def test_on_one_host_auto_has_what_it_needs_and_no_more(tools, no_survivors, shared, mib, backends):
    endpoint = make(TransferSettings(backend="auto", staging_mib=mib), tools, shared=shared)
    assert endpoint.backend == "auto" and endpoint.inner.backends == (backends[0].partition("+")[0],)
    descriptor = await endpoint.accept(9, "here")
    assert descriptor.backend == backends[0] and "same host" in descriptor.why
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
    ways = await target.accept(1, "here"), await target.accept(2, "there")
    assert [way.backend for way in ways] == ["local", "ucx+staging"]
    assert ways[1].why == "the writer is on another host: UCX over tcp; small slices are staged"
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
    with pytest.raises(TransferError, match="backend is 'fake' there; here there are 'local' and 'ucx'"):
        await near.connect(msgspec.structs.replace(ways[0], backend="fake"))
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
    descriptor = await target.accept(1, "here")
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
