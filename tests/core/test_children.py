"""Children that a fork server forks behave as spawned ones, and none depends on it."""

from __future__ import annotations

import json
import os
import resource
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from xpyd_core.children import Child, ForkServer, Start
from xpyd_core.fork_server import PYTHON

DEADLINE_S = 30.0
PREPARED = "import os\nPREPARED_IN = os.getpid()\ndef prepare():\n    {body}\n"
PROGRAM = """
import atexit, json, os, signal, subprocess, sys, threading
import prepared

def say(*_):
    mine = {name: value for name, value in os.environ.items() if name.startswith("XPYD_")}
    print(json.dumps({
        "argv": sys.argv[1:], "name": __name__, "own": mine, "pid": os.getpid(),
        "session": os.getsid(0), "group": os.getpgrp(), "folder": os.getcwd(),
        "parent": os.getppid(), "prepared_in": prepared.PREPARED_IN,
        "descriptors": [d for d in range(256) if os.path.exists(f"/proc/self/fd/{d}")],
        "threads": len(os.listdir("/proc/self/task")),
        "line": open("/proc/self/cmdline", "rb").read().rstrip(b"\\0").decode().split("\\0"),
        "input": os.readlink("/proc/self/fd/0"),
        "signals": [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGCHLD)],
    }))

what = sys.argv[1]
if what == "sleep":
    print("sleeps", flush=True)
    signal.pause()
elif what == "parent":
    print(subprocess.Popen(["sleep", "60"]).pid, flush=True)
    signal.pause()
elif what == "atexit":
    atexit.register(print, "at the exit")
    threading.Timer(0.1, print, ["a thread's end"]).start()
elif what == "raise":
    raise ValueError("the end")
elif what == "text":
    sys.exit("the end")
elif what == "say":
    say()
else:
    sys.exit(int(what))
"""


def until(what: Callable[[], Any]) -> Any:
    end = time.monotonic() + DEADLINE_S
    while True:
        if value := what():
            return value
        assert time.monotonic() < end, "not in time"
        time.sleep(0.01)


def is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def children() -> set[str]:
    """Those of this process that were not reaped."""
    tasks = Path("/proc/self/task").iterdir()
    return {pid for task in tasks for pid in (task / "children").read_text().split()}


class Family:
    """A fork server, and children of it that run PROGRAM."""

    def __init__(self, folder: Path, body: str = "pass", **of_server: float) -> None:
        (folder / "prepared.py").write_text(PREPARED.format(body=body))
        (folder / "program.py").write_text(PROGRAM)
        self.folder = folder
        self.log = folder / "log"
        self.forks = ForkServer(["prepared:prepare"], **of_server)
        self.environ = {"PYTHONPATH": str(folder), "PATH": os.environ["PATH"]}

    def start(self, *words: str, inherit: tuple[int, ...] = (), **own: str) -> Child:
        argv = [*PYTHON, "program", *words]
        with self.log.open("ab") as log:
            return self.forks.start(Start(argv, self.environ | own, log.fileno(), inherit))

    def await_pid(self, child: Child) -> int:
        end = time.monotonic() + DEADLINE_S
        while child.pid is None:
            left_s = end - time.monotonic()
            assert left_s > 0, "the fork server does not answer"
            select.select([self.forks], [], [], min(left_s, 0.1))
            self.forks.take()
        return child.pid

    def end(self, child: Child) -> int:
        self.await_pid(child)
        until(child.has_ended)
        return child.wait()

    def say(self, *words: str, **of_start: Any) -> dict[str, Any]:
        """What a child that says so has."""
        assert self.end(self.start("say", *words, **of_start)) == 0, self.log.read_text()
        return json.loads([x for x in self.log.read_text().splitlines() if x[0] == "{"][-1])

    def server(self) -> int:
        pid = self.forks.pid
        assert pid is not None
        return pid


@pytest.fixture
def family(tmp_path: Path) -> Iterator[Family]:
    made = Family(tmp_path)
    yield made
    made.forks.close()


