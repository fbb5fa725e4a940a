"""Fits a loaded model to its GPU: largest step first, then the KV cache into what is left, graphs.

Between loading, which has read the weights, and the runner that serves. A first runner with a cache
of one block runs the largest step that the scheduler may make and captures all graphs, so that both
are known by measurement; then it is thrown away. It must not know checkpoints.
"""

from __future__ import annotations

import gc
import logging
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from xpyd_core.errors import UserError, XpydError
from xpyd_core.sizes import format_bytes
from xpyd_worker.engine.executor import StepInput, no_layer_done
from xpyd_worker.kernels.api import KvShape, Plan
from xpyd_worker.model.config import ModelConfig
from xpyd_worker.model.decoder import Decoder
from xpyd_worker.parallel.api import GroupError
from xpyd_worker.runner.device import CudaDevice
from xpyd_worker.runner.gpu_memory import (
    GpuLimits,
    GpuUse,
    kv_cache_bytes,
    lacks_memory,
    largest,
    profile,
    warm_ups,
)
from xpyd_worker.runner.graphs import DecodeGraphs, padded_sizes
from xpyd_worker.runner.kv_cache import (
    KvCache,
    MakeMemory,
    agreed_blocks,
    blocks_in_budget,
    cache_bytes,
)
from xpyd_worker.runner.runner import ModelRunner
from xpyd_worker.runner.sampler import draw_for

if TYPE_CHECKING:
    # Triton is not everywhere where torch is.
    from xpyd_worker.kernels.gpu.kernels import TritonKernels
    from xpyd_worker.kernels.gpu.plan import StaticPlan
    from xpyd_worker.parallel.state import ParallelState
    from xpyd_worker.runner.load_draft import LoadedDraft

_log = logging.getLogger(__name__)
# Sequences of the largest graph. Beyond it a step computes long enough to hide its launches.
_MOST_IN_A_GRAPH = 256


@dataclass(frozen=True)
class GpuFit:
    """A rank's part of a model on its GPU, and the KV blocks for which its share of the memory has
    room. Ranks whose cache is one agree on the least of their numbers before they make a runner."""

    part: GpuPart
    num_blocks: int
    use: GpuUse

    def make_runner(
        self, num_blocks: int | None = None, *, make_memory: MakeMemory | None = None
    ) -> ModelRunner:
        """Make a runner with a cache of so many blocks, or as many as there is room for, in memory
        of torch's allocator or in that of `make_memory`. UserError where that memory is not
        there."""
        part, blocks = self.part, agreed_blocks(self.num_blocks, num_blocks)
        layers = part.model.num_layers
        size = cache_bytes(part.shape, num_layers=layers, num_blocks=blocks)
        with part.gpu.use():
            try:
                memory = (make_memory or part.zeros)(size)
                cache = KvCache(part.shape, num_layers=layers, num_blocks=blocks, memory=memory)
                graphs = part.graphs(cache)
                # What drafts has a cache, too.
                return part.runner(cache, graphs)
            except RuntimeError as error:
                if not lacks_memory(error):
                    raise
                raise UserError(
                    f"a KV cache of {format_bytes(size)} does not fit into the GPU's memory with "
                    f"the model and its graphs; lower {part.limits.flag}"
                ) from error


