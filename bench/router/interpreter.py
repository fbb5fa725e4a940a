"""Which Python runs `xpyd router`: the faster of the environment's own and the system's.

Compiled for benchmarks' sake or not, a Python differs by a quarter. Distributions' and the images'
are built with profile and link-time optimisation; one that somebody compiled in passing is not, and
its figures would be nobody's. Peers are compiled with optimisation, too.
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

_ROUNDS = 3
_TIMEOUT_S = 60.0
_SYSTEM = "/usr/bin/python{}.{}"
_ABOUT = "import sys, sysconfig; print(sysconfig.get_config_var('SOABI'), sys.version, sep='\\n')"
# Calls, attributes, small objects: what a router does.
_LOOP = """
import time
class Thing:
    def __init__(self, x): self.x = x; self.y = [x]
    def get(self): return self.x
async def one(x): return Thing(x).get()
def run(work):
    try: work.send(None)
    except StopIteration as end: return end.value
began = time.perf_counter()
for i in range(100_000): run(one(i)); b"".join((b"%x" % i, b"x")); {"a": i}.get("a")
print(time.perf_counter() - began)
"""


@dataclass(frozen=True)
class Interpreter:
    """`version` is its own word: number, build, compiler."""

    path: str
    version: str


def fastest() -> Interpreter:
    """Of those that can load what is installed here."""
    system = _SYSTEM.format(*sys.version_info[:2])
    found = [one for one in map(_about, dict.fromkeys((sys.executable, system))) if one]
    took_s = {one: float("inf") for one in found}
    for _ in range(_ROUNDS):
        for one in found:
            took_s[one] = min(took_s[one], float(_output(one.path, _LOOP)))
    return min(took_s, key=lambda one: took_s[one])


def own_path() -> str:
    """PYTHONPATH by which another interpreter finds what this one does."""
    return ":".join(_here(sys.path))


def _here(paths: Iterable[str]) -> Iterable[str]:
    standard = {sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")}
    for path in paths:
        is_standard = any(path == one or path.startswith(f"{one}/lib-dynload") for one in standard)
        if path and Path(path).is_dir() and not is_standard:
            yield path


def _about(path: str) -> Interpreter | None:
    if not Path(path).exists():
        return None
    abi, version = _output(path, _ABOUT).split("\n", 1)
    if abi != sysconfig.get_config_var("SOABI"):
        return None
    return Interpreter(path, " ".join(version.split()))


def _output(path: str, code: str) -> str:
    argv = [path, "-I", "-S", "-c", code]
    return subprocess.run(
        argv, capture_output=True, text=True, check=True, timeout=_TIMEOUT_S
    ).stdout.strip()
