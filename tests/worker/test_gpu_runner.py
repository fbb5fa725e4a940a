"""The runner over a GPU's seam: tokens as on the CPU by graphs and without, tokens that only the
device knows, block copies, what a failure ends. Plain torch computes; tests/gpu has the kernels."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.gpu.fake_gpu import FakeGpu, FakeMark, StaticPlainKernels
from tests.gpu.models import cpu_runner, gpu_runner, model_config
from tests.worker.ahead_driver import Ahead
from tests.worker.runner_driver import Driver, fork_by_copy, with_params
from xpyd_core.errors import XpydError
from xpyd_worker.engine.executor import DRAWN_BEFORE, Executor, SampleSpec, StepInput
from xpyd_worker.runner.device import DeviceLostError
from xpyd_worker.runner.runner import ModelRunner
from xpyd_worker.runner.sampler import draw

PROMPTS = ([5, 9, 100, 3, 77], [*range(40, 59)], [210], [7, 7, 7, 8, 8, 8, 9, 9])
TOKENS = 8


def make(
    gpu: FakeGpu, *, family: str = "llama", largest_graph: int = 0, blocks: int = 64
) -> ModelRunner:
    """A runner on `gpu`, with graphs of up to `largest_graph` sequences."""
    return gpu_runner(
        gpu,
        StaticPlainKernels(),
        model_config(family),
        dtype=torch.float32,
        draw=draw,
        largest_graph=largest_graph,
        blocks=blocks,
    )


def wanted(family: str = "llama", **changes: object) -> list[list[int]]:
    """What each prompt gives on the CPU, alone."""
    found: list[list[int]] = []
    for prompt in PROMPTS:
        driver = Driver(cpu_runner(model_config(family)))
        sequence = driver.add(prompt, with_params(**changes))
        driver.run([sequence], tokens=TOKENS)
        found.append(sequence.output)
    return found


@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen3-moe"])
@pytest.mark.parametrize("largest_graph", [0, 2, 3, 8])
def test_batches_chunks_and_decodes_give_the_tokens_of_the_cpu(
    family: str, largest_graph: int
) -> None:
    gpu = FakeGpu()
    runner = make(gpu, family=family, largest_graph=largest_graph)
    driver = Driver(runner)
    sequences = [driver.add(prompt) for prompt in PROMPTS]
    driver.run(sequences, tokens=TOKENS, budget=7)
    assert [sequence.output for sequence in sequences] == wanted(family)
    assert sum(graph.replays for graph in gpu.graphs.graphs) == runner.counters.graph_replays
    assert (runner.counters.graph_replays > 0) == (largest_graph > 0)


@pytest.mark.parametrize("largest_graph", [0, 3, 4])
@pytest.mark.parametrize("chunk", [3, 100])
def test_tokens_that_only_the_device_knows_are_those_of_the_cpu(
    largest_graph: int, chunk: int
) -> None:
    found = Ahead(make(FakeGpu(), largest_graph=largest_graph)).run(
        PROMPTS, tokens=TOKENS, chunk=chunk
    )
    assert found == wanted()


def test_draws_ahead_have_the_random_numbers_of_the_cpu() -> None:
    changes = {"temperature": 1.3, "top_p": 0.9, "seed": 9}
    found = Ahead(make(FakeGpu(), largest_graph=4)).run(
        PROMPTS, tokens=TOKENS, chunk=100, **changes
    )
    assert found == wanted(**changes)
    assert found != wanted()


def test_a_graph_runs_for_the_smallest_size_that_holds_the_batch() -> None:
    gpu = FakeGpu()
    driver = Driver(make(gpu, largest_graph=4))
    sequences = [driver.add(prompt) for prompt in PROMPTS[:3]]
    driver.run(sequences, tokens=1)
    assert [graph.replays for graph in gpu.graphs.graphs] == [0, 0, 0]
    driver.run(sequences, tokens=3)
    assert {len(graph.output): graph.replays for graph in gpu.graphs.graphs} == {4: 2, 2: 0, 1: 0}


def test_a_batch_that_fits_no_graph_and_one_with_a_prompt_run_without() -> None:
    gpu = FakeGpu()
    driver = Driver(make(gpu, largest_graph=2))
    three = [driver.add(prompt) for prompt in PROMPTS[:3]]
    driver.run(three, tokens=2)
    late = driver.add(PROMPTS[3])
    driver.step([(three[0], 1), (late, 4)])
    assert not any(graph.replays for graph in gpu.graphs.graphs)


def test_a_token_that_is_none_does_not_index_the_embedding() -> None:
    """The model's numbers are not finite: the engine drops the sequence when it hears of it, one
    step later, and until then the step after must not fail the others."""
    runner = make(FakeGpu(), largest_graph=2)
    driver = Driver(runner)
    broken, sound = driver.add(PROMPTS[0]), driver.add(PROMPTS[2])
    driver.step([(broken, 4)])
    runner.kv_cache.layers[0][broken.blocks[0]] = float("nan")
    parts = (driver.schedule(broken, 1), driver.schedule(sound, 1))
    first = runner.launch(StepInput(1, parts), lambda _: None)
    for sequence in (broken, sound):
        sequence.computed += 1
        sequence.output.append(DRAWN_BEFORE)
    parts = tuple(driver.schedule(sequence, 1) for sequence in (broken, sound))
    assert [part.token_ids for part in parts] == [(DRAWN_BEFORE,)] * 2
    second = runner.launch(StepInput(2, parts), lambda _: None)
    assert list(first.wait().failed) == [broken.seq_id]
    assert list(second.wait().samples) == [sound.seq_id]


def test_a_token_that_the_step_before_did_not_draw_fails_its_sequence_alone() -> None:
    runner = make(FakeGpu())
    driver = Driver(runner)
    known, unknown = driver.add([5, 6]), driver.add([5, 6])
    driver.run([known, unknown], tokens=1)
    driver.step([(known, 1)])
    unknown.output[-1] = DRAWN_BEFORE
    output = driver.step([(known, 1), (unknown, 1)])
    assert "the step before drew, but it drew no one token" in output.failed[unknown.seq_id]
    assert list(output.samples) == [known.seq_id]


def test_tokens_of_two_steps_before_are_forgotten() -> None:
    driver = Driver(make(FakeGpu()))
    sequence, other = driver.add([5, 6]), driver.add(PROMPTS[1])
    driver.step([(sequence, 2)])
    driver.step([(other, 4)])
    sequence.output[-1] = DRAWN_BEFORE
    assert list(driver.step([(sequence, 1)]).failed) == [sequence.seq_id]


def test_a_token_is_found_behind_those_of_a_sequence_that_draws_several() -> None:
    """Rows are ordered by length, so that the one that forks comes first."""
    driver = Driver(make(FakeGpu(), largest_graph=2))
    forking, plain = driver.add([9]), driver.add(PROMPTS[0])
    samples = tuple(SampleSpec(choice, 0) for choice in range(3))
    parts = (replace(driver.schedule(forking, 1), samples=samples), driver.schedule(plain, 5))
    first = driver.runner.launch(StepInput(1, parts), lambda _: None)
    plain.computed = 5
    plain.output.append(DRAWN_BEFORE)
    part = driver.schedule(plain, 1)
    second = driver.runner.launch(StepInput(2, (part,)), lambda _: None)
    found = [first.wait().samples[plain.seq_id][0], second.wait().samples[plain.seq_id][0]]
    assert [token.token_id for token in found] == wanted()[0][:2]


def test_a_forked_choice_is_read_from_the_copy_of_its_block() -> None:
    """The copy is made before the forward that writes behind it, in every layer."""
    runner = make(FakeGpu(), largest_graph=2)
    first, fork = fork_by_copy(runner, PROMPTS[1], 33)
    alone = Driver(cpu_runner(model_config("llama")))
    same = alone.add([*PROMPTS[1], 33])
    alone.run([same], tokens=1)
    assert fork.output[1:] == same.output
    assert first.output == wanted()[1][:2]


def test_copies_outside_the_cache_fail_the_step() -> None:
    runner = make(FakeGpu(), blocks=4)
    with pytest.raises(XpydError, match="outside the cache's 4"):
        runner.launch(StepInput(1, (), ((0, 4),)), lambda _: None)


def test_the_runner_runs_as_far_ahead_as_its_device() -> None:
    """Article fact 44."""
    executor: Executor = make(FakeGpu())
    assert executor.depth == 2
    assert cpu_runner(model_config("llama")).depth == 1


def test_a_step_is_waited_for_behind_its_last_copy() -> None:
    gpu = FakeGpu()
    driver = Driver(make(gpu))
    gpu.marks.append(FakeMark(looks=5))
    mark = gpu.marks[0]
    part = driver.schedule(driver.add([1, 2, 3]), 3)
    running = driver.runner.launch(StepInput(1, (part,)), lambda _: None)
    assert mark.looks == 5
    assert list(running.wait().samples) == [part.seq_id]
    assert mark.looks == 0


@pytest.mark.parametrize("where", ["launch", "wait"])
def test_a_failed_device_ends_the_engine(where: str) -> None:
    gpu = FakeGpu()
    driver = Driver(make(gpu))
    part = driver.schedule(driver.add([1, 2, 3]), 3)

    def layer_done(_: int) -> None:
        if where == "launch":
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    gpu.marks.append(FakeMark(fails=RuntimeError("CUDA error: an illegal memory access")))
    with pytest.raises(RuntimeError, match="illegal memory access"):
        driver.runner.launch(StepInput(1, (part,)), layer_done).wait()


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3 GiB"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        torch.AcceleratorError("CUDA error: out of memory"),
    ],
)
def test_want_of_memory_fails_the_step_and_the_next_one_runs(error: RuntimeError) -> None:
    driver = Driver(make(FakeGpu()))
    sequence = driver.add([1, 2, 3])
    part = driver.schedule(sequence, 3)

    def layer_done(_: int) -> None:
        raise error

    with pytest.raises(XpydError, match=r"step 7 did not fit into memory: CUDA "):
        driver.runner.launch(StepInput(7, (part,)), layer_done)
    again = driver.runner.launch(StepInput(8, (part,)), lambda _: None).wait()
    assert list(again.samples) == [sequence.seq_id]


def test_a_lost_device_is_no_error_that_a_step_may_end_with() -> None:
    assert not issubclass(DeviceLostError, XpydError)
