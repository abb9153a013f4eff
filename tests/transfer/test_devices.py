"""Addresses and the network devices that have them, against the kernel's other interface (ioctl)."""

from __future__ import annotations

import fcntl
import socket
import struct

import pytest

from kvferry.transfer.contract import TransferError
from kvferry.transfer.devices import device_of

SIOCGIFADDR = 0x8915


def addresses() -> dict[str, str]:
    """device -> its first IPv4 address."""
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(probe, SIOCGIFADDR, struct.pack("256s", name.encode()))
            except OSError:  # a device without an address
                continue
            found[name] = socket.inet_ntoa(answer[20:24])
    return found


def test_each_address_is_that_of_its_device() -> None:
    found = addresses()
    assert found["lo"] == "127.0.0.1"
    for name, address in found.items():
        assert device_of(address) == name


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "127.3.2.1"])
def test_loopback(host: str) -> None:
    assert device_of(host) == "lo"


def test_an_address_of_nobody_here_names_those_that_are() -> None:
    with pytest.raises(TransferError, match=r"192\.0\.2\.1; there are .*lo 127\.0\.0\.1"):
        device_of("192.0.2.1")  # reserved for documentation: no machine has it


def test_a_name_that_is_unknown() -> None:
    with pytest.raises(TransferError, match=r"no-such-host\.invalid"):
        device_of("no-such-host.invalid")
