"""The token counter: an estimate at once, or the engine's own count and block hashes.

Policies and limits call it; it gives a client no error. Its owner runs `run` as a task and calls
`close` at the end. It keeps the child process with the fleet's tokenizer files: it fetches, loads
and restarts. One fetch runs at a time, so that one document at most is in memory. The child is
started when the first engine with files is seen.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator
from typing import NamedTuple

import msgspec

from xpyd_core.bodies import PromptShape
from xpyd_core.request_id import Address
from xpyd_core.tokenizer_files import MAX_BYTES, PATH
from xpyd_router.fleet.instances import InstanceKey, ModelInstances
from xpyd_router.fleet.view import FleetView
from xpyd_router.metrics import RouterMetrics
from xpyd_router.tokens.process import ChildEnded, ChildLimits, TokenChild, Uncounted
from xpyd_router.tokens.prompts import estimate_tokens
from xpyd_router.tokens.wanted_files import NextFetch, WantedFiles
from xpyd_router.upstream.client import Dialer

logger = logging.getLogger(__name__)
_FETCH_S = 30.0
_PIECE_BYTES = 256 * 1024
_LOOK_S = 1.0
"""The period of checks whether the child lives and whether something is due."""
_MAX_START_BACKOFF_S = 60.0


Fetch = Callable[..., Awaitable[bytes]]


class FetchFailed(Exception):
    """An engine did not give its files; the message says why, without its address."""


class NoFiles(FetchFailed):
    """An engine has none to give: it does not know the path, or its tokenizer has no such form."""


async def fetch(to: Address, path: str, *, max_bytes: int, dialer: Dialer | None = None) -> bytes:
    """GET from an engine: the body of a 200. NoFiles for a 404, FetchFailed for anything else, and
    for one longer than `max_bytes`, of which no more than that is read. The deadline is the
    caller's. On a connection of its own, for there are few.
    """
    import aiohttp  # some megabytes that routers without a tokenizer do without

    parts: list[bytes] = []
    size_bytes = 0
    try:
        options = (dialer or Dialer()).options(to)
        secure, name = options["ssl"], options["server_hostname"]
        scheme = "http" if secure is None else "https"
        connector = aiohttp.TCPConnector(local_addr=options["local_addr"])
        async with (
            aiohttp.ClientSession(connector=connector) as http,
            http.get(
                f"{scheme}://{to}{path}",
                allow_redirects=False,
                ssl=secure or True,
                server_hostname=name,
            ) as response,
        ):
            if response.status == 404:
                raise NoFiles("status 404")
            if response.status != 200:
                raise FetchFailed(f"status {response.status}")
            async for part in response.content.iter_chunked(_PIECE_BYTES):
                size_bytes += len(part)
                if size_bytes > max_bytes:
                    raise FetchFailed(f"more than {max_bytes} bytes")
                parts.append(part)
    except (aiohttp.ClientError, OSError) as error:
        raise FetchFailed(type(error).__name__) from error
    return b"".join(parts)


class Prompted(NamedTuple):
    """A request's prompts.

    `tokens`: of all prompts together. `hashes`: of the first prompt's full blocks, as the prefix
    cache of the engine has them that gave the files (and with its block size); at most 2,048, and
    none where there is no exact count or no prefix cache. `block_tokens`: tokens of each of them.
    """

    tokens: int
    hashes: tuple[bytes, ...]
    is_exact: bool
    block_tokens: int = 0


class Tokens:
    """One per router process. `clock` is monotonic seconds; `fetch` is the function above, with the
    router's own address.
    """

    def __init__(
        self,
        *,
        fleet: FleetView,
        fetch: Fetch,
        metrics: RouterMetrics,
        clock: Callable[[], float],
        limits: ChildLimits | None = None,
    ) -> None:
        self._fleet = fleet
        self._fetch = fetch
        self._loads = metrics.tokenizer_loads
        self._limits = limits or ChildLimits()
        self._clock = clock
        self._wanted = WantedFiles()
        self._says_who_has_none = True
        self._child: TokenChild | None = None
        self._start_not_before_s = 0.0
        self._start_backoff_s = 1.0
        results = ("exact", "unknown", "long", "busy", "late", "refused", "failed")
        self._counted = {name: metrics.token_counts.labels(name) for name in results}

    def child_with(self, key: str) -> TokenChild | None:
        """The child, if it has the files of `key`."""
        child = self._child
        if child is None or child.has_ended or not self._wanted.is_loaded(key):
            return None
        return child

    async def run(self) -> None:
        """Follow the fleet for ever."""
        while True:
            for key in self._wanted.see(self._fleet.instances):
                if self._child is not None:
                    self._child.forget(key)
            if self._wanted.without is not None:
                self._tell_of(self._wanted.without)
            child = await self._living_child()
            fetch = self._wanted.next_fetch(self._clock()) if child is not None else None
            if child is not None and fetch is not None:
                await self._bring(child, fetch)
            else:
                await self._fleet.wait_change(_LOOK_S)

    async def close(self) -> None:
        """End the child."""
        if self._child is not None:
            await self._child.close()

    async def _living_child(self) -> TokenChild | None:
        """The child; a new one where it ended, after 1, 2, 4, ... 60 s if it loaded nothing."""
        now = self._clock()
        if self._child is not None and self._child.has_ended:
            await self._child.close()
            logger.warning("the tokenizing process ended; it is started again")
            self._wanted.lost(self._child.blamed, now)
            self._child = None
        if self._child is None and not self._wanted.is_empty and now >= self._start_not_before_s:
            self._start_not_before_s = now + self._start_backoff_s
            self._start_backoff_s = min(2 * self._start_backoff_s, _MAX_START_BACKOFF_S)
            try:
                self._child = await TokenChild.start(self._limits)
            except OSError as error:
                logger.warning("the tokenizing process cannot be started: %s", error)
        return self._child

    async def _bring(self, child: TokenChild, fetch: NextFetch) -> None:
        try:
            async with asyncio.timeout(_FETCH_S):
                body = await self._fetch(fetch.source.http, PATH, max_bytes=MAX_BYTES)
            error = await child.load(fetch.key, body)
        except NoFiles:
            self._wanted.lacks(fetch)
            self._loads.labels("absent").inc()
            self._tell_of(fetch.source.instance)
        except (FetchFailed, TimeoutError) as failure:
            self._failed(fetch, "fetch", str(failure) or "no answer in time")
        except ChildEnded:
            self._loads.labels("ended").inc()  # `WantedFiles` learns of it when the next is started
        else:
            if error:
                self._failed(fetch, "unreadable", error)
                return
            self._wanted.loaded(fetch, self._clock())
            self._start_backoff_s = 1.0
            self._loads.labels("loaded").inc()
            logger.info("tokenizer files loaded", extra={"compatibility": fetch.key})

    def _tell_of(self, instance: InstanceKey) -> None:
        """Say once for this router that an engine has no files: it may be one of hundreds."""
        if self._says_who_has_none:
            self._says_who_has_none = False
            logger.warning(
                "--exact-prefixes: %s gives no tokenizer files; prompts for such engines are "
                "compared as text, and a quarter of their bytes is taken for their tokens "
                "(others are not named)",
                instance.http,
            )

    def _failed(self, fetch: NextFetch, result: str, why: str) -> None:
        self._wanted.failed(fetch, self._clock())
        self._loads.labels(result).inc()
        logger.warning(
            "no tokenizer files: %s", why[:200], extra={"instance": fetch.source.instance.http}
        )

    async def count(
        self, model: str, raw: bytes, prompt: msgspec.Raw, shape: PromptShape | None
    ) -> Prompted:
        """The exact count of the request `raw` in bounded time; where there is none, an estimate by
        the JSON of its `prompt`, which has this `shape`, or of its `messages`, which have none: a
        quarter of its bytes, at least 1. Never raises.
        """
        try:
            for key in _keys(self._fleet.snapshot.of_model(model)):
                child = self.child_with(key)
                if child is not None:
                    tokens, hashes = await child.count(key, raw, is_chat=shape is None)
                    self._counted["exact"].inc()
                    return Prompted(tokens, hashes, True, child.block_tokens[key])
            self._counted["unknown"].inc()
        except Uncounted as uncounted:
            self._counted[uncounted.reason].inc()
        return Prompted(estimate_tokens(prompt, shape), (), False)


def _keys(found: ModelInstances) -> Iterator[str]:
    """Compatibility keys of the instances that may serve the request."""
    for group in found.groups:
        yield (*group.prefill, *group.decode)[0].beat.compatibility
    for instance in found.aggregated:
        yield instance.beat.compatibility
