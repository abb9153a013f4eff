"""Endpoints by name, from the settings of the roles."""

import asyncio
import os
import time

import pytest

from kvferry.actors.settings import FaultSettings, TransferSettings
from kvferry.protocol.errors import ConfigError
from kvferry.transfer.backends import make_endpoint
from kvferry.transfer.contract import TransferError
from kvferry.transfer.faulty import FaultyEndpoint
from kvferry.transfer.ucx import UcxEndpoint


def make(settings, tools, host="127.0.0.1"):
    return make_endpoint(
        settings,
        host=host,
        regions=tools.Memory().regions,
        incarnation=7,
        on_notify=lambda agent, payload: None,
        loop=asyncio.get_running_loop(),
        now_s=time.monotonic,
        sleep=asyncio.sleep,
    )


@pytest.mark.parametrize(
    ("faults", "kind"),
    [
        (FaultSettings(), UcxEndpoint),
        (FaultSettings(delay_ms=5), FaultyEndpoint),
        (FaultSettings(stall_after=0), FaultyEndpoint),
        (FaultSettings(late_after_abort_ms=1), FaultyEndpoint),
    ],
)
async def test_ucx_and_its_faults(tools, no_survivors, faults, kind):
    endpoint = make(TransferSettings(faults=faults), tools)
    assert isinstance(endpoint, kind) and endpoint.backend == "ucx"
    assert (await endpoint.accept(1)).agent == "kvferry-0000000000000007-0"
    await endpoint.close()


async def test_an_unknown_backend_is_refused(tools):
    with pytest.raises(ConfigError, match=r"transfer\.backend: 'carrier-pigeon' .* allowed: ucx"):
        make(TransferSettings(backend="carrier-pigeon"), tools)


async def test_transports_that_ucx_can_not_use_are_refused_by_name(tools, no_survivors):
    with pytest.raises(TransferError, match="no agent over 'cma'"):
        make(TransferSettings(transports="cma"), tools)


async def test_tcp_needs_an_address_of_this_host(tools, no_survivors):
    """192.0.2.0/24 is reserved for documentation: no machine has an address in it."""
    with pytest.raises(TransferError, match=r"no agent over 'tcp': .*no network device .* address 192\.0\.2\.1"):
        make(TransferSettings(transports="tcp"), tools, "192.0.2.1")


async def test_tcp_takes_the_device_of_the_address_and_host_the_loopback_one(tools, no_survivors, monkeypatch):
    monkeypatch.setattr("kvferry.transfer.ucx_agent.device_of", {"10.0.0.7": "lo", "127.0.0.1": "unused"}.__getitem__)
    for transports, host in (("tcp", "10.0.0.7"), ("host", "10.0.0.7")):
        endpoint = make(TransferSettings(transports=transports), tools, host)
        assert os.environ["UCX_NET_DEVICES"] == "lo"
        await endpoint.close()
