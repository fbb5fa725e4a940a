"""Fitting a model to its GPU: what runs before the cache is sized, and what the cache gets."""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor
from triton.compiler.errors import CompilationError
from triton.runtime.errors import OutOfResources

from tests.gpu.fake_gpu import MIB, FakeGpu, FakeGraph, FakeGraphDevice, StaticPlainKernels
from tests.gpu.models import BLOCK_SIZE, CPU, cpu_runner, make_model, model_config, shape_of
from tests.worker.runner_driver import Driver
from xpyd_core.errors import UserError
from xpyd_worker.engine.executor import StepInput
from xpyd_worker.model.registry import load_config
from xpyd_worker.runner.gpu_fit import GpuPart
from xpyd_worker.runner.gpu_memory import GpuLimits, GpuUse, largest, warm_ups
from xpyd_worker.runner.kv_cache import host_memory
from xpyd_worker.runner.load import part_on_gpu
from xpyd_worker.runner.runner import ModelRunner

LIMITS = GpuLimits(
    utilization=0.9,
    cache_bytes=None,
    kv_overhead_bytes=0,
    kv_overhead_percent=0,
    max_num_seqs=6,
    max_num_batched_tokens=80,
    max_model_len=256,
    use_graphs=True,
)
CONFIG = model_config("llama")
SHAPE = shape_of(CONFIG, torch.float32)
DEMO = Path(__file__).parents[2] / "examples/demo-model"
EACH = SHAPE.block_bytes * CONFIG.num_layers


class Made:
    """A fit, and what its memory was asked for."""

    def __init__(self, gpu: FakeGpu, limits: GpuLimits, *, refuses: bool = False) -> None:
        self.asked: list[int] = []
        kernels = StaticPlainKernels()
        model = make_model(CONFIG, kernels, CPU, torch.float32)

        def make_memory(size_bytes: int) -> Tensor:
            self.asked.append(size_bytes)
            if refuses:
                raise torch.OutOfMemoryError("CUDA out of memory")
            # Ordinary memory that is never written takes none.
            return host_memory(size_bytes)

        self.runner: ModelRunner
        self.use: GpuUse
        found = GpuPart(model, CONFIG, kernels, SHAPE, gpu, limits, 78 * MIB).fit()
        self.runner, self.use = found.make_runner(make_memory=make_memory), found.use


def test_the_cache_gets_what_the_share_leaves() -> None:
    made = Made(FakeGpu(), LIMITS)
    # 72 MiB, 3 of them at the peak of the largest step. A block more would not fit.
    assert made.runner.num_blocks == 69 * MIB // EACH
    assert made.asked == [made.runner.num_blocks * EACH]
    assert (made.use.found.tensors, made.use.found.others, made.use.graphs) == (3 * MIB, 2 * MIB, 0)


def test_what_moves_kv_has_its_part_of_the_share() -> None:
    made = Made(FakeGpu(), replace(LIMITS, kv_overhead_bytes=3 * MIB, kv_overhead_percent=10))
    assert made.runner.num_blocks == 66 * MIB * 100 // 110 // EACH


def test_a_size_that_is_given_goes_before_the_share() -> None:
    limits = replace(LIMITS, utilization=0.01, cache_bytes=10 * EACH + 1)
    assert Made(FakeGpu(), limits).runner.num_blocks == 10


def test_a_share_that_is_too_small_is_refused() -> None:
    with pytest.raises(UserError, match=r"--gpu-memory-utilization 0\.02 .*Raise it"):
        Made(FakeGpu(), replace(LIMITS, utilization=0.02))


@pytest.mark.parametrize(
    ("given", "flag"), [(10 * EACH, "--kv-cache-memory"), (None, "--gpu-memory-utilization")]
)
def test_memory_that_is_not_there_is_refused_with_the_flag_that_decides(
    given: int | None, flag: str
) -> None:
    limits = replace(LIMITS, cache_bytes=given)
    with pytest.raises(UserError, match=f"KV cache of .* does not fit .*; lower {flag}$"):
        Made(FakeGpu(), limits, refuses=True)


def test_a_share_that_leaves_no_block_is_named() -> None:
    # 1.5 blocks are left, of which what moves KV has two thirds.
    left = (3 * MIB + EACH * 3 // 2) / (80 * MIB)
    limits = replace(LIMITS, utilization=left, kv_overhead_percent=200)
    with pytest.raises(UserError, match=r"^--gpu-memory-utilization: .* hold no block"):
        Made(FakeGpu(), limits)


@pytest.mark.parametrize(
    ("number", "said"),
    [
        (0, "fails with the model loaded: CUDA error: out of memory; lower"),
        (4, "KV cache of .* lower"),
    ],
)
def test_a_graph_without_room_is_refused_with_the_flags(number: int, said: str) -> None:
    gpu = FakeGpu()

    class Full(FakeGraphDevice):
        def capture(self, run: Callable[[], Tensor]) -> FakeGraph:
            if len(self.graphs) == number:
                raise torch.AcceleratorError("CUDA error: out of memory")
            return super().capture(run)

    gpu.graphs = Full()
    with pytest.raises(UserError, match=said):
        Made(gpu, replace(LIMITS, cache_bytes=10 * EACH))


def test_what_else_fails_over_the_real_cache_is_no_want_of_memory() -> None:
    gpu = FakeGpu()

    class Broken(FakeGraphDevice):
        def capture(self, run: Callable[[], Tensor]) -> FakeGraph:
            if len(self.graphs) == 4:
                raise torch.AcceleratorError("CUDA error: an illegal memory access")
            return super().capture(run)

    gpu.graphs = Broken()
    with pytest.raises(torch.AcceleratorError, match="illegal"):
        Made(gpu, replace(LIMITS, cache_bytes=10 * EACH))


def test_a_largest_step_without_room_is_refused_with_the_flags() -> None:
    class Full(StaticPlainKernels):
        def silu_mul(self, gate_up: Tensor) -> Tensor:
            if gate_up.shape[0] == LIMITS.max_num_batched_tokens:
                raise torch.OutOfMemoryError("Tried to allocate 9 GiB")
            return super().silu_mul(gate_up)

    kernels = Full()
    model = make_model(CONFIG, kernels, CPU, torch.float32)
    with pytest.raises(UserError, match=r"80 tokens and 6 sequences .*9 GiB; lower --max-num-b"):
        GpuPart(model, CONFIG, kernels, SHAPE, FakeGpu(), LIMITS, 78 * MIB).fit()


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("Failed to find C compiler"),
        OutOfResources(300_000, 232_448, "shared memory"),
        CompilationError("", ast.Pass(lineno=1, col_offset=0), "input shapes should be >= 16"),
    ],
)
def test_kernels_that_do_not_run_are_refused_with_what_the_device_says(error: Exception) -> None:
    class Broken(StaticPlainKernels):
        def silu_mul(self, gate_up: Tensor) -> Tensor:
            raise error

    kernels = Broken()
    model = make_model(CONFIG, kernels, CPU, torch.float32)
    said = r"(?s)--device: .* fails on cpu: .*(C compiler|shared memory|shapes should be)"
    with pytest.raises(UserError, match=said):
        GpuPart(model, CONFIG, kernels, SHAPE, FakeGpu(), LIMITS, 78 * MIB).fit()


