"""make bench-fleet: the measurements, a line of JSON, and the same in a file, a page and a picture.

Exit status: 0 measured, 1 a fleet failed. How fast any was is no failure.
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
from bench.fleet.plot import plot
from bench.fleet.report import report, with_measured
from bench.fleet.rounds import AGGREGATED, APART, LAYOUTS, Load, measure
from bench.process import end_at_sigterm
from bench.report import say, write_report

_QUICK = Load(prompt_tokens=(128,), output_tokens=16, shares=(0.2, 0.4), seconds=3.0)


def main(argv: list[str]) -> int:
    """Run it."""
    parser = argparse.ArgumentParser(prog="python -m bench.fleet", description=__doc__)
    parser.add_argument("--output", type=Path, default=ROOT / "docs/benchmarks/fleet.json")
    parser.add_argument("--model", default="small", help="tiny, small or medium")
    parser.add_argument("--seconds", type=float, default=Load.seconds, help="of each rung")
    parser.add_argument("--rounds", type=int, default=Load.rounds)
    parser.add_argument("--cores", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument(
        "--quick", action="store_true", help="one minute: the tiny model, two rungs, no chunks"
    )
    options = parser.parse_args(argv)
    load, layouts = Load(seconds=options.seconds, rounds=options.rounds), LAYOUTS
    if options.quick:
        load, layouts, options.model = _QUICK, (APART, AGGREGATED), "tiny"
    checkpoint = model(options.model)
    try:
        with tempfile.TemporaryDirectory() as folder:
            turns = measure(
                checkpoint, layouts, load, cores=options.cores, folder=Path(folder), say=say
            )
    except (ContenderFailed, AssertionError) as error:  # the harness asserts its deadlines
        say(f"failed: {error}")
        return 1
    made = report(checkpoint, turns, load, cores=options.cores)
    options.output.with_suffix(".svg").write_text(plot(made))
    write_report(made, options.output, with_measured)
    sys.stdout.write(json.dumps(made) + "\n")
    return 0


if __name__ == "__main__":
    end_at_sigterm()
    sys.exit(main(sys.argv[1:]))
