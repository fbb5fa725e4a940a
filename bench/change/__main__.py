"""make bench-change: a cluster, a fleet, changes under load, a line of JSON, and the table.

Exit status: 0 nothing was lost, hung, wrong or mixed; 1 something was, or a change did not end; 2
the machine cannot have a cluster.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path

from bench.change.changes import CHANGES
from bench.change.report import broken, report, with_measured
from bench.change.run import run
from bench.change.site import site
from bench.process import end_at_sigterm
from bench.report import say, write_report
from tests.cluster.fleetkit import DEMO_MODEL, ROOT
from tests.cluster.harness import availability, up
from tests.e2e.oracle import mixed_cases


def main(argv: list[str]) -> int:
    """Run it."""
    parser = argparse.ArgumentParser(prog="python -m bench.change", description=__doc__)
    parser.add_argument("--output", type=Path, help="default: docs/benchmarks/change.json if whole")
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--rate", type=float, default=5.0, help="requests that start each second")
    parser.add_argument("--only", action="append", choices=list(CHANGES), help="may be repeated")
    options = parser.parse_args(argv)
    reason = availability.why_no_node()
    if reason is not None:
        sys.stderr.write(f"no cluster can run here: {reason}\n")
        return 2
    cases = mixed_cases(DEMO_MODEL)
    say(f"{len(cases)} cases have their reference")
    cluster = up(f"change-{os.getpid()}", node=True)
    try:
        kubernetes = json.loads(cluster.kubectl("version", "-o", "json"))["serverVersion"]
        with tempfile.TemporaryDirectory() as folder, site(cluster, Path(folder)) as made:
            say("the fleet is ready")
            names = options.only or list(CHANGES)
            sizes = {"requests": options.requests, "rate": options.rate}
            found = run(made, cases, names=names, **sizes)
    finally:
        cluster.down()
    result = report(found, rate=options.rate, kubernetes=kubernetes["gitVersion"])
    output = options.output
    if output is None and not options.only and not broken(result):
        output = ROOT / "docs/benchmarks/change.json"
    if output is not None:
        write_report(result, output, with_measured)
    for complaint in broken(result):
        sys.stderr.write(f"wrong: {complaint}\n")
    sys.stdout.write(json.dumps(result) + "\n")
    return 1 if broken(result) else 0


if __name__ == "__main__":
    end_at_sigterm()
    sys.exit(main(sys.argv[1:]))
