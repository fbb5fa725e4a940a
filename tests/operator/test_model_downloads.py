"""A model that a Job brings into a claim: engines of it wait, those that run go on, and the status
says how far it is or why not."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from tests.operator import fleets
from tests.operator.fleets import prefill_and_decode
from tests.operator.test_controller_turn import SETTINGS, Children, look, stored, writes
from xpyd_core.errors import UserError
from xpyd_operator.controller.decision.cache import Cache, FleetKey
from xpyd_operator.controller.decision.decide import decide
from xpyd_operator.controller.decision.kinds import (
    DEPLOYMENT,
    FLEET,
    JOB,
    NETWORK_POLICY,
    POD,
    POOL,
    Obj,
    kind_of,
    trim,
)
from xpyd_operator.controller.decision.report import report
from xpyd_operator.controller.decision.state import FleetState, read
from xpyd_operator.controller.decision.writes import Apply, DeleteObject, Scale
from xpyd_operator.controller.downloads import DownloadReader
from xpyd_operator.document.engines import Model
from xpyd_operator.status.models import DownloadProgress
from xpyd_operator.up.checks import check_local, downloaded_folder, locate_model, needs_download
from xpyd_worker.download.plan import MANIFEST

CLAIM = {"type": "PersistentVolumeClaim", "claimName": "models"}
FIRST = {"uri": "s3://models/chat", "cache": CLAIM}
SECOND = {**FIRST, "revision": "2"}


def document(model: dict[str, Any], *, decode: int = 1) -> Obj:
    made = fleets.document("chat", model=model, pools=prefill_and_decode(decode=decode))
    own = {
        "namespace": "ns",
        "uid": "fleet",
        "resourceVersion": "5",
        "generation": 1,
        "finalizers": ["xpyd.dev/fleet"],
    }
    return {**made, "metadata": made["metadata"] | own}


def applied(state: FleetState, children: Children) -> list[str]:
    """Do the turn's applies; the kinds and names of what is new."""
    new: list[str] = []
    for write in writes(decide(state)):
        if isinstance(write, Apply):
            obj = stored(write.obj)
            children.setdefault(kind_of(obj), {})[obj["metadata"]["name"]] = obj
            new.append(f"{obj['kind']} {obj['metadata']['name']}")
    return new


def job_in(children: Children) -> Obj:
    [job] = children[JOB].values()
    return job


def complete(job: Obj) -> None:
    job["status"] = {"conditions": [{"type": "Complete", "status": "True"}]}


def download_pod(job: Obj, *, status: dict[str, Any] | None = None) -> Obj:
    """The Job's pod, as it runs or with another status of its container."""
    running = {"name": "xpyd-model", "ready": True, "state": {"running": {"startedAt": "x"}}}
    own = {"kind": "Job", "name": job["metadata"]["name"], "controller": True, "uid": "job"}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": f"{job['metadata']['name']}-x",
            "namespace": "ns",
            "uid": "pod",
            "labels": job["spec"]["template"]["metadata"]["labels"],
            "ownerReferences": [own],
        },
        "spec": {"nodeName": "n", "containers": [{"name": "xpyd-model", "image": "i"}]},
        "status": {
            "phase": "Running",
            "podIP": "127.0.0.1",
            "conditions": [{"type": "PodScheduled", "status": "True"}],
            "containerStatuses": [status or running],
        },
    }


def conditions(state: FleetState) -> dict[str, tuple[str, str, str]]:
    """Status, reason and message of each condition."""
    found = report(state, (), has_key=True).after["conditions"]
    return {c["type"]: (c["status"], c["reason"], c["message"]) for c in found}


def downloaded(model: dict[str, Any]) -> Children:
    """A fleet whose model is there, as it is after its first turns."""
    children: Children = {}
    applied(look(children, document(model)), children)
    complete(job_in(children))
    applied(look(children, document(model)), children)
    return children


def test_a_new_fleets_engines_wait_for_the_job_that_downloads_their_model() -> None:
    children: Children = {}
    new = applied(look(children, document(FIRST)), children)
    assert [name.partition(" ")[0] for name in new].count("Job") == 1
    assert not {"Deployment", "InferenceFleetPool"} & {name.partition(" ")[0] for name in new}
    assert "chat-model" in children[NETWORK_POLICY]
    # Until it is complete, nothing more.
    assert applied(look(children, document(FIRST)), children) == []
    complete(job_in(children))
    assert len(applied(look(children, document(FIRST)), children)) == 9
    assert len(children[DEPLOYMENT]) == 3
    assert conditions(look(children, document(FIRST)))["ModelReady"][:2] == ("True", "Downloaded")


