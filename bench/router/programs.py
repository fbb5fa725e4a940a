"""Compiles the mock engine and the load generator, once per content, into the cache.

The load generator over TLS is the same source with OpenSSL, whose headers not every machine has.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from pathlib import Path

from bench.environments import cache, run

_HERE = Path(__file__).parent
_COMPILE_S = 60.0


@dataclass(frozen=True)
class Programs:
    """Where they are."""

    engine: Path
    load: Path
    tls_load: Path | None = None
    """The load generator over TLS; None: no row needs it."""


def programs(*, tls: bool = False) -> Programs:
    """Those, compiled. NotHere where there is no C compiler, or one that does not take them; of
    `tls` also without OpenSSL's headers."""
    sources = sorted([*_HERE.glob("*.c"), *_HERE.glob("*.h")])
    digest = hashlib.sha256(b"\0".join(source.read_bytes() for source in sources)).hexdigest()
    folder = cache() / "bench-router" / digest[:16]
    folder.mkdir(parents=True, exist_ok=True)
    found = Programs(_compiled(folder, "engine"), _compiled(folder, "load"))
    return replace(found, tls_load=_compiled(folder, "load", *_TLS)) if tls else found


_TLS = ("-DTLS", "-lssl", "-lcrypto")


def _compiled(folder: Path, name: str, *flags: str) -> Path:
    made = folder / (f"{name}-tls" if flags else name)
    if not made.exists():
        part = made.with_suffix(".part")
        source = str(_HERE / f"{name}.c")
        run(["gcc", "-std=gnu11", "-O2", "-o", str(part), source, *flags], _COMPILE_S)
        part.replace(made)
    return made
