"""`xpyd trace`: a request's waterfall, from lines as routers and engines log them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.operator.test_kubectl_commands import Kubectl, listed, xpyd
from tests.operator.test_kubectl_commands import kubectl as kubectl
from xpyd_core import cli
from xpyd_operator.cluster.page import WIDTH
from xpyd_operator.cluster.waterfall import (
    Phase,
    Record,
    read_records,
    requests_of,
    waterfall_of,
    waterfall_text,
)

REQUEST = "466ae71196410408b3c5dff9dce6d1bc"
ROUTER = (
    "2026-01-01T12:00:01.000+00:00 INFO    xpyd_router.access: POST /v1/completions 200"
    f" request={REQUEST} prefill=demo-prefill-0 decode=demo-decode-1 tries=1 seconds=1.0000"
    " queue_seconds=0.1000 bytes=350 prefill_seconds=0.3000 first_byte_seconds=0.4000"
    " decode_seconds=0.5000 prompt_tokens=4 output_tokens=5 model=demo-model"
    ' response=cmpl-8f3a client_id="my id" kv=moved'
)
P = (
    "2026-01-01T12:00:00.500+00:00 INFO    xpyd_worker.server.http.inference: request done"
    f" request={REQUEST} transfer=SendTo prompt_tokens=4 output_tokens=1 seconds=0.2000"
    " queue_seconds=0.0500 first_token_seconds=0.2000"
)
D = (
    "2026-01-01T12:00:09.900+00:00 INFO    xpyd_worker.server.http.inference: request done"
    f" request={REQUEST} transfer=ReceiveFrom prompt_tokens=4 output_tokens=4 seconds=0.5000"
    " queue_seconds=0.1000 first_token_seconds=0.2000"
)
OTHER = (
    ROUTER.replace(REQUEST, "0" * 32).replace("cmpl-8f3a", "cmpl-9999").replace("my id", "your id")
)


def records(pod: str, *lines: str, wanted: str = REQUEST) -> list[Record]:
    return read_records(pod, lines, wanted)


def phases() -> tuple[Phase, ...]:
    (router,) = requests_of(records("r", OTHER, ROUTER, "rubbish " + REQUEST), REQUEST)
    engines = [*records("demo-prefill-0", P), *records("demo-decode-1", D)]
    found = waterfall_of(router, engines, REQUEST)
    assert found is not None
    assert found.lost == ()
    return found.phases


def test_phases_follow_each_other_from_the_queue_to_the_last_byte() -> None:
    """D's clock is 9 s ahead: no times of two machines are compared."""
    rows = [(p.name.strip(), round(p.start_s, 3), round(p.took_s, 3)) for p in phases()]
    assert rows == [
        ("queue", 0.0, 0.1),
        ("pick P and D", 0.1, 0.1),
        ("prefill call", 0.2, 0.3),
        ("queue", 0.25, 0.05),
        ("prefill", 0.3, 0.15),
        ("first token", 0.45, 0.0),
        ("decode call", 0.5, 0.5),
        ("KV from P", 0.5, 0.1),
        ("next token", 0.6, 0.1),
        ("other tokens", 0.7, 0.3),
        ("first byte", 0.4, 0.0),
        ("last byte", 1.0, 0.0),
    ]


def test_the_chart_has_a_bar_for_each_phase_within_a_terminals_width() -> None:
    (router,) = requests_of(records("demo-router-0", ROUTER), REQUEST)
    found = waterfall_of(router, [*records("demo-decode-1", D)], REQUEST)
    assert found is not None
    text = waterfall_text(found)
    lines = text.splitlines()
    assert max(map(len, lines)) <= WIDTH
    assert lines[0] == f"request {REQUEST}"
    assert "200 1.0000 s model=demo-model tries=1 kv=moved" in " ".join(text.split())
    (bar,) = [line for line in lines if line.startswith("decode call")]
    assert bar.split("|")[1] == " " * 20 + "#" * 20
    assert lines[-1] == "  nothing of it in the log of demo-prefill-0"


@pytest.mark.parametrize("wanted", [REQUEST, "cmpl-8f3a", "my id"])
def test_a_request_is_found_by_each_of_its_ids_and_only_by_a_whole_one(wanted: str) -> None:
    said = records("r", OTHER, ROUTER, wanted=wanted)
    assert [one.fields["request"] for one in requests_of(said, wanted)] == [REQUEST]
    assert requests_of(records("r", ROUTER, wanted=wanted[:-1]), wanted[:-1]) == []


