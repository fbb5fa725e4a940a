"""`xpyd up` and its companions over stand-in pods: real processes, real sockets, no engine."""

from __future__ import annotations

import json
import os
import signal
import socket
import stat
import subprocess
import sys
import urllib.request

import msgspec
import pytest

from tests.tls_kit import client_context, write_pair
from xpyd_core.errors import UserError
from xpyd_operator.up import client, control
from xpyd_operator.up.client import FleetFailed, scale, show_logs, show_status, take_fleet_down
from xpyd_operator.up.folder import FleetRecord, PodRecord, ProcessId, claim_addresses, identify
from xpyd_operator.up.supervisor import get

# Test folders are no packages: pytest's importlib mode puts this one on no path by itself.
sys.path.insert(0, os.path.dirname(__file__))
from local_fleet import QUICK_PROBES, LocalFleet, is_gone, until


@pytest.fixture
def running(fleet):
    fleet.up()
    return fleet


def test_status_shows_kv_that_does_not_arrive_with_pair_and_cause(running, capsys):
    assert running.view().kv == control.KvView(
        "Unknown", "NoTraffic", "no request showed lately whether KV arrives"
    )
    assert show_status("t", as_json=False) == 0
    assert "KV " not in capsys.readouterr().out
    assert get(*running.view().admin.removeprefix("http://").split(":"), "/lose/3")
    view = until(lambda: view if (view := running.view()).problems else None)
    row = control.KvRow("t-prefill-0", "t-decode-0", "recomputed", "unreachable", 3)
    assert (view.kv.verified, view.kv.reason, view.kv.outcomes) == ("False", "Unreachable", (row,))
    assert view.ready
    assert show_status("t", as_json=False) == 0
    shown = capsys.readouterr().out
    assert "problem: Unreachable: KV did not arrive from t-prefill-0 to t-decode-0" in shown
    words = [line.split() for line in shown.splitlines()]
    assert ["recomputed", "unreachable", "t-prefill-0", "t-decode-0", "3"] in words
    show_status("t", as_json=True)
    kv = json.loads(capsys.readouterr().out)["kv"]
    assert (kv["verified"], kv["outcomes"][0]["requests"]) == ("False", 3)


def test_detached_fleet_is_ready_when_up_returns_and_gone_after_down(fleet, capsys):
    assert fleet.up() == 0
    said = capsys.readouterr().out
    view = fleet.view()
    assert f"fleet t is ready: {view.endpoint}" in said
    assert "memory plan" in said
    assert {name: pod.state for name, pod in fleet.pods().items()} == dict.fromkeys(
        ("router-0", "prefill-0", "decode-0", "decode-1"), "Ready"
    )
    assert [(p.name, p.desired, p.ready) for p in view.pools] == [
        ("router", 1, 1), ("prefill", 1, 1), ("decode", 2, 2),
    ]  # fmt: skip
    processes = fleet.processes()
    assert take_fleet_down("t", None) == 0
    assert not [process for process in processes if process.is_alive()]
    left = sorted(path.name for path in fleet.state.folder.iterdir())
    assert left == ["lock", "logs", "supervisor.log"]
    with pytest.raises(UserError, match="not running"):
        show_status("t", as_json=True)


def test_a_fleet_with_a_certificate_serves_https_and_keeps_the_flag(fleet, tmp_path, capsys):
    files = write_pair(tmp_path)
    flags = {"ssl_certfile": str(files.certificate), "ssl_keyfile": str(files.key)}
    assert fleet.up(**flags) == 0
    url = fleet.view().endpoint
    assert url.startswith("https://127.0.0.1:")
    assert f"fleet t is ready: {url}" in capsys.readouterr().out
    with urllib.request.urlopen(url, context=client_context(), timeout=5) as answer:
        assert answer.status == 200
    assert fleet.up(**flags) == 0  # the same document and flags again
    assert fleet.up() == 0
    with pytest.raises(UserError, match=r"--ssl-certfile: /other: fleet t runs with .*tls\.crt"):
        fleet.up(ssl_certfile="/other")