def test_a_running_revision_goes_on_while_the_next_model_comes() -> None:
    children = downloaded(FIRST)
    before = {name: json.dumps(obj) for name, obj in children[DEPLOYMENT].items()}
    pools = {name: obj["spec"]["replicas"] for name, obj in children[POOL].items()}
    next_turn = look(children, document(SECOND, decode=2))
    [new] = applied(next_turn, children)
    assert new.startswith("Job chat-model-")
    waiting = writes(decide(next_turn))
    assert not [w for w in waiting if isinstance(w, Scale)]
    # The old download ends, or its Job goes; its folder stays, which pods still read.
    assert [w.kind for w in waiting if isinstance(w, DeleteObject)] == [JOB]
    assert {name: json.dumps(obj) for name, obj in children[DEPLOYMENT].items()} == before
    assert {name: obj["spec"]["replicas"] for name, obj in children[POOL].items()} == pools
    for job in children[JOB].values():
        complete(job)
    turn = decide(look(children, document(SECOND, decode=2)))
    deployed = [
        w.obj for w in writes(turn) if isinstance(w, Apply) and kind_of(w.obj) == DEPLOYMENT
    ]
    assert [obj["metadata"]["labels"]["xpyd.dev/pool"] for obj in deployed] == ["prefill", "decode"]


def test_a_job_that_was_lost_stops_nobody_who_runs() -> None:
    children = downloaded(FIRST)
    children[JOB].clear()
    turn = decide(look(children, document(FIRST)))
    [write] = writes(turn)
    assert isinstance(write, Apply)
    assert kind_of(write.obj) == JOB


def test_a_job_is_never_applied_again_whose_pods_cannot_change() -> None:
    """The API server refuses another template of a Job, as a newer operator would render it."""
    children = downloaded(FIRST)
    job = job_in(children)
    job["spec"]["template"]["spec"]["containers"][0]["image"] = "xpyd-worker:0"
    job["metadata"]["annotations"]["xpyd.dev/applied"] = "older"
    assert writes(decide(look(children, document(FIRST)))) == []


@pytest.mark.parametrize(
    ("reason", "message"),
    [
        ("NotFound", "s3://models/chat: no object below it: correct the path"),
        ("AccessDenied", "s3://models/chat: access denied: give the key s3:ListBucket"),
        ("VolumeFull", "/models/chat: the volume is full: it needs 9 GiB more and has 1 GiB"),
        ("ChecksumMismatch", "s3://models/chat: model.safetensors: sha256 is a: upload it again"),
    ],
)
def test_a_failed_download_is_a_condition_with_the_fix(reason: str, message: str) -> None:
    children: Children = {}
    applied(look(children, document(FIRST)), children)
    said = json.dumps({"phase": "Failed", "reason": reason, "message": message})
    ended = {"exitCode": 2, "reason": "Error", "message": f'{{"phase": "Listing"}}\n{said}\n'}
    waits = {"waiting": {"reason": "CrashLoopBackOff"}}
    pod = download_pod(
        job_in(children),
        status={"name": "xpyd-model", "state": waits, "lastState": {"terminated": ended}},
    )
    children[POD] = {"p": trim(POD, pod)}
    found = conditions(look(children, document(FIRST)))
    assert found["ModelReady"] == ("False", reason, message)
    assert found["Degraded"] == ("True", reason, f"model: {message}")
    assert found["Ready"][1] == reason


def test_what_a_download_did_not_say_is_a_failure_with_its_status() -> None:
    children: Children = {}
    applied(look(children, document(FIRST)), children)
    for ended, words in (
        ({"exitCode": 137, "reason": "OOMKilled"}, "ended for its memory"),
        ({"exitCode": 1, "message": "[1]"}, "ended with status 1: [1]"),
    ):
        status = {"name": "xpyd-model", "state": {"terminated": ended}}
        children[POD] = {"p": trim(POD, download_pod(job_in(children), status=status))}
        ready = conditions(look(children, document(FIRST)))["ModelReady"]
        assert ready[:2] == ("False", "DownloadFailed")
        assert words in ready[2]


def test_progress_is_in_the_status_and_a_fleet_that_waits_is_not_degraded() -> None:
    children: Children = {}
    applied(look(children, document(FIRST)), children)
    children[POD] = {"p": trim(POD, download_pod(job_in(children)))}
    said = DownloadProgress("Downloading", 3 << 30, 12 << 30)
    state = look(children, document(FIRST), progress=said)
    found = conditions(state)
    assert found["ModelReady"] == ("False", "Downloading", "25 % of 12.0 GiB downloaded")
    assert found["Degraded"][0] == "False"
    assert found["Ready"][1] == "ModelDownloading"
    model = report(state, (), has_key=True).after["model"]
    assert (model["downloadedBytes"], model["totalBytes"]) == (3 << 30, 12 << 30)
    # The numbers stay when the pod is gone.
    done = document(FIRST)
    done["status"] = {"model": model}
    complete(job_in(children))
    model = report(look(children, done), (), has_key=True).after["model"]
    assert (model["downloadedBytes"], model["totalBytes"]) == (12 << 30, 12 << 30)


