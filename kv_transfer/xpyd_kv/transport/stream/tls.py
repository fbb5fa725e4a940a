"""KV over TLS 1.3: a TCP socket that encrypts, with the interface that a Stream uses.

The fleet has no certificate authority. Each endpoint makes a certificate of its own at start, whose
key never leaves the process, and AUTH proves both: who holds the fleet's key signs the digest of
the certificate that it sees (the channel binding `tls-server-end-point` of RFC 5929). Somebody in
between has another certificate, so that its AUTH is wrong. See docs/adr/0086.
"""

from __future__ import annotations

import datetime
import os
import socket
import ssl
from collections.abc import Iterable
from hashlib import sha256
from typing import TYPE_CHECKING, Any, cast

from xpyd_core.errors import ProtocolError

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer, WriteableBuffer

_LIFETIME = datetime.timedelta(days=3650)
"""Nobody looks at the dates: the digest is what counts."""
_WRITE_BYTES = 256 * 1024
"""Encrypted and given to the kernel at once: 16 records. At 64 KiB half as much gets through."""
_READ_BYTES = 256 * 1024
"""Read from the kernel at once, before it is decrypted."""
RECORD_BYTES = 16 * 1024 + 256
"""The longest record of TLS 1.3: so much that was read may wait inside for its end."""


class TlsSocket(socket.socket):
    """A connected or connecting TCP socket, non-blocking. It takes over `sock`.

    Its methods raise BlockingIOError as those of a socket do; of `send` and `sendmsg` the next call
    must then begin with the same bytes. ProtocolError for what is no TLS.
    """

    def __init__(
        self,
        sock: socket.socket,
        context: ssl.SSLContext,
        *,
        own: bytes | None,
        scratch: memoryview,
    ) -> None:
        """`own`: the digest of our certificate, at an acceptor; None: we dial. `scratch`: for
        ciphertext within one read; the sockets of one thread share it."""
        super().__init__(sock.family, sock.type, sock.proto, fileno=sock.detach())
        self._encrypted_in, self._encrypted_out = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(
            self._encrypted_in, self._encrypted_out, server_side=own is not None
        )
        self._own = own
        self._scratch = scratch
        # Ciphertext that the kernel has not taken, and the number of plain bytes in it.
        self._unsent = memoryview(b"")
        self._claimed = 0
        self.waits_to_read = False
        """Whether the last `send` was in vain because the peer must speak first (the handshake)."""
        self.may_take = True
        """Whether a read may take bytes from the kernel, or only those that are here already."""

    @property
    def holds_more(self) -> bool:
        """Whether bytes can be read that the kernel does not know of any more."""
        return self._encrypted_in.pending > 0 or self._tls.pending() > 0

    def binding(self) -> bytes:
        """The digest of the acceptor's certificate. ProtocolError before the handshake is done."""
        if self._own is not None:
            return self._own
        certificate = self._tls.getpeercert(binary_form=True)
        if not certificate:
            raise ProtocolError("TLS: the peer has shown no certificate")
        return sha256(certificate).digest()

    # --- reading

    def recv_into(self, buffer: WriteableBuffer, nbytes: int = 0, flags: int = 0) -> int:
        """As many bytes as there are, up to the buffer's size; 0: the peer has closed."""
        view = memoryview(buffer)
        room, got = nbytes or len(view), 0
        while got < room:
            try:
                # With a buffer it returns a number, which its stub does not say.
                count = cast(int, self._tls.read(room - got, view[got:]))
            except ssl.SSLWantReadError:
                if not self._read_raw(may_block=got == 0):
                    break
                continue
            except ssl.SSLError as error:
                if isinstance(error, ssl.SSLZeroReturnError | ssl.SSLEOFError):
                    break
                raise _fault(error) from error
            if not count:
                break
            got += count
        return got

    def recvmsg_into(
        self, buffers: Iterable[WriteableBuffer], ancbufsize: int = 0, flags: int = 0
    ) -> tuple[int, list[Any], int, Any]:
        """The same, into several buffers in order."""
        got = 0
        for buffer in buffers:
            view = memoryview(buffer)
            try:
                count = self.recv_into(view)
            except BlockingIOError:
                if not got:
                    raise
                break
            got += count
            if count < len(view):
                break
        return got, [], 0, None

    def _read_raw(self, *, may_block: bool) -> bool:
        """Take what the kernel has; whether there was any. The handshake's answers leave."""
        self._flush_handshake()
        try:
            if not self.may_take:
                raise BlockingIOError
            count = super().recv_into(self._scratch)
        except BlockingIOError:
            if may_block:
                raise
            return False
        if count:
            self._encrypted_in.write(self._scratch[:count])
        else:
            self._encrypted_in.write_eof()
        return True

    # --- writing

    def send(self, data: ReadableBuffer, flags: int = 0) -> int:
        """Encrypt and send the beginning of `data`; how many of its bytes have left."""
        return self.sendmsg([memoryview(data)])

    def sendmsg(
        self,
        buffers: Iterable[ReadableBuffer],
        ancdata: Iterable[Any] = (),
        flags: int = 0,
        address: object = None,
    ) -> int:
        """The same, of several buffers in order."""
        if not self._claimed:
            self._encrypt(buffers)
        while self._unsent:
            self._unsent = self._unsent[super().send(self._unsent) :]
        claimed, self._claimed = self._claimed, 0
        return claimed

    def _encrypt(self, buffers: Iterable[ReadableBuffer]) -> None:
        plain, at = _beginning(buffers), 0
        self.waits_to_read = False
        try:
            while at < len(plain):
                at += self._tls.write(plain[at:])  # one record
        except ssl.SSLWantReadError:
            self.waits_to_read = True
            self._flush_handshake()
            raise BlockingIOError from None
        except ssl.SSLError as error:
            # What the peer has said before says more: the connection is read once more.
            raise ConnectionResetError(str(_fault(error))) from error
        self._claimed = at
        self._unsent = memoryview(self._encrypted_out.read())

    def _flush_handshake(self) -> None:
        """Send what the handshake says: a few KB, which an idle socket takes at once."""
        if self._encrypted_out.pending and not self._unsent:
            super().send(self._encrypted_out.read())


