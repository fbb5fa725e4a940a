"""Compiles the mock engine and the load generator, once per content, into the cache."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from bench.environments import cache, run

_HERE = Path(__file__).parent
_COMPILE_S = 60.0


@dataclass(frozen=True)
class Programs:
    """Where they are."""

    engine: Path
    load: Path


def programs() -> Programs:
    """Both, compiled. NotHere where there is no C compiler, or one that does not take them."""
    sources = sorted([*_HERE.glob("*.c"), *_HERE.glob("*.h")])
    digest = hashlib.sha256(b"\0".join(source.read_bytes() for source in sources)).hexdigest()
    folder = cache() / "bench-router" / digest[:16]
    folder.mkdir(parents=True, exist_ok=True)
    return Programs(*(_compiled(folder, name) for name in ("engine", "load")))


def _compiled(folder: Path, name: str) -> Path:
    made = folder / name
    if not made.exists():
        part = folder / f"{name}.part"
        run(["gcc", "-std=gnu11", "-O2", "-o", str(part), str(_HERE / f"{name}.c")], _COMPILE_S)
        part.replace(made)
    return made
