"""`make check-chart`: what checkov says of the rendered chart, with all that it can make.

checkov has a hundred dependencies, so it gets a throw-away environment. Exit status 1 where less
than 98 % of the checks that are not excused pass, or an excuse is none of values.yaml's, with its
reason there. Each excuse is listed, and the share without them is printed, too.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import venv
from pathlib import Path
from typing import Any

import yaml

from tests.chart.render import CHART, Helm
from tests.chart.test_objects import EVERYTHING
from tests.cluster.harness.tools import helm_binary

VERSION = "3.3.30"
LEAST = 0.98
_INSTALL_S, _RUN_S = 900, 300


def checked(folder: Path) -> dict[str, Any]:
    """checkov's report about the chart."""
    chart, env = folder / "chart.yaml", folder / "env"
    chart.write_text(yaml.safe_dump_all(Helm(helm_binary(), folder).render(EVERYTHING)))
    venv.create(env, with_pip=True)
    pip = [str(env / "bin/pip"), "install", "--quiet", f"checkov=={VERSION}"]
    subprocess.run(pip, check=True, timeout=_INSTALL_S)
    command = [str(env / "bin/checkov"), "--file", str(chart), "--framework", "kubernetes"]
    command += ["--output", "json", "--skip-download", "--soft-fail"]
    done = subprocess.run(command, check=True, timeout=_RUN_S, capture_output=True, text=True)
    return json.loads(done.stdout)


def main() -> int:
    """Print the figures; the exit status."""
    with tempfile.TemporaryDirectory() as folder:
        report = checked(Path(folder))
    results, summary = report["results"], report["summary"]
    values: dict[str, Any] = yaml.safe_load((CHART / "values.yaml").read_text())["checkov"]
    reasons = {**values["skip"], **values["skipInTest"]}
    unfounded = 0
    for one in results["skipped_checks"]:
        check, reason = one["check_id"], one["check_result"]["suppress_comment"]
        is_founded = bool(reason) and reasons.get(check) == reason
        unfounded += not is_founded
        word = "excused" if is_founded else "NO REASON in values.yaml:"
        sys.stdout.write(f"{word} {check} {one['resource']}: {reason}\n")
    for one in results["failed_checks"]:
        sys.stdout.write(f"FAILED  {one['check_id']} {one['resource']}: {one['check_name']}\n")
    passed, failed = summary["passed"], summary["failed"]
    share = passed / max(1, passed + failed)
    excused = summary["skipped"]
    of_all = passed / max(1, passed + failed + excused)
    sys.stdout.write(
        f"{passed} passed, {failed} failed: {share:.1%}; {excused} excused besides: {of_all:.1%}\n"
    )
    return 0 if share >= LEAST and not unfounded else 1


if __name__ == "__main__":
    sys.exit(main())
