"""make bench-kv: the measurements, a line of JSON, and the same in two files.

Exit status: 0 measured, 1 something of ours failed or moved wrong bytes. How fast anything was is
no failure.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from bench.environments import NotHere
from bench.kv import fleet
from bench.kv.environments import PEERS, environment
from bench.kv.moves import (
    BESIDE,
    CONTROL,
    MEMCPY,
    OWN,
    Group,
    Moves,
    Plan,
    Run,
    WrongBytesError,
)
from bench.kv.page import with_measured
from bench.kv.pair import ROOT, SideFailed, pair
from bench.kv.report import broken, report
from bench.kv.shape import BLOCK_TOKENS, PROMPTS, SPARE_BLOCKS
from bench.process import end_at_sigterm
from bench.report import say, write_report

_QUICK = Plan(prompts=(128,), rounds=2, turn_s=0.05, most=5, control_count=10)


def main(argv: list[str]) -> int:
    """Run it."""
    parser = argparse.ArgumentParser(prog="python -m bench.kv")
    parser.add_argument("--output", type=Path, default=ROOT / "docs/benchmarks/kv.json")
    parser.add_argument(
        "--quick", action="store_true", help="seconds: 128 tokens, no peers, no fleet"
    )
    parser.add_argument("--rounds", type=int, default=Plan.rounds)
    parser.add_argument("--prompts", type=int, nargs="+", default=PROMPTS, metavar="TOKENS")
    parser.add_argument("--no-peers", action="store_true", help="without nixl and mooncake")
    parser.add_argument("--no-fleet", action="store_true", help="without whole engines")
    options = parser.parse_args(argv)
    plan = _QUICK if options.quick else Plan(tuple(options.prompts), options.rounds)
    with tempfile.TemporaryDirectory() as folder:
        try:
            moves, versions = _moves(
                Path(folder), plan, peers=not (options.quick or options.no_peers)
            )
        except (SideFailed, WrongBytesError) as error:
            say(f"wrong: {error}")
            return 1
        modes = {}
        if not (options.quick or options.no_fleet):
            modes = fleet.measure(Path(folder), fleet.Load(), say)
    made = report(moves, modes, versions)
    _write(made, moves, options.output)
    complaints = broken(made)
    for complaint in complaints:
        say(f"wrong: {complaint}")
    sys.stdout.write(json.dumps(made) + "\n")
    return 1 if complaints else 0


def _moves(folder: Path, plan: Plan, *, peers: bool) -> tuple[Moves, dict[str, str]]:
    """What moved the bytes how fast, and the peers' versions."""
    blocks = max(plan.prompts) // BLOCK_TOKENS + SPARE_BLOCKS
    absent: dict[str, str] = {}
    versions: dict[str, str] = {}
    with ExitStack() as stack:
        own = _place(folder, "own")
        started = stack.enter_context(pair(Path(sys.executable), own, blocks=blocks, product=True))
        groups = [Group(started, [MEMCPY, *OWN, *BESIDE, *CONTROL])]
        for name in PEERS if peers else ():
            say(f"{name}: environment")
            try:
                found = environment(name)
                place = _place(folder, name)
                other = pair(found.python, place, blocks=blocks, product=False, env=found.env)
                groups.append(Group(stack.enter_context(other), [name]))
                versions[name] = found.version
            except (NotHere, SideFailed) as error:
                say(f"{name} is left out: {error}")
                absent[name] = str(error)
        found_moves = Run(groups, plan, say).measure()
    found_moves.absent.update(absent)
    return found_moves, versions


def _place(folder: Path, name: str) -> Path:
    place = folder / name
    place.mkdir()
    return place


def _write(made: dict[str, Any], moves: Moves, output: Path) -> None:
    measured = [
        {
            "contender": name,
            "tokens": case.tokens,
            "layout": case.layout,
            "rounds": [[round(s * 1e3, 3) for s in batch.seconds] for batch in batches],
        }
        for (name, case), batches in moves.batches.items()
    ]
    write_report({**made, "measuredMs": measured}, output, with_measured)


if __name__ == "__main__":
    end_at_sigterm()
    sys.exit(main(sys.argv[1:]))
