"""What a test that needs a cluster does on a machine that cannot have one."""

from __future__ import annotations

import os

import pytest

REQUIRED = "XPYD_CLUSTER_REQUIRED"
"""CI sets it to 1: there, a test that is skipped is one that nobody runs."""


def skip_for(reason: str | None) -> None:
    """Skip the test, or fail it where clusters are required; no reason: go on."""
    if reason is None:
        return
    if os.environ.get(REQUIRED) == "1":
        pytest.fail(f"{reason} ({REQUIRED}=1)", pytrace=False)
    pytest.skip(reason)
