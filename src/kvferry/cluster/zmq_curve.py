"""CURVE for the ZMQ carrier: its keys, and the gate that says who may connect (ZAP, ZeroMQ RFC 27).

All processes of a cluster derive the same two key pairs from its secret: one to listen with, one to dial with. A
dialler proves by the handshake that it talks to a member. A listener lets nobody in whose key is not the diallers':
the handshake proves that they own it. A public key alone opens nothing.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable
from dataclasses import dataclass, field

import zmq
from zmq.utils import z85

from kvferry.cluster.secret import Secret

#: What CURVE adds to a message on the wire (RFC 26): command name 8, nonce 8, flags 1, authenticator 16.
OVERHEAD_BYTES = 33
DOMAIN = b"kvferry"

_ZAP = "inproc://zeromq.zap.01"
_VERSION = b"1.0"


@dataclass(frozen=True)
class KeyPair:
    """In Z85, as ZMQ takes them."""

    public: bytes
    secret: bytes = field(repr=False)


@dataclass(frozen=True)
class CurveKeys:
    listener: KeyPair
    dialler: KeyPair

    def listen(self, socket: zmq.Socket[bytes]) -> None:
        """Before it is bound."""
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.CURVE_SECRETKEY, self.listener.secret)
        socket.setsockopt(zmq.CURVE_PUBLICKEY, self.listener.public)
        socket.setsockopt(zmq.ZAP_DOMAIN, DOMAIN)

    def dial(self, socket: zmq.Socket[bytes]) -> None:
        """Before it is connected."""
        socket.setsockopt(zmq.CURVE_SECRETKEY, self.dialler.secret)
        socket.setsockopt(zmq.CURVE_PUBLICKEY, self.dialler.public)
        socket.setsockopt(zmq.CURVE_SERVERKEY, self.listener.public)


def curve_keys(secret: Secret) -> CurveKeys:
    """Any 32 bytes are a secret key of Curve25519."""
    return CurveKeys(_pair(secret.key("zmq curve: listener")), _pair(secret.key("zmq curve: dialler")))


def _pair(secret: bytes) -> KeyPair:
    text = z85.encode(secret)
    return KeyPair(zmq.curve_public(text), text)


def open_gate(context: zmq.Context[zmq.Socket[bytes]], keys: CurveKeys) -> tuple[zmq.Socket[bytes], Gatekeeper]:
    """The socket on which this context's listeners ask, and who answers there. Open it before anything is bound: ZMQ
    lets everybody in where nobody is to be asked."""
    socket = context.socket(zmq.REP)
    socket.setsockopt(zmq.LINGER, 0)
    socket.bind(_ZAP)
    return socket, Gatekeeper(keys, socket.send_multipart)


class Gatekeeper:
    """Answers one question after another; `refused` counts the noes."""

    def __init__(self, keys: CurveKeys, answer: Callable[[list[bytes]], object]) -> None:
        self._allowed = z85.decode(keys.dialler.public)
        self._answer = answer
        self.refused = 0

    def asked(self, parts: list[bytes]) -> None:
        """`parts`: version, request id, domain, address, identity, mechanism, credentials (the client's public key)."""
        request = parts[1] if len(parts) > 1 else b""
        allowed = (
            len(parts) == 7
            and parts[0] == _VERSION
            and parts[5] == b"CURVE"
            and hmac.compare_digest(parts[6], self._allowed)
        )
        self.refused += not allowed
        status, text = (b"200", b"OK") if allowed else (b"400", b"this key is not the cluster's")
        self._answer([_VERSION, request, status, text, b"member" if allowed else b"", b""])