def test_lines_in_json_say_the_same() -> None:
    (text,) = requests_of(records("r", ROUTER), REQUEST)
    entry = {"time": text.time, "level": "info", "logger": text.logger, "message": text.message}
    (found,) = requests_of(records("r", json.dumps({**entry, **text.fields})), REQUEST)
    assert waterfall_of(found, [], REQUEST) == waterfall_of(text, [], REQUEST)


def test_tries_that_failed_are_a_bar_with_their_causes() -> None:
    line = ROUTER.replace("tries=1", "tries=2") + " failures=decode:lost"
    (router,) = requests_of(records("r", line), REQUEST)
    found = waterfall_of(router, [], REQUEST)
    assert found is not None
    tries = found.phases[1]
    assert (tries.name, tries.note) == ("earlier tries", "decode:lost")


def test_what_engines_of_an_earlier_version_and_engines_alone_say_is_shown() -> None:
    old = P.partition(" seconds=")[0]
    (router,) = requests_of(records("r", ROUTER), REQUEST)
    found = waterfall_of(router, records("demo-prefill-0", old), REQUEST)
    assert found is not None
    assert [one.name for one in found.phases][2:4] == ["prefill call", "decode call"]
    alone = waterfall_of(None, records("demo-prefill-0", P), REQUEST)
    assert alone is not None
    assert "no router's line" in alone.head
    assert waterfall_of(None, [], REQUEST) is None


def pod(name: str, role: str) -> dict[str, Any]:
    return {"metadata": {"name": name, "labels": {"xpyd.dev/fleet": "demo", "xpyd.dev/role": role}}}


def test_on_a_cluster_only_the_pods_that_the_router_names_are_read_in_bounds(
    kubectl: Kubectl, capsys: pytest.CaptureFixture[str]
) -> None:
    pods = [pod("demo-router-0", "router"), pod("demo-prefill-0", "Prefill")]
    pods += [pod(f"demo-decode-{n}", "Decode") for n in range(3)]
    kubectl.answers("get pods", listed(*pods))
    kubectl.answers("logs", "", err="Error: gone")
    kubectl.answers("logs pod/demo-router-0", f"{OTHER}\n{ROUTER}\n")
    kubectl.answers("logs pod/demo-prefill-0", f"{P}\n")
    kubectl.answers("logs pod/demo-decode-1", f"{D}\n")
    assert xpyd("trace", "cmpl-8f3a", "--fleet", "demo", "--since", "5m", "-o", "json") == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["request"], found["notFoundAt"]) == (REQUEST, [])
    logs = kubectl.said_like("^logs")
    assert [line.split()[1] for line in logs] == [
        "pod/demo-router-0",
        "pod/demo-prefill-0",
        "pod/demo-decode-1",
    ]
    assert all("--since=5m --tail=50000 --limit-bytes=33554432" in line for line in logs)
    assert "--container=router" in logs[0]
    assert "--container=engine" in logs[1]
    assert xpyd("trace", "no-such-request") == 1
    assert "no line of 'no-such-request' in the logs of 1 routers" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "says"),
    [(("abc",), "at least 4 characters"), (("abcd", "--since", "soon"), "--since 'soon'")],
)
def test_a_wrong_id_or_span_is_refused(
    kubectl: Kubectl, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], says: str
) -> None:
    kubectl.answers("get pods", listed())
    assert xpyd("trace", *words) == 2
    assert says in capsys.readouterr().err


def test_a_local_fleets_log_files_are_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    logs = tmp_path / "xpyd" / "demo" / "logs"
    logs.mkdir(parents=True)
    (logs / "demo-router-0.log").write_text(f"{ROUTER}\n")
    (logs / "demo-prefill-0.log").write_text(f"{P}\n")
    (logs / "demo-decode-1.log").write_text(f"{D}\n")
    assert cli.main(["trace", "cmpl-8f3a", "--fleet", "demo", "--since", "9999d"]) == 0
    assert "KV from P" in capsys.readouterr().out
    assert cli.main(["trace", "cmpl-8f3a", "--fleet", "other"]) == 2
    assert "has no logs" in capsys.readouterr().err
