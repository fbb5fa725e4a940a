"""make bench-router: the measurements, a line of JSON, and the same in two files.

Exit status: 0 measured, 1 nothing could be measured, or a contender did not answer as asked. How
fast anything was is no failure.
"""

from __future__ import annotations

import argparse
import json
import resource
import shlex
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.environments import NotHere
from bench.process import end_at_sigterm
from bench.report import say, write_report
from bench.router.page import tables, with_measured
from bench.router.programs import programs
from bench.router.report import merged, report
from bench.router.rounds import Plan, measure
from bench.router.routers import ROOT, ContenderFailed, absent
from bench.router.shape import (
    BESIDE_LONG,
    CASES,
    CONCURRENCIES,
    LONG_BYTES,
    ROWS,
    SHORT_BYTES,
    STREAMS,
    Case,
    Times,
)
from bench.router.shares import measure_shares

ROUNDS = 2
DUELS = 5
SHARES_S = 10.0
SHARES_PROCESSES = (1, 2)
PAGE = ROOT / "docs/benchmarks/router.json"
_QUICK_ROWS = ["direct", "xpyd", "vllm-router"]
_QUICK_TIMES = Times(warm_s=0.5, seconds=2.0, ramp_s=1.0, rest_s=3.0)
_FILES = 4 * max(STREAMS)
"""A router has two for each stream, and P's side may stay open."""


def main(argv: list[str]) -> int:
    """Run it."""
    options = _parser().parse_args(argv)
    left_out: dict[str, str] = {}
    plan = _plan(options, left_out)
    with tempfile.TemporaryDirectory() as folder:
        try:
            _allow_files()
            is_tls = any(row.is_tls for row in plan.rows)
            found = measure(plan, programs(tls=is_tls), Path(folder), say)
            shares: list[dict[str, Any]] = []
            for processes in SHARES_PROCESSES if options.shares else ():
                one = measure_shares(Path(folder), plan.python.path, SHARES_S, processes)
                say(f"two keys, processes {processes}: {one}")
                shares.append(one)
        except (ContenderFailed, NotHere) as error:
            say(f"wrong: {error}")
            return 1
    made = report(found, plan, left_out, shares)
    if options.part:
        options.output = PAGE
        made = merged(json.loads(PAGE.read_text()), made)
    if options.output is not None:
        write_report(made, options.output, with_measured)
    sys.stderr.write("\n" + tables(made))
    sys.stdout.write(json.dumps(made) + "\n")
    return 1 if made["failed"] else 0


def _allow_files() -> None:
    """As many open files as the system gives, for all that are started. NotHere for too few."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most != resource.RLIM_INFINITY and most < _FILES:
        raise NotHere(f"ulimit -Hn is {most}, and {max(STREAMS)} streams need {_FILES}")
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.router")
    add = parser.add_argument
    add(
        "--output",
        type=Path,
        help="where the JSON goes, and tables into the page beside it (default: "
        "docs/benchmarks/router.json for a whole run, nowhere for a part of it)",
    )
    add("--rows", type=_words, metavar="ROW,...", help=f"of {','.join(ROWS)}")
    add("--concurrency", type=_numbers, metavar="N,...", help="closed loops, and no other case")
    add("--streams", type=_numbers, metavar="N,...", help="streams, and no other case")
    add("--prompt-bytes", type=_numbers, metavar="N,...", help="of the closed loops' prompts")
    add("--beside", action="store_true", help=f"{BESIDE_LONG.name}, and no other case")
    add("--rounds", type=int, default=ROUNDS, help="default: %(default)s")
    add(
        "--duels",
        type=int,
        default=DUELS,
        help="repetitions of what ratios are of (default: %(default)s)",
    )
    add("--seconds", type=float, help="of each turn, its warm-up not counted (default: 3, quick 2)")
    add("--shares", action="store_true", help="also two keys, one of which floods")
    add(
        "--part",
        action="store_true",
        help="put what is measured into the figures of the last run (docs/benchmarks/router.json), "
        "in the place of the same ones: a whole run in parts",
    )
    add("--own-args", type=shlex.split, default=[], help="more for `xpyd router`")
    add("--quick", action="store_true", help=f"one round of {','.join(_QUICK_ROWS)} at 64")
    return parser


def _words(text: str) -> list[str]:
    words = text.split(",")
    if unknown := set(words) - ROWS.keys():
        raise argparse.ArgumentTypeError(f"no such row: {', '.join(sorted(unknown))}")
    return words


def _numbers(text: str) -> list[int]:
    return [int(word) for word in text.split(",")]


def _plan(options: argparse.Namespace, left_out: dict[str, str]) -> Plan:
    cases = _cases(options)
    names: list[str] = options.rows or (_QUICK_ROWS if options.quick else list(ROWS))
    times = _QUICK_TIMES if options.quick else Times()
    if options.seconds is not None:
        times = replace(times, seconds=options.seconds)
    is_whole = names == list(ROWS) and cases == list(CASES) and options.seconds is None
    options.shares = options.shares or (is_whole and not options.quick)
    if options.output is None and is_whole and not options.quick:
        options.output = PAGE
    for name in names:
        if why := absent(ROWS[name]):
            say(f"{name} is left out: {why}")
            left_out[name] = why
    return Plan(
        rows=[
            ROWS[name] if is_whole else replace(ROWS[name], cases=())
            for name in names
            if name not in left_out
        ],
        cases=cases,
        rounds=1 if options.quick else options.rounds,
        duels=0 if options.quick else options.duels,
        times=times,
        own_args=options.own_args,
    )


def _cases(options: argparse.Namespace) -> list[Case]:
    is_open = options.concurrency is None and options.streams is None and not options.beside
    default_closed = ([64] if options.quick else CONCURRENCIES) if is_open else ()
    default_streams = STREAMS if is_open and not options.quick else ()
    sizes = options.prompt_bytes or ((SHORT_BYTES,) if options.quick else (SHORT_BYTES, LONG_BYTES))
    return [
        *(Case("closed", n, s) for s in sizes for n in options.concurrency or default_closed),
        *(Case("streams", n, SHORT_BYTES) for n in options.streams or default_streams),
        *([BESIDE_LONG] if options.beside or (is_open and not options.quick) else []),
    ]


if __name__ == "__main__":
    end_at_sigterm()
    sys.exit(main(sys.argv[1:]))
