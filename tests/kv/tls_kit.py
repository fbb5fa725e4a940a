"""A dialler's side of TLS for tests, over a blocking socket: what a stranger could bring, too."""

from __future__ import annotations

import ssl
from hashlib import sha256

TRUSTING = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
"""Takes every certificate, as a dialler does until AUTH."""
TRUSTING.check_hostname = False
TRUSTING.verify_mode = ssl.CERT_NONE


def digest_of_peer(sock: ssl.SSLSocket) -> bytes:
    """What AUTH is bound to."""
    certificate = sock.getpeercert(binary_form=True)
    assert certificate
    return sha256(certificate).digest()
