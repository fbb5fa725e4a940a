"""schemathesis against the document that a running router publishes: what is asked as it says, or
wrongly on purpose, is answered as it says.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.harness import ROOT, Fleet
from tests.router.strict_engines import ADMIN_KEY, SPARE, fleet_with

SEED = 7
# A schema cannot say the rules between fields (stream_options needs stream, min_tokens is at most
# max_tokens), so some of what fits it is refused.
NOT_CHECKED = "positive_data_acceptance"
_MAX_EVENTS = 1_000_000
# Too many items may make a body that is too long: 413, which schemathesis does not expect.
_REFUSALS = [
    *("400", "401", "403", "404", "405", "406", "409"),
    *("413", "415", "422", "428", "429", "5xx"),
]


def judge(fleet: Fleet, *, examples: int, phases: str, request_timeout_s: int = 20) -> None:
    """Run schemathesis' command; AssertionError shows what it found, and the router's log."""
    flags = {
        "--header": f"Authorization: Bearer {ADMIN_KEY}",
        "--phases": phases,
        "--max-examples": str(examples),
        "--seed": str(SEED),
        "--generation-database": "none",
        "--exclude-checks": NOT_CHECKED,
        "--request-timeout": str(request_timeout_s),
    }
    # By default it leaves a stream after 20 events; ours are read to their ends.
    (fleet.folder / "schemathesis.toml").write_text(
        f"max-stream-events = {_MAX_EVENTS}\n"
        f"[checks]\nnegative_data_rejection.expected-statuses = {_REFUSALS}\n"
    )
    command = [sys.executable, "-m", "schemathesis.cli", "run", "--no-color", "--no-shrink"]
    hooks = {"SCHEMATHESIS_HOOKS": "tests.router.schemathesis_hooks", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*command, f"{fleet.router.url}/openapi.json"]
        + [w for pair in flags.items() for w in pair],
        cwd=fleet.folder,
        env={**os.environ, **hooks},
        capture_output=True,
        text=True,
        timeout=request_timeout_s * examples + 300,
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert "Traceback" not in fleet.router.log, fleet.router.log[-4000:]
    # It really got through to the engines: streams and whole answers, and refusals; of each a
    # quarter of the examples, since many that fit the schema are refused.
    for endpoint in ("completions", "chat/completions"):
        for status in (200, 400):
            name = f"xpyd_router_requests_total{{endpoint={endpoint},status={status}}}"
            assert fleet.router.metric(name) > examples // 4, fleet.router.metrics()


@pytest.mark.long
def test_a_router_answers_as_its_document_says(tmp_path: Path) -> None:
    with fleet_with(tmp_path, "p-0", "d-0", SPARE) as fleet:
        judge(fleet, examples=5, phases="examples,coverage,fuzzing")


@pytest.mark.slow
@pytest.mark.long
def test_so_does_one_with_real_engines(tmp_path: Path) -> None:
    with fleet_with(tmp_path, SPARE) as fleet:
        # Chats without a limit use the context up.
        short = ("--max-model-len", "32")
        engines = [fleet.start_engine(role, *short) for role in ("Prefill", "Decode")]
        fleet.wait_ready(*engines)
        judge(fleet, examples=20, phases="examples,coverage,fuzzing", request_timeout_s=60)


@pytest.mark.soak
def test_so_does_one_that_is_asked_for_minutes(tmp_path: Path) -> None:
    with fleet_with(tmp_path, "p-0", "d-0", SPARE) as fleet:
        judge(fleet, examples=1000, phases="examples,coverage,fuzzing,stateful")
