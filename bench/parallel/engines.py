"""Whole engines in layouts of ranks, asked over HTTP, all with the same cores.

All of them are up from the first round to the last; who is not asked sleeps. They are not stopped,
as other benchmarks do it: a rank that stands still is taken for lost.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from bench.engine.contender import ROOT, Recipe, Server, own_recipe, served
from bench.engine.models import Model
from bench.engine.shape import Case
from xpyd_tools.bench.summary import Sample

PROMPT_TOKENS = 512
DECODE_1 = Case("decode, 1 at once", 32, 64, 1, 2)
DECODE_8 = Case("decode, 8 at once", 32, 64, 8, 16)
BATCHES = tuple(Case(f"{m} prompts", PROMPT_TOKENS, 1, m, m) for m in (1, 2, 4, 8))
"""Each prompt is one step, so they go through a pipeline as that many batches."""
DECODES = (DECODE_1, DECODE_8)
CASES = (*DECODES, *BATCHES)


@dataclass(frozen=True)
class Layout:
    """`is_queued`: with as many steps under way as there are stages; `has_whole_experts`: EP."""

    tensor: int = 1
    pipeline: int = 1
    is_queued: bool = True
    has_whole_experts: bool = False

    @property
    def name(self) -> str:
        experts = ", EP" if self.has_whole_experts else ""
        queue = "" if self.is_queued else ", one step at a time"
        return f"TP {self.tensor} x PP {self.pipeline}{experts}{queue}"

    @property
    def ranks(self) -> int:
        return self.tensor * self.pipeline


LAYOUTS = (
    Layout(),
    Layout(tensor=2),
    Layout(tensor=4),
    Layout(pipeline=2),
    Layout(pipeline=2, is_queued=False),
    Layout(pipeline=4),
    Layout(tensor=2, pipeline=2),
)


EXPERTS = {
    "experts": {
        "family": "qwen3-moe",
        "layers": 6,
        "hidden": 512,
        "intermediate": 256,
        "heads": 8,
        "kv_heads": 4,
        "experts": 32,
        "experts_per_token": 4,
        "vocab": 32000,
    }
}
"""A model with many small experts."""
EXPERT_LAYOUTS = (
    Layout(),
    Layout(tensor=2),
    Layout(tensor=2, has_whole_experts=True),
    Layout(tensor=4),
    Layout(tensor=4, has_whole_experts=True),
)


@dataclass(frozen=True)
class Turn:
    """One case's answers in one round, and what the main process took for them."""

    layout: Layout
    case: Case
    samples: list[Sample]
    main_cpu_s: float


def measure(
    model: Model,
    layouts: Sequence[Layout],
    *,
    cores: int,
    rounds: int,
    folder: Path,
    say: Callable[[str], None],
    cases: Sequence[Case] = CASES,
) -> list[Turn]:
    """Each layout with each case in each round. ContenderFailed."""
    turns: list[Turn] = []
    with ExitStack() as stack:
        servers: list[tuple[Layout, Server]] = []
        for layout in layouts:
            say(f"{model.name}: {layout.name} starts")
            log = folder / f"{model.name}-{len(servers)}.log"
            recipe = _recipe(model, layout, cores)
            server = stack.enter_context(served(recipe, log, f"0-{cores - 1}"))
            servers.append((layout, server))
            server.run(BATCHES[1], seed=10_000)  # what the first steps alone cost
        for number in range(rounds):
            for at, case in enumerate(cases):
                for layout, server in servers:
                    say(f"{model.name}: round {number + 1}, {case.name}, {layout.name}")
                    before_s = server.main_cpu_s()
                    # Prompts of their own each time: nothing is in a cache of any kind.
                    samples = server.run(case, seed=1000 * number + at)
                    turns.append(Turn(layout, case, samples, server.main_cpu_s() - before_s))
    return turns


def _recipe(model: Model, layout: Layout, cores: int) -> Recipe:
    more = [
        *("--tensor-parallel-size", str(layout.tensor)),
        *("--pipeline-parallel-size", str(layout.pipeline)),
        *("--max-num-batched-tokens", str(PROMPT_TOKENS), "--kv-cache-memory", "256Mi"),
        # bfloat16 only where this processor computes in it.
        *("--device", "cpu", "--dtype", "auto"),
    ]
    if layout.has_whole_experts:
        more.append("--enable-expert-parallel")
    made = own_recipe(model.folder, max(1, cores // layout.ranks), more)
    env = dict(made.env)
    argv = list(made.argv)
    if not layout.is_queued:
        argv = [sys.executable, "-m", "bench.parallel.one_step", *argv[1:]]
        env["PYTHONPATH"] = str(ROOT)
    return Recipe(layout.name, argv, env)
