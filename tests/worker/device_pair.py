"""P and D as engines whose caches are on fake GPUs: the real model, the worker's own set-up of the
transfer, and real sockets between them.

A step is enqueued on the fake's compute stream, one operation for each layer, and runs when
somebody asks for an event behind it, in whatever thread that is: all that the transfer does not
order by events is a fault of the machine.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from tests.kv.device_fake import FakeDevice, FakeEvent, Machine
from tests.kv.nccl_fake import FakeNccl, World
from tests.worker.kv_pair import PATIENCE_S, Instance
from tests.worker.runner_driver import BLOCK_SIZE, make_runner
from xpyd_core.errors import XpydError
from xpyd_kv.memory.paged import DevicePagedMemory, PagedMemory
from xpyd_kv.spans import Span
from xpyd_worker.config import WorkerConfig
from xpyd_worker.engine.executor import DRAWN_BEFORE, StepInput, StepOutput
from xpyd_worker.kv.cache import DeviceCache
from xpyd_worker.runner.kv_cache import KvCache
from xpyd_worker.runner.runner import ModelRunner

BLOCKS = 64


def cache_on(device: FakeDevice, world: World | None = None) -> DeviceCache:
    """What a worker keeps its cache in, on a fake GPU."""
    return DeviceCache(
        device,
        tensor_over=lambda view: torch.frombuffer(
            device.bytes_of(device.place_of(view)), dtype=torch.uint8
        ),
        load_nccl=lambda: FakeNccl(world or World(device.machine), device),
    )


class DeviceRunner:
    """An Executor: a runner of the CPU whose steps wait for their turn on a fake GPU."""

    draws_ahead = True

    def __init__(
        self,
        runner: ModelRunner,
        memory: DevicePagedMemory,
        *,
        depth: int,
        before_wait: Callable[[], None],
    ) -> None:
        """`before_wait`: what a test does while a step is under way."""
        self.before_wait = before_wait
        self.runner = runner
        self.num_blocks = runner.num_blocks
        self.depth = depth
        self.under_way = self.most_under_way = 0
        self._memory = memory
        self._drawn: dict[int, int] = {}

    def await_oldest(self, awake: int) -> bool:
        return True

    def launch(self, step: StepInput, layer_done: Callable[[int], None]) -> Launched:
        self.under_way += 1
        self.most_under_way = max(self.most_under_way, self.under_way)
        device: Any = self._memory.device
        compute = device.compute_stream()
        forward = Forward(lambda hook: self._run(step, hook))
        layers = range(len(self._memory.layout.layers))
        sources, targets = zip(*step.block_copies, strict=True) if step.block_copies else ((), ())
        compute.enqueue(
            "copies", self._spans(layers, sources), self._spans(layers, targets), lambda: None
        )
        tables = [(s.block_ids, s.start, s.start + len(s.token_ids)) for s in step.sequences]
        read = {block for ids, _, end in tables for block in ids[: -(-end // BLOCK_SIZE)]}
        written = {
            block
            for ids, start, end in tables
            for block in ids[start // BLOCK_SIZE : -(-end // BLOCK_SIZE)]
        }
        for layer in layers:
            reads, writes = self._spans([layer], read), self._spans([layer], written)
            compute.enqueue(f"step {step.step}, layer {layer}", reads, writes, forward.go_on)
            layer_done(layer)
        compute.enqueue(f"step {step.step}, samples", [], [], forward.go_on)
        return Launched(forward, compute.record(), self._waited_for)

    def _waited_for(self) -> None:
        self.before_wait()
        self.under_way -= 1

    def _spans(self, layers: Sequence[int], blocks: Any) -> list[Span]:
        views = [self._memory.block_view(layer, block) for layer in layers for block in blocks]
        return [Span(view.address, view.length) for view in views]

    def _run(self, step: StepInput, layer_done: Callable[[int], None]) -> StepOutput:
        sequences = tuple(
            replace(s, token_ids=(self._drawn[s.seq_id],)) if DRAWN_BEFORE in s.token_ids else s
            for s in step.sequences
        )
        output = self.runner.launch(replace(step, sequences=sequences), layer_done).wait()
        self._drawn = {seq_id: drawn[0].token_id for seq_id, drawn in output.samples.items()}
        return output


class Forward:
    """A step in a thread of its own, which goes on to the next layer when it is told."""

    def __init__(self, step: Callable[[Callable[[int], None]], StepOutput]) -> None:
        self.output: StepOutput | None = None
        self.error: Exception | None = None
        self._step = step
        self._go = threading.Semaphore(0)
        self._stands = threading.Semaphore(0)
        self._thread = threading.Thread(target=self._run, daemon=True)

    def go_on(self) -> None:
        """Up to the next layer's end, or to the step's."""
        if self._thread.ident is None:
            self._thread.start()
        if self.output is None and self.error is None:
            self._go.release()
            assert self._stands.acquire(timeout=PATIENCE_S)

    def _layer_done(self, _layer: int) -> None:
        self._stands.release()
        assert self._go.acquire(timeout=PATIENCE_S)

    def _run(self) -> None:
        assert self._go.acquire(timeout=PATIENCE_S)
        try:
            self.output = self._step(self._layer_done)
        except Exception as error:
            self.error = error
        self._stands.release()


class Launched:
    """See Running."""

    def __init__(self, forward: Forward, event: FakeEvent, before_wait: Callable[[], None]) -> None:
        self._forward = forward
        self._event = event
        self._before_wait = before_wait

    def wait(self) -> StepOutput:
        self._before_wait()
        assert self._event.wait(PATIENCE_S)
        if self._forward.error is not None:
            raise XpydError("the step failed") from self._forward.error
        assert self._forward.output is not None
        return self._forward.output


def instance(
    config: WorkerConfig,
    folder: Path,
    *,
    machine: Machine | None,
    world: World | None = None,
    depth: int = 1,
    blocks: int = BLOCKS,
    before_wait: Callable[[], None] = lambda: None,
) -> Instance:
    """One whose cache is on a fake GPU of `machine`; None: the CPU's."""
    runner = make_runner(folder, blocks=blocks)
    if machine is None:
        paged = PagedMemory(runner.kv_cache.layers, layers=range(len(runner.kv_cache.layers)))
        return Instance(config, runner, memory=paged, cache=paged.regions)
    gpu = cache_on(machine.device(config.role), world)
    runner.kv_cache = _moved(runner.kv_cache, gpu)
    memory = gpu.paged(runner.kv_cache.layers, layers=range(len(runner.kv_cache.layers)))
    executor = DeviceRunner(runner, memory, depth=depth, before_wait=before_wait)
    return Instance(config, executor, memory=memory, cache=memory.regions, gpu=gpu)


def _moved(cache: KvCache, gpu: DeviceCache) -> KvCache:
    """A cache of the same shape in the memory of `gpu`."""
    memory = gpu.allocate(cache.num_blocks * cache.shape.block_bytes * len(cache.layers))
    layers = len(cache.layers)
    return KvCache(cache.shape, num_layers=layers, num_blocks=cache.num_blocks, memory=memory)
