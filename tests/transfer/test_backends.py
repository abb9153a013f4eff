"""Endpoints by name, from the settings of the roles."""

import asyncio
import time

import pytest

from kvferry.actors.settings import FaultSettings, TransferSettings
from kvferry.protocol.errors import ConfigError
from kvferry.transfer.backends import make_endpoint
from kvferry.transfer.contract import TransferError
from kvferry.transfer.faulty import FaultyEndpoint
from kvferry.transfer.ucx import UcxEndpoint


def make(settings, tools):
    return make_endpoint(
        settings,
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
    ],
)
async def test_ucx_and_its_faults(tools, no_survivors, faults, kind):
    endpoint = make(TransferSettings(faults=faults), tools)
    assert isinstance(endpoint, kind) and endpoint.backend == "ucx"
    assert endpoint.descriptor().agent == "kvferry-0000000000000007-0"
    await endpoint.close()


async def test_an_unknown_backend_is_refused(tools):
    with pytest.raises(ConfigError, match=r"transfer\.backend: 'carrier-pigeon' .* allowed: ucx"):
        make(TransferSettings(backend="carrier-pigeon"), tools)


async def test_transports_that_ucx_can_not_use_are_refused_by_name(tools, no_survivors):
    with pytest.raises(TransferError, match="no agent over 'cma'"):
        make(TransferSettings(transports="cma"), tools)
