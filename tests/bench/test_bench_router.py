"""`make bench-router`: rows are treated alike, and the figures are what they say."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from bench.environments import NotHere
from bench.process import Processes
from bench.report import END
from bench.router import __main__ as bench
from bench.router import routers, shares
from bench.router.interpreter import Interpreter
from bench.router.mocks import Mocks, beats
from bench.router.page import BEGIN, shares_of, with_measured
from bench.router.programs import Programs
from bench.router.report import RATIOS, merged, report
from bench.router.rounds import Cores, Found, Plan, take_turns
from bench.router.routers import ContenderFailed, Ports, Router, argv_of
from bench.router.shape import BESIDE_LONG, CASES, OWN, ROWS, TLS, TLS_PEER, Case, Times
from bench.router.tls import nginx
from bench.router.turns import Beside, Turn, load_words, turn
from xpyd_core.messages import decode_heartbeat
from xpyd_router.keys.lines import parse_keys

ROOT = Path(__file__).parents[2]
_MOCKS = Mocks([1001, 1002], [1003, 1004])


class FakeRouter:
    """A router that says what is done with it."""

    def __init__(self, name: str, running: set[str]) -> None:
        self.name = name
        self.running = running
        self.is_broken = False
        self.row = ROWS["xpyd-tls" if name == "tls" else OWN]

    def go_on(self) -> None:
        self.running.add(self.name)

    def wait_ready(self) -> None:
        assert self.running == {self.name}, "somebody else is on the core"

    def stop(self) -> None:
        self.running.discard(self.name)

    def forget_log(self) -> None:
        assert not self.running


def a_turn(*, p50: float = 1.0, cpu_s: float = 1.0, answered: int = 1000) -> Turn:
    spread = {"p50": p50, "p90": 2 * p50, "p99": 3 * p50, "max": 4 * p50}
    return Turn(2.0, answered, 2 * answered, cpu_s, spread, None, spread)


def test_rows_take_turns_in_changing_order_and_who_failed_is_not_asked_again() -> None:
    running: set[str] = set()
    routers: dict[str, Any] = {name: FakeRouter(name, running) for name in ("xpyd", "one", "two")}
    found, seen = Found(), list[str]()

    def of(router: Any, _: Case) -> Turn:
        name = "direct" if router is None else router.name
        seen.append(name)
        if name == "one" and seen.count("one") == 3:
            raise ContenderFailed("3 errors")
        return a_turn()

    rows = {"direct": None, **routers}
    for number in range(3):
        for case in CASES[:2]:
            take_turns(rows, case, number, found, a_turn=of, say=lambda _: None)
    names = ["direct", "xpyd", "one", "two"]
    assert seen[:8] == [*names, *names]
    assert seen[8:16] == [*names[1:], "direct"] * 2
    assert seen[16:] == ["two", "direct", "xpyd", "one", "two", "direct", "xpyd"]
    assert not running
    assert found.failed == {("one", "c1"): "3 errors"}
    turns = {key: len(many) for key, many in found.turns.items()}
    expected = {(name, case): 3 for name in names for case in ("c1", "c16")}
    del expected["one", "c1"]
    assert turns == expected


def test_the_router_has_cores_of_its_own() -> None:
    cores = Cores((4, 5, 6))
    assert (cores.router(ROWS[OWN]), cores.router(ROWS["xpyd-2"])) == ("4", "4,5")
    assert cores.load == {5, 6}
    assert Cores((3,)).load == {3}


def test_each_row_is_told_of_all_engines_in_its_own_way() -> None:
    ports = Ports(http=80, discovery=81, metrics=82)
    own = argv_of(ROWS["xpyd-2"], ports, _MOCKS, ["--log-level", "info"], python="py")
    assert own[own.index("--policy") + 1] == "LeastLoaded"
    assert own[-6:] == ["--discovery-port", "81", "--processes", "2", "--log-level", "info"]
    for row, is_own in ((ROWS[OWN], False), (ROWS["xpyd-continuing"], True)):
        told = [decode_heartbeat(frame) for frame in beats(_MOCKS, row)]
        assert [(one.type, one.http.port) for one in told] == [
            *(("P", port) for port in _MOCKS.prefills),
            *(("D", port) for port in _MOCKS.decodes),
        ]
        assert {(one.continuation, bool(one.incarnation)) for one in told} == {(is_own, is_own)}
        assert len({one.kv.port for one in told}) == 4


def test_engines_stay_known_for_longer_than_others_may_take_in_a_case() -> None:
    words = argv_of(ROWS[OWN], Ports(), _MOCKS, python="py")
    value = {flag: words[words.index(flag) + 1] for flag in words if flag.startswith("--h")}
    beats_missed = int(words[words.index("--missed-beats") + 1])
    known_s = beats_missed * int(value["--heartbeat-interval-ms"]) / 1000
    longest = Times()
    a_turn_s = longest.ramp_s + longest.warm_s + longest.seconds + 90
    assert known_s > len(ROWS) * a_turn_s


def test_a_whole_run_ends_within_twenty_minutes() -> None:
    times = Times()
    closed_s = times.warm_s + times.seconds
    # All tokens that streams ask for, where a router brings a third of what direct does.
    streams_s = {512: 1 + 2 * times.ramp_s + closed_s, 2048: 3 * (times.ramp_s + closed_s)}
    all_s = sum(
        streams_s[case.count] if case.kind == "streams" else closed_s
        for row in ROWS.values()
        for case in CASES
        if not row.cases or case.name in row.cases
    )
    assert bench.ROUNDS * all_s < 18 * 60


def test_streams_last_until_the_window_is_over() -> None:
    words = load_words(Case("streams", 512, 512), 80, Times(1.0, 3.0, 2.0))
    assert words == ["80", "streams", "512", "512", "2.0", "1.0", "3.0", "300"]
    closed = load_words(Case("closed", 64, 32768), 80, Times(1.0, 3.0, 2.0))
    assert closed == ["80", "closed", "64", "32768", "1.0", "3.0"]


def test_a_turn_in_which_an_answer_was_wrong_fails(bench_programs: Programs) -> None:
    nobody = Ports().http
    times = Times(warm_s=5.0, seconds=1.0)
    with pytest.raises(ContenderFailed, match="2 errors; the first: Connection refused"):
        turn(bench_programs.load, Case("closed", 2, 512), nobody, times)
    with pytest.raises(ContenderFailed, match="the load generator ended after ''"):
        turn(bench_programs.load, Case("closed", 2, 0), nobody, times)


_BURNS = """
import os, resource, subprocess, sys, threading
def burn():
    until = resource.getrusage(resource.RUSAGE_THREAD).ru_utime + 0.05
    while resource.getrusage(resource.RUSAGE_THREAD).ru_utime < until:
        sum(range(1000))
