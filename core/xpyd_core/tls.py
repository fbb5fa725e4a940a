"""Certificates from files: flags, contexts for servers and clients, reload when a file changes.

A Secret that is mounted changes by the swap of a symbolic link; a certificate by itself changes by
a write or a rename. So the files are looked at every `LOOK_S`, and a context that can be made of
them takes the place of the last one: new connections use it, running ones go on. Files that do not
fit each other, or cannot be read, change nothing: the last good context stays, with a log line.
`tls_connection` is the protocol over a context of a server. See docs/adr/0083.
"""

from __future__ import annotations

import argparse
import asyncio
import calendar
import contextlib
import logging
import os
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Literal

from xpyd_core.errors import UserError

LOOK_S = 2.0
"""Between two looks at the files: a revoked or renewed certificate counts within seconds."""
SOON_S = 7 * 86400.0
"""A certificate that ends within so much has a warning when it is loaded."""
ClientCertificates = Literal[0, 1, 2]
"""vLLM's and uvicorn's numbers: 0 none is asked for, 1 one that is sent is verified, 2 required."""
_BEGIN, _END = "-----BEGIN CERTIFICATE-----", "-----END CERTIFICATE-----"
_SEQUENCE, _UTC_TIME, _GENERAL_TIME, _VERSION = 0x30, 0x17, 0x18, 0xA0
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ServerFiles:
    """What a listener shows, and whom it asks for a certificate."""

    certificate: Path
    """PEM, the leaf first."""
    key: Path | None = None
    """PEM without a password; None: it is in the certificate's file."""
    client_ca: Path | None = None
    """PEM of the authorities of clients' certificates."""
    client_certificates: ClientCertificates = 0

    def make(self) -> ssl.SSLContext:
        """A context for connections that clients open. Raises OSError, which ssl.SSLError is."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.options |= ssl.OP_NO_RENEGOTIATION | ssl.OP_NO_COMPRESSION
        context.set_alpn_protocols(["http/1.1"])
        context.load_cert_chain(self.certificate, self.key, _no_password)
        if self.client_ca is not None:
            context.load_verify_locations(self.client_ca)
        context.verify_mode = ssl.VerifyMode(self.client_certificates)
        return context

    @property
    def paths(self) -> tuple[Path, ...]:
        """Every file."""
        return tuple(p for p in (self.certificate, self.key, self.client_ca) if p is not None)


@dataclass(frozen=True)
class ClientFiles:
    """Whom a client trusts, and what it shows."""

    ca: Path
    """PEM of the authorities that servers' certificates must come from; no others count."""
    certificate: Path | None = None
    """PEM of the client's own certificate, the leaf first; None: it shows none."""
    key: Path | None = None
    """PEM without a password; None: it is in the certificate's file."""

    def make(self) -> ssl.SSLContext:
        """A context for connections to servers. Raises OSError, which ssl.SSLError is."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols(["http/1.1"])
        context.load_verify_locations(self.ca)
        if self.certificate is not None:
            context.load_cert_chain(self.certificate, self.key, _no_password)
        return context

    @property
    def paths(self) -> tuple[Path, ...]:
        """Every file."""
        return tuple(p for p in (self.ca, self.certificate, self.key) if p is not None)


class _Stage(Enum):
    """How near the end of a certificate is."""

    GOOD = 0
    SOON = 1
    ENDED = 2


def _no_password() -> str:
    # OpenSSL would ask for it on the terminal.
    raise ValueError("the key has a password; give a key without one")


class WatchedContext:
    """The context that `files` make, as long as `watch` runs the newest one. `on_reload(is_good)`
    is called when they have changed, once for each change. `clock` gives Unix seconds.

    Raises UserError, with `what` in front (a flag), where the files make none.
    """

    def __init__(
        self,
        files: ServerFiles | ClientFiles,
        what: str,
        on_reload: Callable[[bool], object] = lambda is_good: None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.files = files
        self.on_reload = on_reload
        self._what = what
        self._clock = clock
        self._said_end = _Stage.GOOD
        self._seen = self._look()
        try:
            self.current = files.make()
            self.not_after_s = _not_after(files)
        except (OSError, ValueError) as error:
            raise UserError(f"{what}: {_say(files, error)}") from error
        self._warn()

    async def watch(self) -> None:
        """Reload until cancelled."""
        while True:
            await asyncio.sleep(LOOK_S)
            self.look()

    def look(self) -> None:
        """Reload where a file has changed."""
        # Before the files are read: what changes meanwhile is seen by the next look.
        seen = self._look()
        if seen == self._seen:
            self._warn_of_end()
            return
        self._seen = seen
        try:
            made, not_after_s = self.files.make(), _not_after(self.files)
        except (OSError, ValueError) as error:
            _log.error(
                "%s: %s; the last good files stay in use", self._what, _say(self.files, error)
            )
            self.on_reload(False)
            return
        self.current, self.not_after_s = made, not_after_s
        _log.info("%s: loaded again, for new connections", self._what)
        self._warn()
        self.on_reload(True)

    def _look(self) -> tuple[object, ...]:
        return tuple(_state(path) for path in self.files.paths)

    def _warn(self) -> None:
        private = self.files.key or self.files.certificate
        with contextlib.suppress(OSError):  # it may be swapped just now
            if private is not None and private.stat().st_mode & _OTHERS_MAY_READ:
                said = "%s: every user may read the key in %s: chmod o-r"
                _log.warning(said, self._what, private)
        self._said_end = _Stage.GOOD
        self._warn_of_end()

    def _warn_of_end(self) -> None:
        """Once when the certificate in use will end soon, and once when it has ended."""
        left_s = self.not_after_s - self._clock()
        stage = _Stage.ENDED if left_s <= 0 else _Stage.SOON if left_s < SOON_S else _Stage.GOOD
        if stage == self._said_end:
            return
        self._said_end = stage
        if stage is _Stage.ENDED:
            _log.error(
                "%s: the certificate EXPIRED at %s: clients refuse it. Give a new one; it is "
                "loaded without a restart",
                *(self._what, _shown(self.not_after_s)),
            )
        elif stage is _Stage.SOON:
            _log.warning("%s: the certificate ends at %s", self._what, _shown(self.not_after_s))


def _state(path: Path) -> object:
    try:
        found = path.stat()
    except OSError as error:
        return error.errno
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


_OTHERS_MAY_READ = 0o004


def _say(files: ServerFiles | ClientFiles, error: Exception) -> str:
    """What is wrong, with the names of the files: OpenSSL's errors have none."""
    names = ", ".join(str(path) for path in files.paths)
    if isinstance(error, ssl.SSLError):
        return f"cannot use {names}: {_hint(files, error)}"
    if isinstance(error, OSError):
        unread = [str(path) for path in files.paths if not os.access(path, os.R_OK)]
        return f"cannot read {', '.join(unread) or names}: {error.strerror or error}"
    return f"cannot use {names}: {error}"