@dataclass(frozen=True)
class GpuPart:
    """A rank's part of a model, loaded to its GPU, of which `free_at_start` bytes were free before.
    `model` is made of `kernels`. `fit` runs steps, in which ranks wait for each other: all must
    have loaded theirs."""

    model: Decoder
    config: ModelConfig
    kernels: TritonKernels
    shape: KvShape
    gpu: CudaDevice
    limits: GpuLimits
    free_at_start: int
    parallel: ParallelState | None = None
    draft: LoadedDraft | None = None

    def fit(self) -> GpuFit:
        """Find out how many KV blocks the share that the limits name has room for. All ranks of the
        model do it at once, with the same limits: they run the largest step together. UserError
        where the share is too small."""
        limits = self.limits
        with self.gpu.use():
            use = self._measure()
        budget = limits.cache_bytes
        if budget is None:
            left = kv_cache_bytes(
                use.found,
                utilization=limits.utilization,
                graphs=use.graphs,
                kv_transfer=limits.kv_overhead_bytes,
            )
            budget = left * 100 // (100 + limits.kv_overhead_percent)
        beside = 0 if self.draft is None else self.draft.block_bytes
        layers = self.model.num_layers
        blocks = blocks_in_budget(self.shape, layers, budget, limits.flag, beside=beside)
        return GpuFit(self, blocks, use)

    def zeros(self, size_bytes: int) -> Tensor:
        """Memory of torch's allocator."""
        return torch.zeros(size_bytes, dtype=torch.uint8, device=self.gpu.torch_device)

    def runner(self, cache: KvCache, graphs: DecodeGraphs | None) -> ModelRunner:
        """A runner over this cache."""
        return ModelRunner(
            self.model,
            self.config,
            self.kernels,
            cache,
            device=self.gpu,
            graphs=graphs,
            draw=draw_for(self.gpu.torch_device),
            parallel=self.parallel,
            drafter=None if self.draft is None else self.draft.make(cache.num_blocks),
        )

    def graphs(self, cache: KvCache) -> DecodeGraphs | None:
        """Graphs of decoding steps over this cache. None for one of several stages, where a draft
        head reads hidden states, which graphs do not give, and where replicas' rows go to
        experts: a graph cannot hold that the host waits for other ranks. Sums
        over a tensor group are captured, as NCCL's operators are launches like others; on more than
        one GPU this was not run yet."""
        limits, model = self.limits, self.model
        if not limits.use_graphs or model.part.stages > 1 or model.part.exchanges_rows:
            return None
        if model.keeps_features:
            return None

        def forward(token_ids: Tensor, positions: Tensor, plan: Plan) -> Tensor:
            return self.model.forward(token_ids, positions, cache.layers, plan, no_layer_done)

        def plan_buffer(size: int) -> StaticPlan:
            return self.kernels.static_plan(
                self.shape, max_sequences=size, max_context=limits.max_model_len
            )

        with torch.inference_mode():
            return DecodeGraphs(
                self.gpu.graph_device(),
                forward,
                plan_buffer,
                sizes=padded_sizes(min(limits.max_num_seqs, _MOST_IN_A_GRAPH)),
                on=self.gpu.torch_device,
            )

    def _measure(self) -> GpuUse:
        """What the largest step and all graphs take; compiles the kernels that steps will use."""
        try:
            use = self._measured()
        except (XpydError, RuntimeError, *_tritons_errors()) as error:
            reason = error.__cause__ if isinstance(error, GroupError) else error
            if reason is None:
                # Another rank does not answer: that one says what is wrong.
                raise
            if isinstance(reason, XpydError) or (
                isinstance(reason, RuntimeError) and lacks_memory(reason)
            ):
                raise UserError(
                    f"a step of {self.limits.max_num_batched_tokens} tokens and "
                    f"{self.limits.max_num_seqs} sequences fails with the model loaded: {error}; "
                    "lower --max-num-batched-tokens or --max-num-seqs"
                ) from error
            # Such as a C compiler that triton looks for and does not find, or a kernel that its own
            # does not take.
            raise UserError(
                f"--device: the model's first step fails on {self.gpu.torch_device}: {error}"
            ) from error
        # A graph and what it holds know each other in circles.
        gc.collect()
        self.gpu.counters().release()
        return use

    def _measured(self) -> GpuUse:
        counters, block_size = self.gpu.counters(), self.shape.block_size
        size = cache_bytes(self.shape, num_layers=self.model.num_layers, num_blocks=1)
        cache = KvCache(
            self.shape,
            num_layers=self.model.num_layers,
            num_blocks=1,
            memory=self.zeros(size),
        )
        runner = self.runner(cache, None)
        for step in warm_ups(self.limits, block_size):
            _run(runner, step)
        found = profile(
            counters, self.free_at_start, lambda: _run(runner, largest(self.limits, block_size))
        )
        before = counters.free()
        graphs = self.graphs(cache)
        # But for what the runs before each capture took.
        counters.release()
        graph_bytes = max(0, before - counters.free())
        if graphs is not None:
            _log.debug("graphs of up to %d sequences: %s", graphs.most, format_bytes(graph_bytes))
        return GpuUse(found, graph_bytes)


def _run(runner: ModelRunner, step: StepInput) -> None:
    runner.launch(step, no_layer_done).wait()


def _tritons_errors() -> tuple[type[Exception], ...]:
    """What triton's errors derive from, which is none of torch's. A CPU has no triton to import;
    where it failed, it is imported."""
    module = sys.modules.get("triton.errors")
    return () if module is None else (cast("type[Exception]", module.TritonError),)
