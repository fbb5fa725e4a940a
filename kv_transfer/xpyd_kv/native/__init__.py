"""Code in C for what Python would hold its lock for. A module that uses some has a way in Python
that does the same: the installation builds these libraries only where it finds a compiler
(hatch_build.py)."""

from __future__ import annotations

import ctypes
import logging
from functools import cache
from pathlib import Path

_log = logging.getLogger(__name__)


@cache
def library(name: str) -> ctypes.CDLL | None:
    """The library that was made of `name`.c; None where it was not, or does not load here. Says so
    once, at debug. A CDLL's functions run without the interpreter's lock."""
    path = Path(__file__).with_name(f"{name}.so")
    try:
        found = ctypes.CDLL(str(path))
    except OSError as error:
        _log.debug("%s is done in Python: %s", name, error)
        return None
    _log.debug("%s is done by %s", name, path)
    return found
