"""Ctrl-C, once and twice, of each command of a local fleet: status 130, and no traceback."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys

import pytest

from xpyd_operator.up import control

# Test folders are no packages: pytest's importlib mode puts this one on no path by itself.
sys.path.insert(0, os.path.dirname(__file__))
from local_fleet import SUPERVISOR, until

_SAYS_THAT_IT_WAITS = """
import sys, time
from xpyd_core.cli import main
sleep = time.sleep
def say(seconds):
    sys.stderr.write("waits\\n")
    sys.stderr.flush()
    sleep(seconds)
time.sleep = say
sys.exit(main(sys.argv[1:]))
"""


@pytest.fixture
def fleet(fleet):
    fleet.write(["--deaf"], decode=1, drain=3)
    return fleet


def start(fleet, argv):
    child = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    fleet.children.append(child)
    return child


def interrupt(child, times):
    """Its standard error after so many Ctrl-C."""
    for _ in range(times):
        child.send_signal(signal.SIGINT)
    _, err = child.communicate(timeout=20)
    assert child.returncode == 130, err
    assert b"Traceback" not in err
    return err


@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize(
    "words", [["logs", "-f"], ["scale", "t-decode", "--replicas", "0"], ["down", "t"]], ids=" ".join
)
def test_a_command_that_waits_ends_and_the_fleet_does_not(fleet, words, times):
    fleet.up()
    child = start(fleet, [sys.executable, "-c", _SAYS_THAT_IT_WAITS, *words])
    assert child.stderr is not None
    until(lambda: child.stderr.readline() == b"waits\n")
    interrupt(child, times)
    assert fleet.state.is_supervised()


@pytest.mark.parametrize("times", [1, 2])
def test_a_chat_that_waits_for_its_endpoint_ends(fleet, times):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        child = start(fleet, [sys.executable, "-m", "xpyd_core", "chat", "--url", url, "hello"])
        silent.settimeout(20)
        connection, _ = silent.accept()
        with connection:
            connection.recv(1000)
            interrupt(child, times)


_BEFORE_IT_IS_IGNORED = """
import signal, sys
from xpyd_core.cli import main
def press(frame, event, _):
    if event == "call" and frame.f_code is signal.signal.__code__:
        sys.setprofile(None)
        signal.raise_signal(signal.SIGINT)
sys.setprofile(press)
sys.exit(main(sys.argv[1:]))
"""
_AT_THE_END = """
import atexit, signal, sys
from xpyd_core.cli import main
atexit.register(lambda: signal.raise_signal(signal.SIGINT))
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize("second", [_BEFORE_IT_IS_IGNORED, _AT_THE_END], ids=["early", "late"])
def test_a_second_one_that_comes_while_a_chat_ends_is_ignored(fleet, second):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        child = start(fleet, [sys.executable, "-c", second, "chat", "--url", url, "hello"])
        silent.settimeout(20)
        connection, _ = silent.accept()
        with connection:
            connection.recv(1000)
            interrupt(child, 1)


def test_up_that_waits_for_its_fleet_takes_it_down_and_kills_it_at_the_second(fleet):
    fleet.write(["--deaf", "--never-beats"], decode=1)
    child = start(fleet, [sys.executable, str(SUPERVISOR), "up-detached", str(fleet.file)])
    until(lambda: fleet.processes() and fleet.pods()["decode-0"].state == "Starting")
    processes = until(lambda: len(fleet.processes()) == 3 and fleet.processes())
    until(lambda: fleet.state.log_of("t-decode-0").read_text())
    child.send_signal(signal.SIGINT)
    until(lambda: fleet.view().reason == "Draining")
    interrupt(child, 1)
    assert not fleet.state.is_supervised()
    assert not [process for process in processes if process.is_alive()]


def test_a_fleet_in_the_foreground_that_down_ends_has_status_0(fleet):
    fleet.write()
    child = fleet.foreground()
    fleet.settled()
    fleet.ask(control.DownRequest())
    child.communicate(timeout=20)
    assert child.returncode == 0
