"""Ten reasons for which KV does not move, each put into a fleet of real pods: the fleet's condition
KVTransferVerified names the cause, the pair and the fix within 60 s.

tests/e2e/test_kv_causes.py does it with processes. Here a document makes the fault where one can:
a pool is added whose pods differ, by its template's variables, from which `engine.args` take flags,
or by its volumes. The rest happens to a pod that runs: a rule in its network, a key of its own, too
little time of the processor. One fleet has nine of them one after another; faults of instances come
before those of pairs, for which the condition stays False for a minute. Each run has a pod's
network; a Secret's key is in tests/cluster/test_fleet.py. The soak has all, and the fleet that is
edited so that none of its P and D would fit: the rollout stops before a request is lost.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.fleetkit import (
    DEMO_MODEL,
    LOAD_PER_S,
    READY_S,
    FleetClient,
    Obj,
    delete_fleets,
    fleet_document,
    installed_chart,
    small_cases,
    start_client,
)
from tests.cluster.harness import Cluster, wait_for
from tests.cluster.images.build import worker_test_template
from tests.operator.fleets import cpu_pool

pytestmark = pytest.mark.cluster
NAMESPACE = "causes"
WITHIN_S = 60
"""From the cause on, until the condition names it."""
HELD_S = 150
"""A condition that was False stays so for a minute after the last loss."""
DEADLINE_S = 120
"""Of a rollout."""
KV_PORT = 21001
DISCOVERY_PORT = 30001
_ARGS = ("dtype", "role", "kv-transport", "kv-cache-memory")
"""Flags of which each pool's template has the value."""
_ASK = """
import json, random, sys, threading, time, urllib.request
url, tokens, answer, at_once, pause_s = sys.argv[1], *map(int, sys.argv[2:5]), float(sys.argv[5])

def ask():
    while True:
        prompt = [random.randrange(10, 900) for _ in range(tokens)]
        body = {"model": "demo", "prompt": prompt, "max_tokens": answer, "ignore_eos": True}
        request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode())
        request.add_header("Content-Type", "application/json")
        try:
            with urllib.request.urlopen(request, timeout=100) as said:
                said.read()
                print(said.status, flush=True)
        except OSError as error:
            print(repr(error), flush=True)
        time.sleep(pause_s)

threads = [threading.Thread(target=ask, daemon=True) for _ in range(at_once)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
"""
"""Runs in the cluster's network: a line for each answer, its status or what went wrong."""


def pool(name: str, role: str, /, *, model: Path | None = None, **flags: str) -> Obj:
    """A pool of one engine whose flags of _ARGS are `flags`. `model`: a folder of the node with the
    checkpoint, in place of the image's."""
    values = {"dtype": "float32", "role": role, "kv_transport": "auto", "kv_cache_memory": "64Mi"}
    template = worker_test_template(model)
    [engine] = template["spec"]["containers"]
    engine["env"] = [{"name": n.upper(), "value": v} for n, v in {**values, **flags}.items()]
    return cpu_pool(name, role, replicas=1, template=template)


def document(name: str, *pools: Obj, **spec: Any) -> Obj:
    """A fleet of these pools. A folder for sockets that each pod has for itself is as one of which
    the pods' nodes have one each. The operator refuses --role and --kv-socket-dir, but of engines
    whose image has its own version: the tests' image has none."""
    found = fleet_document(prefill=1, decode=1)
    found["metadata"]["name"] = name
    args = [f"--{flag}=$({flag.replace('-', '_').upper()})" for flag in _ARGS]
    more = ["--threads=1", "--max-model-len=2048", "--kv-socket-dir=/tmp/sockets"]
    found["spec"] |= {
        "engine": {"args": [*args, *more]},
        "pools": list(pools),
        "router": {"replicas": 1, "onNoPrefill": "PrefillOnDecode"},
        "heartbeat": {"intervalMilliseconds": 1000},
        "drain": {"timeoutSeconds": 1},
        **spec,
    }
    return found


def chat(*added: Obj) -> Obj:
    """1P1D and what is added. D waits for a short time: it does on a network that is as fast."""
    both = pool("prefill", "Prefill"), pool("decode", "Decode")
    kv = {"bufferSize": "16Mi", "hostPoolSize": "32Mi", "waitSeconds": 2}
    return document("chat", *both, *added, kvTransfer=kv)


def full() -> Obj:
    """A D with room for three prompts. A probe that a busy D answers late is no cause here."""
    both = pool("prefill", "Prefill"), pool("decode", "Decode", kv_cache_memory="6Mi")
    router = {"replicas": 1, "args": ["--kv-probe-seconds=0"]}
    kv = {"bufferSize": "0", "hostPoolSize": "32Mi"}
    return document("full", *both, kvTransfer=kv, router=router)


