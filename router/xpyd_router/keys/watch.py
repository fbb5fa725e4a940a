"""Keeps a ring of client keys as its file says, and counts the routers that share the limits.

The file is read again every two seconds, as Secrets are changed under running pods. One that cannot
be read or has a mistake changes nothing: the last good one holds, a line in the log says why, and
a metric counts it. `Audit` writes a line for each refusal, but not for each of a flood.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import socket
import stat
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from xpyd_core.errors import UserError
from xpyd_router.key_metrics import KeyTable
from xpyd_router.keys.lines import MAX_FILE_BYTES, KeyFile, KeyOptions, digest_of, parse_keys
from xpyd_router.keys.ring import KeyRing

logger = logging.getLogger(__name__)
RELOAD_S = 2.0
_SETTLE_S = 0.1
_SETTLE_READS = 10
_COUNT_S = 10.0
"""Between two counts of the routers."""
API_KEY_NAME = "api-key"
"""The name of keys from flag and environment."""


def read_key_file(path: Path) -> str:
    """The file's text. UserError for none, what is no file, a longer one than a Secret can be, or
    no text."""
    try:
        # A pipe gives its text once, and would hold up who opens it again.
        if not stat.S_ISREG(path.stat().st_mode):
            raise UserError(f"--api-key-file {path}: not a regular file, which is read again")
        with path.open("rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
        if len(content) > MAX_FILE_BYTES:
            raise UserError(f"--api-key-file {path}: longer than {MAX_FILE_BYTES} bytes")
        return content.decode("utf-8-sig")
    except OSError as error:
        raise UserError(f"--api-key-file {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"--api-key-file {path}: not UTF-8") from error


def keys_of(text: str, api_keys: Sequence[str], path: Path | None) -> KeyFile:
    """What a file's text says, with the keys that were given themselves. UserError."""
    found = parse_keys(text, f"--api-key-file {path}")
    if api_keys and API_KEY_NAME in found.options:
        raise UserError(f"--api-key-file {path}: {API_KEY_NAME} is the name of --api-key's keys")
    for key in api_keys:
        digest = digest_of(key.encode())
        if found.by_digest.setdefault(digest, API_KEY_NAME) != API_KEY_NAME:
            raise UserError(f"--api-key: {found.by_digest[digest]} of the file has the same key")
        found.options[API_KEY_NAME] = KeyOptions()
    return found


def count_addresses(host: str) -> int:
    """How many addresses the name has. OSError where it cannot be looked up."""
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return len({address[4][0] for address in found})


class KeyWatch:
    """See the module. `peers`: a name with one address for each router; empty: this one alone."""

    def __init__(
        self,
        ring: KeyRing,
        table: KeyTable,
        *,
        path: Path | None,
        api_keys: Sequence[str] = (),
        peers: str = "",
        count: Callable[[str], int] = count_addresses,
    ) -> None:
        self._ring = ring
        self._table = table
        # Shown from the start: no increase() sees a series that begins with 1.
        table.loads["failed"] += 0
        self._path = path
        self._api_keys = api_keys
        self._peers = peers
        self._count = count
        self._text: str | None = None
        self._said = ""
        self._wrong: tuple[str, UserError] | None = None
        """The last text with a mistake, and what it is."""

    def load(self) -> None:
        """Read the file and go by it, if it changed. UserError where that cannot be done."""
        text = "" if self._path is None else read_key_file(self._path)
        if text != self._text:
            self._take(text)

    def try_load(self) -> None:
        """The same, but go on with what was there."""
        self._attempt(self.load)

    async def run(self) -> None:
        """Look again and again, for ever."""
        # Apart: a name server that does not answer takes half a minute, and no revoked key may.
        await asyncio.gather(self._follow_file(), self._follow_peers())

    async def _follow_peers(self) -> None:
        while self._peers:
            await self.count_routers()
            await asyncio.sleep(_COUNT_S)

    async def _follow_file(self) -> None:
        while True:
            await asyncio.sleep(RELOAD_S)
            if (path := self._path) is not None:
                try:
                    text = await self._read_settled(path)
                except UserError as error:
                    self._complain(error)
                else:
                    self._attempt(lambda text=text: self._take(text))
            self._ring.refresh()

    async def _read_settled(self, path: Path) -> str:
        """The file's text; one that is being written is read until two reads are alike. Most
        editors empty a file first: without this, all keys would be revoked for a moment."""
        text = await asyncio.to_thread(read_key_file, path)
        for _ in range(_SETTLE_READS):
            if text == self._text:
                break
            await asyncio.sleep(_SETTLE_S)
            before, text = text, await asyncio.to_thread(read_key_file, path)
            if text == before:
                break
        return text

    async def count_routers(self) -> None:
        """Have as many routers share the limits as there are; the last number where the name cannot
        be looked up."""
        # UnicodeError: of a name that cannot be one.
        with contextlib.suppress(OSError, UnicodeError):
            count = await asyncio.to_thread(self._count, self._peers)
            self._ring.set_routers(max(1, count))

    def _take(self, text: str) -> None:
        if text == self._text:
            self._said = ""
            return
        if self._wrong is not None and self._wrong[0] == text:
            raise self._wrong[1]  # to read a long file takes some 50 ms of the event loop
        try:
            file = keys_of(text, self._api_keys, self._path)
        except UserError as error:
            self._wrong = text, error
            raise
        self._text, self._said = text, ""
        gone = self._ring.take(file)
        self._table.loads["ok"] += 1
        names = f"; gone: {', '.join(gone)}" if gone else ""
        logger.info("%d client keys of %d names%s", _keys(file), len(file.options), names)

    def _attempt(self, work: Callable[[], None]) -> None:
        try:
            work()
        except UserError as error:
            self._complain(error)

    def _complain(self, error: UserError) -> None:
        self._table.loads["failed"] += 1
        if str(error) != self._said:
            self._said = str(error)
            logger.error("%s: the keys stay as they were", error)