def test_a_claim_that_is_not_there_is_named() -> None:
    children: Children = {}
    applied(look(children, document(FIRST)), children)
    pod = download_pod(job_in(children))
    words = 'persistentvolumeclaim "models" not found'
    pod["status"] = {
        "phase": "Pending",
        "conditions": [{"type": "PodScheduled", "status": "False", "message": words}],
    }
    pod["spec"].pop("nodeName")
    children[POD] = {"p": trim(POD, pod)}
    found = conditions(look(children, document(FIRST)))["ModelReady"]
    assert found[:2] == ("False", "VolumeUnavailable")
    assert words in found[2]


def test_a_fleet_whose_model_no_job_downloads_has_no_such_condition() -> None:
    for model in ({"uri": "s3://models/chat"}, {"uri": "pvc://models/chat"}, {"uri": "file://./m"}):
        children: Children = {}
        new = applied(look(children, document(model)), children)
        assert not [name for name in new if name.startswith("Job ")]
        assert "ModelReady" not in conditions(look(children, document(model)))


def test_two_fleets_of_one_model_write_one_folder_of_the_claim() -> None:
    jobs: list[Obj] = []
    for secret in ("one", "two"):
        children: Children = {}
        applied(look(children, document({**FIRST, "secretRef": {"name": secret}})), children)
        jobs.append(job_in(children))
    places = [job["spec"]["template"]["spec"]["containers"][0]["args"][3] for job in jobs]
    assert places[0] == places[1]
    assert jobs[0]["metadata"]["name"] != jobs[1]["metadata"]["name"]


KEY = FleetKey("ns", "chat")


@contextlib.asynccontextmanager
async def answering(answer: list[bytes]) -> AsyncGenerator[int]:
    """A pod's /progress on loopback; yields its port."""

    async def say(_: web.Request) -> web.Response:
        return web.Response(body=answer[0])

    app = web.Application()
    app.router.add_get("/progress", say)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield runner.addresses[0][1]
    finally:
        await runner.cleanup()


async def test_the_operator_asks_the_jobs_pod_and_wakes_the_fleet_for_each_percent() -> None:
    children: Children = {}
    fleet = document(FIRST)
    applied(look(children, fleet), children)
    job, woken, cache = job_in(children), [], Cache()
    cache.put(FLEET, trim(FLEET, fleet))
    cache.put(JOB, trim(JOB, job))
    cache.put(POD, trim(POD, download_pod(job)))
    said = {"phase": "Downloading", "doneBytes": 10_000, "totalBytes": 1_000_000}
    answer = [json.dumps(said).encode()]
    async with answering(answer) as port, aiohttp.ClientSession() as session:
        reader = DownloadReader(cache, woken.append, port=port)
        await reader.look(session)
        assert reader.progress(KEY) == DownloadProgress("Downloading", 10_000, 1_000_000)
        answer[0] = json.dumps(said | {"doneBytes": 10_001}).encode()
        await reader.look(session)
        assert woken == [KEY]
        answer[0] = json.dumps(said | {"doneBytes": 20_001}).encode()
        await reader.look(session)
        assert woken == [KEY, KEY]
        answer[0] = b"[[[["
        await reader.look(session)
        assert reader.progress(KEY) is not None
        complete(job)
        job["metadata"]["resourceVersion"] = "99"
        cache.put(JOB, trim(JOB, job))
        await reader.look(session)
        assert reader.progress(KEY) is None


def test_a_document_that_is_read_has_the_claims_folder_for_its_engines() -> None:
    want = read(document(FIRST), SETTINGS).want
    args = {pool.name: pool.template.args for pool in want.pools}
    assert any(arg.startswith("--model=/models/chat-") for arg in args["decode"])
    assert "chat" in args["decode"]


def test_up_downloads_a_model_of_a_bucket_into_its_cache_before_engines_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    bucket, repository = Model(uri="s3://models/chat"), Model(uri="hf://org/chat")
    assert needs_download(bucket)
    assert needs_download(repository)
    assert not needs_download(Model(uri="file:///m"))
    assert locate_model(bucket, tmp_path) == "s3://models/chat"
    folder = downloaded_folder(bucket)
    folder.mkdir(parents=True)
    (folder / MANIFEST).write_text("{}")
    assert not needs_download(bucket)
    assert locate_model(bucket, tmp_path) == str(folder)
    # What the hub's own library has is used from there.
    (tmp_path / "hub/hub/models--org--chat/snapshots").mkdir(parents=True)
    assert not needs_download(repository)


def test_up_refuses_a_claim_with_the_fix() -> None:
    with pytest.raises(UserError, match=r"local mode has none; write file://FOLDER"):
        check_local(fleets.parsed(model={"uri": "pvc://claim/m"}), source="f.yaml")