def edited(dtype: str) -> Obj:
    """2P2D whose engines have this dtype; each pool's variable DTYPE is another one."""
    both = pool("prefill", "Prefill"), pool("decode", "Decode", dtype="bfloat16")
    rollout = {"progressDeadlineSeconds": DEADLINE_S}
    found = document("edited", *(one | {"replicas": 2} for one in both), rollout=rollout)
    args = found["spec"]["engine"]["args"]
    args[args.index("--dtype=$(DTYPE)")] = f"--dtype={dtype}"
    # The default: requests wait where no P is left.
    del found["spec"]["router"]["onNoPrefill"]
    return found


@pytest.fixture(scope="module")
def charted(node_cluster: Cluster) -> Iterator[Cluster]:
    """With the chart, and a namespace for fleets."""
    with installed_chart(node_cluster):
        node_cluster.kubectl("create", "namespace", NAMESPACE)
        yield node_cluster
        delete_fleets(node_cluster, NAMESPACE)
        node_cluster.kubectl("delete", "namespace", NAMESPACE, "--wait=false")


@pytest.fixture(scope="module")
def fleet(charted: Cluster) -> FleetClient:
    """The fleet that has nine of the causes, ready."""
    found = FleetClient(charted, NAMESPACE, "chat")
    found.apply(chat())
    found.wait_ready()
    return found


@pytest.fixture
def small(fleet: FleetClient) -> FleetClient:
    """A fleet beside it whose D is full soon, ready."""
    found = FleetClient(fleet.cluster, NAMESPACE, "full")
    found.apply(full())
    found.wait_ready()
    return found


@contextmanager
def asked(
    fleet: FleetClient,
    *,
    tokens: int = 48,
    answer: int = 4,
    at_once: int = 1,
    pause_s: float = 0.2,
) -> Iterator[None]:
    """Requests of so many tokens all the time, and each has an answer."""
    router = fleet.read("services", f"{fleet.name}-router")
    url = f"http://{router['spec']['clusterIP']}:10001"
    argv = [sys.executable, "-c", _ASK, url, *map(str, (tokens, answer, at_once, pause_s))]
    process = fleet.cluster.popen(argv, stdout=subprocess.PIPE, text=True)
    try:
        yield
    finally:
        process.kill()
        said, _ = process.communicate()
    assert set(said.split("\n")) <= {"200", ""}, said


def wait_verified(fleet: FleetClient, within_s: int = WITHIN_S) -> None:
    """Until the condition is True; without requests, by probes."""

    def is_verified() -> bool:
        return fleet.condition("KVTransferVerified").get("status") == "True"

    what = "KVTransferVerified is True"
    wait_for(is_verified, within_s, what, interval_s=0.5, explain=fleet.explain)


def wait_named(fleet: FleetClient, reason: str, *texts: str) -> None:
    """Until the condition is False for `reason`, with all of `texts` in its message."""
    last: Obj = {}

    def is_named() -> bool:
        last.update(fleet.condition("KVTransferVerified"))
        is_right = (last.get("status"), last.get("reason")) == ("False", reason)
        return is_right and all(one in last["message"] for one in texts)

    def said_last() -> str:
        return f"said last: {last}\n{fleet.explain()}"

    wait_for(is_named, WITHIN_S, f"{reason} with {texts}", interval_s=0.5, explain=said_last)


def is_refused(fleet: FleetClient) -> bool:
    """Whether Ready says that a new instance fits none, in the words of the handshake."""
    ready = fleet.condition("Ready")
    said = ("sends it no requests: no pair with edited-", "kv_dtype: P", ", D has ")
    return ready.get("reason") == "NoPair" and all(one in ready["message"] for one in said)


def engines(fleet: FleetClient) -> dict[str, tuple[bool, int]]:
    """Of each P and D, by its pod's uid: whether it is ready, how often it was started again."""
    found: dict[str, tuple[bool, int]] = {}
    for pod in (*fleet.pods("prefill"), *fleet.pods("decode")):
        statuses = pod["status"].get("containerStatuses", ())
        conditions = {one["type"]: one["status"] for one in pod["status"].get("conditions", ())}
        restarts = sum(one["restartCount"] for one in statuses)
        found[pod["metadata"]["uid"]] = (conditions.get("Ready") == "True", restarts)
    return found


def name_of(fleet: FleetClient, pool: str) -> str:
    """Of the pool's only pod."""
    [pod] = fleet.pods(pool)
    return str(pod["metadata"]["name"])