def _keys(file: KeyFile) -> int:
    return len(file.by_digest) + len(file.chosen)


Network = ipaddress.IPv4Network | ipaddress.IPv6Network


def read_proxies(texts: Iterable[str]) -> tuple[Network, ...]:
    """Addresses and networks, with commas between them; `*`: all. UserError for what is none."""
    found: list[Network] = []
    for one in (word.strip() for text in texts for word in text.split(",")):
        try:
            found += map(ipaddress.ip_network, ("0.0.0.0/0", "::/0") if one == "*" else (one,))
        except ValueError as error:
            raise UserError(
                f"--forwarded-allow-ips {one!r}: expected an address, a network such as"
                " 10.0.0.0/8, or *"
            ) from error
    return tuple(found)


def client_behind(
    address: str, headers: Iterable[tuple[bytes, bytes]], proxies: Sequence[Network]
) -> str:
    """Whom a request is of: `address`, or where that is a proxy's what it says of its client. Each
    proxy adds an address behind those that it was given, and only what a proxy added counts."""
    if not proxies:
        return address
    said = b",".join(value for name, value in headers if name == b"x-forwarded-for")
    hops = said.decode("latin-1").split(",") if said else []
    while hops and _is_in(address, proxies):
        hop = hops.pop().strip()
        # Some proxies add a port: 192.0.2.1:5000, [2001:db8::1]:5000.
        host = hop[1:].partition("]")[0] if hop.startswith("[") else hop
        host = host.partition(":")[0] if host.count(":") == 1 else host
        try:
            address = str(ipaddress.ip_address(host))
        except ValueError:
            break
    return address


def _is_in(address: str, networks: Sequence[Network]) -> bool:
    try:
        found = ipaddress.ip_address(address)
    except ValueError:  # "-", where nobody knows it
        return False
    # A socket of both families shows an IPv4 client as ::ffff:10.0.0.1.
    found = getattr(found, "ipv4_mapped", None) or found
    return any(found in one for one in networks)


_LINES_PER_S = 10.0
_MOST_LINES = 50.0


class Audit:
    """Logs refusals: at most ten lines a second over time, with a count of those left out. A line
    has who asked for what, and why it was refused; nothing of the key. Behind `proxies` who asked
    is in X-Forwarded-For."""

    def __init__(
        self, table: KeyTable, clock: Callable[[], float], proxies: Sequence[Network] = ()
    ) -> None:
        self._proxies = proxies
        self._table = table
        self._clock = clock
        self._left = _MOST_LINES
        self._at_s = clock()
        self._unsaid = 0

    def refused(
        self, reason: str, path: str, address: str, headers: Iterable[tuple[bytes, bytes]] = ()
    ) -> None:
        """A request of `address` was refused for `reason`."""
        self._table.refusals[reason.partition(" of ")[0]] += 1
        now_s = self._clock()
        self._left = min(_MOST_LINES, self._left + (now_s - self._at_s) * _LINES_PER_S)
        self._at_s = now_s
        if self._left < 1:
            self._unsaid += 1
            return
        self._left -= 1
        more = f" (and {self._unsaid} more, not logged)" if self._unsaid else ""
        self._unsaid = 0
        shown = ascii(path[:100])[1:-1]
        address = client_behind(address, headers, self._proxies)
        logger.warning("refused 401 path=%s client=%s reason=%r%s", shown, address, reason, more)
