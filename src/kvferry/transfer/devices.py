"""Network devices of this host, by their addresses: UCX is pinned to a device, and people configure addresses."""

from __future__ import annotations

import ctypes
import os
import socket
from collections.abc import Iterator

from kvferry.transfer.contract import TransferError


class _SockAddress(ctypes.Structure):
    """struct sockaddr, as far as both families of IP have it alike."""

    _fields_ = (("family", ctypes.c_uint16),)


class _Entry(ctypes.Structure):
    """struct ifaddrs: one address of one device, and the next one."""


_Entry._fields_ = [
    ("next", ctypes.POINTER(_Entry)),
    ("name", ctypes.c_char_p),
    ("flags", ctypes.c_uint),
    ("address", ctypes.POINTER(_SockAddress)),
    ("netmask", ctypes.c_void_p),
    ("broadcast", ctypes.c_void_p),
    ("data", ctypes.c_void_p),
]

#: Family -> where a sockaddr of it holds the address, and how long that is.
_PLACES = {int(socket.AF_INET): (4, 4), int(socket.AF_INET6): (8, 16)}


def device_of(host: str) -> str:
    """The network device that has the address `host` (an IP address or a name), e.g. "eth0"; all of 127/8 is "lo"'s.

    Raises TransferError when no device of this host has it.
    """
    try:
        infos = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise TransferError(f"{host}: not an address or a known name: {error}") from None
    wanted = [str(info[4][0]).partition("%")[0] for info in infos]
    devices = list(_devices())
    for address in wanted:
        for name, held in devices:
            if held == address or (name == "lo" and address.startswith("127.")):
                return name
    held_text = ", ".join(f"{name} {held}" for name, held in devices)
    raise TransferError(f"no network device of this host has the address {host}; there are {held_text}")


def _devices() -> Iterator[tuple[str, str]]:
    """(device, address) of every IP address of this host."""
    libc = ctypes.CDLL(None, use_errno=True)
    first = ctypes.POINTER(_Entry)()
    if libc.getifaddrs(ctypes.byref(first)) != 0:
        raise TransferError(f"getifaddrs: {os.strerror(ctypes.get_errno())}")
    try:
        entry = first
        while entry:
            address = entry.contents.address
            if address and (place := _PLACES.get(address.contents.family)):
                at, length = place
                raw = ctypes.string_at(ctypes.addressof(address.contents) + at, length)
                yield entry.contents.name.decode(), socket.inet_ntop(address.contents.family, raw)
            entry = entry.contents.next
    finally:
        libc.freeifaddrs(first)
