"""What is measured: rows (a router, and how it runs) and cases (a load). Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Program = Literal["direct", "xpyd", "vllm-router", "smg"]

PREFILLS = DECODES = 2
SHORT_BYTES, LONG_BYTES = 512, 32 * 1024
TOKENS_PER_S = 50
"""Of each stream."""


@dataclass(frozen=True)
class Row:
    """A contender. `wire`: vllm: engines beat and answer as vLLM's do; xpyd: as ours."""

    name: str
    program: Program
    wire: Literal["vllm", "xpyd"] = "vllm"
    processes: int = 1
    key: str = ""
    """What clients need; empty: no key."""
    is_tls: bool = False
    """Clients speak TLS: to ours, and to nginx in front of a peer."""
    cases: tuple[str, ...] = ()
    """The cases of a whole run that it is asked for; none: all."""


DIRECT, OWN, KEYED = "direct", "xpyd", "xpyd-keys"
TLS, TLS_PEER = "xpyd-tls", "vllm-router-nginx"
_TLS_CASES = ("c64", "s512")
ROWS = {
    row.name: row
    for row in (
        Row(DIRECT, "direct"),
        Row(OWN, "xpyd"),
        Row("vllm-router", "vllm-router"),
        Row("smg", "smg"),
        Row("xpyd-continuing", "xpyd", wire="xpyd"),
        Row(KEYED, "xpyd", key="xpyd-bench-0123456789"),
        Row("xpyd-2", "xpyd", processes=2),
        Row(TLS, "xpyd", is_tls=True, cases=_TLS_CASES),
        Row(TLS_PEER, "vllm-router", is_tls=True, cases=_TLS_CASES),
    )
}


@dataclass(frozen=True)
class Case:
    """`count` connections that ask again at once, or streams at the engines' pace, all at once.

    `beside_bytes`: meanwhile one more client sends bodies of this size, one after another.
    """

    kind: Literal["closed", "streams"]
    count: int
    prompt_bytes: int
    beside_bytes: int = 0

    @property
    def name(self) -> str:
        """c64, c64-32k, s512, c16-beside-32m: concurrency or streams, the prompt where it is long,
        and the bodies that others send."""
        long = f"-{self.prompt_bytes // 1024}k" if self.prompt_bytes > SHORT_BYTES else ""
        beside = f"-beside-{self.beside_bytes >> 20}m" if self.beside_bytes else ""
        return f"{self.kind[0]}{self.count}{long}{beside}"


BESIDE_LONG = Case("closed", 16, SHORT_BYTES, beside_bytes=32 << 20)
DUEL_CASES = {"c64", "c256", "s512", BESIDE_LONG.name}
"""The cases that ratios are of: there our turns and the peers' are repeated, close together."""
CONCURRENCIES = (1, 16, 64, 256)
STREAMS = (512, 2048)
CASES = (
    *(Case("closed", n, size) for size in (SHORT_BYTES, LONG_BYTES) for n in CONCURRENCIES),
    *(Case("streams", n, SHORT_BYTES) for n in STREAMS),
    BESIDE_LONG,
)


@dataclass(frozen=True)
class Times:
    """How long a turn takes. Streams are opened one after another in `ramp_s`."""

    warm_s: float = 1.0
    seconds: float = 3.0
    ramp_s: float = 2.0
    rest_s: float = 10.0
    """Behind the last turn, before memory is read."""
