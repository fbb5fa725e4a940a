"""Hatchling's build hook: compiles what the packages have in C and C++, for wheels and editable
installs.

Each library lands beside its sources, from where its package loads it (xpyd_kv.native,
xpyd_worker.kernels.cpu, xpyd_worker.parallel.native), and makes the wheel one for this platform.
Without a compiler, or with one that fails, the wheel has none and fits every platform: all that is
done in C can be done in Python, more slowly.
"""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

_FLAGS = ("-O2", "-Wall", "-shared", "-fPIC")
# Vectors are ours (vec.h); loops over them must be unrolled. Sums may be fused, errno is nobody's.
# The ABI of vectors is no matter: they never cross the library's border.
_VECTOR_FLAGS = (
    "-O3",
    "-std=c++20",
    "-fopenmp",
    "-ffp-contract=fast",
    "-fno-math-errno",
    "-Wno-psabi",
)
_CPU = "worker_image/xpyd_worker/kernels/cpu/"
_PARALLEL = "worker_image/xpyd_worker/parallel/native/"
# Levels of the instruction set that have a library each; other machines: the compiler's default.
_LEVELS = {"x86_64": ("x86-64-v4", "x86-64-v3")}
_TIMEOUT_S = 900.0


class Library(NamedTuple):
    """What is compiled into one file. `compiler`: which variable names it, and its default."""

    path: str
    sources: tuple[str, ...]
    compiler: tuple[str, str] = ("CC", "cc")
    flags: tuple[str, ...] = ()


def libraries() -> list[Library]:
    """All of them, for this machine."""
    machine = platform.machine()
    levels = _LEVELS.get(machine, ())
    operators = tuple(f"{_CPU}{name}.cpp" for name in ("attention", "elementwise", "matvec"))
    named = [(level, (*_VECTOR_FLAGS, f"-march={level}")) for level in levels]
    return [
        Library(
            "kv_transfer/xpyd_kv/native/copy_runs.so", ("kv_transfer/xpyd_kv/native/copy_runs.c",)
        ),
        *(
            Library(f"{path}.{name}.so", sources, ("CXX", "c++"), flags)
            for name, flags in named or [(machine, _VECTOR_FLAGS)]
            for path, sources in (
                (f"{_CPU}operators", operators),
                (f"{_PARALLEL}collectives", (f"{_PARALLEL}collectives.cpp",)),
            )
        ),
    ]


class NativeLibraries(BuildHookInterface[Any]):
    """pyproject.toml asks for it where a wheel is built; an sdist has the sources only."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Before the wheel's files are collected."""
        root = Path(self.root)
        with ThreadPoolExecutor() as pool:
            tries = [(one, pool.submit(compile_library, one, root)) for one in libraries()]
        for library, tried in tries:
            try:
                tried.result()
            except (OSError, ValueError, subprocess.SubprocessError) as error:
                self.app.display_warning(f"{library.path} is not built: {error}")
                continue
            # git ignores it, and hatchling what git ignores.
            build_data["artifacts"].append(f"/{library.path}")
            build_data["pure_python"] = False
            build_data["tag"] = f"py3-none-{_platform()}"


def _platform() -> str:
    """As wheels name it. The libraries know no Python, so they fit every version."""
    return sysconfig.get_platform().replace("-", "_").replace(".", "_")


def compile_library(library: Library, root: Path) -> None:
    """Compile one. OSError, ValueError, SubprocessError when that does not work; then no library is
    left, also not an older one. A process that has the older one loaded keeps it."""
    path = root / library.path
    path.unlink(missing_ok=True)
    made = path.with_suffix(f".{os.getpid()}.so")
    name, default = library.compiler
    command = [
        *shlex.split(os.environ.get(name) or default),
        *_FLAGS,
        *library.flags,
        *("-o", str(made)),
        *(str(root / source) for source in library.sources),
    ]
    try:
        subprocess.run(command, check=True, timeout=_TIMEOUT_S)
        made.replace(path)
    finally:
        made.unlink(missing_ok=True)
