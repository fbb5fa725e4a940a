"""The parts of the test cluster that need no cluster: images, the log of calls, run folders."""

from __future__ import annotations

import hashlib
import io
import json
import os
import ssl
import subprocess
import sys
import tarfile
import tempfile
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.harness import NotInTime, audit, packages, wait_for
from tests.cluster.harness.api_reader import ApiReader
from tests.cluster.harness.images import write_image
from tests.cluster.harness.runs import Process, Run, State, base_folder, runs, sweep
from tests.tls_kit import client_context, write_pair


@pytest.fixture
def own_base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for run folders that no other cluster is in."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    base_folder().mkdir()
    return base_folder()


def test_an_image_holds_its_files_and_how_to_start_them(tmp_path: Path) -> None:
    (tmp_path / "program").write_bytes(b"\x7fELF")
    files: dict[str, bytes | Path] = {"/bin/program": tmp_path / "program", "/etc/a": b"a"}
    made = [
        write_image(
            tmp_path / f"{number}.tar",
            "localhost/x:1",
            files,
            entrypoint=["/bin/program", "serve"],
            env={"A": "b"},
            user="10001",
        )
        for number in (1, 2)
    ]
    assert made[0].read_bytes() == made[1].read_bytes()
    with tarfile.open(made[0]) as archive:

        def read(name: str) -> bytes:
            member = archive.extractfile(name)
            assert member is not None
            return member.read()

        (manifest,) = json.loads(read("manifest.json"))
        config = json.loads(read(manifest["Config"]))
        layer = read(manifest["Layers"][0])
    assert manifest["RepoTags"] == ["localhost/x:1"]
    assert config["config"]["Entrypoint"] == ["/bin/program", "serve"]
    assert config["config"]["User"] == "10001"
    assert "A=b" in config["config"]["Env"]
    assert config["rootfs"]["diff_ids"] == [f"sha256:{hashlib.sha256(layer).hexdigest()}"]
    with tarfile.open(fileobj=io.BytesIO(layer)) as inner:
        assert inner.getnames() == ["bin/program", "etc/a"]
        assert inner.getmember("bin/program").mode == 0o755


def _event(verb: str, user: str, agent: str, resource: str = "pods") -> dict[str, Any]:
    target = {"resource": resource, "subresource": "status", "namespace": "n", "name": "x"}
    return {
        "verb": verb,
        "user": {"username": user},
        "userAgent": agent,
        "objectRef": target,
        "responseStatus": {"code": 200},
        "requestURI": "/api",
    }


def test_calls_are_read_from_a_mark_on_and_an_unfinished_line_is_left(tmp_path: Path) -> None:
    log = tmp_path / "audit.log"
    assert audit.mark(log) == 0
    log.write_text(json.dumps(_event("get", "a", "kopf/1")) + "\n")
    mark = audit.mark(log)
    with log.open("a") as out:
        out.write(json.dumps(_event("patch", "a", "kopf/1")) + "\n")
        out.write(json.dumps(_event("list", "b", "kubectl/1")) + "\n")
        out.write('{"verb": "upd')
    found = audit.calls(log, user=None, user_agent=None, after=mark)
    assert [(call.verb, call.resource, call.writes) for call in found] == [
        ("patch", "pods/status", True),
        ("list", "pods/status", False),
    ]
    assert audit.calls(log, user="b", user_agent=None, after=0) == found[1:]
    assert [one.verb for one in audit.calls(log, user=None, user_agent="kopf", after=0)] == [
        "get",
        "patch",
    ]


def test_a_process_is_not_confused_with_a_later_one_of_its_number() -> None:
    mine = Process.of(os.getpid())
    assert mine.alive
    assert not Process(mine.pid, mine.started + 1).alive
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        other = Process.of(child.pid)
        Process(other.pid, other.started + 1).kill()
        assert other.alive
        other.kill()
        # Until it is collected it is a zombie, and that is not alive.
        wait_for(lambda: not other.alive, 10, "the process has ended")
    with pytest.raises(ProcessLookupError):
        Process.of(other.pid)


def test_only_what_has_no_keeper_any_more_is_swept(own_base: Path) -> None:
    mine = Process.of(os.getpid())
    gone = Process(mine.pid, mine.started + 1)
    for name, keeper in (("alive", mine), ("dead", gone)):
        run = Run(own_base / name)
        run.folder.mkdir()
        (run.folder / "keeper").write_text(f"{keeper.pid} {keeper.started}")
        run.write_state(State(keeper=keeper, init=gone, owner=None))
    for name, age_s in (("starting", 0), ("never-started", 3600)):
        folder = own_base / name
        folder.mkdir()
        then = folder.stat().st_mtime - age_s
        os.utime(folder, (then, then))
    assert sweep() == ["dead", "never-started"]
    assert [run.name for run in runs()] == ["alive", "starting"]
    state = Run(own_base / "alive").state()
    assert state == State(keeper=mine, init=gone, owner=None)


def test_what_a_machine_lacks_is_named_by_its_package() -> None:
    needs = (
        packages.Need("shell", "sh"),
        packages.Need("lacking", "no-such-program"),
        packages.Need("lacking", "/no/such/file"),
    )
    assert packages.missing(needs) == ["lacking"]


def test_a_wait_that_fails_says_what_it_saw_last() -> None:
    def two_are_ready() -> bool:
        assert [1] == [1, 2]
        return True

    with pytest.raises(NotInTime, match=r"two are ready \(last: assert \[1\] == \[1, 2\]"):
        wait_for(two_are_ready, 0, "two are ready")
    assert wait_for(lambda: "an answer", 0, "there is an answer") == "an answer"


class Api(ThreadingHTTPServer):
    """An API server that answers with how many connections it has had, and what was posted."""

    connections = 0
    ends_them = False
    """Behind an answer, without a word."""


class Answers(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = 30
    server: Api

    def setup(self) -> None:
        super().setup()
        self.server.connections += 1

    def do_GET(self) -> None:
        posted = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        body = json.dumps({"connections": self.server.connections, "message": posted.decode()})
        self.send_response(422 if posted else 200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body.encode())
        self.close_connection = self.server.ends_them

    do_POST = do_GET

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - as it is called
        pass


@pytest.fixture
def api(tmp_path: Path) -> Iterator[Api]:
    files = write_pair(tmp_path)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(files.certificate, files.key)
    with Api(("127.0.0.1", 0), Answers) as server:
        server.socket = context.wrap_socket(server.socket, server_side=True)
        serving = threading.Thread(target=server.serve_forever, args=(0.05,))
        serving.start()
        yield server
        server.shutdown()
        serving.join()


def test_a_reader_keeps_its_connection_and_makes_another_where_it_was_ended(api: Api) -> None:
    reader = ApiReader(api.server_port, client_context())
    assert [reader.object("/a") for _ in range(3)] == [{"connections": 1, "message": ""}] * 3
    assert reader.refusal("/a", {"kind": "Fleet"}) == '{"kind": "Fleet"}'
    api.ends_them = True
    found = [reader.object("/a") for _ in range(3)]
    assert [one and one["connections"] for one in found] == [1, 2, 3]