def burn_in_kernel():
    zeros = os.open("/dev/zero", os.O_RDONLY)
    until = resource.getrusage(resource.RUSAGE_THREAD).ru_stime + 0.05
    while resource.getrusage(resource.RUSAGE_THREAD).ru_stime < until:
        os.read(zeros, 2**20)
burn()
for one in (burn, burn_in_kernel):
    thread = threading.Thread(target=one)
    thread.start()
    thread.join()
if sys.argv[1:] == ["parent"]:
    subprocess.Popen([sys.executable, "-c", sys.stdin.readline().strip(), "child"])
used = resource.getrusage(resource.RUSAGE_SELF)
print(used.ru_utime + used.ru_stime, flush=True)
sys.stdin.readline()
"""


def test_processor_time_is_of_user_and_kernel_of_all_threads_and_processes_and_nobody_else(
    tmp_path: Path,
) -> None:
    argv = [sys.executable, "-c", _BURNS, "parent"]
    process = subprocess.Popen(
        argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
    )
    assert process.stdin is not None
    assert process.stdout is not None
    router = Processes(process, tmp_path / "log")
    try:
        process.stdin.write(f"exec({_BURNS!r})\n".encode())
        process.stdin.flush()
        used_s = sum(float(process.stdout.readline()) for _ in range(2))
        counted_s = router.cpu_s()
    finally:
        router.end()
        process.stdin.close()
        process.stdout.close()
    assert used_s >= 0.3
    assert used_s - 0.01 <= counted_s < used_s + 0.2


def test_the_log_is_emptied_and_the_router_writes_on(tmp_path: Path) -> None:
    log = tmp_path / "log"
    code = "import sys; print('a' * 99, flush=True); sys.stdin.readline(); print('b', flush=True)"
    with log.open("ab") as output:
        process = subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=output
        )
    assert process.stdin is not None
    while not log.stat().st_size:
        assert process.poll() is None
    router = Router(ROWS[OWN], process, log, 80)
    router.forget_log()
    process.communicate(b"\n", timeout=60)
    assert log.read_text() == "b\n"


@pytest.fixture
def found() -> Found:
    made = Found(
        idle_gib={OWN: 0.04, "vllm-router": 0.06},
        after_gib={OWN: 0.1, "vllm-router": 0.3},
        failed={("smg", "s512"): "9 errors"},
    )
    # The machine was half as fast in the second round.
    for row, cpu_s, p50 in ((OWN, 0.6, 100.0), ("vllm-router", 1.0, 200.0), ("direct", 0.0, 20.0)):
        for case in ("c64", "s512"):
            made.turns[row, case] = [
                a_turn(cpu_s=cpu_s * slow, p50=p50 * slow) for slow in (1, 2, 1)
            ]
    made.turns[OWN, "c64"][2] = a_turn(cpu_s=0.7, p50=100.0)
    return made


def _reported(found: Found) -> dict[str, Any]:
    cases = [case for case in CASES if case.name in ("c64", "s512")]
    plan = Plan([], cases, 3, 4, Times(), ["--x"], Interpreter("py", "3.0"))
    return json.loads(json.dumps(report(found, plan, {"xpyd-2": "not here"})))


def test_a_ratio_is_of_one_round_and_the_median_of_the_rounds_is_taken(found: Found) -> None:
    found.turns["vllm-router", "c64"][1] = a_turn(cpu_s=1.0, p50=200.0)
    made = _reported(found)
    of = {(one["name"], one["peer"]): one for one in made["ratios"]}
    without = ("c256", BESIDE_LONG.name)
    assert set(of) == {(r.name, "vllm-router") for r in RATIOS if r.case not in without}
    # 0.6, 1.2 and 0.7: the medians of both sides would give 0.7, too, but of 0.7 and 1.0.
    assert of["CPU per request", "vllm-router"]["reached"] == 0.7
    assert of["CPU per request", "vllm-router"]["holds"] is True
    assert of["CPU per request", "vllm-router"]["measured"] == [0.6, 1.2, 0.7]
    assert of["memory", "vllm-router"]["reached"] == 0.333
    found.after_gib[OWN] = 0.2
    assert [one["holds"] for one in _reported(found)["ratios"]] == [True, True, False]


def test_what_others_wait_beside_long_bodies_is_a_ratio_to_the_same_without(found: Found) -> None:
    found.turns[OWN, "c16"] = [a_turn(p50=10.0), a_turn(p50=20.0)]
    found.turns[OWN, BESIDE_LONG.name] = [a_turn(p50=50.0), a_turn(p50=60.0)]
    # A peer that answered nobody in time has no latency, and no ratio.
    found.turns["vllm-router", BESIDE_LONG.name] = [Turn(2.0, 0, 0, 1.0, None, None, None)]
    of = {(one["name"], one["peer"]): one["measured"] for one in _reported(found)["ratios"]}
    assert of["p99 beside long bodies", "xpyd in c16"] == [5.0, 3.0]
    assert ("p99 beside long bodies", "vllm-router") not in of


def test_ours_over_tls_is_compared_with_a_peer_behind_nginx_and_with_ours_without(
    found: Found,
) -> None:
    for memory in (found.idle_gib, found.after_gib):
        memory |= {TLS: 0.1, TLS_PEER: 0.2}
    for row, cpu_s in ((TLS, 0.9), (TLS_PEER, 1.8)):
        found.turns[row, "c64"] = [a_turn(cpu_s=cpu_s * slow) for slow in (1, 2, 1)]
    made = _reported(found)
    of = {(one["name"], one["peer"]): one["measured"] for one in made["ratios"]}
    assert of["CPU per request over TLS", TLS_PEER] == [0.5, 0.5, 0.5]
    assert of["CPU per request over TLS", "xpyd without"] == [1.5, 1.5, 1.286]
    assert ("CPU per token over TLS", TLS_PEER) not in of
    assert "| CPU per request over TLS | c64 | vllm-router-nginx |  | 0.50 |" in with_measured(
        f"{BEGIN}{END}", made
    )


def test_a_row_of_few_cases_takes_no_turn_in_others(found: Found) -> None:
    running: set[str] = set()
    fakes: Any = {name: FakeRouter(name, running) for name in ("own", "tls")}
    for case in ("c16", "c64"):
        [one] = [case_ for case_ in CASES if case_.name == case]
        take_turns(fakes, one, 0, found, a_turn=lambda *_: a_turn(), say=lambda _: None)
    assert {case for name, case in found.turns if name == "tls"} == {"c64"}
    assert {case for name, case in found.turns if name == "own"} == {"c16", "c64"}


def test_where_turns_were_repeated_ratios_are_of_these(found: Found) -> None:
    for row, cpu_s in ((OWN, 0.9), ("vllm-router", 1.0)):
        found.duels[row, "c64"] = [a_turn(cpu_s=cpu_s * slow) for slow in (1, 3)]
    of = {(one["name"], one["case"]): one for one in _reported(found)["ratios"]}
    assert of["CPU per request", "c64"]["measured"] == [0.9, 0.9]
    assert of["CPU per request", "c64"]["holds"] is False
    assert of["CPU per token", "s512"]["measured"] == [0.6, 0.6, 0.6]


def test_repeated_turns_are_noted_apart() -> None:
    found, rows = Found(), dict.fromkeys(["xpyd", "vllm-router"])

    def of(_: Any, case: Case) -> Turn:
        return a_turn(answered=case.count)

    take_turns(rows, CASES[2], 0, found, turns=found.duels, a_turn=of, say=lambda _: None)
    assert not found.turns
    assert [one.answered for one in found.duels["xpyd", "c64"]] == [64]


def test_cpu_is_by_request_and_by_token_and_added_is_to_direct_of_the_same_round(
    found: Found,
) -> None:
    own = _reported(found)["cases"]["c64"][OWN]
    assert (own["cpuUsPerRequest"], own["requestsPerS"], own["cores"]) == (700.0, 500.0, 0.35)
    assert own["measured"]["p50Us"] == [100, 200, 100]
    assert own["added"] == {"p50Us": 80.0, "p99Us": 240.0}
    streams = _reported(found)["cases"]["s512"]["vllm-router"]
    assert (streams["cpuUsPerToken"], streams["tokensPerS"]) == (500.0, 1000.0)
    assert streams["added"] == {"relayP50Us": 180.0, "relayP99Us": 540.0}


def test_who_answered_nothing_in_time_has_no_cost(found: Found) -> None:
    for row in (OWN, "vllm-router"):
        nothing = Turn(2.0, 0, 0, 1.0, None, None, None)
        found.turns[row, "c64"] = [nothing] * 3
    made = _reported(found)
    assert made["cases"]["c64"][OWN]["cpuUsPerRequest"] is None
    assert "CPU per request" not in {one["name"] for one in made["ratios"]}
    assert "| c64 | **xpyd** | 0 | - / - / - | - / - | - | 0.50 |" in with_measured("", made)


def test_the_page_has_a_table_for_each_kind_of_load_and_says_what_is_missing(
    found: Found,
) -> None:
    page = with_measured(f"before\n{BEGIN}old\n{END}after\n", _reported(found))
    assert (page[:7], page[-6:], "old" in page) == ("before\n", "after\n", False)
    for line in (
        "| CPU per request | c64 | vllm-router | at most 0.75 | 0.60 | 0.60 to 0.70 | yes |",
        "| memory |  | vllm-router | at most 0.50 | 0.33 |  | yes |",
        "| c64 | direct | 500 | 0.02 / 0.04 / 0.06 |  |  |  |",
        "| c64 | **xpyd** | 500 | 0.10 / 0.20 / 0.30 | 0.08 / 0.24 | 700.0 | 0.35 |",
        "| s512 | vllm-router | 1000 | - / - | 0.20 / 0.60 | 0.18 / 0.54 | 500.0 | 0.50 |",
        "| **xpyd** | 41 | 102 |",
        "Not measured: xpyd-2 (not here).",
        "**smg failed in s512**: 9 errors.",
    ):
        assert f"{line}\n" in page
    assert "Rounds: 3, duels: 4. Ours with `--x`." in page


def test_the_page_shows_what_the_json_has() -> None:
    page = ROOT / "docs/benchmarks/router.md"
    kept = page.with_suffix(".json")
    text = page.read_text()
    made = json.loads(kept.read_text()) if kept.exists() else None
    assert (BEGIN in text, END in text) == (True, True)
    assert made is None or with_measured(text, made) == text


@pytest.mark.parametrize("words", [["--rows", "xpyd,envoy"], ["--streams", "many"]])
def test_a_row_that_nobody_knows_is_refused(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        bench.main(words)
    assert words[0] in capsys.readouterr().err


@pytest.mark.long
def test_the_short_form_measures_our_router_beside_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    output = tmp_path / "router.json"
    output.with_suffix(".md").write_text(f"{BEGIN}{END}")
    rows = "direct,xpyd,xpyd-continuing"
    words = ["--quick", "--rows", rows, "--concurrency", "4", "--streams", "8"]
    assert bench.main([*words, "--seconds", "1", "--output", str(output)]) == 0
    made = json.loads(capsys.readouterr().out)
    assert json.loads(output.read_text()) == made
    assert (set(made["cases"]), made["failed"]) == ({"c4", "s8"}, [])
    for row in (OWN, "xpyd-continuing"):
        closed, streams = made["cases"]["c4"][row], made["cases"]["s8"][row]
        assert closed["requestsPerS"] > 0
        assert closed["cpuUsPerRequest"] > 0
        assert streams["tokensPerS"] > 0
        assert streams["cpuUsPerToken"] > 0
        assert made["memoryMib"][row]["after"] > 10
    assert "| c4 | **xpyd-continuing** |" in output.with_suffix(".md").read_text()


@pytest.mark.parametrize(("status", "fault"), [(200, ""), (413, "413 b'no'")])
def test_a_client_beside_sends_bodies_of_the_size_and_says_what_was_refused(
    status: int, fault: str
) -> None:
    sizes: list[int] = []

    class Answering(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            assert json.loads(body)["x"][-1] == {}
            sizes.append(len(body))
            self.send_response(status)
            self.send_header("Content-Length", "2")
            self.end_headers()
            self.wfile.write(b"no")

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Answering) as server:
        threading.Thread(target=server.serve_forever).start()
        beside = Beside(server.server_port, 1 << 16)
        deadline = time.monotonic() + 20
        while not sizes and time.monotonic() < deadline:
            time.sleep(0.01)
        beside.end()
        server.shutdown()
    assert set(sizes) <= {65536, 65535, 65534}
    assert sizes
    assert beside.fault == fault


def test_two_keys_are_judged_by_the_time_to_the_first_token_and_by_weight() -> None:
    found = shares.result(0.2, 0.29, {"quiet": 3100, "flood": 1000})
    assert (found["ttftRatio"], found["ttftHolds"]) == (1.45, True)
    assert (found["apart"], found["shareHolds"]) == (0.033, True)
    worse = shares.result(0.2, 0.31, {"quiet": 1000, "flood": 1000})
    assert (worse["ttftHolds"], worse["shareHolds"]) == (False, False)
    assert list(parse_keys(shares.key_lines(), "keys").options) == ["quiet", "flood"]


def test_a_part_takes_the_place_of_the_same_figures_and_leaves_the_others() -> None:
    def made(row: str, cost: float, **more: Any) -> dict[str, Any]:
        ratio = {"name": "CPU", "case": "c64", "peer": row, "reached": cost}
        return {
            "cases": {"c64": {row: {"cpu": cost}}},
            "memoryMib": {row: {"idle": cost}},
            "ratios": [ratio],
            "failed": [],
            "shares": [],
            **more,
        }

    failed = {"row": "xpyd", "case": "c64", "why": "x"}
    other = {**failed, "case": "c16"}
    old = made("smg", 1.0, failed=[failed, other], shares=[{"processes": 1}])
    found = merged(merged(old, made("xpyd", 2.0)), made("xpyd", 3.0))
    assert found["cases"] == {"c64": {"smg": {"cpu": 1.0}, "xpyd": {"cpu": 3.0}}}
    assert [one["reached"] for one in found["ratios"]] == [1.0, 3.0]
    assert found["memoryMib"] == {"smg": {"idle": 1.0}, "xpyd": {"idle": 3.0}}
    assert found["failed"] == [other], "it was measured anew"
    assert found["shares"] == [{"processes": 1}]


def test_shares_are_shown_for_each_number_of_processes() -> None:
    one = shares.result(0.2, 0.29, {"quiet": 3100, "flood": 1000})
    page = shares_of({"shares": [{"processes": 1, **one}, {"processes": 2, **one}]})
    assert [line.split(" | ")[1] for line in page[2:]] == ["1", "1", "2", "2"]
    assert shares_of({"shares": []}) == []


def test_the_row_with_keys_sends_one_and_its_router_asks_for_it() -> None:
    row = ROWS["xpyd-keys"]
    assert argv_of(row, Ports(), _MOCKS, python="py")[-2:] == ["--api-key", row.key]
    assert "--api-key" not in argv_of(ROWS[OWN], Ports(), _MOCKS, python="py")


def test_a_row_over_tls_serves_it_itself_or_has_nginx_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    argv = argv_of(ROWS[TLS], Ports(), _MOCKS, python="py", folder=tmp_path)
    assert argv[-4::2] == ["--ssl-certfile", "--ssl-keyfile"]
    assert all(Path(file).is_file() for file in argv[-3::2])
    nginx.cache_clear()
    system = tmp_path / "bin" / "nginx"
    system.parent.mkdir()
    system.touch(0o755)
    monkeypatch.setenv("PATH", str(system.parent))
    monkeypatch.setattr(routers, "peer_environment", lambda: tmp_path)
    words = argv_of(ROWS[TLS_PEER], Ports(http=80, inner=81), _MOCKS, python="py", folder=tmp_path)
    assert words[words.index("--port") + 1] == "81"
    config = Path(words[1].partition("=")[2]).read_text()
    assert "listen 127.0.0.1:80 ssl" in config
    assert "server 127.0.0.1:81;" in config


def test_a_row_whose_proxy_cannot_be_fetched_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nginx.cache_clear()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(shutil, "which", lambda *_, **__: None)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(NotHere, match=r"apt-get: .*No such file"):
        nginx()
