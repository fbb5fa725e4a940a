"""`LLM` and `xpyd bench` on several ranks: the same tokens, no process is left, a loss is said."""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.ranks.kit.instances import is_alive
from xpyd_core.cli import main
from xpyd_core.errors import UserError
from xpyd_worker import (
    LLM,
    RankLostError,
    RequestOutput,
    SamplingParams,
    StructuredOutputsParams,
)
from xpyd_worker.load.engine import LoadedEngine
from xpyd_worker.ranks.instance import Instance

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "examples/demo-model"
WAIT_S = 120.0
PROMPTS = ["San Francisco is a", "Return a list of", "class", "The", "A city:"]
TWO_KEYS = StructuredOutputsParams(
    json={
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 9}, "age": {"type": "integer"}},
        "required": ["name"],
    }
)
PARAMS = [
    SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=1),
    SamplingParams(temperature=0, max_tokens=5, prompt_logprobs=1),
    SamplingParams(temperature=1.5, seed=7, n=2, max_tokens=8, ignore_eos=True),
    SamplingParams(temperature=0, max_tokens=12, repetition_penalty=1.3),
    SamplingParams(seed=5, n=2, max_tokens=60, structured_outputs=TWO_KEYS),
]
starts_ranks = pytest.mark.slow  # torch is imported in each


def make_llm(**options: object) -> LLM:
    small = {"dtype": "float32", "kv_cache_memory": "16Mi", "threads": 1, "max_model_len": 256}
    return LLM(MODEL, **{**small, **options})  # pyright: ignore[reportArgumentType]


def engine_of(llm: LLM) -> LoadedEngine:
    # Users of an LLM have no way to its ranks and counters.
    parts = llm._session._parts  # pyright: ignore[reportPrivateUsage]
    assert parts is not None
    return parts[0]


def instance_of(llm: LLM) -> Instance:
    instance = engine_of(llm).ready.instance
    assert instance is not None
    return instance


def pids_of(llm: LLM) -> list[int]:
    instance = instance_of(llm)
    return [instance.rank_identity(rank).pid for rank in range(len(instance.channels))]


def wait_until_gone(pids: list[int]) -> None:
    wait_for(lambda: not any(map(is_alive, pids)))


def wait_for(condition: Callable[[], bool]) -> None:
    ticks = threading.Event()
    for _ in range(round(WAIT_S / 0.05)):
        if condition():
            return
        ticks.wait(0.05)
    raise AssertionError("it did not come to pass")


def own_threads() -> set[str]:
    names = {"engine", "offline", "offline-close", "rank-links", "rank-watch"}
    return names & {thread.name for thread in threading.enumerate()}


def tokens(outputs: list[RequestOutput]) -> list[tuple[int, ...]]:
    return [choice.token_ids for output in outputs for choice in output.outputs]


@pytest.fixture(scope="module")
def alone() -> list[tuple[int, ...]]:
    with make_llm() as llm:
        return tokens(llm.generate(PROMPTS, PARAMS, use_tqdm=False))


@pytest.fixture
def two() -> Iterator[LLM]:
    with make_llm(tensor_parallel_size=2) as llm:
        yield llm


@starts_ranks
@pytest.mark.parametrize(
    ("tensor", "pipeline"),
    [
        (2, 2),
        pytest.param(2, 1, marks=pytest.mark.soak),
        pytest.param(1, 2, marks=pytest.mark.soak),
    ],
)
def test_tokens_are_those_of_one_rank_and_no_rank_outlives_the_block(
    alone: list[tuple[int, ...]], tensor: int, pipeline: int
) -> None:
    with make_llm(tensor_parallel_size=tensor, pipeline_parallel_size=pipeline) as llm:
        pids = pids_of(llm)
        assert len(pids) == tensor * pipeline
        assert all(map(is_alive, pids))
        outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
        again = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    assert tokens(outputs) == tokens(again) == alone
    assert outputs[1].prompt_logprobs is not None
    assert not any(map(is_alive, pids))


NGRAMS = {"method": "ngram", "prompt_lookup_max": 3, "prompt_lookup_min": 1}
ITSELF = {"method": "draft_model", "model": str(MODEL)}
HEADS = {"method": "eagle3", "model": str(MODEL.parent / "demo-eagle3")}


@starts_ranks
@pytest.mark.parametrize(
    ("tensor", "pipeline", "method"),
    [(2, 1, NGRAMS), (1, 2, NGRAMS), (2, 1, ITSELF), (1, 2, HEADS)],
    ids=["TP2-ngram", "PP2-ngram", "TP2-draft_model", "PP2-eagle3"],
)
def test_drafts_change_no_token_over_ranks(
    alone: list[tuple[int, ...]], tensor: int, pipeline: int, method: dict[str, Any]
) -> None:
    drafts = {**method, "num_speculative_tokens": 3}
    sizes = {"tensor_parallel_size": tensor, "pipeline_parallel_size": pipeline}
    with make_llm(**sizes, speculative_config=drafts) as llm:
        outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
        stats = engine_of(llm).stats()
    assert tokens(outputs) == alone
    assert stats.spec_draft_tokens > 0


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"tensor_parallel_size": 3}, "size: 3 does not divide the model's 4 attention heads"),
        ({"pipeline_parallel_size": 9}, "--pipeline-parallel-size: 9 stages for 6 layers"),
        ({"pipeline_parallel_size": 0}, "--pipeline-parallel-size: 0; expected 1 to 64"),
        ({"tensor_parallel_size": 65}, "--tensor-parallel-size: 65; expected 1 to 64"),
        ({"tensor_parallel_size": 2, "device": "cuda:1"}, "--device cuda:1: with several ranks"),
    ],
)
def test_what_cannot_be_divided_is_refused_with_its_numbers(
    options: dict[str, Any], says: str
) -> None:
    with pytest.raises(UserError, match=says):
        make_llm(**options)


