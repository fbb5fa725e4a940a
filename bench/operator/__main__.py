"""make bench-operator: a cluster, the measurements, a line of JSON, and more of it in two files.

Exit status: 0 measured, 1 it failed or something that must always hold does not, 2 the machine
cannot have a cluster. How fast anything was is no failure.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from bench.operator.inside import add_size_arguments, size_arguments
from bench.operator.page import with_measured
from bench.operator.report import broken, report
from bench.process import end_at_sigterm
from tests.cluster.harness import Cluster, availability, up

ROOT = Path(__file__).parents[2]
_CRDS = ROOT / "crds"
_NODES = 20
"""Each takes 256 pods."""
_DEADLINE_S = 1800.0
"""A few minutes are usual."""


def main(argv: list[str]) -> int:
    """Run it."""
    parser = argparse.ArgumentParser(prog="python -m bench.operator")
    parser.add_argument("--output", type=Path, default=ROOT / "docs/benchmarks/operator.json")
    add_size_arguments(parser)
    options = parser.parse_args(argv)
    reason = availability.why_no_control_plane()
    if reason is not None:
        sys.stderr.write(f"no cluster can run here: {reason}\n")
        return 2
    cluster = up(f"bench-{os.getpid()}")
    try:
        cluster.kubectl("apply", "-f", str(_CRDS))
        cluster.kubectl("wait", "--for=condition=Established", "-f", str(_CRDS))
        cluster.add_kwok_nodes(_NODES)
        version = json.loads(cluster.kubectl("version", "-o", "json"))["serverVersion"]
        found = _measure(cluster, options)
    finally:
        cluster.down()
    made = report(found, version["gitVersion"])
    sizes = vars(size_arguments(options))
    whole = {**made, "sizes": sizes, "measured": found}
    options.output.write_text(json.dumps(whole, indent=1) + "\n")
    page = options.output.with_suffix(".md")
    if page.exists():
        page.write_text(with_measured(page.read_text(), made, sizes))
    complaints = broken(made)
    for complaint in complaints:
        sys.stderr.write(f"wrong: {complaint}\n")
    sys.stdout.write(json.dumps(made) + "\n")
    return 1 if complaints else 0


def _measure(cluster: Cluster, options: argparse.Namespace) -> dict[str, Any]:
    sizes = [f"--{key.replace('_', '-')}={n}" for key, n in vars(size_arguments(options)).items()]
    log = cluster.run_folder / "operator.log"
    argv = [
        sys.executable,
        "-m",
        "bench.operator.inside",
        cluster.name,
        f"--log={log}",
        *sizes,
    ]
    done = cluster.run(argv, stdout=subprocess.PIPE, text=True, cwd=ROOT, timeout=_DEADLINE_S)
    if done.returncode != 0:
        raise SystemExit(1)
    measured: dict[str, Any] = json.loads(done.stdout)
    return measured


if __name__ == "__main__":
    end_at_sigterm()
    sys.exit(main(sys.argv[1:]))
