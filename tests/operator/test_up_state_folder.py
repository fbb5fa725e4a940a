"""A state folder that is full, cannot be made or belongs to somebody else: a running fleet goes on,
and a command says one sentence with the folder and the fix."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.small_disk import fill, free
from xpyd_core import cli
from xpyd_operator.up.client import scale, take_fleet_down
from xpyd_operator.up.folder import FleetFolder

# Test folders are no packages: pytest's importlib mode puts this one on no path by itself.
sys.path.insert(0, os.path.dirname(__file__))
from local_fleet import LocalFleet, until


@pytest.fixture
def on_small_disk(tmp_path, small_disk, monkeypatch):
    """A document beside a state folder that is a disk of 4 MiB."""
    disk = small_disk("4m")
    monkeypatch.setenv("XDG_STATE_HOME", str(disk))
    made = LocalFleet(tmp_path, "t")
    made.state = FleetFolder(disk / "xpyd" / "t")
    made.write()
    yield made
    made.end()


def test_a_full_disk_ends_no_pod_and_what_could_not_be_written_is_written_later(on_small_disk):
    fleet = on_small_disk
    disk = fleet.state.folder.parents[1]
    fleet.up()
    before = fleet.pids()
    fill(disk)
    os.kill(before["decode-0"], signal.SIGKILL)
    until(lambda: fleet.pods()["decode-0"].pid not in (0, before["decode-0"]))
    assert scale("t-decode", 3, timeout_s=20) == 0
    view = fleet.settled()
    [problem] = view.problems
    assert f"{fleet.state.record} cannot be written: No space left on device" in problem
    after = fleet.pids()
    changed = {name for name, pid in before.items() if after[name] != pid}
    assert changed == {"decode-0"}
    assert {pod.process.pid for pod in fleet.state.read_record().pods} == set(before.values())
    free(disk)
    until(lambda: not fleet.view().problems)
    assert {pod.process.pid for pod in fleet.state.read_record().pods} == set(after.values())
    processes = fleet.processes()
    assert take_fleet_down("t", None) == 0
    assert not [process for process in processes if process.is_alive()]


def test_status_shows_what_people_should_mend(on_small_disk, capsys):
    fleet = on_small_disk
    fleet.up()
    fill(fleet.state.folder.parents[1])
    scale("t-decode", 1, timeout_s=20)
    until(lambda: fleet.view().problems)
    capsys.readouterr()
    assert cli.main(["status"]) == 0
    first, second = capsys.readouterr().out.splitlines()[:2]
    assert first.startswith("fleet t  Ready  http://")
    assert second == f"problem: {fleet.view().problems[0]}"


def test_a_fleet_is_not_started_on_a_full_disk(on_small_disk, capsys):
    fleet = on_small_disk
    disk = fleet.state.folder.parents[1]
    fill(disk)
    assert cli.main(["up", "-f", str(fleet.file), "--detach"]) == 2
    said = capsys.readouterr().err
    assert said == (
        f"xpyd: state folder {fleet.state.folder}: No space left on device; free some space there,"
        " or set XDG_STATE_HOME to a folder that you may write to\n"
    )
    assert not fleet.state.is_supervised()


def test_logs_that_fill_the_disk_are_removed_by_the_next_up(on_small_disk):
    fleet = on_small_disk
    fleet.state.make()
    fill(fleet.state.logs)
    assert fleet.up() == 0


def test_a_pod_that_can_make_no_log_serves_without_one(fleet, small_disk):
    disk = small_disk("64k,nr_inodes=1")  # the folder itself is one
    fleet.up()
    log = fleet.state.log_of("t-decode-2")
    log.symlink_to(disk / "nowhere")
    assert scale("t-decode", 3, timeout_s=20) == 0
    [problem] = fleet.view().problems
    assert problem == f"{log} cannot be made: No space left on device; free some space"


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
COMMANDS = (
    ["status"],
    ["status", "t"],
    ["scale", "t-decode", "--replicas", "2"],
    ["logs"],
    ["logs", "t"],
    ["logs", "--fleet", "t"],
    ["chat", "hello"],
    ["down"],
    ["down", "t"],
)


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_a_state_folder_that_may_not_be_read_is_named_in_one_sentence(fleet, words):
    fleet.state.make()
    root = fleet.state.folder.parent
    said = _as_somebody_else(words, root.parent)
    assert said.startswith(f"xpyd: state folder {root}")
    fix = "set XDG_STATE_HOME to a folder that you may write to"
    assert said.endswith(f": Permission denied; {fix}\n")
    assert said.count("\n") == 1


def _as_somebody_else(words: list[str], state: Path) -> str:
    """What the command says on standard error to a user who may not read the folder."""
    code = (
        "import os, sys\n"
        "from xpyd_core.cli import main\n"
        "import xpyd_operator.up.client, xpyd_operator.up.chat\n"
        "os.seteuid(65534) if os.geteuid() == 0 else os.chmod(sys.argv[1], 0)\n"
        "sys.exit(main(sys.argv[2:]))\n"
    )
    # pytest's folders above it may be their owner's alone: the message would name one of them.
    for folder in state.parents:
        if folder.stat().st_mode & 0o055 == 0:
            folder.chmod(0o755)
    state.chmod(0o700)
    done = subprocess.run(
        [sys.executable, "-c", code, str(state), *words],
        env={**os.environ, "XDG_STATE_HOME": str(state)},
        capture_output=True,
        text=True,
        check=False,
    )
    state.chmod(0o700)
    assert done.returncode == 2, done.stderr
    return done.stderr


def test_a_state_folder_that_cannot_be_made_is_named_in_one_sentence(fleet, monkeypatch, capsys):
    file = fleet.file.parent / "a-file"
    file.touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(file))
    assert cli.main(["up", "-f", str(fleet.file)]) == 2
    said = capsys.readouterr().err
    assert said == (
        f"xpyd: state folder {file}/xpyd/t: Not a directory; a file is where a folder is needed:"
        " move it away, or set XDG_STATE_HOME to a folder that you may write to\n"
    )


@needs_root
def test_a_state_folder_of_another_user_is_refused_also_to_root(fleet, capsys):
    fleet.state.make()
    os.chown(fleet.state.folder.parent, 54321, -1)
    assert cli.main(["up", "-f", str(fleet.file)]) == 2
    said = capsys.readouterr().err
    assert said == (
        f"xpyd: state folder {fleet.state.folder.parent}: it belongs to user 54321; run xpyd as"
        " user 54321, or set XDG_STATE_HOME to a folder that you may write to\n"
    )


@needs_root
def test_a_user_without_a_home_is_told_which_variable_helps():
    code = (
        "import os, sys\n"
        "from xpyd_core.cli import main\n"
        "import xpyd_operator.up.client\n"
        "os.setuid(54321)\n"
        "sys.exit(main(['status']))\n"
    )
    gone = ("HOME", "XDG_STATE_HOME")
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={name: value for name, value in os.environ.items() if name not in gone},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stderr == (
        "xpyd: this user has no home folder; set XDG_STATE_HOME to a folder that you may write to\n"
    )
    assert done.returncode == 2


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--log-max-files", "0"], "--log-max-files 0: expected 1 to 100"),
        (["--log-max-files", "101"], "--log-max-files 101: expected 1 to 100"),
        (["--log-max-size", "much"], "--log-max-size: 'much' is not a size"),
        (["--log-max-size", "10"], "--log-max-size 10: expected at least 4.0 KiB"),
    ],
)
def test_wrong_bounds_of_logs_are_refused(fleet, words, complaint, capsys):
    assert cli.main(["up", "-f", str(fleet.file), *words]) == 2
    assert complaint in capsys.readouterr().err
