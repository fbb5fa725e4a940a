"""Decoding steps of a whole model, as the engine makes them: two under way, tokens never asked for.

A step has to read all weights and the contexts' keys and values once; how fast memory is copied
says how long that takes at least.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from tests.gpu.fake_gpu import FakeGpu
from tests.gpu.models import BLOCK_SIZE, gpu_runner, model_config, shape_of
from xpyd_worker.engine.executor import DRAWN_BEFORE, Running, SampleSpec, StepInput
from xpyd_worker.engine.executor import ScheduledSequence as Scheduled
from xpyd_worker.engine.request import SamplingParams
from xpyd_worker.model.config import ModelConfig
from xpyd_worker.runner.device import CudaDevice
from xpyd_worker.runner.runner import ModelRunner
from xpyd_worker.runner.sampler import kernel_draw

_GREEDY = SamplingParams(max_tokens=1 << 30, seed=0, temperature=0.0)


@dataclass(frozen=True)
class StepSizes:
    """An 8B model's layers, a quarter of them."""

    model: dict[str, int]
    batches: tuple[tuple[int, int], ...] = ((1, 1024), (8, 1024), (64, 1024), (64, 8192))
    """(sequences, context)."""
    warm_ups: int = 20
    steps: int = 100


EIGHT_B = StepSizes(
    {
        "vocab_size": 128_256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 8,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 16384,
    }
)
SMOKE_STEPS = StepSizes({"num_hidden_layers": 1}, batches=((2, 20),), warm_ups=0, steps=2)


def step_rows(
    package: Any, sizes: StepSizes, device: torch.device, dtype: torch.dtype, copy_speed: float
) -> Iterator[dict[str, Any]]:
    """A row for each batch, with graphs and without. `package`: the GPU's modules; `copy_speed` in
    bytes a second."""
    config = model_config("llama", **sizes.model)
    kernels = package.kernels.TritonKernels(device)
    gpu: CudaDevice = (
        FakeGpu(kernels) if device.type != "cuda" else CudaDevice(torch.device("cuda", 0))
    )
    most = max(count for count, _ in sizes.batches)
    blocks = max(count * _blocks(context, sizes) for count, context in sizes.batches)
    for has_graphs in (True, False):
        runner = gpu_runner(
            gpu,
            kernels,
            config,
            dtype=dtype,
            draw=kernel_draw(package.sampling.sample),
            largest_graph=most if has_graphs else 0,
            blocks=blocks,
        )
        # The model's numbers stay finite.
        for layer in runner.kv_cache.layers:
            layer.zero_()
        for count, context in sizes.batches:
            seconds = _seconds(runner, sizes, count, context)
            moved = _moved_bytes(runner, config, count, context, dtype)
            yield {
                "sequences": count,
                "context": context,
                "graphs": has_graphs,
                "ms": round(seconds * 1e3, 3),
                "ofCopySpeed": round(moved / seconds / copy_speed, 3),
            }
        del runner


def _seconds(runner: ModelRunner, sizes: StepSizes, count: int, context: int) -> float:
    """Of one step among many."""
    under_way: deque[Running] = deque()
    each = _blocks(context, sizes)
    begun = 0.0
    for number in range(sizes.warm_ups + sizes.steps):
        if number == sizes.warm_ups:
            begun = time.perf_counter()
        parts = tuple(
            Scheduled(
                seq_id=index,
                token_ids=(DRAWN_BEFORE if number else 1,),
                start=context + number - 1,
                block_ids=tuple(range(index * each, (index + 1) * each)),
                sampling=_GREEDY,
                prompt_tokens=1,
                samples=(SampleSpec(0, number),),
            )
            for index in range(count)
        )
        under_way.append(runner.launch(StepInput(number, parts), lambda _: None))
        if len(under_way) == runner.depth:
            under_way.popleft().wait()
    while under_way:
        under_way.popleft().wait()
    return (time.perf_counter() - begun) / sizes.steps


def _blocks(context: int, sizes: StepSizes) -> int:
    return -(-(context + sizes.warm_ups + sizes.steps) // BLOCK_SIZE)


def _moved_bytes(
    runner: ModelRunner, config: ModelConfig, count: int, context: int, dtype: torch.dtype
) -> int:
    """Weights but for the embedding, of which a step reads a few rows, and the contexts' KV."""
    embedding = config.vocab_size * config.hidden_size * dtype.itemsize
    kv = shape_of(config, dtype).block_bytes // BLOCK_SIZE * config.num_layers
    return runner.weight_bytes - embedding + count * context * kv
