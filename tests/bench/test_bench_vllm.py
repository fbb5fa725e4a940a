"""The benchmark of vLLM's connectors: metrics are read right, and figures are what they say."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from bench.engine.contender import ContenderFailed, Recipe, Server
from bench.engine.models import Model
from bench.engine.shape import Case
from bench.process import free_port
from bench.report import END
from bench.vllm.report import BEGIN, broken, report, with_measured
from bench.vllm.rounds import (
    CASES,
    KV_TOKEN_BYTES,
    MODEL,
    SHAPES,
    FailedTurn,
    Found,
    Plan,
    Turn,
    rotated,
    run_round,
    said,
)
from bench.vllm.rounds import take_turn as ask
from bench.vllm.servers import (
    ALONE,
    NIXL,
    OURS,
    Contender,
    Counts,
    bind,
    external,
    nixl_recipes,
    our_recipes,
    vllm_recipe,
)
from xpyd_tools.bench.summary import Sample

_MODEL = Model(MODEL, Path("/models/kv"), 25_000_000, 1)
_CASE = Case("1500", 1500, 3, 1, 2)


def _turn(name: str, factor: float, *, case: Case = _CASE, external_tokens: float = 2998) -> Turn:
    sample = Sample(0.0, 1.0 * factor, (0.2 * factor, 0.01 * factor), 1.21 * factor, 1500, 3)
    is_pair = name != ALONE
    return Turn(
        name,
        case,
        [sample, sample],
        prefill_s=0.9 * factor,
        waited_s=0.1 * factor if is_pair else None,
        moved_s=0.05 if name == NIXL else None,
        without_s=0.6 * factor if is_pair else None,
        external_tokens=external_tokens if is_pair else 0.0,
    )


def _made(*turns: Turn) -> dict:
    return report(_MODEL, Found(list(turns)), Plan(rounds=2), cores="0-1")


def _two_rounds() -> list[Turn]:
    second = (_turn(OURS, 3.0), _turn(NIXL, 2.0), _turn(ALONE, 0.5))
    return [
        *(_turn(OURS, 1.0), _turn(NIXL, 2.0), _turn(ALONE, 0.5)),
        *(replace(turn, number=1) for turn in second),
    ]


def test_a_metric_is_the_sum_of_its_samples_over_all_labels():
    found = Counts(
        "# HELP a_total of something\n"
        'a_total{engine="0",outcome="done"} 3.0\na_total{engine="0",outcome="failed"} 1.5\n'
        "b_total 2e3\n"
    )
    assert (found.of("a_total"), found.of("b_total"), found.of("c_total")) == (4.5, 2000.0, 0.0)


def test_a_histograms_mean_is_of_what_came_between_two_readings():
    before = Counts("h_sum 10.0\nh_count 5.0\n")
    after = Counts("h_sum 16.0\nh_count 7.0\n")
    assert after.mean_since(before, "h") == 3.0
    assert before.mean_since(before, "h") is None


def test_hits_whose_load_failed_are_no_kv_from_p():
    names = ("vllm:external_prefix_cache_hits_total", "xpyd_kv_recomputed_tokens_total")
    before = Counts(f"{names[0]} 100\n{names[1]} 7\n")
    after = Counts(f"{names[0]} 1600\n{names[1]} 307\n")
    assert external(before, after) == 1200


def test_a_ratio_is_of_one_round_and_a_row_has_the_range_of_the_rounds():
    made = _made(*_two_rounds())
    ratios = {(one["name"], one["peer"]): one for one in made["ratios"]}
    to_nixl = ratios["TTFT, 1500 tokens", NIXL]
    assert (to_nixl["median"], to_nixl["min"], to_nixl["max"]) == (1.0, 0.5, 1.5)
    assert ratios["to the second token, 1500 tokens", ALONE]["median"] == 4.0
    assert ("D waits for KV, 1500 tokens", ALONE) not in ratios
    rows = {row["contender"]: row for row in made["rows"]}
    assert rows[OURS]["ttftMs"] == {"median": 2000.0, "min": 1000.0, "max": 3000.0}
    assert rows[OURS]["requests"] == 4


def test_a_turn_that_failed_is_in_no_ratio_and_on_the_page() -> None:
    turns = [turn for turn in _two_rounds() if (turn.contender, turn.number) != (NIXL, 0)]
    failed = FailedTurn(NIXL, "1500", 0, "the generating instance failed")
    made = report(_MODEL, Found(turns, [failed]), Plan(rounds=2), cores="0-1")
    ratios = {(one["name"], one["peer"]): one for one in made["ratios"]}
    to_nixl = ratios["TTFT, 1500 tokens", NIXL]
    assert (to_nixl["min"], to_nixl["max"]) == (1.5, 1.5)
    assert ratios["TTFT, 1500 tokens", ALONE]["max"] == 6.0
    said_there = "Round 1, 1500 tokens: NixlConnector failed (the generating instance failed)."
    assert said_there in with_measured(f"{BEGIN}{END}", made)
    json.dumps(made)


def _no_router(pair: Contender, name: str, folder: Path) -> Contender:
    """A contender whose router is not there."""
    (folder / "log").touch()
    front = Server(Recipe("fake", (), {}), pair.front.process, folder / "log", free_port())
    return replace(pair, name=name, front=front)


def test_a_peer_that_fails_lets_the_others_go_on_and_ours_does_not(
    pair: Contender, tmp_path: Path
) -> None:
    found, said_to_user = Found(), list[str]()
    plan = Plan(cases=(_CASE,), rounds=1)
    run_round(_no_router(pair, NIXL, tmp_path), plan, 1, found, said_to_user.append, routed_s=0.0)
    (failed,) = found.failed
    assert (failed.contender, failed.case, failed.number) == (NIXL, "1500", 1)
    assert failed.reason in said_to_user[0]
    assert found.turns == []
    with pytest.raises(ContenderFailed):
        run_round(
            _no_router(pair, OURS, tmp_path), plan, 1, found, said_to_user.append, routed_s=0.0
        )


def test_the_gap_that_holds_a_transfer_is_not_a_time_between_tokens():
    row = _made(_turn(OURS, 1.0))["rows"][0]
    assert row["secondMs"]["median"] == 1200.0
    assert row["itlMs"]["median"] == row["itlMaxMs"]["median"] == 10.0


def test_what_sending_costs_p_is_set_against_the_same_p_and_a_vllm_alone():
    (ours, nixl) = _made(*_two_rounds())["stepOfP"]
    assert (ours["contender"], nixl["contender"]) == (OURS, NIXL)
    assert ours["toSameWithout"]["median"] == 1.5
    assert ours["toPlain"] == {"median": 4.0, "min": 2.0, "max": 6.0}


def test_a_run_in_which_d_computed_prompts_is_wrong():
    assert broken(_made(*_two_rounds())) == []
    complaints = broken(_made(_turn(OURS, 1.0, external_tokens=1499), _turn(ALONE, 1.0)))
    assert complaints == ["xpyd, 1500 tokens: D had 50% of the prompts' tokens from P"]


def test_the_page_has_a_table_for_each_case_and_says_who_is_absent():
    short = replace(_CASE, name="512", input_tokens=512)
    turns = [*_two_rounds(), _turn(OURS, 1.0, case=short)]
    found = Found(turns, absent={NIXL: "no wheel"})
    made = report(_MODEL, found, Plan(rounds=2), cores="0-1")
    page = with_measured(f"a\n{BEGIN}old\n{END}b\n", made)
    assert "old" not in page
    assert "so 94 MiB for 1,500" in page
    assert "Not measured: NixlConnector (no wheel)." in page
    assert "| 1,500 tokens: ms, median (range) | xpyd | NixlConnector | recompute |" in page
    assert "| 512 tokens: ms, median (range) | xpyd |" in page
    assert "| D waits for KV | 200.0 (100.0 to 300.0) | 200.0 (200.0 to 200.0) | - |" in page
    assert "| TTFT, 1500 tokens | 1.00 (0.50 to 1.50) | 4.00 (2.00 to 6.00) |" in page
    json.dumps(made)


def test_another_contender_is_first_in_each_round():
    names = ["a", "b", "c"]
    orders = [rotated(names, number) for number in range(4)]  # type: ignore[arg-type]
    assert [order[0] for order in orders] == ["a", "b", "c", "a"]


def test_who_waits_sees_only_figures_that_the_contender_has():
    assert said(_turn(ALONE, 1.0)) == (
        "1500 tokens, recompute: TTFT 1000, second token 1200, P's prefill 900 ms"
    )
    assert said(_turn(NIXL, 1.0)).endswith("without transfer 600, D waited 100, NIXL moved 50 ms")


def test_the_kv_of_a_token_is_what_the_shape_says():
    shape = SHAPES[MODEL]
    assert shape["layers"] * 2 * shape["kv_heads"] * shape["head_dim"] * 2 == KV_TOKEN_BYTES
    assert all(case.input_tokens + case.output_tokens <= 2048 for case in CASES.values())


def _flag(recipe: Recipe, name: str) -> str:
    return recipe.argv[recipe.argv.index(name) + 1]


def test_p_and_d_of_a_pair_share_nothing_but_the_model(tmp_path: Path):
    """A router takes a KV address from one instance only."""
    for recipes in (
        our_recipes(tmp_path, "path", _MODEL.folder, tmp_path, 1234),
        nixl_recipes(tmp_path, "path", _MODEL.folder),
    ):
        p, d = recipes
        assert p.name != d.name
        bound = "VLLM_CPU_OMP_THREADS_BIND"
        assert (p.env[bound], d.env[bound]) == ("0", "1")
        transfers = [json.loads(_flag(one, "--kv-transfer-config")) for one in recipes]
        ports = {
            transfer.get("kv_port", one.env.get("VLLM_NIXL_SIDE_CHANNEL_PORT"))
            for transfer, one in zip(transfers, recipes, strict=True)
        }
        assert len(ports) == 2


def test_contenders_compute_alike(tmp_path: Path):
    recipes = [
        *our_recipes(tmp_path, "path", _MODEL.folder, tmp_path, 1234),
        *nixl_recipes(tmp_path, "path", _MODEL.folder),
        vllm_recipe(tmp_path, ALONE, _MODEL.folder, 1, None, {}),
    ]
    plain = list(recipes[-1].argv)
    for one in recipes:
        argv = list(one.argv)
        if "--kv-transfer-config" in argv:
            at = argv.index("--kv-transfer-config")
            del argv[at : at + 2]
        assert argv == plain


class _Vllm:
    """Answers streams, and counts what it computed as vLLM's metrics do."""

    def __init__(self, prefill_s: float) -> None:
        self.prefill_s, self.count = prefill_s, 0

    def metrics(self) -> str:
        name = "vllm:request_prefill_time_seconds"
        hits = f"vllm:external_prefix_cache_hits_total {1499 * self.count}\n"
        queued = "vllm:request_queue_time_seconds"
        return hits + "".join(
            f'{one}_sum{{engine="0"}} {value * self.count}\n{one}_count {self.count}\n'
            for one, value in ((name, self.prefill_s), (queued, 0.25))
        )