def test_a_child_is_forked_also_where_few_files_may_be_open(family: Family) -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, before[1]))
    try:
        assert family.say()["prepared_in"] == family.server()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_a_forked_child_has_its_own_arguments_environment_output_and_session(
    family: Family,
) -> None:
    with (family.folder / "held").open("w") as held:
        number = held.fileno()
        said = family.say("--flag", "a b", inherit=(number,), XPYD_OWN="1")
    server = family.server()
    pid = said["pid"]
    assert said == {
        "argv": ["say", "--flag", "a b"],
        "name": "__main__",
        "own": {"XPYD_OWN": "1"},
        "pid": pid,
        "session": pid,
        "group": pid,
        "folder": os.getcwd(),
        "parent": os.getpid(),
        "prepared_in": server,
        "descriptors": [0, 1, 2, number],
        "threads": 1,
        "line": [*PYTHON, "program", "say", "--flag", "a b"],
        "input": "/dev/null",
        "signals": [signal.SIG_DFL, signal.SIG_DFL],
    }
    again = family.say(XPYD_OTHER="2")
    assert again["own"] == {"XPYD_OTHER": "2"}
    assert again["prepared_in"] == server


@pytest.mark.parametrize(
    ("how", "status", "last"),
    [
        ("0", 0, ""),
        ("3", 3, ""),
        ("text", 1, "the end"),
        ("raise", 1, "ValueError: the end"),
        ("atexit", 0, "at the exit"),
    ],
)
def test_the_exit_status_of_a_forked_child_arrives(
    family: Family, how: str, status: int, last: str
) -> None:
    assert family.end(family.start(how)) == status
    lines = family.log.read_text().splitlines()
    assert (lines[-1] if lines else "") == last
    if how == "atexit":
        assert lines == ["a thread's end", "at the exit"]


def test_a_signal_to_its_group_ends_a_forked_child_and_no_other(family: Family) -> None:
    first, second = family.start("parent"), family.start("sleep")
    family.await_pid(second)
    of_group = int(until(lambda: family.log.read_text().replace("sleeps", "").strip()))
    first.signal(signal.SIGKILL, group=True)
    assert family.end(first) == -signal.SIGKILL
    until(lambda: is_gone(of_group))
    assert not second.has_ended()
    second.signal(signal.SIGTERM)
    assert family.end(second) == -signal.SIGTERM
    second.signal(signal.SIGTERM)


def test_children_go_on_when_the_fork_server_is_killed_and_the_next_starts_another(
    family: Family,
) -> None:
    child = family.start("sleep")
    family.await_pid(child)
    server = family.server()
    os.kill(server, signal.SIGKILL)
    until(lambda: is_gone(server))
    later = family.start("say")
    assert family.end(later) == 0
    assert not child.has_ended()
    child.signal(signal.SIGTERM)
    assert family.end(child) == -signal.SIGTERM
    assert family.say()["prepared_in"] == family.server() != server


