"""Whole steps over the kernels of a GPU beside plain torch on the CPU: chunks, batches, decodes by
graphs and without, tokens that only the device knows, copies of blocks.

On the CPU through Triton's interpreter, over a fake of what captures and marks; on a GPU over its
own, and there also: nothing in a launch waits for it, and the memory stays within its share.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.gpu.conftest import Kit
from tests.gpu.fake_gpu import FakeGpu
from tests.gpu.models import cpu_runner, gpu_runner, make_model, model_config, shape_of
from tests.gpu.waits import waits_are_errors
from tests.worker.ahead_driver import Ahead
from tests.worker.runner_driver import Driver, fork_by_copy, with_params
from tests.worker.test_gpu_engine import Run
from xpyd_worker.engine.executor import DRAWN_BEFORE, StepInput
from xpyd_worker.runner.device import CudaDevice
from xpyd_worker.runner.gpu_fit import GpuPart
from xpyd_worker.runner.gpu_memory import GpuLimits
from xpyd_worker.runner.runner import ModelRunner
from xpyd_worker.runner.sampler import kernel_draw

PROMPTS = ([5, 9, 100, 3, 77], [*range(40, 57)], [210])
TOKENS = 3
BLOCKS = 16
LIMITS = GpuLimits(
    utilization=0.25,
    cache_bytes=None,
    kv_overhead_bytes=0,
    kv_overhead_percent=0,
    max_num_seqs=6,
    max_num_batched_tokens=200,
    max_model_len=256,
    use_graphs=True,
)
MIXED: list[dict[str, Any]] = [
    {},
    {"temperature": 1.0, "top_p": 0.9, "top_k": 20, "seed": 4, "logprobs": 3},
    {"temperature": 0.7, "min_p": 0.05, "logit_bias": ((5, 2.0),), "min_tokens": 3},
]


def gpu_of(kit: Kit) -> CudaDevice:
    """The device, or what stands for it."""
    if kit.device.type == "cuda":
        return CudaDevice(torch.device("cuda", torch.cuda.current_device()))
    return FakeGpu(kit.gpu.kernels.TritonKernels(kit.device))


def make(kit: Kit, family: str, *, largest_graph: int) -> ModelRunner:
    """A runner with graphs of up to so many sequences; none for 0."""
    gpu = gpu_of(kit)
    return gpu_runner(
        gpu,
        kit.gpu.kernels.TritonKernels(gpu.torch_device),
        model_config(family),
        dtype=kit.dtype,
        draw=kernel_draw(kit.gpu.sampling.sample),
        largest_graph=largest_graph,
        blocks=BLOCKS,
    )


def wanted(family: str) -> list[list[int]]:
    """What each prompt gives in plain torch, alone."""
    found: list[list[int]] = []
    for prompt in PROMPTS:
        driver = Driver(cpu_runner(model_config(family)))
        sequence = driver.add(prompt)
        driver.run([sequence], tokens=TOKENS)
        found.append(sequence.output)
    return found


@pytest.fixture
def float32(kit: Kit) -> Kit:
    """Tokens are equal in it, and only in it."""
    if kit.dtype != torch.float32:
        pytest.skip("equal tokens are for float32")
    return kit


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_chunks_and_batches_give_the_tokens_of_plain_torch(float32: Kit, family: str) -> None:
    runner = make(float32, family, largest_graph=0)
    driver = Driver(runner)
    sequences = [driver.add(prompt) for prompt in PROMPTS]
    driver.run(sequences, tokens=TOKENS, budget=12)
    assert [sequence.output for sequence in sequences] == wanted(family)


@pytest.mark.parametrize(
    ("family", "largest_graph", "replays"), [("llama", 2, 1), ("llama", 4, 2), ("qwen3-moe", 4, 2)]
)
def test_two_steps_under_way_give_the_tokens_of_plain_torch(
    float32: Kit, family: str, largest_graph: int, replays: int
) -> None:
    """By graphs that are padded, and where the batch is larger than the largest of them."""
    runner = make(float32, family, largest_graph=largest_graph)
    assert Ahead(runner).run(PROMPTS, tokens=TOKENS, chunk=12) == wanted(family)
    # The last step has one sequence, the one before it three; before that there are prompts.
    assert runner.counters.graph_replays == replays


def test_a_forked_choice_is_read_from_the_copy_of_its_block(float32: Kit) -> None:
    runner = make(float32, "llama", largest_graph=2)
    first, fork = fork_by_copy(runner, PROMPTS[1], 33)
    alone = Driver(cpu_runner(model_config("llama")))
    same = alone.add([*PROMPTS[1], 33])
    alone.run([same], tokens=1)
    assert (first.output, fork.output[1:]) == (wanted("llama")[1][:2], same.output)


# --- on a GPU only


@pytest.fixture
def gpu(kit: Kit) -> Kit:
    """A real one."""
    if kit.device.type != "cuda":
        pytest.skip("of a GPU's own")
    return kit


def on_gpu(kit: Kit, limits: GpuLimits) -> ModelRunner:
    """Fitted as a worker's is."""
    device = CudaDevice(torch.device("cuda", torch.cuda.current_device()))
    config, kernels, counters = model_config("llama"), device.kernels(), device.counters()
    counters.release()
    free = counters.free()
    model = make_model(config, kernels, device.torch_device, kit.dtype)
    shape = shape_of(config, kit.dtype)
    return GpuPart(model, config, kernels, shape, device, limits, free).fit().make_runner()


