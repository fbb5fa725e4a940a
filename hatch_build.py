"""Hatchling's build hook: compiles what the packages have in C, for wheels and editable installs.

Each library lands beside its source, from where its package loads it (xpyd_kv.native), and makes
the wheel one for this platform. Without a compiler, or with one that fails, the wheel has none and
fits every platform: all that is done in C can be done in Python, more slowly.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

SOURCES = ("kv_transfer/xpyd_kv/native/copy_runs.c",)
_FLAGS = ("-O2", "-Wall", "-shared", "-fPIC")
_TIMEOUT_S = 120.0


class NativeLibraries(BuildHookInterface[Any]):
    """pyproject.toml asks for it where a wheel is built; an sdist has the sources only."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Before the wheel's files are collected."""
        for source in SOURCES:
            library = Path(source).with_suffix(".so")
            try:
                compile_library(Path(self.root) / source, Path(self.root) / library)
            except (OSError, ValueError, subprocess.SubprocessError) as error:
                self.app.display_warning(f"{library} is not built: {error}")
                continue
            # git ignores it, and hatchling what git ignores.
            build_data["artifacts"].append(f"/{library.as_posix()}")
            build_data["pure_python"] = False
            build_data["tag"] = f"py3-none-{_platform()}"


def _platform() -> str:
    """As wheels name it. The library knows no Python, so it fits every version."""
    return sysconfig.get_platform().replace("-", "_").replace(".", "_")


def compile_library(source: Path, library: Path) -> None:
    """With CC, by default `cc`. OSError, ValueError, SubprocessError when that does not work; then
    no library is left, also not an older one. A process that has the older one loaded keeps it."""
    library.unlink(missing_ok=True)
    made = library.with_suffix(f".{os.getpid()}.so")
    compiler = shlex.split(os.environ.get("CC") or "cc")
    try:
        subprocess.run(
            [*compiler, *_FLAGS, "-o", str(made), str(source)], check=True, timeout=_TIMEOUT_S
        )
        made.replace(library)
    finally:
        made.unlink(missing_ok=True)