class _Handler(BaseHTTPRequestHandler):
    server: _Http

    def log_message(self, *args: object) -> None:
        """Nothing."""

    def do_GET(self) -> None:
        self._answer(self.server.vllm.metrics().encode())

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        for one in (self.server.vllm, *self.server.behind):
            one.count += 1
        usage = {"completion_tokens": body["max_tokens"], "prompt_tokens": len(body["prompt"])}
        parts = [{"choices": [{"text": "a", "token_ids": [7]}]}] * body["max_tokens"]
        parts = [*parts, {"choices": [], "usage": usage}]
        lines = [f"data: {json.dumps(part)}\n\n" for part in parts]
        self._answer("".join([*lines, "data: [DONE]\n\n"]).encode())

    def _answer(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


class _Http(ThreadingHTTPServer):
    def __init__(self, vllm: _Vllm, *behind: _Vllm) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.vllm, self.behind = vllm, behind


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Contender]:
    """A router, which counts at both engines, P and D, as HTTP servers of this process."""
    p, d = _Vllm(0.5), _Vllm(9.0)
    https = [_Http(_Vllm(0.0), p, d), _Http(p), _Http(d)]
    for one in https:
        threading.Thread(target=one.serve_forever, args=(0.05,), daemon=True).start()
    process = subprocess.Popen(["true"])
    process.wait()
    recipe = Recipe("fake", (), {})
    servers = [Server(recipe, process, tmp_path / "log", one.server_port) for one in https]
    yield Contender(OURS, *servers)
    for one in https:
        one.shutdown()
        one.server_close()


