"""Who a request comes from: the keys of a router's clients.

A request with a known key costs one SHA-256 and one look into a dict. A key that is not known may
be one that a person chose: then `KeyRing.find` cannot say, `verify` can, on a thread, and what it
finds is remembered under a digest that only this process can make. Everything else runs on the
event loop (docs/adr/0079).

What a client may use, and does, is in `keys.client`.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from hashlib import blake2b, sha256
from hmac import compare_digest
from typing import NamedTuple

from xpyd_core.errors import ApiError
from xpyd_router.keys.client import KEY_COLUMNS, KEY_SLOTS, Client, Header, mark_of
from xpyd_router.keys.lines import MAX_KEY_BYTES, KeyFile, Scrypt

_MAX_VERIFIED = 4096
_MAX_WAITING = 8
"""Unknown keys that wait for the thread: some seconds of its work."""
_MAX_GONE = 4096


def _slots(names: Iterable[str]) -> dict[str, int]:
    """A slot for each name: the same in every process that has the same names, and mostly also in
    one that has some others."""
    taken: dict[int, str] = {}
    for name in sorted(names):
        slot = mark_of(name) % KEY_SLOTS
        while slot in taken:
            slot = (slot + 1) % KEY_SLOTS
        taken[slot] = name
    return {name: slot for slot, name in taken.items()}


class Refused(NamedTuple):
    """Why a request has no key that counts."""

    message: str
    reason: str
    """For the audit log."""

    @property
    def error(self) -> ApiError:
        """What the client gets."""
        return ApiError(401, self.message, code="invalid_api_key")


_MISSING = "no API key: send Authorization: Bearer KEY, or x-api-key: KEY"
_UNKNOWN = "the API key is not valid"
_SEVERAL = "several API keys: send one"
REVOKED = Refused(_UNKNOWN, "revoked")
"""Of a key that went while the body of its request came."""


def key_in(headers: Iterable[Header]) -> bytes | None:
    """The key that a request bears; empty without one. Authorization wins. None where one of the
    headers comes with several keys: what is in front of the router may take another one."""
    bearer = found = b""
    for name, value in headers:
        if name == b"authorization":
            scheme, _, key = value.partition(b" ")
            if scheme.lower() == b"bearer":
                key = key.strip()
                if bearer and key != bearer:
                    return None
                bearer = key
        elif name == b"x-api-key":
            key = value.strip()
            if found and key != found:
                return None
            found = key
    return bearer or found


class Shown:
    """The one Authorization header with which a connection's last request came, and whose key it
    had while the ring went by `file`: the next request mostly has the same. A ring writes it
    (docs/adr/0092)."""

    __slots__ = ("client", "file", "value")

    def __init__(self) -> None:
        self.value = b""
        self.client: Client | None = None
        self.file: KeyFile | None = None


class KeyRing:
    """See the module. `rows`: the own row of cells and the others', as shared memory has them."""

    def __init__(
        self,
        clock: Callable[[], float],
        rows: tuple[memoryview, Sequence[memoryview]] | None = None,
    ) -> None:
        self._clock = clock
        self._rows = rows
        self._clients: dict[str, Client] = {}
        self._by_digest: dict[bytes, tuple[bytes, Client]] = {}
        self._file, self._is_loaded = KeyFile(), False
        self._slots: dict[str, int] = {}
        self._gone: OrderedDict[bytes, str] = OrderedDict()
        """Digests of keys that were revoked since the start, with their names."""
        self._secret = secrets.token_bytes(32)
        self._verified: OrderedDict[bytes, Client | None] = OrderedDict()
        """By a digest that only this process can make: keys that are no SHA-256 line's."""
        self._hasher = ThreadPoolExecutor(1, thread_name_prefix="keys")
        self._waiting, self._routers = 0, 1

    @property
    def names(self) -> tuple[str, ...]:
        """The names that have a key."""
        return tuple(self._clients)

    def take(self, file: KeyFile) -> list[str]:
        """Go by `file` from now on; the names that have no key any more, whose running requests
        are cut."""
        clients = {
            name: self._clients.get(name) or Client(name, self._clock) for name in file.options
        }
        gone = [client for name, client in self._clients.items() if name not in clients]
        for digest, (_, client) in self._by_digest.items():
            if digest not in file.by_digest:
                self._gone[digest] = client.name
        for digest in file.by_digest:
            self._gone.pop(digest, None)
        while len(self._gone) > _MAX_GONE:
            self._gone.popitem(last=False)
        self._clients, self._file, self._is_loaded = clients, file, True
        self._by_digest = {d: (d, clients[name]) for d, name in file.by_digest.items()}
        self._verified.clear()
        self._place(gone)
        self._share()
        for client in gone:
            client.is_gone = True
            for task in client.running:
                task.cancel()
        return [client.name for client in gone]

    def set_routers(self, count: int) -> None:
        """So many routers share the limits."""
        if count != self._routers:
            self._routers = count
            self._share()

    def refresh(self) -> None:
        """Take what other processes have used; called every few seconds."""
        for client in self._clients.values():
            client.refresh()

    def find(
        self, headers: Sequence[Header], shown: Shown | None = None
    ) -> Client | Refused | None:
        """Who a request is of, or why it is refused; None where only `verify` can say. `shown`: of
        the connection on which it came."""
        bearer, is_usual = b"", False
        for name, value in headers:
            if name == b"authorization":
                is_usual = not bearer
                bearer = value
        is_same = is_usual and shown is not None and shown.file is self._file
        if is_same and shown is not None and compare_digest(bearer, shown.value):
            return shown.client
        key = key_in(headers)
        if key is None:
            return Refused(_SEVERAL, "several keys")
        if not key:
            return Refused(_MISSING, "no key")
        digest = sha256(key).digest()
        found = self._by_digest.get(digest)
        if found is not None and compare_digest(found[0], digest):
            # Beside another scheme the key is x-api-key's, which the next request may not have.
            if shown is not None and is_usual and key_in(((b"authorization", bearer),)):
                shown.value, shown.client, shown.file = bearer, found[1], self._file
            return found[1]
        if not self._is_loaded:
            return None
        if not self._file.chosen or len(key) > MAX_KEY_BYTES:
            name = self._gone.get(digest)
            return Refused(_UNKNOWN, f"revoked key of {name}" if name else "unknown key")
        known = self._known_as(key)
        if known not in self._verified:
            return None
        self._verified.move_to_end(known)
        return self._verified[known] or Refused(_UNKNOWN, "unknown key")

    async def verify(self, headers: Iterable[Header]) -> Client | Refused | ApiError:
        """As `find`, where that cannot say. ApiError 503 where too many unknown keys wait, or the
        file had a mistake when this process began."""
        headers = list(headers)
        if (found := self.find(headers)) is not None:
            return found
        if not self._is_loaded:
            return ApiError(503, "the API keys cannot be read at the moment", retry_after_s=2)
        if self._waiting >= _MAX_WAITING:
            return ApiError(503, "too many unknown API keys are being looked at", retry_after_s=2)
        key, chosen = key_in(headers) or b"", self._file.chosen
        self._waiting += 1
        try:
            loop = asyncio.get_running_loop()
            name = await loop.run_in_executor(self._hasher, partial(_owner, chosen, key))
        finally:
            self._waiting -= 1
        if chosen is not self._file.chosen:
            return await self.verify(headers)  # the file changed meanwhile
        client = None if name is None else self._clients.get(name)
        self._verified[self._known_as(key)] = client
        if len(self._verified) > _MAX_VERIFIED:
            self._verified.popitem(last=False)
        return client or Refused(_UNKNOWN, "unknown key")

    def close(self) -> None:
        """End the thread."""
        self._hasher.shutdown(wait=False, cancel_futures=True)

    def _known_as(self, key: bytes) -> bytes:
        return blake2b(key, key=self._secret, digest_size=32).digest()

    def _share(self) -> None:
        for name, client in self._clients.items():
            client.set_options(self._file.options[name], self._routers)

    def _place(self, gone: Sequence[Client]) -> None:
        if self._rows is None:
            return
        own, others = self._rows
        slots = _slots(self._clients)
        moved = [name for name, slot in slots.items() if self._slots.get(name) != slot]
        for client in (*gone, *(self._clients[name] for name in moved)):
            client.unplace()
        for name in moved:
            part = slice(slots[name] * KEY_COLUMNS, (slots[name] + 1) * KEY_COLUMNS)
            self._clients[name].place(own[part], [row[part] for row in others])
        self._slots = slots


def _owner(chosen: Sequence[tuple[Scrypt, str]], key: bytes) -> str | None:
    """Whose key it is; all lines are looked at, so that the time does not say which."""
    found: str | None = None
    for kind, name in chosen:
        if kind.matches(key):
            found = found or name
    return found
