"""What drafts cost that rest: an engine in this process makes steps with and without them in turns.

`python -m bench.engine.resting [eagle3 ...]`, of the demo model. Servers beside each other differ
by more than what is measured. Ends with one line of JSON: by method and concurrency, a step with
drafts that rest to one without, of all steps together and in the median of the rounds.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch

from bench.engine.shape import VOCABULARY
from bench.engine.speculation import DEMO_DRAFTS
from bench.operator.report import machine
from bench.report import say
from scripts.train_demo_model.random_checkpoint import DEMO_MODEL
from tests.worker.runner_driver import BLOCK_SIZE, draft_source, make_runner, with_params
from xpyd_worker.engine.block_manager import BlockManager
from xpyd_worker.engine.core import EngineCore
from xpyd_worker.engine.inbox import Inbox
from xpyd_worker.engine.open_requests import StopRules
from xpyd_worker.engine.request import EngineRequest, SchedulerConfig
from xpyd_worker.engine.speculation import Method

METHODS = {config["method"]: Path(config["model"]) for config in DEMO_DRAFTS.values()}
_STEPS, _ROUNDS = 50, 14
_PROMPT = 200


def measure(method: Method, concurrency: int, *, rounds: int = _ROUNDS) -> dict[str, float]:
    """Seconds of a step with resting drafts to one without, `all` and in the `median` of rounds."""
    given, source = draft_source(DEMO_MODEL, METHODS[method], method)
    tokens = _PROMPT + 2 * _STEPS * (rounds + 1)
    blocks = concurrency * (tokens // BLOCK_SIZE + 2)
    runner = make_runner(DEMO_MODEL, draft=source, blocks=blocks)
    engine = EngineCore(
        runner,
        pool=BlockManager(runner.num_blocks, block_size=BLOCK_SIZE),
        inbox=Inbox(),
        config=SchedulerConfig(concurrency, 1024, speculative=given),
        rules=StopRules((), tokens),
        deliver=lambda _: None,
    )
    for number in range(concurrency):
        first = VOCABULARY[number]
        params = with_params(max_tokens=tokens, ignore_eos=True, temperature=1.0, seed=number)
        prompt = tuple(range(first, first + _PROMPT))
        engine.submit(EngineRequest(f"r{number}", f"r{number}", prompt, params))

    def steps() -> float:
        begun = time.perf_counter()
        for _ in range(_STEPS):
            engine.turn()
        return time.perf_counter() - begun

    for _ in range(concurrency):
        engine.turn()
    scheduler: Any = engine._scheduler
    for sequence in scheduler._running:
        sequence.draft.resume_at = 1 << 30
    steps()
    drafted = engine.stats().spec_draft_tokens
    drafts: Any = runner._drafter, runner._model._kept_layers
    pairs: list[tuple[float, float]] = []
    for _ in range(rounds):
        runner._drafter, runner._model._kept_layers = drafts
        resting = steps()
        runner._drafter, runner._model._kept_layers = None, ()
        pairs.append((resting, steps()))
    assert engine.stats().spec_draft_tokens == drafted, "they rest"
    both = [sum(side) for side in zip(*pairs, strict=True)]
    return {
        "all": round(both[0] / both[1], 4),
        "median": round(median(one / other for one, other in pairs), 4),
        "stepMs": round(both[1] / _STEPS / rounds * 1e3, 2),
    }


def main(argv: list[str]) -> int:
    """Run it."""
    parser = argparse.ArgumentParser(prog="python -m bench.engine.resting")
    methods = list(METHODS)
    parser.add_argument(
        "methods", nargs="*", default=methods, help=f"default: {', '.join(methods)}"
    )
    parser.add_argument("--threads", type=int, default=2, help="of torch (default: 2)")
    options = parser.parse_args(argv)
    if unknown := set(options.methods) - set(methods):
        parser.error(f"no method: {', '.join(sorted(unknown))}; one of {', '.join(methods)}")
    torch.set_num_threads(options.threads)
    found: dict[str, dict[str, float]] = {}
    for method in options.methods:
        for concurrency in (1, 8):
            name = f"{method} at {concurrency}"
            found[name] = measure(method, concurrency)
            say(f"{name}: {found[name]}")
    sys.stdout.write(json.dumps({"resting": found, "machine": machine()}) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