def test_a_turn_has_p_from_p_and_waiting_from_d_and_p_alone_apart(pair: Contender):
    turn = ask(pair, _CASE, seed=1)
    assert (turn.prefill_s, turn.without_s, turn.waited_s) == (0.5, 0.5, 0.25)
    assert turn.moved_s is None
    assert turn.external_tokens == 2 * 1499  # nothing of the requests that P had alone
    assert len(turn.samples) == 2


def test_a_p_that_computed_nothing_is_a_failure(pair: Contender):
    stranger = replace(pair, front=pair.d)
    with pytest.raises(ContenderFailed, match="P has computed no prompt"):
        ask(stranger, _CASE, seed=1)


def test_tokens_that_came_in_one_event_are_a_gap_of_none() -> None:
    """vLLM's server was behind, and sent them all at once."""
    turns = _two_rounds()
    at_once = Sample(0.0, 1.0, (), 1.0, 1500, 3)
    made = _made(*(replace(turn, samples=[at_once]) for turn in turns))
    assert {row["secondMs"]["median"] for row in made["rows"]} == {1000.0}
    assert {row["itlMs"] for row in made["rows"]} == {None}
    assert "second token 1000" in said(replace(turns[0], samples=[at_once]))
    assert "ITL" not in with_measured(f"{BEGIN}{END}", made)