@pytest.mark.parametrize("use_graphs", [True, False])
def test_nothing_in_a_launch_waits_for_the_gpu(gpu: Kit, use_graphs: bool) -> None:
    runner = on_gpu(gpu, replace(LIMITS, cache_bytes=1 << 24, use_graphs=use_graphs))
    for is_checked in (False, True):
        # In the first round pinned memory and workspaces are made.
        driver = Driver(runner)
        sequences = [
            driver.add(prompt, with_params(**changes))
            for prompt, changes in zip(PROMPTS, MIXED, strict=True)
        ]
        steps = [driver.schedule(sequence, len(sequence.prompt)) for sequence in sequences]
        launches = [StepInput(1, tuple(steps), ((3, 5),))]
        for sequence in sequences:
            sequence.computed = len(sequence.prompt)
        for number in (2, 3):
            for sequence in sequences:
                sequence.output.append(DRAWN_BEFORE)
            parts = tuple(driver.schedule(sequence, 1) for sequence in sequences)
            launches.append(StepInput(number, parts))
            for sequence in sequences:
                sequence.computed += 1
        torch.cuda.synchronize()
        with waits_are_errors() if is_checked else nullcontext():
            running = [runner.launch(step, lambda _: None) for step in launches]
        for one in running:
            assert len(one.wait().samples) == len(PROMPTS)
    assert runner.counters.graph_replays == (4 if use_graphs else 0)


def test_graphs_give_what_steps_without_them_give(gpu: Kit) -> None:
    found: list[Sequence[Sequence[int]]] = []
    for use_graphs in (True, False):
        runner = on_gpu(gpu, replace(LIMITS, cache_bytes=1 << 24, use_graphs=use_graphs))
        found.append(Ahead(runner).run(PROMPTS, tokens=20, chunk=100))
        assert (runner.counters.graph_replays > 10) == use_graphs
    if gpu.dtype == torch.float32:
        assert found[0] == found[1]


def test_all_of_an_engine_stays_within_its_share(gpu: Kit) -> None:
    gc.collect()
    torch.cuda.empty_cache()
    before, total = torch.cuda.mem_get_info()
    runner = on_gpu(gpu, LIMITS)
    Ahead(runner).run(PROMPTS, tokens=20, chunk=100)
    torch.cuda.synchronize()
    used = before - torch.cuda.mem_get_info()[0]
    # Segments of torch's allocator are rounded up; the cache is nearly all of it.
    assert used <= total * LIMITS.utilization + (256 << 20)
    assert used >= total * LIMITS.utilization * 0.9


def test_an_engine_writes_what_it_writes_on_the_cpu(gpu: Kit) -> None:
    found = Run(on_gpu(gpu, replace(LIMITS, cache_bytes=1 << 24)))
    if gpu.dtype == torch.float32:
        expected = Run(cpu_runner(model_config("llama")))
        # Where logits are drawn from, their last bits may draw another token.
        greedy = [key for key, params in found.sampling.items() if params.temperature == 0]
        assert len(greedy) == 4
        assert [found.tokens[key] for key in greedy] == [expected.tokens[key] for key in greedy]
