"""Contenders in turns: each has each case in each round, with the same prompts.

All are up from the first turn to the last, and stopped while it is not their turn. One that is
first in a round is last in another. Of each turn there are the client's times, and what vLLM's own
metrics of P and D counted meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

from bench.engine.contender import ContenderFailed
from bench.engine.models import Model
from bench.engine.shape import Case
from bench.environments import NotHere
from bench.vllm.servers import (
    ALONE,
    NIXL,
    OURS,
    ROUTED_S,
    Contender,
    Counts,
    counts,
    external,
    start_alone,
    start_pair,
)
from xpyd_tools.bench.summary import Sample

# Sixteen layers, each with K and V of 8 heads of 128, in bfloat16: 64 KiB for each token, as in
# models of some billion parameters; all else is narrow, so that a core computes prompts in seconds.
MODEL = "kv-64k"
SHAPES: dict[str, dict[str, Any]] = {
    MODEL: {
        "family": "llama",
        "layers": 16,
        "hidden": 256,
        "intermediate": 512,
        "heads": 8,
        "kv_heads": 8,
        "head_dim": 128,
        "vocab": 4096,
    }
}
KV_TOKEN_BYTES = 16 * 2 * 8 * 128 * 2

# 128 and 512 tokens are multiples of vLLM's blocks: there D computes the first token, too (ADR
# 0053). With 1,500 the client's first token is P's.
CASES = {
    case.name: case
    for case in (
        Case("128", 128, 16, 1, 4),
        Case("512", 512, 16, 1, 4),
        Case("1500", 1500, 16, 1, 3),
        Case("1500x2", 1500, 48, 2, 4),
    )
}
_PREFILL = "vllm:request_prefill_time_seconds"
_QUEUED = "vllm:request_queue_time_seconds"
_NIXL_MOVE = "vllm:nixl_xfer_time_seconds"
_NIXL_POST = "vllm:nixl_post_time_seconds"


@dataclass(frozen=True)
class Turn:
    """What one contender answered of one case in one round."""

    contender: str
    case: Case
    samples: list[Sample]
    prefill_s: float
    """A prompt in P: from its first chunk's step to its first token. The mean of vLLM's metric."""
    waited_s: float | None = None
    """A request in D: from its coming to its first step; so how long it waited for its KV. The mean
    of vLLM's metric; None where no KV moves."""
    moved_s: float | None = None
    """What NIXL says that reading took, posting included. None for others."""
    without_s: float | None = None
    """`prefill_s` of the same P in the same turn, of requests without a transfer."""
    past_router_s: float | None = None
    """TTFT of these requests, which P got past the router: the client's median."""
    external_tokens: float = 0.0
    """Prompt tokens whose KV D had from P."""
    number: int = 0
    """The round."""


@dataclass(frozen=True)
class FailedTurn:
    """A turn of the peer in which a request got no answer, or a wrong one."""

    contender: str
    case: str
    number: int
    reason: str


@dataclass
class Found:
    """Everything that a run measured. `absent`: who is not there, and why."""

    turns: list[Turn] = field(default_factory=list[Turn])
    failed: list[FailedTurn] = field(default_factory=list[FailedTurn])
    pss_gib: dict[str, float] = field(default_factory=dict[str, float])
    absent: dict[str, str] = field(default_factory=dict[str, str])


@dataclass(frozen=True)
class Plan:
    """The cases and the contenders of one run, and its number of rounds."""

    cases: Sequence[Case] = tuple(CASES.values())
    rounds: int = 3
    contenders: Sequence[str] = (OURS, NIXL, ALONE)