def test_a_pod_finds_the_ports_and_variables_that_it_would_find_in_a_cluster(running):
    pods = running.pods()
    addresses = [pod.address for pod in pods.values()]
    assert len(set(addresses)) == len(addresses)
    decode = running.start_line("decode-0")
    environ, argv = decode["environ"], decode["argv"]
    environ.pop("OMP_WAIT_POLICY", None)  # inherited from the run of the tests
    prefix = pods["router-0"].address.rpartition(".")[0]
    assert pods["router-0"].address == f"{prefix}.1"
    assert environ == {
        "OMP_NUM_THREADS": environ["OMP_NUM_THREADS"],
        "XPYD_ROLE": "Decode",
        "XPYD_POD_IP": pods["decode-0"].address,
        "XPYD_HTTP_PORT": "20001",
        "XPYD_KV_PORT": "21001",
        "XPYD_DISCOVERY": f"{prefix}.1:30001",
        "XPYD_KV_KEY_FILE": str(running.state.key_file),
        "XPYD_FLEET": "t",
        "XPYD_POOL": "decode",
        "XPYD_INSTANCE": "t-decode-0",
        "XPYD_REVISION": pods["decode-0"].revision,
        "XPYD_FLEET_REVISION": running.start_line("prefill-0")["environ"]["XPYD_FLEET_REVISION"],
    }
    assert f"--model={running.file.parent / 'model'}" in argv
    assert f"--kv-socket-dir={running.state.folder / 'sockets'}" in argv
    assert "--kv-host-pool-size=1Mi" in argv
    assert "--role=Decode" in argv
    assert running.view().endpoint.startswith("http://127.0.0.1:")


def test_secrets_and_the_control_socket_are_for_the_owner_alone(running):
    state = running.state
    modes = {
        path.name: stat.S_IMODE(path.stat().st_mode)
        for path in (state.folder, state.key_file, state.socket, state.sockets)
    }
    assert modes == {"t": 0o700, "key": 0o600, "control.sock": 0o600, "sockets": 0o700}
    key = state.key_file.read_text().strip()
    logged = b"".join(path.read_bytes() for path in state.logs.iterdir())
    assert key.encode() not in logged + state.supervisor_log.read_bytes()


def test_a_killed_pod_returns_at_its_address_and_no_other_is_touched(running):
    before = running.pods()
    os.kill(before["decode-0"].pid, signal.SIGKILL)
    until(lambda: running.pods()["decode-0"].pid not in (0, before["decode-0"].pid))
    running.settled()
    after = running.pods()
    assert after["decode-0"].address == before["decode-0"].address
    assert after["decode-0"].restarts == 1
    del before["decode-0"], after["decode-0"]
    assert {n: p.pid for n, p in after.items()} == {n: p.pid for n, p in before.items()}


def test_a_pod_that_serves_again_after_three_ends_fails_no_scale(running, monkeypatch):
    view = running.view()
    pods = tuple(msgspec.structs.replace(pod, failures=3) for pod in view.pods)
    busy = msgspec.structs.replace(view, pods=pods, ready=False)
    views = iter([busy, busy, view])
    monkeypatch.setattr(client, "read_view", lambda _: next(views))
    assert client.wait_settled(running.state, timeout_s=30) is view


@pytest.mark.parametrize("pod", ["decode-0", "router-0"])
def test_a_pod_that_hangs_is_killed_and_started_again(fleet, monkeypatch, capsys, pod):
    monkeypatch.setenv(QUICK_PROBES, "1")
    fleet.up()
    before = fleet.pids()
    os.kill(before[pod], signal.SIGSTOP)
    until(lambda: fleet.pods()[pod].pid not in (0, before[pod]))
    fleet.settled()
    assert is_gone(before[pod])
    words = "did not answer GET /live 2 times in a row: killed"
    assert fleet.pods()[pod].last_exit == words
    assert f"pod t-{pod} {words}" in fleet.state.supervisor_log.read_text()
    capsys.readouterr()
    show_status("t", as_json=False)
    assert f" 1 ({words})" in capsys.readouterr().out


