"""Who a request comes from, and what that key uses: the clients of a router and their limits.

A request with a known key costs one SHA-256 and one look into a dict. A key that is not known may
be one that a person chose: then `KeyRing.find` cannot say, `verify` can, on a thread, and what it
finds is remembered under a digest that only this process can make. Everything else runs on the
event loop (docs/adr/0079).

A key's limits are the fleet's: each router has its equal share of them. Processes of one router
count together, in rows as those of `admission`, each written by one process.
"""

from __future__ import annotations

import asyncio
import math
import secrets
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from hashlib import blake2b, sha256
from hmac import compare_digest
from typing import NamedTuple

import msgspec

from xpyd_core.bodies import BodyBudget
from xpyd_core.errors import ApiError
from xpyd_router.fair_queue import Account, Cost
from xpyd_router.keys.lines import (
    MAX_KEY_BYTES,
    MAX_NAMES,
    KeyFile,
    KeyOptions,
    Scrypt,
    salted,
)

Header = tuple[bytes, bytes]
KEY_SLOTS = 4 * MAX_NAMES
KEY_COLUMNS = 5
MARK, REQUESTS, TOKENS, CHARGED, SPENT = range(KEY_COLUMNS)
"""A slot's cells: a fingerprint of the name that has it, its requests and tokens in flight, what
these were charged of a minute's tokens, and what those before them took, which only grows."""
Cells = list[int] | memoryview
UNCOUNTED = Cost(0)
"""What a request of a key without limits holds of them."""
_MINUTE_S = 60.0
_MAX_RETRY_S = 60
_RETRY_S = 1
"""Where only the end of a running request makes room."""
_RETRY = b"%ds" % _RETRY_S
_UNSAID: tuple[Header, Header] = ((b"", b""), (b"", b""))
_MAX_VERIFIED = 4096
_MAX_WAITING = 8
"""Unknown keys that wait for the thread: some seconds of its work."""
_MAX_GONE = 4096


class Bucket:
    """Tokens that a key may still use now: a minute's at most, a minute's more each minute. Below
    zero where requests took more than was expected. Pure."""

    def __init__(self, per_minute: float, now_s: float) -> None:
        self.per_minute = per_minute
        self.level = per_minute
        self._at_s = now_s

    def fill(self, now_s: float) -> None:
        """Let time pass."""
        passed_s, self._at_s = now_s - self._at_s, now_s
        if passed_s > 0:
            self.level += passed_s * self.per_minute / _MINUTE_S
        if self.level > self.per_minute:
            self.level = self.per_minute

    def resize(self, per_minute: float) -> None:
        """Another limit; what was used stays used, in proportion."""
        self.level *= per_minute / self.per_minute
        self.per_minute = per_minute

    def missing_s(self, tokens: float) -> float:
        """Until so many are there; of more than a minute's, until it is full."""
        short = (tokens if tokens < self.per_minute else self.per_minute) - self.level
        return short * _MINUTE_S / self.per_minute if short > 0 else 0.0