def test_heads_that_are_too_wide_for_a_gpu_are_refused_before_the_model_is_read() -> None:
    wide = model_config("llama", head_dim=272)
    with pytest.raises(UserError, match=r"head_dim: 272; .* at most 256 .*--device cpu"):
        part_on_gpu(Path("none"), wide, dtype=torch.float32, gpu=FakeGpu(), limits=LIMITS)


def test_a_part_runs_its_first_step_only_when_it_is_fitted() -> None:
    """Other ranks may still be at their weights."""
    gpu = FakeGpu(own_kernels=StaticPlainKernels())
    part = part_on_gpu(DEMO, load_config(DEMO), dtype=torch.float32, gpu=gpu, limits=LIMITS)
    assert (gpu.marked, gpu.graphs.graphs) == (0, [])
    assert part.fit().num_blocks > 0
    assert gpu.marked > 0
    assert gpu.graphs.graphs


def test_what_graphs_take_is_measured_before_the_cache_is_sized() -> None:
    gpu = FakeGpu()

    class Growing(FakeGraphDevice):
        def capture(self, run: Callable[[], Tensor]) -> FakeGraph:
            gpu.memory.tensors += MIB // 2
            return super().capture(run)

    gpu.graphs = Growing()
    made = Made(gpu, LIMITS)
    # The second time over the real cache.
    assert [len(graph.output) for graph in gpu.graphs.graphs] == [6, 4, 2, 1] * 2
    assert made.use.graphs == 2 * MIB
    assert made.runner.num_blocks == 67 * MIB // EACH


@pytest.mark.parametrize("use_graphs", [True, False])
def test_the_fitted_runner_gives_the_tokens_of_the_cpu(use_graphs: bool) -> None:
    gpu = FakeGpu()
    limits = replace(LIMITS, cache_bytes=20 * EACH, use_graphs=use_graphs)
    runner = Made(gpu, limits).runner
    assert runner.counters.forwards == 0
    assert tokens_of(runner) == tokens_of(cpu_runner(CONFIG))
    assert (runner.counters.graph_replays > 0) == use_graphs


def tokens_of(runner: ModelRunner) -> list[list[int]]:
    driver = Driver(runner)
    sequences = [driver.add(prompt) for prompt in ([3, 1, 4], [1, 5, 9, 2, 6], [5])]
    driver.run(sequences, tokens=5)
    return [sequence.output for sequence in sequences]


@pytest.mark.parametrize(("seqs", "tokens"), [(6, 80), (1, 300), (5, 5), (3, 7)])
def test_the_largest_step_has_all_tokens_and_all_draws(seqs: int, tokens: int) -> None:
    limits = replace(LIMITS, max_num_seqs=seqs, max_num_batched_tokens=tokens)
    step = largest(limits, BLOCK_SIZE)
    assert step.tokens == tokens
    assert len(step.sequences) == seqs
    assert all(len(one.samples) == 1 for one in step.sequences)
    assert {block for one in step.sequences for block in one.block_ids} == {0}


def test_every_form_of_a_kernel_is_compiled_before_the_first_request() -> None:
    steps = list(warm_ups(replace(LIMITS, max_model_len=1 << 20), BLOCK_SIZE))
    assert all(len(step.sequences) == 1 for step in steps)
    # Both sides of each size that a tile of rows may have.
    prompts = [step.tokens for step in steps if step.tokens > 1]
    assert prompts == [2, 16, 32, 64, 17, 33, 65]
    contexts = [_context(step) for step in steps if step.tokens == 1]
    assert contexts[:2] == [1, 256]
    # One in each power of two of parts of 256 tokens, up to 64 of them.
    assert all(later == 2 * sooner for sooner, later in pairwise(contexts[1:]))
    assert contexts[-1] >= 64 * 256


def test_steps_before_the_first_request_fit_the_model() -> None:
    limits = replace(LIMITS, max_model_len=100, max_num_batched_tokens=40)
    for step in warm_ups(limits, BLOCK_SIZE):
        assert step.tokens <= 40
        assert _context(step) <= 100


def _context(step: StepInput) -> int:
    (sequence,) = step.sequences
    return sequence.start + len(sequence.token_ids)
