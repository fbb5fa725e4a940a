"""One program at a time downloads into a folder, on whichever machine it runs."""

from __future__ import annotations

import json
import os
import threading
import time
from pathlib import Path

import pytest

from xpyd_worker.download.folder import FolderLock
from xpyd_worker.download.plan import DownloadError


def write_in_place(path: Path, text: str) -> None:
    """As an owner does: a reader never sees the record empty."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
    os.pwrite(descriptor, text.encode(), 0)
    os.ftruncate(descriptor, len(text))
    os.close(descriptor)


def far(beat: int) -> str:
    return json.dumps({"owner": "far/1", "boot": "other", "beat": beat})


def test_a_lock_of_another_machine_is_taken_over_once_its_record_rests(tmp_path: Path) -> None:
    record = tmp_path / ".m.lock"

    def beat() -> None:
        for number in range(3):
            write_in_place(record, far(number))
            time.sleep(0.5)

    beat_thread = threading.Thread(target=beat)
    write_in_place(record, far(-1))
    beat_thread.start()
    waited: list[str] = []
    with FolderLock(tmp_path / "m", "near/1", lease_s=1.0).held(wait_s=30, waits=waited.append):
        # It waited while the record moved.
        assert not beat_thread.is_alive()
        assert "near/1" in record.read_text()
    assert set(waited) == {"far/1"}
    assert record.read_text() == ""


def test_half_a_record_is_an_owner_that_writes_and_not_a_free_lock(tmp_path: Path) -> None:
    record = tmp_path / ".m.lock"
    write_in_place(record, f"{far(10)}}}")
    waited: list[str] = []
    with FolderLock(tmp_path / "m", "near/1", lease_s=1.0).held(wait_s=30, waits=waited.append):
        assert "near/1" in record.read_text()
    assert set(waited) == {"another program"}


def test_a_lock_that_stays_anothers_ends_the_wait_at_its_deadline(tmp_path: Path) -> None:
    with (
        FolderLock(tmp_path / "m", "first").held(wait_s=1, waits=print),
        pytest.raises(DownloadError, match="first still downloads this model"),
        FolderLock(tmp_path / "m", "second").held(wait_s=0, waits=lambda _: None),
    ):
        raise AssertionError("two have the lock")
