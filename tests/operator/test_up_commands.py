"""The `xpyd` sub-commands of local mode: light to load, with examples, and clear when refused."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from xpyd_core import cli
from xpyd_core.errors import UserError
from xpyd_operator.document.load import load_fleet
from xpyd_operator.plan.template import fleet_want
from xpyd_operator.status.drains import InstanceLoad
from xpyd_operator.up import commands
from xpyd_operator.up.pods import PodProcess
from xpyd_operator.up.programs import Pod

DEMO = Path(__file__).parents[2] / "examples" / "demo" / "fleet.yaml"
NAMES = ("up", "status", "scale", "logs", "chat", "down")


@pytest.fixture(autouse=True)
def _state(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))


def test_commands_load_without_the_libraries_that_they_use_when_they_run():
    code = (
        "import sys, xpyd_operator.up.commands;"
        "print({'pydantic', 'yaml', 'asyncio', 'msgspec'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


def test_what_drains_shows_no_count_that_nobody_said() -> None:
    want = fleet_want(load_fleet(DEMO), model="m").pools[0]
    pod = PodProcess(Pod("t-router-0", want.name, want.revision, 1, want.template), 0, Path("log"))
    pod.drain(10.0)
    assert pod.leaving_text(13.0) == "it ends its requests, 3 s"
    pod.is_loaded(InstanceLoad(2, 1))
    assert pod.leaving_text(13.0) == "2 requests, 1 KV leases, 3 s"
    assert pod.seen.load == 3
    pod.is_loaded(None)
    assert pod.leaving_text(14.0) == "it ends its requests, 4 s"
    assert pod.seen.load == 0


@pytest.mark.parametrize("name", NAMES)
def test_every_help_text_has_examples_of_its_own_command(name, capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main([name, "--help"])
    assert caught.value.code == 0
    assert f"examples:\n  xpyd {name}" in capsys.readouterr().out.replace('  echo "Hello" | ', "")


@pytest.mark.parametrize(
    ("argv", "complaint"),
    [
        (["status"], "no fleet is running; start one with `xpyd up -f FILE`"),
        (["status", "x"], "fleet 'x' is not running; running: none"),
        (["down"], "no fleet is running"),
        (["chat", "hello"], "no fleet is running"),
        (["logs", "--fleet", "x"], "fleet 'x' has no logs in"),
        (["logs", "--since", "soon"], "--since 'soon': expected a span such as"),
        (["scale", "x-y", "--replicas", "1"], "no pool 'x-y'; there is no running fleet"),
        (["up", "-f", "nowhere.yaml"], "nowhere.yaml: No such file or directory"),
        (["up", "-f", str(DEMO), "--port", "0"], "--port 0: expected 1 to 65535"),
        (["up", "-f", str(DEMO), "--ssl-keyfile", "k"], "--ssl-keyfile: needs --ssl-certfile"),
        (["up", "-f", str(DEMO), "--ssl-certfile", "/no"], "--ssl-certfile: cannot read /no: No"),
        (["down", "--timeout", "-1"], "--timeout -1.0: expected 0 or more"),
    ],
)
def test_what_cannot_be_done_is_said_in_one_line_with_status_2(argv, complaint, capsys):
    assert cli.main(argv) == 2
    said = capsys.readouterr().err
    assert said.startswith("xpyd: ")
    assert complaint in said
    assert said.count("\n") == 1


@pytest.mark.parametrize("platform", ["darwin", "win32"])
def test_elsewhere_than_on_linux_a_local_fleet_is_refused(platform):
    with pytest.raises(UserError, match="local fleets run on Linux"):
        commands.check_platform(platform)


def test_a_document_that_does_not_fit_is_refused_before_anything_starts(tmp_path, capsys):
    text = DEMO.read_text().replace("file://../demo-model", f"file://{DEMO.parents[1]}/demo-model")
    file = tmp_path / "huge.yaml"
    # UDS needs a folder of the nodes in a cluster only.
    pool = "hostPoolSize: 100Ti\n    transport: UDS"
    file.write_text(text.replace("hostPoolSize: 256Mi", pool))
    assert cli.main(["up", "-f", str(file)]) == 2
    assert "the fleet does not fit this machine: it needs 300.0 TiB" in capsys.readouterr().err
    assert not (tmp_path / "xpyd").exists()
