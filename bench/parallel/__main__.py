"""make bench-parallel: the measurements, a line of JSON, and the same in two files.

Exit status: 0 measured, 1 an engine failed or a sum was wrong. How fast anything was is no failure.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path

from bench.engine.contender import ROOT, ContenderFailed
from bench.engine.models import model
from bench.parallel import all_reduce, engines, experts, gpu_all_reduce, replicas
from bench.parallel.engines import (
    CASES,
    DECODES,
    EXPERT_LAYOUTS,
    EXPERTS,
    LAYOUTS,
    Layout,
    Turn,
)
from bench.parallel.page import with_measured
from bench.parallel.report import Collectives, report
from bench.process import end_at_sigterm
from bench.report import say, write_report

MODELS = ("tiny", "small", *EXPERTS)
"""One whose steps cost next to nothing but to be handed out, one that has something to do, and one
with experts."""
_REPLICA_REQUESTS = 96
_QUICK_LAYOUTS = (
    Layout(),
    Layout(tensor=2),
    Layout(pipeline=2),
    Layout(pipeline=2, is_queued=False),
)


def main(argv: list[str]) -> int:
    """Run it."""
    parser = argparse.ArgumentParser(prog="python -m bench.parallel")
    parser.add_argument("--output", type=Path, default=ROOT / "docs/benchmarks/parallel.json")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cores", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--models", nargs="*", default=list(MODELS))
    parser.add_argument(
        "--quick", action="store_true", help="two minutes: one size, the tiny model, one round"
    )
    options = parser.parse_args(argv)
    worlds, sizes_kib, layouts = all_reduce.WORLDS, all_reduce.SIZES_KIB, LAYOUTS
    exchanged_kib, rows = experts.SIZES_KIB, experts.ROWS
    if options.quick:
        worlds, sizes_kib, layouts = worlds[:1], sizes_kib[:1], _QUICK_LAYOUTS
        exchanged_kib, rows = exchanged_kib[:1], rows[:1]
        options.rounds, options.models = 1, options.models[:1]
    requests = _REPLICA_REQUESTS // 8 if options.quick else _REPLICA_REQUESTS
    turns: dict[str, list[Turn]] = {}
    of_replicas: dict[str, list[replicas.ReplicasTurn]] = {}
    try:
        say("all-reduce")
        reduces = all_reduce.measure(worlds, sizes_kib, options.rounds)
        on_gpus = gpu_all_reduce.measure(options.rounds)
        say("all-to-all, experts")
        exchanges = experts.measure_exchanges(worlds, exchanged_kib, options.rounds)
        of_experts = experts.measure_layers(worlds, rows, options.rounds)
        for name in options.models:
            with tempfile.TemporaryDirectory() as folder:
                has_experts = name in EXPERTS
                turns[name] = engines.measure(
                    model(name, shapes=EXPERTS) if has_experts else model(name),
                    EXPERT_LAYOUTS if has_experts else layouts,
                    cores=options.cores,
                    rounds=options.rounds,
                    folder=Path(folder),
                    say=say,
                    # Without stages there is no bubble.
                    cases=DECODES if has_experts else CASES,
                )
        for name in options.models:
            contenders = replicas.OF_EXPERTS if name in EXPERTS else replicas.CONTENDERS
            with tempfile.TemporaryDirectory() as folder:
                of_replicas[name] = replicas.measure(
                    model(name, shapes=EXPERTS) if name in EXPERTS else model(name),
                    requests=requests,
                    cores=options.cores,
                    rounds=options.rounds,
                    folder=Path(folder),
                    say=say,
                    contenders=contenders[:2] if options.quick else contenders,
                )
    except (
        ContenderFailed,
        AssertionError,  # the harness asserts its deadlines
        all_reduce.WrongSumError,
        gpu_all_reduce.WrongGpuSumError,
    ) as error:
        say(f"wrong: {error}")
        return 1
    collectives = Collectives(reduces, on_gpus, exchanges, of_experts)
    made = report(collectives, turns, of_replicas, cores=options.cores, rounds=options.rounds)
    write_report(made, options.output, with_measured)
    sys.stdout.write(json.dumps(made) + "\n")
    return 0


if __name__ == "__main__":
    end_at_sigterm()
    sys.exit(main(sys.argv[1:]))
