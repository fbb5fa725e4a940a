"""Replay one seed and print every step: `.venv/bin/python -m tests.kv.simulation SEED`."""

from __future__ import annotations

import sys

from tests.kv.simulation.plan import plan_of
from tests.kv.simulation.run import lines
from tests.kv.simulation.world import World


def main() -> None:
    plan = plan_of(int(sys.argv[1]))
    world = World(plan, keep_all=True)
    try:
        world.run()
    finally:
        print("\n".join(lines(world.trace)))  # noqa: T201
        print(dict(world.outcomes))  # noqa: T201


if __name__ == "__main__":
    main()
