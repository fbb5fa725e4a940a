"""A step's tensors, its limits, its errors, and the size of the KV cache."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.worker.runner_driver import Driver, make_runner, tiny_checkpoint, with_params
from xpyd_core.errors import UserError, XpydError
from xpyd_worker.engine.executor import (
    Executor,
    SampleSpec,
    ScheduledSequence,
    StepInput,
    StepOutput,
)
from xpyd_worker.kernels.api import KvShape
from xpyd_worker.runner.device import cpu_is_fast_in, resolve_dtype
from xpyd_worker.runner.kv_cache import blocks_in_budget
from xpyd_worker.runner.runner import ModelRunner

SHAPE = KvShape(kv_heads=2, head_dim=16, block_size=16, dtype=torch.float32)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama")
    tiny_checkpoint(path, "llama")
    return path


@pytest.fixture
def runner(folder: Path) -> ModelRunner:
    return make_runner(folder, blocks=8)


def scheduled(runner: ModelRunner, tokens: int = 5) -> ScheduledSequence:
    """One sequence that asks for a token."""
    driver = Driver(runner)
    return driver.schedule(driver.add(list(range(tokens)), with_params(max_tokens=9)), tokens)


def execute(runner: ModelRunner, *sequences: ScheduledSequence) -> StepOutput:
    """One step."""
    return runner.launch(StepInput(1, sequences), lambda layer: None).wait()


def test_the_runner_is_an_executor(runner: ModelRunner) -> None:
    executor: Executor = runner
    assert executor.num_blocks == 8


def test_a_step_without_sequences_copies_blocks_and_runs_no_forward(runner: ModelRunner) -> None:
    cache = runner.kv_cache.layers[2]
    cache[3] = 7.0
    output = runner.launch(StepInput(1, (), ((3, 5),)), lambda layer: None).wait()
    assert output == StepOutput({}, {})
    assert runner.counters.forwards == 0
    assert bool((cache[5] == 7.0).all())


def test_each_sequence_gets_the_samples_it_asked_for_in_its_order(runner: ModelRunner) -> None:
    """Choices fork from one row: each draws with its own number, whatever the rows' order is."""
    driver = Driver(runner)
    params = with_params(temperature=1.0, seed=11)
    forked = replace(
        driver.schedule(driver.add(list(range(20)), params), 20),
        samples=tuple(SampleSpec(choice, 0) for choice in (4, 2, 9)),
    )
    silent = replace(driver.schedule(driver.add([5, 6], params), 2), samples=())
    single = driver.schedule(driver.add([7], params), 1)
    tokens = execute(runner, forked, silent, single).samples
    assert {seq_id: len(found) for seq_id, found in tokens.items()} == {
        forked.seq_id: 3,
        single.seq_id: 1,
    }
    for spec, token in zip(forked.samples, tokens[forked.seq_id], strict=True):
        alone = execute(runner, replace(forked, samples=(spec,))).samples[forked.seq_id]
        assert alone == (token,)
    assert execute(runner, single).samples[single.seq_id] == tokens[single.seq_id]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"token_ids": (1, 307, 2)}, "token id"),
        ({"token_ids": (-1,)}, "token id"),
        ({"token_ids": ()}, "0 tokens"),
        ({"block_ids": (8,)}, "block"),
        ({"block_ids": (-1,)}, "block"),
        ({"block_ids": ()}, "in 0 blocks"),
        ({"start": 14}, "5 tokens from 14 in 1 blocks"),
    ],
)
def test_what_would_touch_foreign_memory_fails_alone_and_by_name(
    runner: ModelRunner, changes: dict[str, object], words: str
) -> None:
    before = [layer.clone() for layer in runner.kv_cache.layers]
    good = scheduled(runner)
    bad = replace(good, seq_id=99, log_id="ab" * 16, **changes)  # type: ignore[arg-type]  # a table of fields
    output = execute(runner, bad)
    assert output == StepOutput({}, {}, output.failed)
    assert list(output.failed) == [99]
    assert "ab" * 16 in output.failed[99]
    assert words in output.failed[99]
    assert runner.counters.forwards == 0
    assert all(torch.equal(a, b) for a, b in zip(before, runner.kv_cache.layers, strict=True))
    alone = execute(runner, good)
    assert len(alone.samples[good.seq_id]) == 1
    assert execute(runner, bad, good) == replace(alone, failed=output.failed)


