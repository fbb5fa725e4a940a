"""A hub that cannot be reached is tried for a while, and then named with the fix."""

from __future__ import annotations

from pathlib import Path

import pytest
from huggingface_hub import errors

from tests.e2e.harness import free_port
from xpyd_core.errors import UserError
from xpyd_worker.download.plan import DownloadError
from xpyd_worker.download.transfer import Limits, Want, download
from xpyd_worker.model.registry import resolve_checkpoint


def test_a_hub_that_is_not_there_is_an_error_with_the_fix(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{free_port()}")
    with pytest.raises(DownloadError, match="look whether the source can be reached") as caught:
        download(Want("hf://org/model", tmp_path / "m", limits=Limits(retry_s=0.0)))
    assert caught.value.reason == "DownloadFailed"


def test_so_it_is_where_an_engine_fetches_its_model_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = errors.HTTPError("nobody listens")  # httpx's, which is no OSError
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))

    def fails(*_: object, **__: object) -> None:
        raise refused

    monkeypatch.setattr("huggingface_hub.snapshot_download", fails)
    with pytest.raises(UserError, match=r"^model: cannot get hf://org/model: nobody listens"):
        resolve_checkpoint("hf://org/model")