def test_a_fork_server_that_hangs_is_replaced_and_no_child_is_lost(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    family = Family(tmp_path, answer_s=0.3)
    running = family.start("sleep")
    family.await_pid(running)
    server = family.server()
    os.kill(server, signal.SIGSTOP)
    waiting = [family.start("sleep") for _ in range(2)]
    said = family.say()
    assert said["prepared_in"] == said["pid"], "spawned"
    assert is_gone(server)
    assert "the fork server did not answer in 0.3 s" in caplog.text
    assert family.say()["prepared_in"] == family.server() != server
    for child in (running, *waiting):
        assert not child.has_ended()
        child.signal(signal.SIGTERM)
        assert family.end(child) == -signal.SIGTERM
    family.forks.close()


def test_children_are_spawned_where_the_imports_of_a_fork_server_hang(tmp_path: Path) -> None:
    family = Family(tmp_path, body="import time; time.sleep(600)", first_answer_s=0.3)
    first = family.start("3")
    server = family.server()
    assert family.end(first) == 3
    assert is_gone(server)
    assert family.end(family.start("4")) == 4
    assert family.forks.pid is None, "the next one would hang, too"
    family.forks.close()


def test_a_child_is_spawned_where_the_fork_server_ends_before_it_forks(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tried = tmp_path / "tried"
    family = Family(tmp_path, body=f"open({str(tried)!r}, 'a').write('x'); os._exit(3)")
    said = family.say()
    assert said["prepared_in"] == said["pid"]
    assert "the fork server failed" in caplog.text
    assert family.say()["prepared_in"] != said["pid"]
    assert family.forks.pid is None
    assert tried.read_text() == "x", "it is not started again and again"
    family.forks.close()


def test_a_child_is_spawned_where_an_import_starts_a_thread(tmp_path: Path) -> None:
    wait = "import threading, time; threading.Thread(target=time.sleep, args=[60], daemon=True)"
    family = Family(tmp_path, body=f"{wait}.start()")
    said = family.say()
    assert said["prepared_in"] == said["pid"]
    family.forks.close()


def test_a_child_runs_no_outdated_code(family: Family) -> None:
    assert family.say()["prepared_in"] == family.server()
    changed = family.folder / "prepared.py"
    changed.write_text(changed.read_text() + "\n")
    os.utime(changed, (1, 1))
    said = family.say()
    assert said["prepared_in"] == said["pid"]
    assert family.say()["prepared_in"] == family.server()


def test_another_environment_gets_another_fork_server(family: Family) -> None:
    family.say()
    first = family.server()
    assert family.say(OMP_NUM_THREADS="3")["prepared_in"] == family.server() != first
    assert is_gone(first)


def test_a_child_that_is_killed_before_it_is_forked_never_runs(tmp_path: Path) -> None:
    before = children()
    family = Family(tmp_path, body="import time; time.sleep(1)")
    first, second, third = (family.start(word) for word in ("sleep", "sleep", "0"))
    assert not first.has_ended()
    first.signal(signal.SIGTERM)
    second.signal(signal.SIGKILL, group=True)
    assert first.has_ended()
    assert (first.wait(), second.wait()) == (-signal.SIGTERM, -signal.SIGKILL)
    assert family.end(third) == 0
    assert family.log.read_text() in ("", "sleeps\n"), "the first may be killed as it begins"
    for _ in range(20):  # also where it has just answered
        first, second = family.start("sleep"), family.start("0")
        first.signal(signal.SIGKILL)
        assert family.end(second) == 0
    family.forks.close()
    assert children() == before


OWNER = """
import sys
from xpyd_core.children import *
forks = ForkServer(["prepared:prepare"])
child = forks.start(Start(sys.argv[1:], dict(PYTHONPATH=sys.path[0]), 2))
while child.pid is None:
    forks.take()
print(forks.pid, child.pid, flush=True)
sys.stdin.read()
"""


def test_a_killed_owner_leaves_no_fork_server_behind(family: Family) -> None:
    """Its children go on: the owner's record of their pids is on disk (`xpyd down` ends them)."""
    (family.folder / "owner.py").write_text(OWNER)
    command = [sys.executable, str(family.folder / "owner.py"), *PYTHON, "program", "sleep"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as owner:
        assert owner.stdout is not None
        server, child = map(int, owner.stdout.readline().split())
        owner.kill()
        owner.wait()
        until(lambda: is_gone(server))
        assert not is_gone(child)
        os.kill(child, signal.SIGKILL)
    until(lambda: is_gone(child))


def test_closing_it_leaves_nothing_open(tmp_path: Path) -> None:
    before = set(os.listdir("/proc/self/fd"))
    family = Family(tmp_path, body="import time; time.sleep(5)")
    children = [family.start("sleep") for _ in range(3)]
    server = family.server()
    family.forks.close()
    assert is_gone(server)
    assert [child.wait() for child in children] == [-signal.SIGKILL] * 3
    assert set(os.listdir("/proc/self/fd")) == before


def test_closing_it_ends_a_child_whose_answer_was_not_read(tmp_path: Path) -> None:
    before = children()
    family = Family(tmp_path)
    child = family.start("parent")
    until(family.log.read_text)  # it runs
    [pid] = {int(pid) for pid in children() - before} - {family.server()}
    of_group = int(until(family.log.read_text))
    assert child.pid is None
    family.forks.close()
    assert is_gone(pid)
    until(lambda: is_gone(of_group))
    assert child.wait() == -signal.SIGKILL
    assert children() == before, "it is reaped"


def test_a_fork_server_that_is_stopped_can_be_closed(tmp_path: Path) -> None:
    family = Family(tmp_path)
    running = family.start("sleep")
    family.await_pid(running)
    server = family.server()
    os.kill(server, signal.SIGSTOP)
    waiting = family.start("sleep")
    family.forks.close()
    assert is_gone(server)
    assert waiting.wait() == -signal.SIGKILL
    assert not running.has_ended()
    running.signal(signal.SIGKILL)
    assert running.wait() == -signal.SIGKILL
