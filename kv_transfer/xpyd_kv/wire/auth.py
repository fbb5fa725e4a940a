"""Proof that both ends of a connection hold a key of the fleet. Pure.

Each side signs both HELLOs to the byte and its own side of the connection. The HELLOs' nonces make
a recorded proof worthless, the side makes a reflected one worthless. No address is signed: a
connection may pass a relay or NAT. What follows AUTH is not encrypted or signed (docs/wire.md).
"""

from __future__ import annotations

import hmac
from hashlib import sha256

_CONTEXT = b"xpyd-kv-auth/1 "


def auth_mac(key: bytes, *, by_dialler: bool, dialler_hello: bytes, acceptor_hello: bytes) -> bytes:
    """HMAC-SHA256 that the dialler (or acceptor) sends; the HELLOs are whole frames."""
    digest = hmac.new(key, _CONTEXT, sha256)
    digest.update(b"dialler" if by_dialler else b"acceptor")
    for hello in (dialler_hello, acceptor_hello):
        digest.update(len(hello).to_bytes(4, "little") + hello)
    return digest.digest()


def key_of(
    mac: bytes,
    keys: tuple[bytes, ...],
    *,
    by_dialler: bool,
    dialler_hello: bytes,
    acceptor_hello: bytes,
) -> bytes | None:
    """The one of `keys` that made `mac`, or None. Constant time for each key."""
    found = None
    for key in keys:
        wanted = auth_mac(
            key,
            by_dialler=by_dialler,
            dialler_hello=dialler_hello,
            acceptor_hello=acceptor_hello,
        )
        if hmac.compare_digest(wanted, mac):
            found = key
    return found
