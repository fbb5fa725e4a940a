"""A hub that cannot be reached is tried for a while, and then named with the fix."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.harness import free_port
from xpyd_worker.download.plan import DownloadError
from xpyd_worker.download.transfer import Limits, Want, download


def test_a_hub_that_is_not_there_is_an_error_with_the_fix(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{free_port()}")
    with pytest.raises(DownloadError, match="look whether the source can be reached") as caught:
        download(Want("hf://org/model", tmp_path / "m", limits=Limits(retry_s=0.0)))
    assert caught.value.reason == "DownloadFailed"
