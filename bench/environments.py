"""Environments for programs of others that benchmarks and tests run: made with uv, in the cache."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path


class NotHere(Exception):
    """A peer cannot be measured on this machine; says why."""


def cache() -> Path:
    """The product's cache, outside the tree."""
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "xpyd"


def uv() -> str:
    """The program, which scripts/setup.sh has put into the cache where there was none."""
    return shutil.which("uv") or str(cache() / "uv/bin/uv")


def environment(folder: Path, *pins: str, timeout_s: float) -> Path:
    """`folder`, a virtual environment with these packages, made if it is not there. NotHere.

    One that was cut short is made anew. Making and installing take `timeout_s` each at most.
    """
    ready = folder / "ready"
    if not ready.exists():
        shutil.rmtree(folder, ignore_errors=True)
        run([uv(), "venv", "--quiet", "--python", "python3", str(folder)], timeout_s)
        python = str(folder / "bin/python")
        run([uv(), "pip", "install", "--quiet", "--python", python, *pins], timeout_s)
        ready.touch()
    return folder


def run(
    argv: list[str],
    timeout_s: float,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
) -> None:
    """Run it to its end. NotHere with the last thing that it said."""
    try:
        done = subprocess.run(
            argv,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            env={**os.environ, **(env or {})},
            cwd=cwd,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NotHere(f"{argv[0]}: {error}") from error
    if done.returncode:
        said = (done.stderr or done.stdout).strip().splitlines()
        raise NotHere(said[-1][:200] if said else f"{argv[0]} ended with {done.returncode}")
