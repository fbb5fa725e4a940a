"""`xpyd up` of a fleet of type VLLM: the real router and heartbeats, and a vLLM that is none."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
import urllib.request
from collections.abc import Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from tests.operator.fleets import document, prefill_and_decode
from tests.operator.local_fleet import until
from xpyd_core.errors import UserError
from xpyd_operator.document.load import load_fleet
from xpyd_operator.up import control
from xpyd_operator.up.checks import check_local
from xpyd_operator.up.client import read_view, take_fleet_down
from xpyd_operator.up.control import FleetView
from xpyd_operator.up.folder import FleetFolder
from xpyd_operator.up.run import UpOptions, run_up

COMMAND = Path(__file__).with_name("stand_in_vllm.py")
ENGINE = {
    "type": "VLLM",
    "connector": "Xpyd",
    "env": [{"name": "VLLM_CPU_KVCACHE_SPACE", "value": "1"}],
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    yield tmp_path
    if FleetFolder(tmp_path / "state/xpyd/v").is_supervised():
        take_fleet_down("v", 5.0)


def write(folder: Path, **spec: Any) -> UpOptions:
    made = document(
        "v",
        **{
            "model": {"uri": "file://model"},
            "engine": ENGINE,
            "pools": prefill_and_decode(),
            "kvTransfer": {"hostPoolSize": "1Mi"},
            "heartbeat": {"intervalMilliseconds": 200, "missedBeats": 10},
        }
        | spec,
    )
    (folder / "fleet.yaml").write_text(json.dumps(made))
    command = folder / "vllm"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} {COMMAND} "$@"\n')
    command.chmod(0o755)
    return UpOptions(str(folder / "fleet.yaml"), timeout_s=60.0, vllm=str(command))


def view(folder: Path) -> FleetView:
    found = read_view(FleetFolder(folder / "state/xpyd/v"))
    assert found is not None
    return found


def complete(folder: Path, prompt: str = "a b", *, endpoint: str = "") -> Any:
    body = json.dumps({"model": "model", "prompt": prompt, "max_tokens": 5}).encode()
    request = urllib.request.Request(
        f"{endpoint or view(folder).endpoint}/v1/completions",
        data=body,
        headers={"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=30) as answer:
        return json.load(answer)


def notes(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "model/notes").read_text().splitlines()]


def test_p_and_d_of_vllm_serve_through_the_fleets_router(folder: Path) -> None:
    transfer = {"hostPoolSize": "1Mi", "transport": "UDS"}
    assert run_up(write(folder, kvTransfer=transfer), detach=True) == 0
    assert complete(folder)["choices"][0]["text"] == "kv_consumer"
    prefill, decode = notes(folder)
    assert (prefill["role"], prefill["max_tokens"]) == ("kv_producer", 1)
    assert (decode["role"], decode["max_tokens"]) == ("kv_consumer", 5)
    for note in (prefill, decode):
        assert note["params"]["pair_mac"], "a pair id without its MAC would move no KV"
        assert note["environment"]["VLLM_PLUGINS"] == "xpyd"
    assert prefill["id"] == decode["id"]
    pods = {pod.pool: pod for pod in view(folder).pods}
    for note, pool in ((prefill, "prefill"), (decode, "decode")):
        extra = note["transfer"]["kv_connector_extra_config"]
        assert extra["host"] == pods[pool].address
        assert Path(extra["key_file"]).is_file()
        assert Path(extra["socket_dir"]).is_dir()
        assert f"{pods[pool].address}:21001" in note["id"]

    # A vLLM that dies is another instance, and serves again.
    os.kill(decode["pid"], signal.SIGKILL)
    until(lambda: any(pod.restarts for pod in view(folder).pods), 30)
    until(lambda: view(folder).ready, 30)
    assert complete(folder)["choices"][0]["text"] == "kv_consumer"
    last = notes(folder)[-1]
    assert last["pid"] != decode["pid"]

    take_fleet_down("v", 30.0)
    for note in notes(folder):
        with pytest.raises(ProcessLookupError):
            os.kill(note["pid"], 0)


@contextlib.contextmanager
def load(folder: Path) -> Generator[list[str]]:
    """Clients that ask again and again, and who answered them; HTTPError at the end for one that
    was refused."""
    done, texts = threading.Event(), list[str]()

    def ask() -> None:
        endpoint = view(folder).endpoint
        while not done.is_set():
            texts.append(complete(folder, endpoint=endpoint)["choices"][0]["text"])

    with ThreadPoolExecutor(4) as threads:
        clients = [threads.submit(ask) for _ in range(4)]
        try:
            yield texts
        finally:
            done.set()
        for client in clients:
            client.result(30)


@pytest.mark.slow
@pytest.mark.parametrize("connector", ["Xpyd", "Nixl"])
def test_pools_of_vllm_scale_and_change_under_load_without_a_lost_request(
    folder: Path, connector: str
) -> None:
    engine = ENGINE | {"connector": connector}
    spec: dict[str, Any] = {
        "engine": engine,
        "pools": prefill_and_decode(prefill=2, decode=2),
        "kvTransfer": {"hostPoolSize": "1Mi"} if connector == "Xpyd" else {},
    }
    assert run_up(write(folder, **spec), detach=True) == 0

    def answered(more: int) -> None:
        most = len(texts) + more
        until(lambda: len(texts) > most, 30)

    with load(folder) as texts:
        answered(20)
        state = FleetFolder(folder / "state/xpyd/v")
        for pool in ("prefill", "decode"):
            control.send_request(state.socket, control.ScaleRequest(pool, 1))
            until(lambda pool=pool: sum(p.pool == pool for p in view(folder).pods) == 1, 30)
            answered(20)
        before = len(notes(folder))
        answered(20)
        first = {note["pid"] for note in notes(folder)[before:]}
        assert len(first) == 2
        # A change of the image in a cluster is one of the arguments here: another revision.
        changed = write(folder, **spec | {"engine": engine | {"args": ["--seed=3"]}})
        assert run_up(changed, detach=True) == 0
        answered(20)
        before = len(notes(folder))
        answered(20)
        assert not first & {note["pid"] for note in notes(folder)[before:]}


def test_a_changed_document_goes_to_a_running_fleet_with_and_without_its_command(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_up(write(folder), detach=True) == 0
    changed = write(folder, engine=ENGINE | {"args": ["--seed=3"]})
    monkeypatch.setenv(
        "PATH", "/nowhere"
    )  # no `vllm` there, which the supervisor need not look for
    assert run_up(replace(changed, vllm=None), detach=True) == 0
    assert "pool decode: revision" in capsys.readouterr().out
    assert run_up(changed, detach=True) == 0
    assert "nothing changed" in capsys.readouterr().out
    with pytest.raises(UserError, match="--vllm: other: fleet v runs "):
        run_up(replace(changed, vllm="other"), detach=True)


@pytest.mark.parametrize("connector", ["Xpyd", "Nixl"])
def test_prompts_of_one_beginning_go_to_one_p_of_a_vllm_fleet(folder: Path, connector: str) -> None:
    spec: dict[str, Any] = {
        "engine": ENGINE | {"connector": connector},
        "pools": prefill_and_decode(prefill=2),
        "kvTransfer": {"hostPoolSize": "1Mi"} if connector == "Xpyd" else {},
        "router": {"policy": "PrefixAware"},
    }
    assert run_up(write(folder, **spec), detach=True) == 0
    stories = ["a long story of one fox " * 20, "another one, of a dog " * 20]
    order = (0, 1, 1, 0, 0, 1)
    for turn, story in enumerate(order):
        complete(folder, stories[story] + f"and then {turn}")
    pids = [note["pid"] for note in notes(folder) if note["max_tokens"] == 1]
    homes = dict(zip(order, pids, strict=False))
    assert pids == [homes[story] for story in order]
    assert homes[0] != homes[1]


@pytest.mark.parametrize("connector", ["Xpyd", "Nixl"])
def test_a_request_between_p_and_d_is_finished_when_the_fleet_is_taken_down(
    folder: Path, connector: str
) -> None:
    engine = ENGINE | {"connector": connector}
    transfer = {"hostPoolSize": "1Mi"} if connector == "Xpyd" else {}
    assert run_up(write(folder, engine=engine, kvTransfer=transfer), detach=True) == 0
    with ThreadPoolExecutor() as threads:
        answer = threads.submit(complete, folder, "hold")
        until((folder / "model/notes").exists, 30)
        down = threads.submit(take_fleet_down, "v", 30.0)
        until(lambda: "Draining" in {pod.state for pod in view(folder).pods}, 30)
        # vLLM refuses what comes after its SIGTERM, as the stand-in does.
        (folder / "model/go").touch()
        assert answer.result(30)["choices"][0]["text"] == notes(folder)[1]["role"]
        assert down.result(30) == 0


def test_p_and_d_with_nixl_serve_through_the_fleets_router(folder: Path) -> None:
    engine = ENGINE | {"connector": "Nixl"}
    assert run_up(write(folder, engine=engine, kvTransfer={"port": 22001}), detach=True) == 0
    assert complete(folder)["choices"][0]["text"] == "kv_both"
    prefill, decode = notes(folder)
    assert prefill["params"]["do_remote_decode"]
    assert decode["params"]["do_remote_prefill"]
    addresses = {pod.address for pod in view(folder).pods if pod.pool != "router"}
    assert {n["environment"]["VLLM_NIXL_SIDE_CHANNEL_HOST"] for n in (prefill, decode)} == addresses
    for note in (prefill, decode):
        assert note["environment"]["VLLM_NIXL_SIDE_CHANNEL_PORT"] == "22001"
        assert "VLLM_PLUGINS" not in note["environment"]


@pytest.mark.parametrize(
    ("spec", "vllm", "says"),
    [
        ({}, "no/such/vllm", "spec.engine.type: VLLM: no command no/such/vllm: install vLLM"),
        (
            {"engine": ENGINE | {"env": []}},
            COMMAND,
            "spec.engine.env: local mode chooses",
        ),
        (
            {"engine": ENGINE | {"env": [{"name": "VLLM_CPU_KVCACHE_SPACE", "value": "0"}]}},
            COMMAND,
            "spec.engine.env: local mode chooses",
        ),
        ({"kvTransfer": {}}, COMMAND, "spec.kvTransfer.hostPoolSize: local mode chooses no memory"),
    ],
)
def test_what_a_local_vllm_lacks_is_refused_with_the_field(
    folder: Path, spec: dict[str, Any], vllm: str | Path, says: str
) -> None:
    options = write(folder, **spec)
    fleet = load_fleet(Path(options.file), local=True)
    with pytest.raises(UserError) as refused:
        check_local(fleet, source="f", vllm=str(vllm))
    assert str(refused.value).splitlines()[1].strip().startswith(says)