class Client:
    """All keys of one name. Made and changed by its KeyRing."""

    def __init__(self, name: str, clock: Callable[[], float]) -> None:
        self.name = name
        self.account = Account()
        self.bodies: BodyBudget | None = None
        """What its open bodies may take; the application makes it."""
        self.running: set[asyncio.Task[None]] = set()
        """What ends when the last key of this name goes."""
        self.is_gone = False
        """That key went. A request whose body came later is still of this client."""
        self._clock = clock
        self.priority = 0
        """The earliest place in line that its requests may ask for."""
        self._models: frozenset[str] = frozenset()
        self.salt = _json_salt(name)
        """The JSON of what engines get for it."""
        self._share = KeyOptions()
        self.is_limited = False
        """Whether `enter` and `leave` count its requests, and answers say what is left."""
        self._said_limits: tuple[Header, Header] = _UNSAID
        """The headers of its limits, of requests and of tokens, which change with the options."""
        self._bucket: Bucket | None = None
        self._own: Cells = [0] * KEY_COLUMNS
        self._others: Sequence[Cells] = ()
        self._seen: list[tuple[int, int]] = []
        """Of each other process: what was charged and spent together, and what was spent."""

    def may_use(self, model: str) -> bool:
        """Whether it may use the model of this name."""
        return not self._models or model in self._models

    def only(self, models: Iterable[str]) -> list[str]:
        """Those of `models` that it may use."""
        return [model for model in models if self.may_use(model)]

    def set_options(self, options: KeyOptions, routers: int) -> None:
        """What the file says now, for one of so many routers."""
        self.priority, self._models = options.priority, frozenset(options.models)
        self.account.weight = options.weight
        self.salt = _json_salt(options.salt or self.name)

        def share(limit: int | None) -> int | None:
            return None if limit is None else max(1, limit // routers)

        per_minute = share(options.tokens_per_minute)
        self._share = KeyOptions(share(options.requests), share(options.tokens), per_minute)
        self.is_limited = self._share.is_limited
        most = per_minute if per_minute is not None else self._share.tokens
        self._said_limits = (
            (b"x-ratelimit-limit-requests", b"%d" % (self._share.requests or 0)),
            (b"x-ratelimit-limit-tokens", b"%d" % (most or 0)),
        )
        if per_minute is None:
            self._bucket = None
        elif self._bucket is None:
            self._bucket = Bucket(per_minute, self._clock())
            self._seen = [_used(cells) for cells in self._others]
        else:
            self._bucket.resize(per_minute)

    def place(self, own: Cells, others: Sequence[Cells]) -> None:
        """Count in these cells from now on, beside those of other processes."""
        own[MARK] = _mark(self.name)
        for column in range(REQUESTS, KEY_COLUMNS):
            own[column] = self._own[column]
        self._own, self._others = own, others
        self._seen = [_used(cells) for cells in others]

    def unplace(self) -> None:
        """Count for itself: another name may get the cells."""
        cells, self._own = self._own, list(self._own)
        for column in range(KEY_COLUMNS):
            cells[column] = 0
        self._others, self._seen = (), []

    def enter(self, cost: Cost) -> Cost:
        """What the request takes of the key's limits; `leave` gives it back. ApiError 429."""
        if not self.is_limited:
            return UNCOUNTED
        share, tokens = self._share, cost.tokens
        if share.tokens is not None:
            tokens = min(tokens, share.tokens)  # a larger one runs alone, as in admission
        requests, in_flight = self._in_flight()
        if share.requests is not None and requests >= share.requests:
            raise self._refusal("requests at once", share.requests, _RETRY_S)
        if share.tokens is not None and in_flight + tokens > share.tokens:
            raise self._refusal("tokens at once", share.tokens, _RETRY_S)
        bucket = self._bucket
        if bucket is not None:
            self.refresh()
            if (missing_s := bucket.missing_s(cost.tokens)) > 0:
                retry_s = math.ceil(min(missing_s, _MAX_RETRY_S))
                raise self._refusal("tokens per minute", round(bucket.per_minute), retry_s)
            bucket.level -= cost.tokens
        own = self._own
        own[REQUESTS] += 1
        own[TOKENS] += tokens
        own[CHARGED] += cost.tokens
        return cost if tokens == cost.tokens else cost._replace(tokens=tokens)

    def leave(self, held: Cost, charged: int, used: int | None) -> None:
        """The request that holds `held` ended, of `charged` tokens; it took `used`; None: not
        known."""
        if held is UNCOUNTED:
            return
        own = self._own
        own[REQUESTS] -= 1
        own[TOKENS] -= held.tokens
        own[CHARGED] -= charged
        own[SPENT] += charged if used is None else used
        if used is not None and self._bucket is not None:
            self._bucket.level -= used - charged

    def refresh(self) -> None:
        """Take what other processes have used since the last time."""
        bucket = self._bucket
        if bucket is None:
            return
        bucket.fill(self._clock())
        mark, seen = self._own[MARK], self._seen
        for place, cells in enumerate(self._others):
            if cells[MARK] == mark:
                now, (before, spent) = _used(cells), seen[place]
                # Less spent than before: a process that began anew.
                bucket.level -= now[0] - before if now[1] >= spent else now[0]
                seen[place] = now

    def headers(self) -> list[Header]:
        """What is left of its limits, as OpenAI says it; empty without limits."""
        if not self.is_limited:
            return []
        share, bucket = self._share, self._bucket
        said_requests, said_tokens = self._said_limits
        requests, tokens = self._in_flight()
        made: list[Header] = []
        if share.requests is not None:
            left = max(0, share.requests - requests)
            made += (
                said_requests,
                (b"x-ratelimit-remaining-requests", b"%d" % left),
                (b"x-ratelimit-reset-requests", b"0s" if left else _RETRY),
            )
        if bucket is not None:
            bucket.fill(self._clock())
            left = max(0, math.floor(bucket.level))
            reset = b"%ds" % math.ceil(bucket.missing_s(bucket.per_minute))
        elif share.tokens is not None:
            left = max(0, share.tokens - tokens)
            reset = b"0s" if left else _RETRY
        else:
            return made
        made += (
            said_tokens,
            (b"x-ratelimit-remaining-tokens", b"%d" % left),
            (b"x-ratelimit-reset-tokens", reset),
        )
        return made

    def _in_flight(self) -> tuple[int, int]:
        own, mark = self._own, self._own[MARK]
        requests, tokens = own[REQUESTS], own[TOKENS]
        for cells in self._others:
            if cells[MARK] == mark:
                requests += cells[REQUESTS]
                tokens += cells[TOKENS]
        return requests, tokens

    def _refusal(self, what: str, limit: int, retry_s: int) -> ApiError:
        return ApiError(
            429,
            f"this key's limit of {limit} {what} in this router is reached",
            code="rate_limit_exceeded",
            retry_after_s=max(1, retry_s),
        )


def _json_salt(salt: str) -> msgspec.Raw:
    return msgspec.Raw(f'"{salted(salt)}"'.encode())


def _used(cells: Cells) -> tuple[int, int]:
    spent = cells[SPENT]
    return cells[CHARGED] + spent, spent


def _mark(name: str) -> int:
    """63 bits, not 0."""
    return int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "big") >> 1 | 1


def _slots(names: Iterable[str]) -> dict[str, int]:
    """A slot for each name: the same in every process that has the same names, and mostly also in
    one that has some others."""
    taken: dict[int, str] = {}
    for name in sorted(names):
        slot = _mark(name) % KEY_SLOTS
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