@contextmanager
def added(fleet: FleetClient, pool: Obj) -> Iterator[str]:
    """The fleet with this pool besides; the pod of its engine, which serves. The pool may not be
    ready: routers admit none that fits no other."""
    fleet.apply(chat(pool))

    def serves() -> bool:
        status = [pod["status"].get("conditions", ()) for pod in fleet.pods(pool["name"])]
        found = [{one["type"]: one["status"] for one in conditions} for conditions in status]
        return [one.get("ContainersReady") for one in found] == ["True"]

    try:
        what = f"the engine of the pool {pool['name']} serves"
        wait_for(serves, READY_S, what, explain=fleet.explain)
        yield name_of(fleet, pool["name"])
    finally:
        fleet.apply(chat())
    what = f"the pool {pool['name']} is gone"
    wait_for(lambda: not fleet.pods(pool["name"]), WITHIN_S, what, explain=fleet.explain)


def engine_process(fleet: FleetClient, pool: str) -> int:
    """The engine of the pool's only pod, as this machine numbers it."""
    [pod] = fleet.pods(pool)
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            is_in_pod = f"pod{pod['metadata']['uid']}" in (folder / "cgroup").read_text()
            is_engine = b"\0worker\0" in (folder / "cmdline").read_bytes()
        except OSError:  # it has ended
            continue
        if is_in_pod and is_engine:
            return int(folder.name)
    raise AssertionError(f"no engine runs in {pod['metadata']['name']}")


def in_network(process: int, *argv: str) -> None:
    """Run a program of this machine in the network of the process' pod."""
    command = ["nsenter", f"--net=/proc/{process}/ns/net", "--", *argv]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 0, f"{argv}: {done.stderr}"


@contextmanager
def dropped(process: int, hook: str, port: int) -> Iterator[None]:
    """What comes to the pod's port (`input`), or what the pod sends to a port (`output`), is lost,
    as a NetworkPolicy does it; the cluster's own network enforces none."""
    chain = f"type filter hook {hook} priority 0; meta l4proto {{ tcp, udp }} th dport {port} drop;"
    in_network(process, "nft", f"table ip wall {{ chain seen {{ {chain} }}; }}")
    try:
        yield
    finally:
        in_network(process, "nft", "delete table ip wall")


@pytest.mark.soak
def test_a_p_that_is_never_asked_is_named(fleet: FleetClient) -> None:
    """Its heartbeats reach no router: D serves all requests alone."""
    with asked(fleet):
        with dropped(engine_process(fleet, "prefill"), "output", DISCOVERY_PORT):
            wait_named(fleet, "PrefillIdle", name_of(fleet, "prefill"), "XPYD_DISCOVERY")
        wait_verified(fleet)


@pytest.mark.soak
def test_a_wrong_role_is_named(fleet: FleetClient) -> None:
    with added(fleet, pool("turned", "Prefill", role="Decode")) as pod:
        wait_named(fleet, "WrongRole", f"{pod} of a Prefill pool", "it is Decode", "take --role")
    wait_verified(fleet)


@pytest.mark.soak
def test_a_wrong_key_is_named(fleet: FleetClient) -> None:
    with fleet.copied_pod("decode", key="0" * 64) as pod:
        wait_named(fleet, "KeyMismatch", pod, "kvTransfer.keySecretRef")
    wait_verified(fleet)


@pytest.mark.long
def test_a_firewall_is_named_though_requests_wait_behind_it(fleet: FleetClient) -> None:
    d = engine_process(fleet, "decode")
    [pod] = fleet.pods("decode")
    pair = f"{name_of(fleet, 'prefill')} to {pod['metadata']['name']}: no_answer"
    address = f"no_answer at {pod['status']['podIP']}:{KV_PORT}"
    with asked(fleet), dropped(d, "input", KV_PORT):
        wait_named(fleet, "NoAnswer", pair, address, "a firewall or NetworkPolicy")


