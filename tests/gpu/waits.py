"""torch's own check for calls that make the host wait for a GPU."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch


@contextmanager
def waits_are_errors() -> Iterator[None]:
    """Within, such a call raises RuntimeError; behind it the mode is torch's own again."""
    cuda = cast("Any", torch.cuda)
    try:
        # The first call says that the mode is a prototype, after it has set it.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            cuda.set_sync_debug_mode("error")
        yield
    finally:
        cuda.set_sync_debug_mode("default")