def _hint(files: ServerFiles | ClientFiles, error: ssl.SSLError) -> str:
    reason = getattr(error, "reason", None) or str(error)
    if "KEY_VALUES_MISMATCH" in reason:
        return (
            "the key is not that of the first certificate: is the leaf behind its authority, or "
            "has one file been replaced and not the other?"
        )
    if "PEM lib" in reason:
        key = files.key or files.certificate
        return f"no certificate in PEM in {files.certificate}, or no key in PEM in {key}"
    return reason


def _shown(time_s: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time_s))


def _not_after(files: ServerFiles | ClientFiles) -> float:
    """The end of the own certificate; infinite where there is none."""
    if files.certificate is None:
        return float("inf")
    return not_after_s(files.certificate.read_text(encoding="ascii", errors="replace"))


def not_after_s(pem: str) -> float:
    """Unix time at which the first certificate of `pem` ends. ValueError where it has none.

    Python's ssl shows this of a peer's certificate alone.
    """
    start, end = pem.find(_BEGIN), pem.find(_END)
    if not 0 <= start < end:
        raise ValueError("no certificate in PEM")
    der = ssl.PEM_cert_to_DER_cert(pem[start : end + len(_END)])
    try:
        _, at, _ = _element(der, 0)  # Certificate
        _, at, _ = _element(der, at)  # TBSCertificate
        if der[at] == _VERSION:
            at = _element(der, at)[2]
        for _ in range(3):  # serial number, signature, issuer
            at = _element(der, at)[2]
        kind, at, _ = _element(der, at)  # validity
        not_before_end = _element(der, at)[2]
        tag, at, end = _element(der, not_before_end)
    except IndexError as error:
        raise ValueError("a certificate that is cut") from error
    if kind != _SEQUENCE or tag not in (_UTC_TIME, _GENERAL_TIME):
        raise ValueError("a certificate without validity")
    form = "%y%m%d%H%M%SZ" if tag == _UTC_TIME else "%Y%m%d%H%M%SZ"
    return float(calendar.timegm(time.strptime(der[at:end].decode("ascii"), form)))