def test_a_failure_inside_torch_is_our_error_and_the_runner_goes_on(runner: ModelRunner) -> None:
    sequence = scheduled(runner)

    def fail(layer: int) -> None:
        raise RuntimeError("not enough memory")

    with pytest.raises(XpydError, match=r"step 4 .*not enough memory"):
        runner.launch(StepInput(4, (sequence,)), fail)
    assert len(execute(runner, sequence).samples[sequence.seq_id]) == 1


def test_logits_that_are_not_finite_fail_their_sequence_alone_and_by_name(
    runner: ModelRunner,
) -> None:
    sound, broken = scheduled(runner), Driver(runner)
    alone = execute(runner, sound)
    runner.kv_cache.layers[0][7] = float("nan")
    sequence = broken.add(list(range(20)), shared_blocks=[7])
    broken.take_blocks(1)
    bad = replace(broken.schedule(sequence, 4), seq_id=99)
    output = execute(runner, bad, sound)
    assert list(output.failed) == [99]
    assert f"{sequence.seq_id:032x}: the model gave logits that are not finite" in output.failed[99]
    assert output.samples == alone.samples


def test_the_runner_changes_no_global_state_of_torch(runner: ModelRunner) -> None:
    def state() -> tuple[object, ...]:
        threads, dtype = torch.get_num_threads(), torch.get_default_dtype()
        return threads, dtype, torch.is_grad_enabled(), torch.is_inference_mode_enabled()

    before, random = state(), torch.get_rng_state()
    execute(runner, scheduled(runner))
    assert state() == before
    assert torch.equal(random, torch.get_rng_state())


def test_layer_done_is_logged_at_debug_only(
    runner: ModelRunner, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "xpyd_worker"):
        execute(runner, scheduled(runner))
    assert not caplog.records
    with caplog.at_level(logging.DEBUG, "xpyd_worker"):
        execute(runner, scheduled(runner))
    lines = [r for r in caplog.records if r.getMessage() == "layer done"]
    assert [(vars(r)["layer"], vars(r)["step"]) for r in lines] == [(0, 1), (1, 1), (2, 1)]
    times = [vars(r)["monotonic_ns"] for r in lines]
    assert times == sorted(times)


def test_the_cache_is_as_large_as_its_budget() -> None:
    # 2 (K and V) x 16 tokens x 2 heads x 16 x 4 bytes, over 3 layers.
    each = 2 * 16 * 2 * 16 * 4 * 3
    assert blocks_in_budget(SHAPE, 3, each) == 1
    assert blocks_in_budget(SHAPE, 3, 10 * each - 1) == 9
    with pytest.raises(UserError, match="--kv-cache-memory"):
        blocks_in_budget(SHAPE, 3, each - 1)


def test_a_block_of_a_llama_8b_layer_is_64_kib() -> None:
    shape = KvShape(kv_heads=8, head_dim=128, block_size=16, dtype=torch.bfloat16)
    assert shape.block_bytes == 65_536


@pytest.mark.parametrize(
    ("requested", "stored", "fast", "dtype"),
    [
        ("auto", "bfloat16", True, torch.bfloat16),
        ("auto", "bfloat16", False, torch.float32),
        ("auto", "float16", False, torch.float32),
        ("auto", "float32", True, torch.float32),
        ("bfloat16", "float32", False, torch.bfloat16),
        ("float32", "bfloat16", True, torch.float32),
    ],
)
def test_auto_is_the_checkpoints_dtype_where_the_processor_is_fast_in_it(
    requested: str, stored: str, fast: bool, dtype: torch.dtype
) -> None:
    assert resolve_dtype(requested, stored, is_fast=fast) == dtype


def test_an_unknown_dtype_is_refused() -> None:
    with pytest.raises(UserError, match="--dtype"):
        resolve_dtype("int8", "float32", is_fast=True)


@pytest.mark.parametrize(
    ("text", "dtype", "fast"),
    [
        ("processor: 0\nflags\t\t: fpu avx512_bf16 amx_tile\n", "bfloat16", True),
        ("flags\t: fpu avx512_bf16\n", "float16", False),
        ("flags\t: fpu avx512_fp16\n", "float16", True),
        ("flags\t: fpu avx2 avx512f\n", "bfloat16", False),
        ("Features\t: fp asimd bf16\n", "bfloat16", True),
        ("Features\t: fp asimdhp\n", "float16", True),
        ("", "bfloat16", False),
        ("", "float32", True),
        (None, "bfloat16", False),
    ],
)
def test_the_processor_says_whether_it_is_fast_in_16_bits(
    tmp_path: Path, text: str | None, dtype: str, fast: bool
) -> None:
    path = tmp_path / "cpuinfo"
    if text is not None:
        path.write_text(text)
    assert cpu_is_fast_in(dtype, path) is fast