def measure(
    model: Model, plan: Plan, folder: Path, cores: str, say: Callable[[str], None]
) -> Found:
    """Start all, let them take turns, end them. ContenderFailed, and NotHere without vLLM.

    A turn in which NixlConnector fails is one of `failed`, and the others go on: on two cores its
    polling threads may starve what computes until a deadline is over.
    """
    found = Found()
    with ExitStack() as stack:
        up: list[Contender] = []
        for name in plan.contenders:
            say(f"{name}: starting")
            try:
                if name == ALONE:
                    one = start_alone(stack, model.folder, folder, cores)
                else:
                    one = start_pair(stack, name, model.folder, folder, cores)
            except NotHere as error:
                if name != NIXL:
                    raise
                say(f"{name} is left out: {error}")
                found.absent[name] = str(error)
                continue
            one.go_on(seed=1)
            for case in plan.cases:  # the first prompts of a length pay for compiled kernels
                say(f"warm-up, {said(take_turn(one, case, seed=2))}")
            found.pss_gib[name] = one.d.pss_gib()
            one.stop()
            up.append(one)
        for number in range(plan.rounds):
            for one in rotated(up, number):
                run_round(one, plan, number, found, say)
    return found


def rotated(contenders: Sequence[Contender], by: int) -> list[Contender]:
    """Another one first in each round."""
    by %= len(contenders)
    return [*contenders[by:], *contenders[:by]]


def run_round(
    one: Contender,
    plan: Plan,
    number: int,
    found: Found,
    say: Callable[[str], None],
    *,
    routed_s: float = ROUTED_S,
) -> None:
    """All cases of one contender; what it answers, or how it failed, goes into `found`. A pair
    gets `routed_s` until KV moves."""
    for case in plan.cases:
        try:
            one.go_on(seed=10 + number, within_s=routed_s)
            turn = replace(take_turn(one, case, seed=1000 + number), number=number)
        except ContenderFailed as error:
            if one.name != NIXL:
                raise
            reason = str(error).splitlines()[0]
            say(f"round {number + 1}, {case.name} tokens, {one.name} failed: {reason}")
            found.failed.append(FailedTurn(one.name, case.name, number, reason))
        else:
            found.turns.append(turn)
            say(f"round {number + 1}, {said(turn)}")
    one.stop()


def second_s(sample: Sample) -> float:
    """From sending to the second token. vLLM sends tokens in one event where its server is behind:
    then they come at once."""
    return sample.ttft_s + sum(sample.gaps_s[:1])


def said(turn: Turn) -> str:
    """The turn for people who wait, in milliseconds."""
    figures = {
        "TTFT": median(sample.ttft_s for sample in turn.samples),
        "second token": median(map(second_s, turn.samples)),
        "P's prefill": turn.prefill_s,
        "without transfer": turn.without_s,
        "D waited": turn.waited_s,
        "NIXL moved": turn.moved_s,
    }
    known = (f"{name} {value * 1e3:.0f}" for name, value in figures.items() if value is not None)
    return f"{turn.case.name} tokens, {turn.contender}: {', '.join(known)} ms"


def take_turn(one: Contender, case: Case, seed: int) -> Turn:
    """Ask it the case's prompts. ContenderFailed."""
    at_p, at_d = counts(one.p), counts(one.d)
    samples = one.front.run(case, seed=seed)
    after_p, after_d = counts(one.p), counts(one.d)
    prefill_s = _prefill(one, at_p, after_p)
    if not one.is_pair:
        return Turn(one.name, case, samples, prefill_s)
    # Asked past the router and without its parameters, P computes as any vLLM.
    before = counts(one.p)
    short = Case(case.name, case.input_tokens, 1, case.concurrency, case.requests)
    past_router = one.p.run(short, seed + 500)
    moves, post = (after_d.mean_since(at_d, name) or 0.0 for name in (_NIXL_MOVE, _NIXL_POST))
    return Turn(
        one.name,
        case,
        samples,
        prefill_s,
        waited_s=after_d.mean_since(at_d, _QUEUED),
        moved_s=moves + post if one.name == NIXL else None,
        without_s=_prefill(one, before, counts(one.p)),
        past_router_s=median(sample.ttft_s for sample in past_router),
        external_tokens=external(at_d, after_d),
    )


def _prefill(one: Contender, before: Counts, after: Counts) -> float:
    mean_s = after.mean_since(before, _PREFILL)
    if mean_s is None:
        raise ContenderFailed(f"{one.name}: P has computed no prompt")
    return mean_s