def _element(der: bytes, at: int) -> tuple[int, int, int]:
    """Tag, begin and end of the content of the element at `at`."""
    tag, size, at = der[at], der[at + 1], at + 2
    if size & 0x80:
        digits = size & 0x7F
        size, at = int.from_bytes(der[at : at + digits]), at + digits
    return tag, at, at + size


def add_server_arguments(parser: argparse.ArgumentParser) -> None:
    """Give `parser` the flags of a TLS listener, with vLLM's names."""
    add = parser.add_argument
    add(
        "--ssl-certfile",
        type=Path,
        metavar="FILE",
        help="serve HTTPS with this certificate (PEM, the leaf first); a new one is loaded when "
        "the file changes",
    )
    add(
        "--ssl-keyfile",
        type=Path,
        metavar="FILE",
        help="its key, without a password (default: it is in --ssl-certfile)",
    )
    add(
        "--ssl-ca-certs",
        type=Path,
        metavar="FILE",
        help="authorities of clients' certificates (default: none is asked for)",
    )
    add(
        "--ssl-cert-reqs",
        type=int,
        choices=(0, 1, 2),
        help="clients' certificates: 0 none, 1 one that is sent is verified, 2 required (default: "
        "2 with --ssl-ca-certs, else 0)",
    )


def read_server_files(args: argparse.Namespace) -> ServerFiles | None:
    """The flags of `add_server_arguments`; None without them. UserError names the wrong one."""
    certificate, authorities, required = args.ssl_certfile, args.ssl_ca_certs, args.ssl_cert_reqs
    if certificate is None:
        for flag in ("ssl_keyfile", "ssl_ca_certs", "ssl_cert_reqs"):
            if getattr(args, flag) is not None:
                raise UserError(f"--{flag.replace('_', '-')}: needs --ssl-certfile")
        return None
    if authorities is None and required:
        raise UserError("--ssl-cert-reqs: needs --ssl-ca-certs, which verifies the certificates")
    if authorities is not None and required == 0:
        raise UserError("--ssl-ca-certs: does nothing with --ssl-cert-reqs 0; give 1 or 2")
    if required is None:
        required = 0 if authorities is None else 2
    return ServerFiles(certificate, args.ssl_keyfile, authorities, required)


def add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    """Give `parser` the flags of who calls engines that serve HTTPS."""
    add = parser.add_argument
    add(
        "--engine-ca-file",
        type=Path,
        metavar="FILE",
        help="authorities of the certificates of engines that serve HTTPS (default: the system's)",
    )
    add(
        "--engine-server-name",
        metavar="NAME",
        help="a name that every engine's certificate has (default: each has the engine's address)",
    )
    add(
        "--engine-certfile",
        type=Path,
        metavar="FILE",
        help="the caller's own certificate, for engines that ask for one",
    )
    add(
        "--engine-keyfile",
        type=Path,
        metavar="FILE",
        help="its key, without a password (default: it is in --engine-certfile)",
    )


def read_engine_files(args: argparse.Namespace) -> ClientFiles | None:
    """The files of `add_engine_arguments`; None without them. UserError names the wrong one."""
    if args.engine_keyfile is not None and args.engine_certfile is None:
        raise UserError("--engine-keyfile: needs --engine-certfile")
    if args.engine_ca_file is None:
        if args.engine_certfile is not None:
            raise UserError("--engine-certfile: needs --engine-ca-file")
        return None
    return ClientFiles(args.engine_ca_file, args.engine_certfile, args.engine_keyfile)


def engine_context(files: ClientFiles | None) -> ssl.SSLContext:
    """For a call to an engine, by files of `read_engine_files`. UserError where they make none."""
    if files is None:
        return ssl.create_default_context()
    return WatchedContext(files, "--engine-ca-file").current