def _beginning(buffers: Iterable[ReadableBuffer]) -> memoryview:
    """The first _WRITE_BYTES: small buffers in one piece, since each write makes a record."""
    pieces: list[memoryview] = []
    room = _WRITE_BYTES
    for buffer in buffers:
        piece = memoryview(buffer)[:room]
        pieces.append(piece)
        room -= len(piece)
        if not room:
            break
    return pieces[0] if len(pieces) == 1 else memoryview(b"".join(pieces))


def _fault(error: ssl.SSLError) -> ProtocolError:
    return ProtocolError(f"TLS: {error.reason or error}; has the peer --kv-encryption tls, too?")


class Encryption:
    """An endpoint's certificate and how it dials and accepts."""

    def __init__(self) -> None:
        certificate, self._digest = _certificate()
        self._scratch = memoryview(bytearray(_READ_BYTES))
        self._accepting = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._accepting.num_tickets = 0
        self._dialling = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        # Nobody has signed the certificate; AUTH says whether it is the peer's.
        self._dialling.check_hostname = False
        self._dialling.verify_mode = ssl.CERT_NONE
        for context in (self._accepting, self._dialling):
            context.minimum_version = ssl.TLSVersion.TLSv1_3
        # The library reads files only; this one has no name and ends here.
        with os.fdopen(os.memfd_create("xpyd-kv-tls", os.MFD_CLOEXEC), "wb") as file:
            file.write(certificate)
            file.flush()
            self._accepting.load_cert_chain(f"/proc/self/fd/{file.fileno()}")

    def accepted(self, sock: socket.socket) -> TlsSocket:
        """The acceptor's side of a connection."""
        return TlsSocket(sock, self._accepting, own=self._digest, scratch=self._scratch)

    def dialled(self, sock: socket.socket) -> TlsSocket:
        """The dialler's, which may still be connecting."""
        return TlsSocket(sock, self._dialling, own=None, scratch=self._scratch)


def _certificate() -> tuple[bytes, bytes]:
    """A new key with its certificate, as PEM, and the digest of the certificate."""
    # Only who encrypts needs the library, and only here.
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "xpyd-kv")])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _LIFETIME)
        .not_valid_after(now + _LIFETIME)
        .sign(key, hashes.SHA256())
    )
    pem = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    pem += certificate.public_bytes(serialization.Encoding.PEM)
    return pem, certificate.fingerprint(hashes.SHA256())