def test_scaling_starts_and_drains_instances_and_touches_no_other(running, capsys):
    before = running.pids()
    assert scale("t-decode", 3, timeout_s=20) == 0
    more = running.pids()
    assert set(more) - set(before) == {"decode-2"}
    assert {name: more[name] for name in before} == before
    assert scale("t-decode", 1, timeout_s=20) == 0
    assert running.pids() == {n: p for n, p in before.items() if n != "decode-1"}
    assert is_gone(more["decode-2"])
    assert is_gone(more["decode-1"])
    assert "t-decode: 3 -> 1 replicas\nt-decode: 1 ready\n" in capsys.readouterr().out


def test_an_instance_of_several_ranks_is_one_process_of_ours_with_its_layout(fleet, capsys):
    fleet.write(decode=1, layout={"tensor": 2, "data": 2, "expert": 4})
    assert fleet.up() == 0
    argv = fleet.start_line("decode-0")["argv"]
    flags = {"--tensor-parallel-size=2", "--data-parallel-size=2", "--enable-expert-parallel"}
    assert flags <= set(argv)
    threads = max(1, len(os.sched_getaffinity(0)) // 5)
    assert f"--threads={threads}" in argv
    assert not [arg for arg in fleet.start_line("prefill-0")["argv"] if "parallel" in arg]
    view = fleet.view()
    assert {p.name: p.layout for p in view.pools} == {
        "router": "", "prefill": "TP1xPP1", "decode": "TP2xPP1xDP2xEP4",
    }  # fmt: skip
    layouts = {name: pod.layout for name, pod in fleet.pods().items()}
    assert layouts == {"router-0": "", "prefill-0": "TP1xPP1", "decode-0": "TP2xPP1xDP2xEP4"}
    capsys.readouterr()
    show_status("t", as_json=False)
    rows = [line.split()[:3] for line in capsys.readouterr().out.splitlines()[7:]]
    assert rows == [
        ["POD", "ROLE", "LAYOUT"],
        ["t-router-0", "Router", "-"],
        ["t-decode-0", "Decode", "TP2xPP1xDP2xEP4"],
        ["t-prefill-0", "Prefill", "TP1xPP1"],
    ]


def test_a_layout_that_does_not_fit_the_model_leaves_a_running_fleet_as_it_is(running, tmp_path):
    pids = running.pids()
    config = {"num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 8}
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    running.write(layout={"pipeline": 3})
    with pytest.raises(UserError, match=r"spec\.pools\[1\]\.parallelism\.pipeline: 3 stages for 2"):
        running.up()
    assert running.pids() == pids


def test_an_unchanged_document_undoes_no_scaling_and_a_changed_one_replaces_what_it_changes(
    running,
):
    scale("t-decode", 1, timeout_s=20)
    pids = running.pids()
    assert running.up() == 0
    assert running.pids() == pids
    running.write(decode=2)  # what it declared before: still not a new declaration
    assert running.up() == 0
    assert running.pids() == pids
    running.write(["--kv-wait-seconds=1"], decode=3)
    assert running.up() == 0
    after = running.pids()
    assert after["router-0"] == pids["router-0"]
    assert not {pid for name, pid in after.items() if name != "router-0"} & set(pids.values())
    assert [(p.name, p.ready) for p in running.view().pools] == [
        ("router", 1), ("prefill", 1), ("decode", 3),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("target", "replicas", "complaint"),
    [
        ("t-router", 2, "a local fleet has one router"),
        ("t-x", 2, "no pool 't-x'; there is t-prefill, t-decode"),
        ("t-decode", -1, "--replicas -1: expected 0 to 1024"),
        ("t-decode", 300, "a local fleet has addresses for at most 252"),
    ],
)
def test_wrong_scaling_is_refused_with_what_is_allowed(running_once, target, replicas, complaint):
    with pytest.raises(UserError, match=complaint):
        scale(target, replicas, timeout_s=1)


@pytest.fixture(scope="module")
def running_once(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shared")
    old = os.environ.get("XDG_STATE_HOME")
    os.environ["XDG_STATE_HOME"] = str(folder / "state")
    made = LocalFleet(folder, "t")
    made.write()
    made.up()
    yield made
    made.end()
    if old is None:
        del os.environ["XDG_STATE_HOME"]
    else:
        os.environ["XDG_STATE_HOME"] = old


def test_a_role_cannot_be_changed_under_a_running_fleet(running):
    document = running.file.read_text().replace(
        '"prefill", "role": "Prefill"', '"x", "role": "Prefill"'
    )
    document = document.replace('"decode", "role": "Decode"', '"prefill", "role": "Decode"')
    running.file.write_text(document)
    with pytest.raises(UserError, match=r"spec\.pools\[1\]\.role: Forbidden: .* is immutable"):
        running.up()


def test_a_fleet_whose_pods_crash_is_refused_with_the_reason_and_leaves_nothing(fleet, tmp_path):
    (tmp_path / "crash").touch()
    fleet.write([f"--crash-while={tmp_path / 'crash'}"], decode=1)
    with pytest.raises(FleetFailed) as caught:
        fleet.up()
    assert "keeps ending (exit status 3" in str(caught.value)
    assert "told to crash" in str(caught.value)
    assert not fleet.state.is_supervised()
    assert not fleet.processes()


def test_a_pod_that_refuses_its_input_is_not_tried_again(fleet, tmp_path):
    (tmp_path / "crash").touch()
    fleet.write([f"--crash-while={tmp_path / 'crash'}", "--crash-status=2"], decode=1)
    with pytest.raises(FleetFailed, match=r"ended \(exit status 2\)") as caught:
        fleet.up()
    assert str(caught.value).count("told to crash") == 1
    assert not fleet.processes()


def test_a_fleet_that_is_not_ready_in_time_is_taken_down(fleet):
    fleet.write(["--drain=0"], decode=1)
    with pytest.raises(FleetFailed, match=r"not ready after 0 s"):
        fleet.up(timeout_s=0)
    assert not fleet.state.is_supervised()
    assert not fleet.processes()


def test_ctrl_c_drains_the_router_before_the_engines_and_streams_their_lines(fleet):
    fleet.write(["--drain=0.3"])
    child = fleet.foreground()
    fleet.settled()
    child.send_signal(signal.SIGINT)
    out, _ = child.communicate(timeout=20)
    assert child.returncode == 130
    said = out.decode()
    drains = [line for line in said.splitlines() if line.endswith("stand-in: drains")]
    assert len(drains) == 4
    assert drains[0].startswith("t-router-0  |")
    assert "fleet t is down" in said


def test_a_second_ctrl_c_kills_what_does_not_drain(fleet):
    fleet.write(["--deaf"])
    child = fleet.foreground()
    fleet.settled()
    child.send_signal(signal.SIGINT)

    def drains_in_order() -> bool:
        """It finishes its requests, for which it needs the engines; they drain when it is gone."""
        pods = fleet.pods()
        router = pods.pop("router-0", None)
        states = {pod.state for pod in pods.values()}
        if router is None:  # nor does anybody say what they have
            told = {pod.reason.partition(",")[0] for pod in pods.values()}
            return states == {"Draining"} and told == {"it ends its requests"}
        says = router.reason.startswith("4 requests, ")
        return router.state == "Draining" and says and states == {"Ready"}

    until(drains_in_order)
    with pytest.raises(UserError, match="fleet t is being taken down"):
        fleet.ask(control.ScaleRequest("decode", 1))
    processes = fleet.processes()
    child.send_signal(signal.SIGINT)
    assert child.wait(timeout=20) == 130
    assert not [process for process in processes if process.is_alive()]


def test_down_with_a_timeout_kills_what_has_not_drained_by_then(fleet):
    fleet.write(["--deaf"], decode=1)
    fleet.up()
    processes = fleet.processes()
    assert take_fleet_down("t", 0.2) == 0
    assert not [process for process in processes if process.is_alive()]
    assert "did not drain in time" in fleet.state.supervisor_log.read_text()


def test_orphans_of_a_dead_supervisor_are_shown_and_ended_by_down(running, capsys):
    processes = running.processes()
    os.kill(running.view().supervisor_pid, signal.SIGKILL)
    until(lambda: not running.state.is_supervised())
    assert all(process.is_alive() for process in processes)
    # Without the router nothing listens on the discovery port: what is inherited must hold it.
    router = next(pod.process for pod in running.state.read_record().pods if "router" in pod.name)
    assert router.signal(signal.SIGKILL)
    until(lambda: not router.is_alive())
    taken = int(running.state.read_record().pods[0].address.split(".")[2])
    claim = claim_addresses(running.state.folder.parent)
    for descriptor in claim.descriptors:
        os.close(descriptor)
    assert claim.index != taken  # the orphans hold on to their addresses
    assert show_status("t", as_json=False) == 1
    assert "Orphaned" in capsys.readouterr().out
    with pytest.raises(UserError, match="end them with `xpyd down t`"):
        running.up()
    assert take_fleet_down("t", None) == 0
    assert not [process for process in processes if process.is_alive()]
    assert running.up() == 0


def test_a_recycled_pid_is_never_signalled(fleet):
    stranger = subprocess.Popen(["sleep", "60"])
    fleet.children.append(stranger)
    real = identify(stranger.pid)
    for stale in (
        ProcessId(real.pid, real.start_ticks - 1, real.boot),
        ProcessId(real.pid, real.start_ticks, "another boot"),
    ):
        assert not stale.is_alive()
        assert not stale.signal(signal.SIGKILL)
        assert not stale.signal(signal.SIGKILL, group=True)
        fleet.state.make()
        pod = PodRecord("t-decode-0", "127.1.1.2", stale)
        fleet.state.write_record(FleetRecord("t", "", stale, 0.0, (pod,)))
        assert fleet.state.orphans() == ()
    assert stranger.poll() is None


def test_two_fleets_run_side_by_side_on_other_addresses(running, tmp_path, monkeypatch):
    (tmp_path / "b").mkdir()
    other = LocalFleet(tmp_path / "b", "u")
    other.state = type(other.state)(running.state.folder.parent / "u")
    other.write()
    try:
        other.up()
        mine = {pod.address.rpartition(".")[0] for pod in running.view().pods}
        theirs = {pod.address.rpartition(".")[0] for pod in other.view().pods}
        assert not mine & theirs
        assert running.view().endpoint != other.view().endpoint
        with pytest.raises(UserError, match="several fleets are running, say which: t, u"):
            show_status(None, as_json=False)
    finally:
        other.end()


def test_junk_on_the_control_socket_costs_its_connection_only(running_once):
    for junk in (b"\n", b"{}\n", b'{"type": "scale"}\n', b"\xff" * 100 + b"\n", b"half"):
        with socket.socket(socket.AF_UNIX) as connection:
            with control.short_address(running_once.state.socket) as address:
                connection.connect(address)
            connection.sendall(junk)
            if junk.endswith(b"\n"):
                assert b"control request" in connection.recv(10000)
    assert running_once.view().ready


def test_logs_of_all_pods_are_merged_and_chosen_by_pool(running_once, capsys):
    show_logs([], fleet="t", follow=False, since=None)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4
    assert lines == sorted(lines, key=lambda line: line.split(" | ")[1][:29])
    show_logs(["decode", "t-router-0"], fleet="t", follow=False, since=None)
    shown = {line.split(" ")[0] for line in capsys.readouterr().out.splitlines()}
    assert shown == {"t-decode-0", "t-decode-1", "t-router-0"}
    with pytest.raises(UserError, match="no pod 'nobody' in fleet t"):
        show_logs(["nobody"], fleet="t", follow=False, since=None)


def test_a_reader_that_stops_early_is_no_error(running_once):
    log = running_once.state.log_of("t-extra-0")
    log.write_text("a line of a long log\n" * 20_000)
    argv = [sys.executable, "-m", "xpyd_core", "logs", "extra", "--fleet", "t"]
    child = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    child.stdout.readline()
    child.stdout.close()
    assert child.stderr.read() == b""
    child.stderr.close()
    assert child.wait(timeout=20) == 0
