"""Fixtures of the operator's tests."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.small_disk import mounted
from xpyd_operator.controller import client, reconcile, workqueue
from xpyd_operator.controller.decision import decide

# Test folders are no packages: pytest's importlib mode puts this one on no path by itself.
sys.path.insert(0, os.path.dirname(__file__))
from local_fleet import LocalFleet


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """Mounts a disk of a size such as 64k."""
    with contextlib.ExitStack() as stack:
        yield lambda size: stack.enter_context(mounted(tmp_path / "disk", size))


@pytest.fixture
def fleet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalFleet]:
    """A local fleet of stand-in pods, that is not started yet and is ended afterwards."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    made = LocalFleet(tmp_path, "t")
    made.write()
    yield made
    made.end()


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waits that a person would not notice become waits that a test does not notice."""
    monkeypatch.setattr(client, "_BACKOFFS_S", (0.01, 0.01, 0.01))
    monkeypatch.setattr(workqueue, "BACKOFF_FIRST_S", 0.05)
    monkeypatch.setattr(decide, "_UNSETTLED_RECHECK_S", 0.3)
    monkeypatch.setattr(decide, "_TAKEN_RECHECK_S", 0.3)
    monkeypatch.setattr(reconcile, "_AGAIN_S", 0.05)
