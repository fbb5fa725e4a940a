"""D's half in the scheduler's process: which requests wait for KV, and which blocks it goes to.

vLLM's thread calls the methods. Nothing can wake that thread while vLLM has no request, so another
one answers OFFERs, and both take `_lock` around the consumer.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from xpyd_core.blocks import blocks_for
from xpyd_core.errors import XpydError
from xpyd_core.kv_outcome import header_of
from xpyd_core.request_id import TransferKey
from xpyd_kv.connector.build import Connector
from xpyd_kv.connector.consumer import KvConsumer
from xpyd_kv.connector.contact import UNVERIFIED
from xpyd_kv.values import BlockPool, Landed, NoKv
from xpyd_kv.vllm import engine_api
from xpyd_kv.vllm.engine_api import GpuBlockPool, Request, SchedulerOutput, VllmConfig
from xpyd_kv.vllm.options import Options
from xpyd_kv.vllm.scheduler import PREFILLED, EngineBlocks, SchedulerHalf, params_of
from xpyd_kv.vllm.worker import Loaded, RankFacts, StepMetadata

_CLOSE_S = 2.0
_ANSWER_S = 0.5
# vLLM decides itself how many requests may load at once.
_SEATS = 1 << 30
_KNOWN_OUTCOMES = 4096
"""More than vLLM runs at once; the API server asks when a request's first token is there."""


@dataclass
class Loading:
    """A request of D that waits for its prompt's KV."""

    request_id: str
    key: TransferKey
    tokens: tuple[int, ...]
    # P's KV address.
    peer: str
    # How many of them P has offered.
    offered: int = 0
    # From when vLLM has given blocks: those of the offered tokens, and how many vLLM had cached.
    blocks: tuple[int, ...] = ()
    cached: int = 0
    # The transfer may write into the blocks; it does so no more.
    is_taken: bool = False
    is_quiet: bool = False
    # vLLM gave other blocks than the landing needs: it begins within a block of P.
    is_misfit: bool = False
    # Why its KV will not come.
    lost: str = ""
    is_over: bool = False

    @property
    def landing_blocks(self) -> tuple[int, ...]:
        """Those that the transfer writes into."""
        return self.blocks[self.cached :]


