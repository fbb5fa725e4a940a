"""`xpyd router` is told to end while it starts: at whatever moment, it does, and leaves nobody.

The program tells itself, by an audit hook, at the moment that a case names.
"""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow

PATIENCE_S = 60.0
FIRST = ("unshare", "--pid", "--fork", "--mount-proc", "--kill-child", "--")
"""A program behind it is process 1, as in a container: signals it does not handle are nothing."""
TELL = """
import os, signal, sys
left = {after}
def hook(event, args):
    global left
    if event == {event!r} and {first!r} in (None, args[0]):
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.{name})
"""
MAIN = "from xpyd_core.cli import main; sys.addaudithook(hook); sys.exit(main())"

LOADS = ("import", "xpyd_router.config", 1)
"""All programs' flags are read."""
IMPORTS = ("import", "xpyd_router.http.server", 1)
"""Within a second of imports."""
BINDS = ("socket.bind", None, 2)
SECOND_WORKER = ("subprocess.Popen", None, 2)
"""The first has begun, nobody listens."""


def told(
    moment: tuple[str, str | None, int], *flags: str, name: str = "SIGTERM", is_first: bool = False
) -> subprocess.CompletedProcess[str]:
    """The program's end, when it gets the signal at that moment."""
    event, first, after = moment
    code = TELL.format(event=event, first=first, after=after, name=name) + MAIN
    return subprocess.run(
        [
            *(FIRST if is_first else ()),
            *(sys.executable, "-c", code, "router", "--kv-insecure"),
            *("--port", "0", "--admin-port", "0", "--discovery-port", "0", *flags),
        ],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,  # also for workers: they have its standard error
    )


def can_be_first() -> bool:
    try:
        return subprocess.run([*FIRST, "true"], capture_output=True).returncode == 0
    except FileNotFoundError:
        return False


needs_namespace = pytest.mark.skipif(not can_be_first(), reason="no PID namespace can be made")


@pytest.mark.parametrize(
    ("moment", "name", "flags"),
    [
        (IMPORTS, "SIGTERM", ()),
        (IMPORTS, "SIGINT", ()),
        (BINDS, "SIGTERM", ()),
        (BINDS, "SIGTERM", ("--processes", "2")),
        (SECOND_WORKER, "SIGTERM", ("--processes", "2")),
        (SECOND_WORKER, "SIGINT", ("--processes", "2")),
    ],
)
def test_a_signal_ends_the_start_and_leaves_nobody(
    moment: tuple[str, str | None, int], name: str, flags: tuple[str, ...]
) -> None:
    ended = told(moment, *flags, name=name)
    assert ended.returncode == 0, ended.stderr
    for word in ("ERROR", "Traceback"):
        assert word not in ended.stderr
    # Where there may be workers it is not only gone: it has ended them first.
    assert bool(flags) is ("stopped before it listened" in ended.stderr)


@needs_namespace
@pytest.mark.parametrize(
    ("moment", "status"), [(LOADS, 128 + signal.SIGTERM), (IMPORTS, 0), (SECOND_WORKER, 0)]
)
def test_a_signal_ends_the_start_of_a_containers_first_process(
    moment: tuple[str, str | None, int], status: int
) -> None:
    ended = told(moment, "--processes", "2", is_first=True)
    assert ended.returncode == status, ended.stderr
