"""The check for waits ends with the test that asked for it."""

from __future__ import annotations

import warnings
from typing import Any, cast

import pytest
import torch

from tests.gpu.waits import waits_are_errors


@pytest.fixture
def modes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Modes that were set; as in torch, the first call sets its own and then warns."""
    made: list[str] = []

    def set_mode(mode: str) -> None:
        made.append(mode)
        if len(made) == 1:
            warnings.warn("Synchronization debug mode is a prototype feature", stacklevel=1)

    monkeypatch.setattr(cast("Any", torch.cuda), "set_sync_debug_mode", set_mode)
    return made


def test_the_warning_of_the_first_call_is_no_error(modes: list[str]) -> None:
    with waits_are_errors():
        assert modes == ["error"]
    assert modes == ["error", "default"]


def test_a_wait_that_was_found_leaves_the_mode_as_it_was(modes: list[str]) -> None:
    with pytest.raises(RuntimeError, match="synchronizing"), waits_are_errors():
        raise RuntimeError("called a synchronizing CUDA operation")
    assert modes[-1] == "default"
