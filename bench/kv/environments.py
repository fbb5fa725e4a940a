"""Throw-away environments for what is measured beside the product, outside the tree.

Made once in the cache with uv; taken up again in the next run. What does not install or load here
gives a reason in place of an interpreter.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass, field
from importlib.metadata import distributions
from pathlib import Path

from bench.environments import NotHere, cache, run, uv

_INSTALL_S = 300.0
_LOAD_S = 60.0


@dataclass(frozen=True)
class Peer:
    """A library that moves bytes: its package, what proves that it loads, and Debian packages whose
    libraries its wheel expects on the machine."""

    package: str
    load: str
    debian: tuple[str, ...] = ()


PEERS = {
    "nixl": Peer("nixl", "from nixl._api import nixl_agent"),
    "mooncake": Peer(
        "mooncake-transfer-engine-non-cuda",
        "from mooncake.engine import TransferEngine",
        ("libibverbs1", "libnl-3-200", "libnl-route-3-200"),
    ),
}


@dataclass(frozen=True)
class Environment:
    """An interpreter that has the peer, and the variables that it needs."""

    python: Path
    version: str
    env: dict[str, str] = field(default_factory=dict[str, str])


def environment(name: str) -> Environment:
    """The peer's environment, made if it is not there. NotHere."""
    peer = PEERS[name]
    folder = cache() / "bench-kv" / name
    python = folder / "bin/python"
    if not python.exists():
        run([uv(), "venv", "--quiet", "--python", "python3", str(folder)], _INSTALL_S)
        install = [uv(), "pip", "install", "--quiet", "--python", str(python), "numpy"]
        try:
            run([*install, peer.package], _INSTALL_S)
        except NotHere:
            shutil.rmtree(folder, ignore_errors=True)
            raise
    env: dict[str, str] = {}
    try:
        run([str(python), "-c", peer.load], _LOAD_S)
    except NotHere:
        if not peer.debian:
            raise
        env = {"LD_LIBRARY_PATH": _libraries(folder / "debian", peer.debian)}
        run([str(python), "-c", peer.load], _LOAD_S, env)
    (site,) = folder.glob("lib/python*/site-packages")
    found = [d.version for d in distributions(path=[str(site)]) if d.name == peer.package]
    return Environment(python, found[0], env)


def _libraries(folder: Path, packages: tuple[str, ...]) -> str:
    """Unpack these packages' libraries beside the environment, without installing them."""
    if not folder.exists():
        folder.mkdir()
        try:
            run(["apt-get", "download", *packages], _LOAD_S, cwd=folder)
            for package in folder.glob("*.deb"):
                run(["dpkg", "-x", str(package), str(folder)], _LOAD_S)
        except NotHere:
            shutil.rmtree(folder)
            raise
    return os.pathsep.join(sorted({str(path.parent) for path in folder.rglob("*.so.*")}))
