"""What one client's keys use of a router: its limits, its turns, and what runs under its name.

A name's limits are the fleet's: each router has its equal share of them. Processes of one router
count together, in rows of shared memory as those of `admission`, each written by one process. On
the event loop only; `keys.ring` makes the clients.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterable, Sequence
from hashlib import blake2b

import msgspec

from xpyd_core.bodies import BodyBudget
from xpyd_core.errors import ApiError
from xpyd_router.fair_queue import Account, Cells, Cost
from xpyd_router.keys.lines import MAX_NAMES, KeyOptions, salted

Header = tuple[bytes, bytes]
KEY_SLOTS = 4 * MAX_NAMES
KEY_COLUMNS = 6
MARK, REQUESTS, TOKENS, CHARGED, SPENT, RUNNING = range(KEY_COLUMNS)
"""A slot's cells: a fingerprint of the name that has it, its requests and tokens in flight, what
these were charged of a minute's tokens, what those before them took, which only grows, and how many
of its requests have a place."""
UNCOUNTED = Cost(0)
"""What a request of a key without limits holds of them."""
_MINUTE_S = 60.0
_MAX_RETRY_S = 60
_RETRY_S = 1
"""Where only the end of a running request makes room."""
_RETRY = b"%ds" % _RETRY_S
_UNSAID: tuple[Header, Header] = ((b"", b""), (b"", b""))


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
        own[MARK] = mark_of(self.name)
        for column in range(REQUESTS, RUNNING):
            own[column] = self._own[column]
        self._own, self._others = own, others
        self._seen = [_used(cells) for cells in others]
        self.account.place(own[RUNNING : RUNNING + 1], self._running_elsewhere)

    def unplace(self) -> None:
        """Count for itself: another name may get the cells."""
        cells, self._own = self._own, list(self._own)
        self.account.place([0], None)
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

    def _running_elsewhere(self) -> int:
        mark = self._own[MARK]
        return sum(cells[RUNNING] for cells in self._others if cells[MARK] == mark)

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


def mark_of(name: str) -> int:
    """63 bits, not 0."""
    return int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "big") >> 1 | 1