@pytest.mark.soak
@pytest.mark.parametrize(
    ("factor", "fix"),
    [
        ("kv_dtype", "one dtype of the KV cache"),
        ("revision", "one revision of the model"),
        ("tokenizer", "the tokenizer files of one checkpoint"),
    ],
)
def test_what_p_and_d_do_not_share_is_named_with_both_values(
    fleet: FleetClient, factor: str, fix: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The folder of a node may have another checkpoint than the image of the other pools."""
    model = tmp_path_factory.mktemp(factor) / "model"
    shutil.copytree(DEMO_MODEL, model)
    if factor == "tokenizer":
        path = model / "tokenizer.json"
        path.write_text(path.read_text() + "\n")
    elif factor == "revision":
        [path] = model.glob("*.safetensors")
        path.write_bytes(path.read_bytes()[:-2] + b"\x3f\x3f")
    flags = {"dtype": "bfloat16"} if factor == "kv_dtype" else {}
    name = factor.replace("_", "-")
    other = pool(name, "Decode", model=model, **flags)
    with added(fleet, other) as pod, asked(fleet):
        what = f"{name_of(fleet, 'prefill')} to {pod}: incompatible (incompatible:{factor} at "
        wait_named(fleet, "Incompatible", what, f": {factor}: P", ", D has ", fix)


@pytest.mark.soak
def test_missing_shared_memory_is_named(fleet: FleetClient) -> None:
    with added(fleet, pool("near", "Prefill", kv_transport="shm")) as pod, asked(fleet):
        pair = f"{pod} to {name_of(fleet, 'decode')}: no_socket"
        wait_named(fleet, "NoSharedMemory", pair, "kvTransfer.sameHostPath")


@pytest.mark.soak
def test_a_wait_that_is_too_short_is_named_with_what_a_probe_takes(fleet: FleetClient) -> None:
    """P's network carries 200 KB/s, on which a probe takes a third of a second."""
    p = engine_process(fleet, "prefill")
    pair = f"{name_of(fleet, 'prefill')} to {name_of(fleet, 'decode')}: "
    slow = ("dev", "eth0", "root", "tbf", "rate", "1600kbit", "burst", "8kb", "latency", "400ms")
    in_network(p, "tc", "qdisc", "add", *slow)
    try:
        # KV of each prompt is 0.9 MB; between two of them probes pass.
        with asked(fleet, tokens=300, pause_s=6):
            wait_named(fleet, "WaitTooShort", pair, "64 KiB took up to", "waitSeconds")
    finally:
        in_network(p, "tc", "qdisc", "delete", *slow[:3])


@contextmanager
def slowed(process: int) -> Iterator[None]:
    """It runs for a twentieth of the time."""
    over = threading.Event()

    def slow() -> None:
        while not over.wait(0.02):
            os.kill(process, signal.SIGSTOP)
            over.wait(0.38)
            os.kill(process, signal.SIGCONT)

    thread = threading.Thread(target=slow)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@pytest.mark.soak
def test_a_d_without_room_is_named_with_its_numbers(small: FleetClient) -> None:
    """Prompts of 1.8 MB of KV each, at a D that computes slowly."""
    d = engine_process(small, "decode")
    pod = name_of(small, "decode")
    with slowed(d), asked(small, tokens=600, answer=1400, at_once=8):
        wait_named(small, "NoRoom", f"{pod} has ", " blocks free", "kvTransfer.bufferSize")
    with asked(small):
        wait_verified(small)


@pytest.mark.soak
def test_behind_the_faults_the_fleet_is_verified_again(fleet: FleetClient) -> None:
    wait_verified(fleet, HELD_S)


@pytest.mark.soak
def test_a_rollout_to_engines_that_refuse_each_other_stops_says_why_and_is_taken_back(
    charted: Cluster,
) -> None:
    """No old instance ends, none of the requests fails, and one P and one D are all it costs."""
    chat = FleetClient(charted, NAMESPACE, "edited")
    start_client(charted, NAMESPACE)
    chat.apply(edited("float32"))
    chat.wait_ready()
    chat.kubectl("wait", "--for=condition=Ready", "pod/client", "--timeout=60s")
    old = engines(chat)
    assert len(old) == 4
    with chat.under_load(small_cases(), rate=LOAD_PER_S) as load:
        chat.apply(edited("$(DTYPE)"))
        wait_for(lambda: is_refused(chat), 2 * DEADLINE_S, "NoPair", explain=chat.explain)
        assert chat.condition("Available")["status"] == "True"
        said = chat.rollout("status", "edited", "--wait", f"--timeout={2 * DEADLINE_S}", code=1)
        assert "kv_dtype: P" in said
        assert "ProgressDeadlineExceeded" in said
        now = engines(chat)
        assert old.items() <= now.items(), "each of the old serves, and was not started again"
        assert len(now) == 6, "one P and one D of the new are tried"
        chat.rollout("undo", "edited")
        chat.rollout("status", "edited", "--wait", f"--timeout={DEADLINE_S}")
        wait_for(lambda: engines(chat) == old, WITHIN_S, "the new are gone", explain=chat.explain)
        chat.wait_ready()
    assert load["requests"] > 0
    assert load["failed"] == 0, load
