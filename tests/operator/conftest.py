"""Fixtures of the operator's tests."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.small_disk import mounted
from xpyd_operator.controller import client, reconcile, workqueue
from xpyd_operator.controller.decision import decide


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """Mounts a disk of a size such as 64k."""
    with contextlib.ExitStack() as stack:
        yield lambda size: stack.enter_context(mounted(tmp_path / "disk", size))


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waits that a person would not notice become waits that a test does not notice."""
    monkeypatch.setattr(client, "_BACKOFFS_S", (0.01, 0.01, 0.01))
    monkeypatch.setattr(workqueue, "BACKOFF_FIRST_S", 0.05)
    monkeypatch.setattr(decide, "_UNSETTLED_RECHECK_S", 0.3)
    monkeypatch.setattr(decide, "_TAKEN_RECHECK_S", 0.3)
    monkeypatch.setattr(reconcile, "_AGAIN_S", 0.05)
