"""`xpyd up --detach` whose supervisor takes an engine for hung after ten seconds, not a minute:
`python -m tests.e2e.quick_probes FILE PORT`. All else is the product's.
"""

from __future__ import annotations

import sys

from xpyd_operator.plan.values import ENGINE_PROBES, ROUTER, Probe, Probes, Template, probes_of
from xpyd_operator.up import run
from xpyd_operator.up.programs import Programs

_DAEMON = (sys.executable, "-m", "tests.e2e.quick_probes", "daemon")
_FAILURES = 10
HUNG = f"did not answer GET /live {_FAILURES} times in a row: killed"


def _probes(template: Template) -> Probes:
    # Ten failures: an engine that is slow on a busy machine is not taken for hung.
    quick = Probes(ENGINE_PROBES.startup, Probe("/live", 1, _FAILURES, 1))
    return probes_of(template) if template.role == ROUTER else quick


def main() -> int:
    """Be the command, or the supervisor that it starts; the exit status."""
    if sys.argv[1] == "daemon":
        del sys.argv[1]
        return run.main(Programs(probes=_probes))
    file, port = sys.argv[1:]
    return run.run_up(run.UpOptions(file, port=int(port)), detach=True, daemon=_DAEMON)


if __name__ == "__main__":
    sys.exit(main())
