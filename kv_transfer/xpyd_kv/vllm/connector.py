"""The class that vLLM loads: `"kv_connector_module_path": "xpyd_kv.vllm.connector"`.

vLLM makes one object with the role SCHEDULER and one with the role WORKER in each rank's process.
Each passes vLLM's calls to the half of its process. All loads are asynchronous.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from xpyd_core.errors import XpydError
from xpyd_kv.vllm.decode import DecodeHalf, GivenBlocks
from xpyd_kv.vllm.engine_api import (
    GpuBlockPool,
    KvCacheBlocks,
    KvCacheConfig,
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KvConnectorOutput,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    Request,
    SchedulerOutput,
    SupportsHMA,
    VllmConfig,
    check_engine,
)
from xpyd_kv.vllm.gpu import Gpu, open_gpu
from xpyd_kv.vllm.options import check_config, read_options, role_of
from xpyd_kv.vllm.prefill import HeldBlocks, PrefillHalf
from xpyd_kv.vllm.stats import KvPrometheus, KvStats, StatsTaker
from xpyd_kv.vllm.worker import RankFacts, RankHalf

if TYPE_CHECKING:
    from xpyd_kv.vllm.engine_api import Tensor


class XpydConnector(KVConnectorBase_V1, SupportsHMA):
    """See KVConnectorBase_V1 for what vLLM calls when, docs/vllm.md for the options."""

    def __new__(
        cls, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KvCacheConfig
    ) -> XpydConnector:
        """UserError for a vLLM whose connectors have other methods. Before Python refuses a class
        that lacks one."""
        check_engine(cls)
        return super().__new__(cls)

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KvCacheConfig
    ) -> None:
        """UserError, with the reason, for a model or options that are not served."""
        options = read_options(vllm_config)
        check_config(vllm_config, kv_cache_config, options)
        super().__init__(vllm_config, role, kv_cache_config)
        self._rank: RankHalf | None = None
        self._half: PrefillHalf | DecodeHalf | None = None
        self._gpu_pool: GpuBlockPool | None = None
        self._stats: StatsTaker | None = None
        if role == KVConnectorRole.WORKER:
            self._rank = RankHalf(vllm_config, options, open_gpu=self._open_gpu)
        else:
            half = PrefillHalf if role_of(vllm_config) == "P" else DecodeHalf
            self._half = half(vllm_config, options)

    # --- both

    def _open_gpu(self, tensor: Tensor) -> Gpu | None:
        """See OpenGpu. The seam at which tests have a GPU of their own."""
        return open_gpu(tensor)

    def shutdown(self) -> None:
        """End the threads of this process."""
        for part in (self._rank, self._half):
            if part is not None:
                part.close()

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str | None:
        """Return the layout in which a head's tokens are one run."""
        return "LBHNC"

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: Mapping[str, Any]) -> bool:
        """Return True: `save_kv_layer` is not called in full graphs."""
        return True

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: object) -> bool:
        """Return False: KV may move while vLLM takes the cache's memory away. vLLM 0.33 asks, and
        refuses to start with sleep mode; under 0.32 `check_config` does."""
        return False

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KvStats:
        """Return the counts that came from the scheduler's process."""
        return KvStats(data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: Mapping[type[Any], type[Any]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KvPrometheus:
        """Return the counters of the API server."""
        return KvPrometheus(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    # --- a rank's process

    @property
    def _worker(self) -> RankHalf:
        if self._rank is None:
            raise XpydError("a rank's call to the scheduler's connector")
        return self._rank

    def register_kv_caches(self, kv_caches: Mapping[str, Tensor]) -> None:
        """Take the caches of this rank."""
        self._worker.register(kv_caches)

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        """Return what the scheduler's object must know of this rank."""
        return self._worker.facts

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """Begin a step."""
        super().bind_connector_metadata(connector_metadata)
        self._worker.begin_step(connector_metadata)

    def start_load_kv(self, forward_context: object, **kwargs: object) -> None:
        """Do nothing: the I/O thread loads."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing: a request runs when all of its KV is there."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: Tensor, attn_metadata: object, **kwargs: object
    ) -> None:
        """Pass on a layer that is computed."""
        self._worker.layer_done(layer_name)

    def wait_for_save(self) -> None:
        """End the step's forward; waits for nothing, as blocks are held until they are sent."""
        self._worker.end_step()

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Return the loads that are over."""
        return self._worker.results()

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        """Return how many steps are over."""
        return self._worker.steps_done()

    # --- the scheduler's process

    @property
    def _scheduler(self) -> PrefillHalf | DecodeHalf:
        if self._half is None:
            raise XpydError("the scheduler's call to a rank's connector")
        return self._half

    def bind_gpu_block_pool(self, gpu_block_pool: GpuBlockPool) -> None:
        """Keep vLLM's block pool."""
        self._gpu_pool = gpu_block_pool

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: Mapping[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        """Connect to the ranks. `metadata` is by (pipeline stage, place in it)."""
        ranks = [facts for _, facts in sorted(metadata.items()) if isinstance(facts, RankFacts)]
        assert self._gpu_pool is not None
        half, size = self._scheduler, ranks[0].block_size
        blocks = HeldBlocks if isinstance(half, PrefillHalf) else GivenBlocks
        self._stats = StatsTaker(half.connect(ranks, blocks(self._gpu_pool, size)))

    def on_new_request(self, request: Request) -> None:
        """Look whether the request is one of a pair."""
        self._scheduler.new_request(request)

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Return how many tokens' KV will be loaded; None: it is not known yet."""
        return self._scheduler.matched(request, num_computed_tokens)

    def update_state_after_alloc(
        self, request: Request, blocks: KvCacheBlocks, num_external_tokens: int
    ) -> None:
        """Take the blocks that the KV is loaded into."""
        self._scheduler.allocated(request, blocks.get_block_ids()[0], num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """Return what the ranks must know of a step."""
        self._scheduler.running = len(scheduler_output.num_scheduled_tokens)
        return self._scheduler.step(scheduler_output)

    def update_connector_output(self, connector_output: KvConnectorOutput) -> None:
        """Take in what ranks report."""
        self._scheduler.reported(connector_output.kv_connector_worker_meta)

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Never delay the free: a P holds blocks by references of its own."""
        (blocks,) = block_ids
        return False, self._scheduler.finished(request, blocks)

    def has_pending_push_work(self) -> bool:
        """Return whether vLLM's loop must go on."""
        return self._scheduler.has_work()

    def reset_cache(self) -> bool | None:
        """Drop KV that is on its way: its weights are no more the model's."""
        self._scheduler.reset()
        return True

    def get_kv_connector_stats(self) -> KvStats | None:
        """Return what was counted since the last call; a rank's counts come by its Channel."""
        half = self._half
        if half is None or self._stats is None:
            return None
        recomputed = half.recomputed_tokens if isinstance(half, DecodeHalf) else 0
        return self._stats.take(recomputed)
