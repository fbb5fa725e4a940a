"""What a rank runs: its part of the model. A rank's way to torch: `process` imports this module
when the rank beats already, and what torch reads of the environment is set.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Sequence

import torch

from xpyd_core.errors import UserError
from xpyd_core.parallel.checks import ELASTIC, ON_LOSS
from xpyd_core.parallel.partition import partition
from xpyd_kv.ranks.engine import Channel
from xpyd_worker.config import WorkerConfig
from xpyd_worker.engine.executor import LayerExperts, Resize
from xpyd_worker.kv.cache import CacheMemory, gpu_limits, open_cache, paged
from xpyd_worker.kv.rank import RankKv, engine_layout, share_of, start_rank_kv
from xpyd_worker.kv.transports import check_host
from xpyd_worker.model.registry import load_config, own_name, resolve_checkpoint
from xpyd_worker.parallel.api import Part
from xpyd_worker.parallel.distributed import Rendezvous
from xpyd_worker.parallel.stages import HiddenSize
from xpyd_worker.parallel.state import ParallelState, open_parallel
from xpyd_worker.ranks.compute.request_states import DeviceStates, RequestStates
from xpyd_worker.ranks.compute.work import RankStep, RankWork
from xpyd_worker.ranks.start.messages import KvReady, RankReady, Start
from xpyd_worker.ranks.start.preflight import check_devices, look_at_network, look_at_waits
from xpyd_worker.ranks.step.messages import slot_count
from xpyd_worker.runner.device import (
    CPU,
    CudaDevice,
    choose_device,
    cpu_dtype,
    dtype_name,
    gpu_dtype,
)
from xpyd_worker.runner.gpu_fit import GpuFit, GpuPart
from xpyd_worker.runner.load import CpuFit, deal_experts, fit_on_cpu, open_gpu, part_on_gpu
from xpyd_worker.runner.load_draft import open_draft
from xpyd_worker.runner.runner import ModelRunner
from xpyd_worker.system import give_back, resident_bytes


class RankProgram:
    """What a rank computes. Any call raises UserError for what the user can mend, and GroupError
    where another rank is at fault."""

    def __init__(self, start: Start, channel: Channel, give_up: Callable[[str], None]) -> None:
        """`channel`: where the KV transfer's ranks hear of it. `give_up` ends the rank."""
        config = start.config
        self._start = start
        self._channel = channel
        self._give_up = give_up
        torch.set_num_threads(_threads(config, start.pod_ranks))
        self._folder = resolve_checkpoint(config.model, config.revision)
        self._model = load_config(self._folder)
        self._draft = open_draft(config, self._model, self._folder)
        self._device = _device(start)
        if self._device.type == "cuda" and start.sizes.is_elastic:
            given = ELASTIC if config.enable_elastic_ep else f"{ON_LOSS} continue"
            raise UserError(
                f"{given}: replicas that share experts come and go on CPUs only; leave it out, "
                "or give --device cpu"
            )
        if self._device.type == "cuda":
            self._dtype = gpu_dtype(config.dtype, self._model.dtype, self._device)
            open_gpu(CudaDevice(self._device))
        else:
            check_host(config)
            self._dtype = cpu_dtype(config.dtype, self._model.dtype)
        self._cache = CacheMemory(config, open_cache(config, self._device))
        self._stages = partition(
            self._model.num_layers, start.sizes.pipeline, config.layer_partition
        )
        self._parallel: ParallelState | None = None
        self._loaded: GpuPart | None = None
        self._fit: CpuFit | GpuFit | None = None
        self._runner: ModelRunner | None = None
        self._work: RankWork | None = None
        self._kv: RankKv | None = None

    def load(self) -> None:
        """Meet the other ranks and load the weights."""
        self._parallel = parallel = self._meet()
        config, model = self._start.config, self._model
        if self._device.type == "cuda":
            self._loaded = part_on_gpu(
                self._folder,
                model,
                dtype=self._dtype,
                gpu=CudaDevice(self._device),
                limits=gpu_limits(
                    config, model, share=share_of(config, self._stage, model.num_layers)
                ),
                block_size_tokens=config.block_size,
                parallel=parallel,
                draft=self._draft,
            )
        else:
            self._fit = fit_on_cpu(
                self._folder,
                model,
                dtype=self._dtype,
                kv_cache_bytes=config.cpu_cache_bytes,
                block_size_tokens=config.block_size,
                parallel=parallel,
                draft=self._draft,
            )

    def measure(self) -> int:
        """Blocks of KV that fit into the memory that the weights leave. When all ranks have
        loaded: it may wait for them, no longer than steps do. On a CPU nothing has to be run."""
        if self._loaded is not None:
            self._fit = self._loaded.fit()
        assert self._fit is not None, "load comes before"
        return self._fit.num_blocks

    def _meet(self) -> ParallelState:
        start, config, model = self._start, self._start.config, self._model
        host, port = start.rendezvous
        listener = None if start.listener is None else socket.socket(fileno=start.listener)
        # Replicas that share nothing are worlds of their own.
        place = start.place if config.in_lock_step else 0
        return open_parallel(
            start.sizes,
            rank=place * start.sizes.replica + start.rank,
            local_rank=start.pod_rank,
            at=Rendezvous(host=host, port=port, address=start.address, listener=listener),
            device=self._device,
            layers=self._stages,
            hidden=HiddenSize(
                most_rows=config.batched_tokens(on_gpu=self._device.type == "cuda"),
                width=model.hidden_size,
                dtype=self._dtype,
                feature_layers=() if self._draft is None else self._draft.feature_layers,
            ),
            custom_all_reduce=config.custom_all_reduce,
            meeting=start.meeting,
            replica=config.replica if config.in_lock_step else 0,
        )

    def make(self, blocks: int) -> RankReady:
        """Make the KV cache."""
        assert self._fit is not None, "load comes before"
        assert self._parallel is not None, "load comes before"
        config = self._start.config
        self._runner = runner = self._make_runner(blocks)
        kv = self._start_kv(runner) if config.moves_kv else None
        most_tokens = config.max_model_len or self._model.max_positions
        most_tokens = min(most_tokens, blocks * config.block_size)
        self._work = RankWork(
            runner,
            self._states(slot_count(config.max_num_seqs), most_tokens, self._parallel.part),
            parallel=self._parallel,
            kv_sender=None if self._kv is None else self._kv.sender,
            resize=self._resize,
            outlives=config.outlives_replicas,
        )
        give_back()
        return RankReady(
            blocks=blocks,
            weight_bytes=runner.weight_bytes,
            cache_bytes=runner.kv_cache.size_bytes,
            resident_bytes=resident_bytes(),
            dtype=dtype_name(runner.kv_cache.shape.dtype),
            depth=runner.depth,
            on_gpu=self._device != CPU,
            kv=kv,
            draft_bytes=runner.draft_bytes,
        )

    @property
    def _stage(self) -> Sequence[int]:
        return self._stages[self._start.sizes.coordinates(self._start.rank).stage]

    def _make_runner(self, blocks: int) -> ModelRunner:
        fit = self._fit
        assert fit is not None, "load comes before"
        if isinstance(fit, CpuFit):
            return fit.make_runner(blocks, make_memory=self._cache.allocate)
        # Where no KV moves the cache is torch's.
        make = None if self._cache.gpu is None else self._cache.allocate
        return fit.make_runner(blocks, make_memory=make)

    def _start_kv(self, runner: ModelRunner) -> KvReady:
        start, config, model = self._start, self._start.config, self._model
        cache = paged(runner.kv_cache.layers, self._cache.gpu, layers=tuple(self._stage))
        engine = engine_layout(config, cache, kv_heads=model.num_kv_heads, stages=self._stages)
        self._kv = start_rank_kv(
            config,
            rank=start.rank,
            host=config.host,
            engine_id=start.engine_id,
            incarnation=start.incarnation,
            channel=self._channel,
            cache=cache,
            memory=self._cache,
            engine=engine,
            folder=self._folder,
            model_name=own_name(config.model, self._folder),
            give_up=self._give_up,
        )
        return KvReady(engine, model.head_dim, self._kv.address, self._kv.transports.gpu)

    def _states(self, slots: int, most_tokens: int, part: Part) -> RequestStates:
        """Draws come to the host, but on a last stage with a GPU."""
        if self._device == CPU or not part.is_last:
            return RequestStates(slots, most_tokens)
        # Triton is imported with it.
        from xpyd_worker.kernels.gpu.post_update import post_update

        device = CudaDevice(self._device)
        return DeviceStates(slots, most_tokens, device=device, update=post_update)

    def _resize(self, resize: Resize) -> bool:
        """Share experts over other replicas than before; whether this rank's is one of them."""
        parallel, fit = self._parallel, self._fit
        assert parallel is not None, "load comes before"
        assert isinstance(fit, CpuFit), "replicas come and go on CPUs"
        if not parallel.resize(resize):
            return False
        deal_experts(self._folder, fit)
        give_back()
        return True

    def launch(self, message: bytes) -> RankStep:
        """Start a step; see RankWork."""
        assert self._work is not None, "make comes before"
        return self._work.launch(message)

    @property
    def meeting(self) -> int:
        """See RankWork."""
        assert self._work is not None, "make comes before"
        return self._work.meeting

    def experts_chosen(self) -> tuple[LayerExperts, ...]:
        """What the engine cannot learn from another rank: those of a tensor group have the same
        rows. Any thread."""
        assert self._parallel is not None, "make comes before"
        part, runner = self._parallel.part, self._runner
        has_own = part.exchanges_rows or part.tensor_rank == 0
        return runner.experts_chosen() if runner is not None and has_own else ()

    def close(self) -> None:
        """Leave the other ranks. When no step is under way."""
        if self._kv is not None:
            self._kv.close()
        if self._parallel is not None:
            self._parallel.close()


def _threads(config: WorkerConfig, pod_ranks: int) -> int:
    """The threads of one rank: the machine's cores are shared."""
    if config.threads is not None:
        return config.threads
    if "OMP_NUM_THREADS" in os.environ:
        return torch.get_num_threads()
    return max(1, len(os.sched_getaffinity(0)) // (pod_ranks * config.pod_replicas))


def _device(start: Start) -> torch.device:
    """The GPU of the rank's number in its pod, behind those of the replicas before, or the CPU.
    UserError where there are too few."""
    chosen = choose_device(start.config.device)
    if chosen == CPU:
        return chosen
    config = start.config
    check_devices(torch.cuda.device_count(), start.pod_ranks * config.pod_replicas)
    if start.pod_rank == 0:
        look_at_network(
            1 if config.has_replicas and not config.in_lock_step else config.pods, os.environ
        )
        look_at_waits(os.environ)
    before = config.replica % config.pod_replicas * start.pod_ranks
    return choose_device(f"cuda:{before + start.pod_rank}")
