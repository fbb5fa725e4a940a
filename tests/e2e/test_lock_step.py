"""Replicas that share experts, with real ranks in lock step: their greedy tokens are those of
transformers, and what happens to one of them happens to all."""

from __future__ import annotations

import itertools
import json
import logging
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Generator, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from scripts.train_demo_model.random_checkpoint import make_checkpoint
from scripts.train_demo_model.random_weights import Family
from tests.e2e.harness import empty_fleet, ranks_of, wait_for
from tests.e2e.test_lost_replicas import under_load
from tests.e2e.test_parallel import (
    EXPERT,
    Layout,
    check,
    flags,
    make_model,
    named,
    tokens_of_experts,
    written_by,
)
from tests.ranks.kit.instances import WAIT_S, is_alive
from tests.ranks.kit.worker import LONG, Worker, start_cold, started
from tests.ranks.kit.worker import wait_for as wait_until
from xpyd_worker.ranks.loss import EXIT_RANK_ENDED, EXIT_RANK_SILENT

FAMILIES: tuple[Family, ...] = ("mixtral", "qwen3-moe")
# Of each of two replicas: (tensor, pipeline). Seven experts over two ranks and over four.
USUAL = [("qwen3-moe", (2, 1)), ("mixtral", (1, 2))]
ENGINES = [
    pytest.param(
        *(family, layout),
        marks=pytest.mark.slow if (family, layout) in USUAL else pytest.mark.soak,
        id=f"{family}-dp2{named(layout)}",
    )
    for family, layout in itertools.product(FAMILIES, [(1, 1), (2, 1), (1, 2), (2, 2)])
]
_log = logging.getLogger(__name__)
PATH = "/v1/completions"


@pytest.mark.parametrize(("family", "layout"), ENGINES)
def test_greedy_tokens_of_replicas_are_those_of_transformers(
    tmp_path: Path, family: Family, layout: Layout
) -> None:
    """One request at a time, while the other replica makes dummies; then several on both."""
    compare(tmp_path, family, layout)


@pytest.mark.slow
def test_so_they_are_with_drafts(tmp_path: Path) -> None:
    """A step with drafts is one forward, whatever the other replica has."""
    keys = {"num_speculative_tokens": 3, "prompt_lookup_max": 2, "prompt_lookup_min": 1}
    drafts = json.dumps({"method": "ngram", **keys})
    samples = compare(tmp_path, "mixtral", (1, 1), "--speculative-config", drafts)
    assert samples["xpyd_engine_spec_decode_num_draft_tokens_total"] > 0


def compare(tmp_path: Path, family: Family, layout: Layout, *more: str) -> dict[str, float]:
    """What two replicas of `layout` write with what transformers does; the engine's metrics."""
    model = make_model(tmp_path / "model", family, experts=7)
    with empty_fleet(tmp_path) as running:
        engine = running.start_engine(
            *("Aggregated", *flags(layout), EXPERT, "--data-parallel-size", "2", *more),
            model=model,
            env={"XPYD_DISCOVERY": ""},
        )
        running.wait_healthy(engine)
        written = written_by(engine)
        wait_for("ranks to tell of their experts", lambda: tokens_of_experts(engine))
        assert engine.metric("xpyd_engine_replica_dummy_forwards_total") > 0
        samples = engine.metrics()
        assert engine.stop() == 0, engine.log[-3000:]
    check(model, written)
    return samples


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One in which a request may take long."""
    return make_checkpoint(
        tmp_path_factory.mktemp("model"),
        family="mixtral",
        layers=2,
        hidden=64,
        intermediate=64,
        heads=4,
        kv_heads=2,
        max_len=2048,
        experts=4,
    )


@pytest.fixture
def worker(tmp_path: Path, model: Path) -> Generator[Worker]:
    with started(tmp_path, "--model", str(model), "-dp", "2", EXPERT) as found:
        yield found


@pytest.mark.soak
def test_ranks_more_take_little_memory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Pages of what was imported are there once for each replica; what is printed is in
    docs/parallel.md. Started cold, as users do: warm ones share pages with this process' server."""
    folder = make_model(tmp_path / "model", "mixtral", experts=7)
    body, found_mib = LONG | {"stream": False, "max_tokens": 24}, dict[int, float]()
    for replicas, tensor in ((2, 1), (2, 2), (3, 2)):
        layout = ("-dp", str(replicas), "-tp", str(tensor), EXPERT, "--model", str(folder))
        with started(tmp_path, *layout, start=start_cold) as worker:
            ranks = worker.ranks()
            assert len(ranks) == replicas * tensor
            for replica in range(replicas):
                headers = {"X-data-parallel-rank": str(replica)}
                answer = worker.client.post(PATH, json=body, headers=headers)
                assert answer.status_code == 200
            all_of_it = [worker.process.pid, *worker.tree()]
            found_mib[len(ranks)] = sum(memory_mib(pid, "Pss") for pid in all_of_it)
            alone = [memory_mib(pid, "Rss") for pid in ranks]
            text = f"DP{replicas}xTP{tensor}: PSS {found_mib[len(ranks)]:.0f} MiB"
            with capsys.disabled():
                sys.stdout.write(f"\n{text}; a rank {min(alone):.0f} to {max(alone):.0f} resident")
    assert found_mib[6] < 2 * found_mib[2]


