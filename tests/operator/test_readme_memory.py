"""README's number for free memory is enough for the demo's memory plan."""

from __future__ import annotations

import re
from pathlib import Path

from xpyd_operator.document.load import load_fleet
from xpyd_operator.up.checks import locate_model, weights_bytes
from xpyd_operator.up.memory import Machine, plan_memory

ROOT = Path(__file__).parents[2]
DEMO = ROOT / "examples/demo/fleet.yaml"


def test_the_demo_fits_into_the_free_memory_that_readme_asks_for():
    stated = re.search(r"(\d+) GB of free memory", (ROOT / "README.md").read_text())
    assert stated
    fleet = load_fleet(DEMO)
    model = locate_model(fleet.spec.model, DEMO.parent)
    replicas = [1 if pool.replicas is None else pool.replicas for pool in fleet.spec.pools]
    machine = Machine(int(stated[1]) * 10**9, cores=1)
    weights = weights_bytes(model, fleet.spec.engine.args)
    plan = plan_memory(fleet, replicas, machine, weights_bytes=weights)
    assert plan.total_bytes <= plan.usable_bytes
