"""The folder names of downloaded checkpoints, on which operator, `xpyd up` and worker agree."""

from __future__ import annotations

import os
import re
from hashlib import sha256
from pathlib import Path


def checkpoint_folder(uri: str, revision: str = "", endpoint: str = "") -> str:
    """The name of the folder of one revision of one model: its own name, and 10 hex digits over all
    that says which bytes are in it."""
    digest = sha256("\n".join((uri, revision, endpoint)).encode()).hexdigest()[:10]
    plain = re.sub(r"[^a-z0-9.]+", "-", uri.rstrip("/").rsplit("/", 1)[-1].lower()).strip("-.")
    return f"{plain[:40].strip('-.') or 'model'}-{digest}"


def own_name(uri: str) -> str:
    """The name that requests use for a downloaded model where nobody gives another: the hub's
    `org/name`, else the last part of the address."""
    return uri[5:] if uri.startswith("hf://") else uri.rstrip("/").rsplit("/", 1)[-1]


def cache_root() -> Path:
    """Where this user's downloads are kept."""
    given = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(given) if given.startswith("/") else Path.home() / ".cache") / "xpyd" / "models"