_A_WORKER = """
import os, threading, time
open("/proc/self/comm", "w").write("VLLM::Worker")
threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
print("up", flush=True)
time.sleep(60)
"""


def test_a_worker_computes_on_its_core_and_its_other_threads_run_anywhere(tmp_path: Path) -> None:
    everywhere = os.sched_getaffinity(0)
    core, last = min(everywhere), max(everywhere)
    argv = ["taskset", "-c", str(last), sys.executable, "-c", _A_WORKER]
    with subprocess.Popen(argv, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"up\n"
            bind(Server(Recipe("a", [], {}), process, tmp_path / "log", 1), core)
            threads = [int(one.name) for one in Path(f"/proc/{process.pid}/task").iterdir()]
            found = {thread: os.sched_getaffinity(thread) for thread in threads}
            ranks = {thread: os.getpriority(os.PRIO_PROCESS, thread) for thread in threads}
            own = os.getpriority(os.PRIO_PROCESS, process.pid)
        finally:
            process.kill()
    assert len(found) == 2
    assert found.pop(process.pid) == {core}
    assert list(found.values()) == [everywhere]
    assert ranks.pop(process.pid) == own
    assert list(ranks.values()) == [min(19, own + 19)]


_A_BENCHMARK = """
import subprocess, sys, time
from bench.process import Processes, end_at_sigterm
from pathlib import Path
end_at_sigterm()
server = subprocess.Popen(["sleep", "60"], start_new_session=True)
try:
    print(server.pid, flush=True)
    time.sleep(60)
finally:
    Processes(server, Path("log")).end()
"""


def test_sigterm_to_a_benchmark_ends_its_servers() -> None:
    root = Path(__file__).parents[2]
    argv = [sys.executable, "-c", _A_BENCHMARK]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, cwd=root) as process:
        assert process.stdout is not None
        server = int(process.stdout.readline())
        process.terminate()
        assert process.wait(30) == 128 + 15
    assert not Path(f"/proc/{server}").exists()
