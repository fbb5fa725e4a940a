"""make bench-vllm: the measurements, a line of JSON, and the same in a file and a page.

Exit status: 0 measured, 1 a contender failed or computed prompts that it should have loaded, or
vLLM is not there. How fast any was is no failure.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from bench.engine.contender import ROOT, ContenderFailed
from bench.engine.models import model
from bench.environments import NotHere
from bench.process import end_at_sigterm
from bench.report import say, write_report
from bench.vllm.report import broken, report, with_measured
from bench.vllm.rounds import CASES, MODEL, SHAPES, Plan, measure
from bench.vllm.servers import ALONE, NIXL, OURS

_QUICK = Plan(cases=(replace(CASES["1500"], requests=1),), rounds=1, contenders=(OURS, ALONE))
_EXAMPLES = """\
examples:
  all, and docs/benchmarks/vllm.json and .md anew:
    make bench-vllm
  three minutes: our pair and a vLLM alone, one prompt of 1,500 tokens each:
    python -m bench.vllm --quick --output /tmp/vllm.json
  one case against NixlConnector alone, written nowhere:
    python -m bench.vllm --cases 1500 --rounds 5 --contenders xpyd NixlConnector
"""


def main(argv: list[str]) -> int:
    """Run it."""
    options = _parser().parse_args(argv)
    plan = Plan([CASES[name] for name in options.cases], options.rounds, tuple(options.contenders))
    if options.quick:
        plan = _QUICK
    output = options.output
    is_whole = (plan.cases, plan.contenders) == (list(CASES.values()), (OURS, NIXL, ALONE))
    if output is None and is_whole:
        output = ROOT / "docs/benchmarks/vllm.json"
    cores = f"0-{max(1, (os.cpu_count() or 2) - 1)}"
    say(f"{MODEL}: checkpoint")
    checkpoint = model(MODEL, shapes=SHAPES)
    try:
        with tempfile.TemporaryDirectory() as folder:
            found = measure(checkpoint, plan, Path(folder), cores, say)
    except (ContenderFailed, NotHere) as error:
        say(f"failed: {error}")
        return 1
    made = report(checkpoint, found, plan, cores=cores)
    complaints = broken(made)
    for complaint in complaints:
        say(f"wrong: {complaint}")
    if output is not None:
        write_report(made, output, with_measured)
    sys.stdout.write(json.dumps(made) + "\n")
    return 1 if complaints else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench.vllm",
        description=__doc__,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--output",
        type=Path,
        help="where the JSON goes, and tables into the page beside it (default: "
        "docs/benchmarks/vllm.json for a whole run, nowhere for a part of it)",
    )
    parser.add_argument("--rounds", type=int, default=Plan.rounds)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument(
        "--contenders", nargs="+", choices=(OURS, NIXL, ALONE), default=list(Plan.contenders)
    )
    parser.add_argument(
        "--quick", action="store_true", help="three minutes: without NixlConnector, one prompt each"
    )
    return parser


if __name__ == "__main__":
    end_at_sigterm()
    sys.exit(main(sys.argv[1:]))