def memory_mib(pid: int, name: str) -> float:
    """A sum over the pages of a process."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) / 1024
    raise AssertionError(f"no {name} of process {pid}")


def by_replica(worker: Worker, name: str) -> list[float]:
    """Of each replica."""
    text = worker.client.get("/metrics").text
    return [float(n) for n in re.findall(rf"^xpyd_engine_replica_{name}{{.*}} (\S+)$", text, re.M)]


def stream(worker: Worker, stack: ExitStack, replica: int, tokens: int) -> Any:
    """Lines of a request that has begun there."""
    body = LONG | {"max_tokens": tokens, "temperature": 0}
    headers = {"X-data-parallel-rank": str(replica)}
    response = worker.client.stream("POST", PATH, json=body, headers=headers)
    lines = stack.enter_context(response).iter_lines()
    next(lines)
    return lines


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "status", "how"),
    [
        (signal.SIGKILL, EXIT_RANK_ENDED, r"was ended by SIGKILL"),
        (signal.SIGSTOP, EXIT_RANK_SILENT, r"has given no sign of life"),
    ],
)
@pytest.mark.long
def test_the_instance_falls_with_a_rank_of_any_replica(
    worker: Worker, number: signal.Signals, status: int, how: str
) -> None:
    """It makes dummies; the other replica has the request, and waits for it."""
    ranks = worker.ranks()
    assert len(ranks) == 2
    with ExitStack() as stack:
        lines = stream(worker, stack, 0, 1900)
        begun_s = time.monotonic()
        os.kill(ranks[1], number)
        last = [line for line in lines if line][-1]
    # By the engine that ends or by the process that does, whichever is first.
    assert re.search(r'"code": "(replica_lost|engine_failed)"', last)
    assert worker.process.wait(WAIT_S) == status
    took_s = time.monotonic() - begun_s
    _log.info("%s: the instance ended after %.1f s", number.name, took_s)
    assert took_s < 10
    assert re.search(rf"the instance ended: rank 1 \(.*\) {how}", worker.log.read_text())
    assert not any(map(is_alive, ranks))


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("tensor", [1, 2])
def test_the_others_go_on_without_a_rank_of_a_replica(
    tmp_path: Path, model: Path, number: signal.Signals, tensor: int
) -> None:
    """All replicas have a request; the lost one's fails, the others' texts are as without a loss;
    then it comes again."""
    replicas, lost = (3, 1) if tensor == 1 else (2, 1)
    body = LONG | {"max_tokens": 600, "temperature": 0}
    short = body | {"stream": False, "max_tokens": 24}
    layout = ("-dp", str(replicas), "-tp", str(tensor), EXPERT, "--on-rank-loss", "continue")
    with started(tmp_path, "--model", str(model), *layout) as worker, ExitStack() as stack:
        ranks = worker.ranks()
        worker.client.timeout = 300
        expected = worker.client.post(PATH, json=short).json()["choices"]
        lines = [stream(worker, stack, replica, 600) for replica in range(replicas)]
        begun_s = time.monotonic()
        os.kill(ranks[lost * tensor], number)
        with ThreadPoolExecutor(replicas) as pool:
            timed = list(pool.map(timed_lines, lines))
        rest = [[line for _, line in one] for one in timed]
        # Tokens of a replica come together with those of the others.
        times_s = [begun_s, *(at_s for at_s, _ in timed[0] if at_s > begun_s)]
        pause_s = max(b - a for a, b in itertools.pairwise(times_s))
        _log.info("%s, TP%d: no token for %.1f s", number.name, tensor, pause_s)
        assert pause_s < 10
        assert "replica_lost" in "".join(rest[lost])
        whole = worker.client.post(PATH, json=body | {"stream": False}).json()["choices"][0]["text"]
        for replica in set(range(replicas)) - {lost}:
            text = "".join(map(written, rest[replica]))
            assert [line for line in rest[replica] if line][-1] == "data: [DONE]"
            assert len(text) > 100
            assert whole.endswith(text)
        wait_until(lambda: by_replica(worker, "up") == [1.0] * replicas)
        assert by_replica(worker, "restarts_total")[lost] == 1
        for replica in range(replicas):
            headers = {"X-data-parallel-rank": str(replica)}
            answered = worker.client.post(PATH, json=short, headers=headers)
            assert answered.json()["choices"] == expected
        assert worker.process.poll() is None


def timed_lines(lines: Iterable[str]) -> list[tuple[float, str]]:
    """Each with when it came."""
    return [(time.monotonic(), line) for line in lines]


def written(line: str) -> str:
    """The text of a line of a stream."""
    data = line.removeprefix("data: ")
    if not data.startswith("{"):
        return ""
    return "".join(one["text"] for one in json.loads(data).get("choices", ()))


@pytest.mark.slow
@pytest.mark.long
def test_aborts_resets_and_drains_leave_the_replicas_in_step(worker: Worker) -> None:
    body = {"prompt": "The capital of", "max_tokens": 24, "temperature": 0, "ignore_eos": True}
    answer = worker.client.post(PATH, json=body).json()["choices"]
    with ExitStack() as stack:
        for replica in range(2):
            stream(worker, stack, replica, 1900)
        assert by_replica(worker, "in_wave") == [1, 1]
        # A client goes: so does its request, on each replica.
    wait_until(lambda: by_replica(worker, "in_wave") == [0, 0])
    waves = by_replica(worker, "wave")
    assert waves[0] == waves[1] > 1
    assert worker.client.post("/reset_prefix_cache").status_code == 200
    for replica in range(2):
        headers = {"X-data-parallel-rank": str(replica)}
        assert worker.client.post(PATH, json=body, headers=headers).json()["choices"] == answer
    ranks = worker.ranks()
    with ExitStack() as stack:
        streams = [stream(worker, stack, replica, 50 + 100 * replica) for replica in range(2)]
        worker.process.terminate()
        assert [[line for line in lines if line][-1] for lines in streams] == ["data: [DONE]"] * 2
        assert worker.process.wait(WAIT_S) == 0
    assert not any(map(is_alive, ranks))
    assert "the engine failed" not in worker.log.read_text()


def scale(worker: Worker, replicas: int) -> httpx.Response:
    asked = {"new_data_parallel_size": replicas}
    return worker.client.post("/scale_elastic_ep", json=asked, timeout=300)


@pytest.mark.slow
@pytest.mark.long
def test_a_rank_that_dies_as_it_loads_leaves_the_others_as_they_were(
    tmp_path: Path, model: Path
) -> None:
    body = {"prompt": "The capital of", "max_tokens": 24, "temperature": 0, "ignore_eos": True}
    flags = ("-dp", "1", EXPERT, "--enable-elastic-ep")
    with started(tmp_path, "--model", str(model), *flags) as worker, ThreadPoolExecutor(1) as pool:
        expected = worker.client.post(PATH, json=body, timeout=300).json()["choices"]
        before = set(worker.tree())
        answer = pool.submit(scale, worker, 2)
        # Before it calls itself a rank: by then it may have loaded, and come.
        wait_until(lambda: bool(set(worker.tree()) - before))
        os.kill((set(worker.tree()) - before).pop(), signal.SIGKILL)
        refused = answer.result(300)
        assert refused.status_code == 409
        assert re.search(r"rank 1 \(.*\) was ended by SIGKILL", refused.text)
        answered = worker.client.post(PATH, json=body, timeout=300)
        assert answered.status_code == 200, answered.text
        assert answered.json()["choices"] == expected
        assert scale(worker, 2).status_code == 200
        for replica in ("0", "1"):
            headers = {"X-data-parallel-rank": replica}
            answered = worker.client.post(PATH, json=body, headers=headers, timeout=300)
            assert answered.json()["choices"] == expected
        assert "\nxpyd_engine_scalings_total 1" in worker.client.get("/metrics").text


@pytest.mark.slow
@pytest.mark.long
def test_replicas_that_share_experts_come_and_go_under_load(tmp_path: Path, model: Path) -> None:
    """2 -> 4 -> 1 replicas: no request fails, and all texts are the same; five ranks are too many
    for four experts."""
    body = {"prompt": "The capital of", "max_tokens": 24, "temperature": 0, "ignore_eos": True}
    flags = ("-dp", "2", EXPERT, "--enable-elastic-ep")
    with started(tmp_path, "--model", str(model), *flags) as worker, ThreadPoolExecutor(16) as pool:

        def text() -> str:
            answer = worker.client.post(PATH, json=body, timeout=300)
            assert answer.status_code == 200, answer.text
            return answer.json()["choices"][0]["text"]

        expected, over = text(), threading.Event()

        def load() -> list[str]:
            """One request behind the other."""
            texts: list[str] = []
            while not over.is_set():
                texts.append(text())
            return texts

        loads = [pool.submit(load) for _ in range(4)]
        for replicas in (4, 1):
            begun_s = time.monotonic()
            answer = scale(worker, replicas)
            assert answer.status_code == 200, answer.text
            assert answer.json()["cut"] == 0
            _log.info("%d replicas after %.1f s", replicas, time.monotonic() - begun_s)
            assert len(worker.ranks()) == replicas
        over.set()
        texts = [one for each in loads for one in each.result(300)]
        assert texts == [expected] * len(texts)
        refused = scale(worker, 5)
        assert refused.status_code == 409
        assert "5 ranks for 4 experts" in refused.json()["error"]["message"]
        assert text() == expected


@pytest.mark.slow
@pytest.mark.parametrize(
    "sizes", [(2, 1), pytest.param((2, 4, 1), marks=pytest.mark.long)], ids=str
)
def test_replicas_that_share_experts_follow_a_file_while_a_router_has_requests(
    tmp_path: Path, model: Path, sizes: tuple[int, ...]
) -> None:
    """The engine of a pod whose document says `maxData` and `expert`: it starts with one, and the
    file is the pod's annotation. No request fails, and all texts are the same; what cannot be is
    said where the operator reads it."""
    bodies = [
        {"prompt": prompt, "max_tokens": 24, "ignore_eos": True}
        for prompt in ("The capital of", "Once upon a time")
    ]
    size_file = tmp_path / "data"
    size_file.write_text(str(sizes[0]))
    with empty_fleet(tmp_path) as running:
        # Ranks that start take the cores: on a busy machine beats are seconds late.
        running.heartbeat_ms = 3000
        running.start_router()
        flags = (EXPERT, "--enable-elastic-ep", f"--data-parallel-size-file={size_file}")
        engine = running.start_engine("Aggregated", *flags, model=model, name="elastic")

        def shown(replicas: int) -> str | None:
            """What the router says of the engine, once it has so many."""
            [row] = running.instances()
            return row["scaling_problem"] if row["replicas"] == replicas else None

        running.wait_ready(engine)
        wait_for(f"{sizes[0]} replicas", lambda: shown(sizes[0]) == "", 60)
        with under_load(running, bodies) as texts:
            for size in sizes[1:]:
                begun_s = time.monotonic()
                size_file.write_text(str(size))
                wait_for(f"{size} replicas", lambda n=size: shown(n) == "", 120)
                wait_for("those that go to end", lambda n=size: len(ranks_of(engine)) == n, 60)
                _log.info("%d replicas after %.1f s", size, time.monotonic() - begun_s)
        _log.info("%d requests in all", len(texts))
        size_file.write_text("5")
        wait_for("a reason", lambda: shown(sizes[-1]), 60)
        assert "5 ranks for 4 experts" in (shown(sizes[-1]) or "")
        assert running.complete(**bodies[0])["choices"][0]["text"] == texts[0]