class GivenBlocks(EngineBlocks):
    """A BlockPool for D that holds what vLLM has given to the request that is served now, and
    nothing else: vLLM alone takes and frees blocks. Own references keep what is to be compared."""

    def __init__(self, pool: GpuBlockPool, block_size: int) -> None:
        super().__init__(pool, block_size)
        self._now: Loading | None = None
        self._taken: dict[TransferKey, Loading] = {}
        self._kept = 0
        self._to_free: deque[Sequence[int]] = deque()

    def serve(self, loading: Loading | None) -> None:
        """Give the blocks of this request, if any are asked for."""
        self._now = loading

    def landed(self, loading: Loading) -> None:
        """The transfer is over: the blocks are the request's alone."""
        self._taken.pop(loading.key, None)

    def match_prefix(self, token_ids: Sequence[int], *, salt: bytes, max_tokens: int) -> list[int]:
        """The blocks that vLLM's lookup has found."""
        if self._now is None:
            return []
        return list(self._now.blocks[: self._now.cached][: max_tokens // self.block_size])

    def take(self, count: int) -> list[int] | None:
        """The blocks behind them."""
        loading = self._now
        if loading is None:
            return None
        rest = loading.landing_blocks
        if len(rest) != count:
            loading.is_misfit = True
            return None
        loading.is_taken = True
        self._taken[loading.key] = loading
        return list(rest)

    @property
    def keeps(self) -> bool:
        """Whether references of our own are held."""
        return self._kept > 0

    def keep(self, block_ids: Sequence[int]) -> Callable[[], None]:
        """Hold references of our own until the call that is returned, on any thread, and the next
        `free_kept`. vLLM's thread."""
        self.hold(block_ids)
        self._kept += 1
        return lambda: self._to_free.append(block_ids)

    def free_kept(self) -> None:
        """Give back what need not be held any more. vLLM's thread."""
        while self._to_free:
            self.give_back(self._to_free.popleft())
            self._kept -= 1

    def retain(self, block_ids: Sequence[int]) -> None:
        """Do nothing: vLLM's request holds them."""

    def release(self, block_ids: Sequence[int]) -> None:
        """Note that no write can land in a request's blocks; a prefix is vLLM's."""
        blocks = tuple(block_ids)
        for key, loading in self._taken.items():
            if loading.landing_blocks == blocks:
                loading.is_quiet = True
                del self._taken[key]
                return


class DecodeHalf(SchedulerHalf):
    """D's. It takes no block by itself: what comes before its request lands in the buffer or the
    host pool, or waits at P."""

    def __init__(self, config: VllmConfig, options: Options) -> None:
        super().__init__(config, options)
        self._lock = threading.RLock()
        self._loadings: dict[str, Loading] = {}
        # Whose blocks the transfer may write into, in the order in which they got them.
        self._open: list[Loading] = []
        self._pool: GivenBlocks | None = None
        self._is_closing = False
        self._thread = threading.Thread(target=self._answer, name="xpyd-kv-answers", daemon=True)
        self.recomputed_tokens = 0
        self._words: dict[str, str] = {}
        """Why a request's KV did not come, '' where it did, by its uuid."""

    def connect(self, ranks: Sequence[RankFacts], pool: BlockPool) -> Connector:
        """See SchedulerHalf; and begin to answer OFFERs."""
        assert isinstance(pool, GivenBlocks)
        self._pool = pool
        connector = super().connect(ranks, pool)
        self._thread.start()
        return connector

    def close(self) -> None:
        """See SchedulerHalf."""
        self._is_closing = True
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join(_CLOSE_S)
        super().close()

    @property
    def _consumer(self) -> KvConsumer:
        assert self.connector is not None
        assert self.connector.consumer is not None
        return self.connector.consumer

    def new_request(self, request: Request) -> None:
        """See KVConnectorBase_V1.on_new_request."""
        pair = self._pair_of(request)
        if pair is None:
            return
        key = TransferKey(pair.uuid, pair.suffix_index)
        if any(other.key == key for other in self._loadings.values()):
            engine_api.log().warning("KV of %s is awaited by another request of this id", key)
            return
        tokens = tuple(request.prompt_token_ids or ())
        loading = self._loadings[request.request_id] = Loading(
            request.request_id, key, tokens, str(pair.prefill)
        )
        states = params_of(request).get("transfer")
        if isinstance(states, list) and "none" in states:
            loading.is_over, loading.lost = True, "not_sent"
            self._count_lost(loading)
            return
        with self._lock:
            now, wait_s = time.monotonic(), self._options.wait_s
            self._consumer.expect(key, wait_s=wait_s, now=now, source=pair.prefill)

    def matched(self, request: Request, computed: int) -> tuple[int | None, bool]:
        """Whether the KV of what vLLM has not computed was offered; None: it may yet be."""
        loading = self._loadings.get(request.request_id)
        if loading is None or loading.is_over or loading.blocks:
            return 0, False
        with self._lock:
            now = time.monotonic()
            self._consumer.poll(now)
            offered = self._consumer.offered(loading.key)
            if offered is not None and not self._consumer.is_compared(loading.key):
                loading.offered = len(offered.token_ids)
                if loading.tokens[: loading.offered] == offered.token_ids:
                    return self._external(loading, computed)
            answer = self._consumer.admit(loading.key, loading.tokens, seats=_SEATS, now=now)
        if isinstance(answer, NoKv):
            loading.is_over, loading.lost = True, answer.reason
            self._count_lost(loading, computed)
            return 0, False
        return None, False

    def allocated(self, request: Request, blocks: Sequence[int], external: int) -> None:
        """vLLM has given blocks; it may decide to load nothing after all."""
        loading = self._loadings.get(request.request_id)
        if loading is None or loading.is_over or loading.blocks:
            return
        if external <= 0:
            self._forget(loading, "local")
            loading.is_over = True
            return
        size = self._config.cache_config.block_size
        loading.blocks = tuple(blocks[: blocks_for(loading.offered, size)])
        loading.cached = (loading.offered - external) // size
        self._open.append(loading)

    def step(self, step: SchedulerOutput) -> StepMetadata:
        """Which loads are over by now."""
        assert self.connector is not None
        assert self._turns is not None
        is_moving = self.connector.metrics.open_transfers > 0
        self._turns.give(is_moving=is_moving)
        with self._lock:
            self._consumer.poll(time.monotonic())
        assert self._pool is not None
        self._pool.free_kept()
        metadata = StepMetadata(b"" if step.total_num_scheduled_tokens else None, is_moving)
        still: list[Loading] = []
        for loading in self._open:
            if self._try_load(loading):
                metadata.landed.append(Loaded(loading.request_id, loading.landing_blocks))
            elif loading.lost and (loading.is_quiet or not loading.is_taken):
                loading.is_over = True
                metadata.lost.append(loading.request_id)
            else:
                still.append(loading)
        self._open = still
        return metadata

    def reported(self, meta: object) -> None:
        """Do nothing: the ranks of a D report landings on their Channel."""

    def finished(self, request: Request, blocks: Sequence[int]) -> dict[str, Any] | None:
        """The request is over; vLLM frees its blocks when their load is reported as over. What it
        has computed of a prompt whose KV is to be compared stays until that is done."""
        loading = self._loadings.pop(request.request_id, None)
        if loading is None:
            return None
        if not loading.is_over:
            self._forget(loading, "aborted")
        elif loading.lost == UNVERIFIED and request.status.name in PREFILLED:
            assert self._pool is not None
            with self._lock:
                if self._consumer.is_compared(loading.key, len(loading.tokens)):
                    release = self._pool.keep(tuple(blocks))
                    self._consumer.computed(loading.key, blocks, release)
        return None

    def has_work(self) -> bool:
        """Whether vLLM's loop must go on, so that loads are reported and blocks come back."""
        return bool(self._open) or (self._pool is not None and self._pool.keeps)

    def reset(self) -> None:
        """Drop all KV that has come and is not a request's yet."""
        with self._lock:
            self._consumer.release_all(time.monotonic())

    def _release(self, uuid: str) -> None:
        """Free KV that has come for a request that does not."""
        with self._lock:
            self._consumer.release(uuid, time.monotonic())

    def _outcomes(self, uuids: str) -> dict[str, str]:
        """As header values of the router's; each is told once."""
        with self._lock:
            found = {uuid: self._words.pop(uuid, None) for uuid in uuids.split(",")}
        return {uuid: header_of(word) for uuid, word in found.items() if word is not None}

    # --- inside

    def _external(self, loading: Loading, computed: int) -> tuple[int, bool]:
        external = loading.offered - computed
        if external > 0:
            return external, True
        self._forget(loading, "local")
        loading.is_over = True
        return 0, False

    def _try_load(self, loading: Loading) -> bool:
        """Let the transfer write into the blocks, as soon as it may; whether all KV is in them."""
        assert self._pool is not None
        with self._lock:
            now = time.monotonic()
            if loading.lost:
                self._consumer.poll(now)
                return False
            self._pool.serve(loading)
            try:
                answer = self._consumer.admit(loading.key, loading.tokens, seats=_SEATS, now=now)
            finally:
                self._pool.serve(None)
        if isinstance(answer, Landed):
            if answer.block_ids != loading.blocks:
                raise XpydError(f"KV of {loading.key} is in other blocks than vLLM gave")
            self._pool.landed(loading)
            self._count_peer(loading)
            loading.is_over = True
            return True
        if isinstance(answer, NoKv):
            loading.lost = answer.reason
            self._count_lost(loading, loading.cached * self._pool.block_size)
        elif loading.is_misfit:
            self._forget(loading, "alignment")
            self._count_lost(loading, loading.cached * self._pool.block_size)
        return False

    def _forget(self, loading: Loading, reason: str) -> None:
        loading.lost = loading.lost or reason
        with self._lock:
            self._consumer.forget(loading.key)

    def _count_lost(self, loading: Loading, computed: int = 0) -> None:
        self.recomputed_tokens += max(0, len(loading.tokens) - computed)
        self._count_peer(loading)
        engine_api.log().warning("KV of %s does not come: %s", loading.key, loading.lost)

    def _count_peer(self, loading: Loading) -> None:
        """The KV of one prompt has come, or does not."""
        # Of several prompts in one body the first that got none counts.
        uuid = loading.key.uuid
        with self._lock:
            self._words[uuid] = self._words.pop(uuid, "") or loading.lost
            while len(self._words) > _KNOWN_OUTCOMES:
                del self._words[next(iter(self._words))]
        if self.connector is not None:
            self.connector.metrics.peers.count(loading.peer, loading.lost)

    def _answer(self) -> None:
        while not self._is_closing:
            self._wake.wait(_ANSWER_S)
            self._wake.clear()
            with self._lock:
                self._consumer.poll(time.monotonic())
