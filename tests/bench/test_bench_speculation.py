"""`make bench-engine`, speculation: rows are compared with their own engine, and drafts counted."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from bench.engine import resting, speculation
from bench.engine.__main__ import _parser, _plan, _subjects
from bench.engine.contender import ContenderFailed, Recipe, requests_of
from bench.engine.models import text_prompts
from bench.engine.page import BEGIN, with_measured
from bench.engine.report import report, with_drafts
from bench.engine.resting import METHODS
from bench.engine.rounds import OWN, PEER, Found, Plan
from bench.engine.shape import Case
from bench.engine.speculation import (
    SHORT,
    SUBJECTS,
    CountingServer,
    draft_counts,
    fault,
    measure_drafts,
)
from bench.report import END
from tests.bench.test_bench_engine import turn
from xpyd_tools.bench.summary import Sample

OWN_METRICS = """# TYPE xpyd_engine_spec_decode_num_drafts_total counter
xpyd_engine_spec_decode_num_drafts_total 10
xpyd_engine_spec_decode_num_draft_tokens_total 38
xpyd_engine_spec_decode_num_accepted_tokens_total 12
xpyd_engine_spec_decode_num_accepted_tokens_per_pos_total{position="0"} 8
xpyd_engine_spec_decode_num_accepted_tokens_per_pos_total{position="1"} 4
xpyd_engine_steps_total 77
"""
PEER_METRICS = """# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{engine="0",model_name="bench"} 10.0
vllm:spec_decode_num_drafts_created{engine="0",model_name="bench"} 1.7e+09
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="bench"} 38.0
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="bench"} 12.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="bench",position="0"} 8.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="bench",position="1"} 4.0
"""
COUNTS = {"drafts": 10, "draft_tokens": 38, "accepted_tokens": 12, "0": 8, "1": 4}
ONE = Case("copying", 512, 128, 1, 3)
NO_OTHERS = Plan([], [], rounds=1, threads=2, peer=None, reference=False)


@pytest.mark.parametrize("metrics", [OWN_METRICS, PEER_METRICS])
def test_what_became_of_drafts_is_read_of_either_engine(metrics: str) -> None:
    assert draft_counts(metrics) == COUNTS
    assert not draft_counts("xpyd_engine_steps_total 77\n")


class FakeServer:
    """Each load drafts as many tokens as it has requests, and accepts them."""

    def __init__(self, *, fails: bool = False) -> None:
        self._drafts = 100
        self._fails = fails
        self.ended = False

    def metrics(self) -> str:
        return f"xpyd_engine_spec_decode_num_drafts_total {self._drafts}\n"

    def run(self, case: Case, seed: int, rate: float = 0.0) -> list[Sample]:
        del seed, rate
        if self._fails:
            raise ContenderFailed("HTTP 500")
        self._drafts += case.requests
        return [Sample(0.0, 0.5, (0.1,), 0.6, case.input_tokens, case.output_tokens)]

    def stop(self) -> None:
        pass

    go_on = stop

    def __enter__(self) -> FakeServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.ended = True


def test_drafts_are_counted_for_the_case_in_which_they_were_made() -> None:
    fake: Any = FakeServer()
    server = CountingServer(fake)
    for case in (ONE, Case("random", 512, 128, 1, 5), ONE):
        server.run(case, seed=0)
    assert {name: counts["drafts"] for name, counts in server.drafts.items()} == {
        "copying": 6,
        "random": 5,
    }


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> dict[str, Any]:
    """The servers that were started; the one that the test names fails at its first request."""
    servers: dict[str, Any] = {}

    def serve(recipe: Recipe, log: Path, cores: str) -> FakeServer:
        del cores
        log.write_text(
            "INFO ready\nNotImplementedError: no drafts on the CPU\nRuntimeError: dead\n"
        )
        name = recipe.name if recipe.name not in servers else f"{recipe.name}, again"
        servers[name] = FakeServer(fails=recipe.name == request.param)
        return servers[name]

    monkeypatch.setattr(speculation, "served", serve)
    return servers


@pytest.mark.parametrize("started", [f"{PEER}, n-gram"], indirect=True)
def test_a_peer_that_refuses_is_left_out_with_its_words(
    started: dict[str, FakeServer], tmp_path: Path
) -> None:
    plan = Plan([], [], rounds=2, threads=2, peer=tmp_path, reference=False)
    absent: dict[str, str] = {}
    ran: list[str] = []

    def say(text: str) -> None:
        if text.startswith("round "):
            ran.append(text.partition("copying, ")[2].partition(":")[0])

    found = measure_drafts(SHORT[0], plan, tmp_path, absent, say)
    assert absent == {f"{PEER}, n-gram": "NotImplementedError: no drafts on the CPU"}
    assert {name for name, _ in found.turns} == {OWN, f"{OWN}, n-gram", PEER}
    assert found.drafts[OWN, "copying"]["drafts"] == 2
    assert all(server.ended for server in started.values())
    # In turned order, and what refused is not asked again.
    ours = [OWN, f"{OWN}, n-gram", PEER]
    again = [f"{name}, again" for name in ours[::-1]]
    assert list(started) == [*ours, f"{PEER}, n-gram", *again]
    assert ran == [*ours, *ours[1:], *ours[:1]]


@pytest.mark.parametrize("started", [f"{OWN}, n-gram"], indirect=True)
def test_ours_may_not_refuse(started: dict[str, FakeServer], tmp_path: Path) -> None:
    with pytest.raises(ContenderFailed, match="HTTP 500"):
        measure_drafts(SHORT[0], NO_OTHERS, tmp_path, {}, lambda _: None)
    assert all(server.ended for server in started.values())


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        ("INFO x\n(Engine pid=7) ERROR ValueError: no such method\nRuntimeError: see above\n", 0),
        ("WARN may fail with error like `OSError: x`\nValueError: no such method\n", 0),
        ("killed\n\n", "killed"),
        ("", "it said nothing"),
    ],
)
def test_a_fault_is_the_first_error_of_a_log(said: str, shown: Any) -> None:
    assert fault(said) == (shown or "ValueError: no such method")


def drafted() -> Found:
    """Two rounds of ours and the peer; the machine was half as fast in the second."""
    found = Found()
    found.turns[OWN, "copying"] = [turn(25, 500, 40), turn(50, 1000, 20)]
    found.turns[f"{OWN}, n-gram", "copying"] = [turn(12, 500, 80), turn(30, 1000, 32)]
    found.turns[PEER, "copying"] = [turn(25, 500, 36), turn(50, 1000, 18)]
    found.turns[f"{PEER}, n-gram", "copying"] = [turn(25, 500, 54), turn(50, 1000, 18)]
    found.turns[OWN, "random"] = [turn(25, 500, 40)]
    found.turns[f"{OWN}, n-gram", "random"] = [turn(25, 500, 38)]
    found.drafts = {key: Counter() for key in found.turns}
    found.drafts[f"{OWN}, n-gram", "copying"].update(COUNTS)
    return found


def test_a_row_is_compared_with_its_own_engine_in_the_same_round() -> None:
    made = report({}, NO_OTHERS, {}, {"medium": drafted()})["speculation"]["medium"]
    assert made["copying"]["drafting"] == {
        f"{OWN}, n-gram": {
            "toWithout": {"median": 1.8, "best": 2.0},
            "draftTokens": 38,
            "accepted": 0.316,
            "byPlace": [0.8, 0.4],
            "wanted": 1.5,
            "holds": True,
        },
        f"{PEER}, n-gram": {
            "toWithout": {"median": 1.25, "best": 1.5},
            "draftTokens": 0,
            "accepted": 0.0,
            "byPlace": [],
        },
    }
    assert made["random"]["drafting"][f"{OWN}, n-gram"]["holds"] is False


def test_the_page_has_a_table_of_each_model() -> None:
    made = report({}, NO_OTHERS, {f"{PEER}, n-gram": "no"}, {"medium": drafted()})
    page = with_measured(f"{BEGIN}{END}", json.loads(json.dumps(made)))
    lines = page.splitlines()
    assert "Not measured: vllm, n-gram (no)." in page
    assert "| copying, 512/128 at 1 | xpyd | 37.5 | 30.0 | | | | | |" in lines
    reached = "| 1.80 (2.00) | at least 1.50: yes | 38 | 32% | 80% / 40% |"
    assert f"| copying, 512/128 at 1 | xpyd, n-gram | 21.0 | 56.0 {reached}" in lines
    assert "| 0.95 (0.95) | at least 0.97: missed | 0 | 0% |  |" in page
    columns = {line.count("|") for line in lines if line.startswith("|")}
    assert columns == {10}


def test_drafts_alone_take_the_place_of_a_whole_runs() -> None:
    whole = report({}, NO_OTHERS, {f"{PEER}, n-gram": "no", PEER: "gone"}, {"tiny": drafted()})
    whole |= {"models": {"tiny": 1}, "date": "2026-01-01"}
    part = report({}, NO_OTHERS, {f"{PEER}, EAGLE": "never"}, {"medium": drafted()})
    both = with_drafts(whole, part)
    assert both["speculation"] == part["speculation"]
    assert both["absent"] == {PEER: "gone", f"{PEER}, EAGLE": "never"}
    assert (both["models"], both["date"]) == ({"tiny": 1}, "2026-01-01")
    page = with_measured(f"{BEGIN}{END}", {**json.loads(json.dumps(both)), "models": {}})
    assert f"Drafts, {part['date']}: " in page
    # What another machine measured is not beside it.
    other = {**whole, "machine": {**whole["machine"], "cores": 192}}
    assert with_drafts(other, part) == part


@pytest.mark.parametrize(
    ("argv", "models", "subjects"),
    [
        (["--speculation", "--no-peer"], [], SUBJECTS),
        (["--quick"], ["tiny"], SHORT),
        (["--quick", "--speculation"], [], SHORT),
        (["--no-peer"], ["tiny", "small", "medium"], SUBJECTS),
        (["--no-peer", "--models", "tiny"], ["tiny"], ()),
    ],
)
def test_the_part_is_run_alone_or_with_the_whole(
    argv: list[str], models: list[str], subjects: Any
) -> None:
    options = _parser().parse_args(argv)
    assert _plan(options, {}).models == models
    assert _subjects(options) == subjects
    assert options.output is None


def test_the_whole_is_written_and_the_part_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.engine.__main__.peer_environment", lambda: Path("peer"))
    for argv, is_written in ([], True), (["--speculation"], False):
        options = _parser().parse_args(argv)
        _plan(options, {})
        assert (options.output is not None) is is_written


def test_prompts_of_text_are_as_long_as_asked_and_the_same_for_all() -> None:
    case = Case("text", 40, 8, 1, 3, text=True)
    prompts = [request.prompt for request in requests_of(case, seed=1)]
    assert prompts == text_prompts(3, 40, seed=1) != text_prompts(3, 40, seed=2)
    assert {len(prompt) for prompt in prompts} == {40}


@pytest.mark.parametrize("method", METHODS)
def test_steps_with_resting_drafts_are_compared_with_steps_without(method: Any) -> None:
    found = resting.measure(method, 2, rounds=1)
    assert found["all"] == found["median"] > 0
    assert found["stepMs"] > 0