def test_the_override_of_stages_is_read_where_there_are_stages(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("VLLM_PP_LAYER_PARTITION", "1,2,3")
    with pytest.raises(UserError, match="VLLM_PP_LAYER_PARTITION"):
        make_llm(pipeline_parallel_size=2)
    make_llm().close()


@starts_ranks
def test_a_killed_rank_is_said_by_the_running_call_and_by_the_next(two: LLM) -> None:
    pids = pids_of(two)
    llm, failures = two, list[BaseException]()
    running = threading.Event()

    def generate() -> None:
        params = SamplingParams(max_tokens=None, ignore_eos=True)
        running.set()
        try:
            llm.generate(["The"] * 2000, params, use_tqdm=False)
        except RankLostError as error:
            failures.append(error)

    thread = threading.Thread(target=generate)
    thread.start()
    running.wait(WAIT_S)
    os.kill(pids[1], signal.SIGKILL)
    thread.join(WAIT_S)
    assert not thread.is_alive()
    said = f"rank 1 (stage 0, tensor share 1, pid {pids[1]}) was ended by SIGKILL"
    assert str(failures[0]).startswith(said)
    assert str(failures[0]).endswith("this LLM has ended, make a new one")
    with pytest.raises(RankLostError, match=r"rank 1 .* was ended by SIGKILL"):
        llm.generate("The", use_tqdm=False)
    assert not any(map(is_alive, pids))


@starts_ranks
def test_an_llm_that_nobody_holds_any_more_ends_its_ranks_whatever_thread_finds_out() -> None:
    llm = make_llm(tensor_parallel_size=2)
    pids = pids_of(llm)
    del llm
    gc.collect()
    assert not any(map(is_alive, pids))
    # A collection may run in the threads that the end of ranks waits for.
    llm = make_llm(tensor_parallel_size=2)
    pids = pids_of(llm)
    watch = instance_of(llm)._watch  # pyright: ignore[reportPrivateUsage]
    end = llm._session.close  # pyright: ignore[reportPrivateUsage]
    watch.report(lambda _: end())
    wait_until_gone(pids)
    del watch
    wait_for(lambda: not own_threads())
    with pytest.raises(UserError, match="this LLM was closed"):
        llm.generate("The")


PROGRAM = """
import os, sys
from tests.worker.test_offline_ranks import make_llm, pids_of
from xpyd_core.errors import UserError

if __name__ == "__main__":
    llm = make_llm(tensor_parallel_size=2)
    if os.fork() == 0:
        try:
            llm.generate("The", use_tqdm=False)
        except UserError as error:
            print("copy:", error, flush=True)
        sys.exit()
    os.wait()
    print("answers:", len(llm.generate("The", use_tqdm=False)), flush=True)
    print(*pids_of(llm), flush=True)
    sys.stdin.read()
"""


@starts_ranks
@pytest.mark.parametrize("how", ["it ends", "it is killed"])
def test_ranks_end_with_their_program_and_not_with_a_forked_copy_of_it(how: str) -> None:
    command = [sys.executable, "-W", "ignore", "-c", PROGRAM]
    with subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        copy, answers, pids = (process.stdout.readline() for _ in range(3))
        assert copy.startswith(f"copy: this LLM runs in process {process.pid}, and ")
        assert answers == "answers: 1\n"
        ranks = [int(pid) for pid in pids.split()]
        assert len(ranks) == 2
        assert all(map(is_alive, ranks))
        if how == "it is killed":
            process.kill()
        process.stdin.close()
        assert process.wait(WAIT_S) == (-signal.SIGKILL if how == "it is killed" else 0)
    wait_until_gone(ranks)


@starts_ranks
def test_bench_measures_ranks_and_says_what_it_cannot_divide(
    capfd: pytest.CaptureFixture[str],
) -> None:
    flags = ["--model", str(MODEL), "--dtype", "float32", "--threads", "1", "--output", "json"]
    small = ["--kv-cache-memory", "16Mi", "--input-len", "8", "--output-len", "4"]
    words = ["bench", "throughput", *flags, *small, "--num-prompts", "3"]
    for given, says in (
        (["-tp", "3"], "3 does not divide the model's 4 attention heads"),
        (["-pp", "9"], "9 stages for 6 layers"),
    ):
        assert main([*words, *given]) == 2
        assert says in capfd.readouterr().err
    assert main([*words, "-pp", "2"]) == 0
    printed = capfd.readouterr()
    found = json.loads(printed.out)
    assert (found["requests"], found["output_tokens"]) == (3, 12)
    assert "rank 1: KV cache" in printed.err
