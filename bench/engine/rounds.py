"""Contenders take turns: each case by all of them within minutes, whoever is not on stopped.

The machine's speed changes from minute to minute by more than what is measured, so ratios are of
one round; and the order changes from round to round, so that nobody always comes first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

from bench.engine.bandwidth import read_bandwidth
from bench.engine.contender import WARM_UP, Contender, Recipe, Server, own_recipe, served
from bench.engine.models import Model
from bench.engine.peer import peer_recipe
from bench.engine.reference import referenced
from bench.engine.shape import BUSY, REFERENCE_CASES, SHARED, Case
from xpyd_tools.bench.summary import Summary, summarize

OWN, PEER, REFERENCE = "xpyd", "vllm", "transformers"
OWN_TTFT = "xpyd, ttft"
"""Ours with the other goal, where prompts and decodes share steps."""
Say = Callable[[str], None]


@dataclass(frozen=True)
class Plan:
    """What is run. `peer` None: without vLLM. `dtype`: of weights and KV. `own_args`: more flags
    of `xpyd worker`."""

    models: Sequence[str]
    cases: Sequence[Case]
    rounds: int
    threads: int
    peer: Path | None
    reference: bool
    dtype: str = "bfloat16"
    own_args: Sequence[str] = ()

    @property
    def cores(self) -> str:
        """What all contenders are bound to, as taskset has it."""
        return f"0-{self.threads - 1}"


@dataclass
class Found:
    """Of one model: seconds to /health, memory after the load, one Summary per round."""

    starts_s: dict[str, float] = field(default_factory=dict[str, float])
    pss_gib: dict[str, float] = field(default_factory=dict[str, float])
    turns: dict[tuple[str, str], list[Summary]] = field(
        default_factory=dict[tuple[str, str], list[Summary]]
    )
    bandwidth: list[float] = field(default_factory=list[float])
    """Bytes per second of each round, measured before the case at concurrency 1."""
    drafts: dict[tuple[str, str], Counter[str]] = field(
        default_factory=dict[tuple[str, str], Counter[str]]
    )
    """What became of drafts in all rounds, see speculation.draft_counts."""


def measure(model: Model, plan: Plan, folder: Path, say: Say) -> Found:
    """Start everybody, let them take turns, end them. `folder`: for logs. ContenderFailed."""
    found = Found()
    with ExitStack() as stack:
        contenders: dict[str, Contender] = {}
        for name, contender in _started(model, plan, folder, stack, found, say):
            contender.stop()
            contenders[name] = contender
        for number in range(plan.rounds):
            for case in plan.cases:
                if case.concurrency == 1:
                    found.bandwidth.append(read_bandwidth(plan.threads))
                take_turns(contenders, case, number, found, say)
        found.pss_gib = {name: one.pss_gib() for name, one in contenders.items()}
    return found


def _started(
    model: Model, plan: Plan, folder: Path, stack: ExitStack, found: Found, say: Say
) -> Iterator[tuple[str, Contender]]:
    recipe = own_recipe(model.folder, plan.threads, plan.own_args, plan.dtype)
    # The second start of each counts: files are in memory, and vLLM's compiled model in its cache.
    yield OWN, _warm(recipe, plan, folder, stack, found, say, is_warm=False)
    if any(case.name in SHARED for case in plan.cases):
        more = [*plan.own_args, "--latency-goal", "ttft"]
        other = own_recipe(model.folder, plan.threads, more, plan.dtype)
        recipe = replace(other, name=OWN_TTFT)
        yield OWN_TTFT, _warm(recipe, plan, folder, stack, found, say, is_warm=True)
    if plan.peer is not None:
        recipe = peer_recipe(plan.peer, model.folder, plan.threads, plan.dtype)
        started_before = plan.peer / f"started-{model.name}-{plan.dtype}"
        server = _warm(recipe, plan, folder, stack, found, say, is_warm=started_before.exists())
        started_before.touch()
        yield PEER, server
    if plan.reference and any(case.name in REFERENCE_CASES for case in plan.cases):
        say(f"{REFERENCE}: loading")
        log = folder / f"{REFERENCE}.log"
        reference = referenced(model.folder, log, plan.threads, plan.cores, plan.dtype)
        yield REFERENCE, stack.enter_context(reference)


def _warm(
    recipe: Recipe,
    plan: Plan,
    folder: Path,
    stack: ExitStack,
    found: Found,
    say: Say,
    *,
    is_warm: bool,
) -> Server:
    log = folder / f"{recipe.name}.log"
    if not is_warm:
        with served(recipe, log, plan.cores) as first:
            say(f"{recipe.name}: first start {first.start_s:.1f} s")
    server = stack.enter_context(served(recipe, log, plan.cores))
    say(f"{recipe.name}: start {server.start_s:.1f} s")
    found.starts_s[recipe.name] = server.start_s
    return server


def take_turns(
    contenders: Mapping[str, Contender], case: Case, number: int, found: Found, say: Say
) -> None:
    """One round of a case, by all that have it."""
    rate = 0.0
    if case.stream_of:
        same = found.turns[OWN, case.stream_of][number]
        rate = BUSY * same.output_tokens_per_s / case.output_tokens
    names = list(contenders)
    names = names[number % len(names) :] + names[: number % len(names)]
    for name in names:
        if name == REFERENCE and case.name not in REFERENCE_CASES:
            continue
        if name == OWN_TTFT and case.name not in SHARED:
            continue
        contender = contenders[name]
        contender.go_on()
        contender.run(WARM_UP, seed=number)
        # The same prompts for all, others in each round.
        summary = summarize(contender.run(case, seed=1000 + number, rate=rate))
        contender.stop()
        found.turns.setdefault((name, case.name), []).append(summary)
        say(
            f"round {number + 1}, {case.name}, {name}: TTFT {summary.ttft_ms.p50:.0f} ms, "
            f"ITL {summary.itl_ms.p50:.2f} ms, {summary.output_tokens_per_s:.1f} tokens/s"
        )
