"""make bench-engine: the measurements, a line of JSON, and the same in two files.

Exit status: 0 measured, 1 a contender failed or did not answer as asked. How fast anything was is
no failure.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from bench.engine.contender import ROOT, ContenderFailed
from bench.engine.models import Model, cache, model
from bench.engine.page import with_measured
from bench.engine.peer import peer_environment
from bench.engine.report import name_of, report, with_drafts
from bench.engine.rounds import PEER, Found, Plan, measure
from bench.engine.shape import CASES, DTYPES, MODELS
from bench.engine.speculation import SHORT, SUBJECTS, Subject, measure_drafts
from bench.environments import NotHere
from bench.process import end_at_sigterm
from bench.report import say, write_report
from xpyd_worker.runner.device import cpu_is_fast_in

_QUICK_CASES = ("c1", "c8")


def main(argv: list[str]) -> int:
    """Run it."""
    options = _parser().parse_args(argv)
    absent: dict[str, str] = {}
    plan = _plan(options, absent)
    found: dict[str, tuple[Model, Found]] = {}
    drafted: dict[str, Found] = {}
    with tempfile.TemporaryDirectory() as folder:
        try:
            for name in plan.models:
                say(f"{name}: checkpoint")
                one = model(name)
                found[name] = one, measure(one, plan, Path(folder), say)
            for subject in _subjects(options):
                drafted[subject.name] = measure_drafts(subject, plan, Path(folder), absent, say)
        except ContenderFailed as error:
            say(f"wrong: {error}")
            return 1
    made = report(found, plan, absent, drafted)
    if options.output is not None:
        if options.speculation == "only" and options.output.exists():
            made = with_drafts(json.loads(options.output.read_text()), made)
        write_report(made, options.output, with_measured)
    sys.stdout.write(json.dumps(made) + "\n")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.engine")
    parser.add_argument(
        "--output",
        type=Path,
        help="where the JSON goes, and tables into the page beside it (default: of a whole run "
        "docs/benchmarks/engine-cpu.json, in float32 engine-cpu-float32.json; of a part nowhere). "
        "`--speculation` alone renews that part of what is there",
    )
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument(
        "--speculation",
        nargs="?",
        choices=("only", "too"),
        const="only",
        help="the part with `--speculative-config`, only (default) or too; a whole run has it",
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--dtype",
        choices=DTYPES,
        default="bfloat16" if cpu_is_fast_in("bfloat16") else "float32",
        help="of weights and KV, of all contenders (default: bfloat16 where the processor has "
        "instructions for it, else float32)",
    )
    parser.add_argument("--threads", type=int, default=2, help="of each contender, on cores 0 on")
    parser.add_argument("--no-peer", action="store_true", help="without vLLM")
    parser.add_argument("--no-reference", action="store_true", help="without transformers")
    parser.add_argument("--own-args", type=shlex.split, default=[], help="more for `xpyd worker`")
    parser.add_argument(
        "--quick", action="store_true", help="a minute: tiny, few requests, one round, no others"
    )
    return parser


def _plan(options: argparse.Namespace, absent: dict[str, str]) -> Plan:
    cases = [CASES[name] for name in options.cases]
    plan = Plan(
        [] if options.speculation == "only" else options.models,
        cases,
        options.rounds,
        options.threads,
        peer=None,
        reference=not options.no_reference,
        dtype=options.dtype,
        own_args=options.own_args,
    )
    if options.quick:
        short = [replace(CASES[name], requests=CASES[name].concurrency) for name in _QUICK_CASES]
        models = ["tiny"] if plan.models else []
        return replace(plan, models=models, cases=short, rounds=1, reference=False)
    others = not (options.no_peer or options.no_reference)
    if options.output is None and _is_whole(options) and others:
        options.output = ROOT / f"docs/benchmarks/{name_of(options.dtype)}.json"
    if options.no_peer:
        return plan
    say(f"{PEER}: environment in {cache()}")
    try:
        return replace(plan, peer=peer_environment())
    except NotHere as error:
        say(f"{PEER} is left out: {error}")
        absent[PEER] = str(error)
        return plan


def _is_whole(options: argparse.Namespace) -> bool:
    whole = list(MODELS) == options.models and list(CASES) == options.cases
    return whole and options.speculation != "only"


def _subjects(options: argparse.Namespace) -> Sequence[Subject]:
    if options.quick:
        return SHORT
    return SUBJECTS if options.speculation or _is_whole(options) else ()


if __name__ == "__main__":
    end_at_sigterm()
    sys.exit(main(sys.argv[1:]))
