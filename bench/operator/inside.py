"""The measurements, one after the other, in the cluster's network.

`__main__` starts it as a program of its own, because a network namespace is entered by a new
process. Progress goes to stderr, the results to stdout as one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

from bench.operator import big, many, resync
from bench.operator.client import Client
from bench.operator.measure import Bench
from bench.operator.processes import Operator
from bench.operator.watching import Namespace
from tests.cluster.harness import Cluster, attach

_RESYNC_EVERY_S = 30.0
_TEAMS = 20
"""Namespaces that the fleets of the no-op resync are in, but for the first hundred."""


def add_size_arguments(parser: argparse.ArgumentParser) -> None:
    """How much of everything."""
    parser.add_argument("--pods", type=int, default=1000, help="of one fleet and of its peer")
    parser.add_argument("--pairs", type=int, default=3, help="rounds of a fleet and its peers")
    parser.add_argument("--fleets", type=int, default=100, help="small fleets at once")
    parser.add_argument("--most-fleets", type=int, default=500, help="fleets of the no-op resync")


def size_arguments(options: argparse.Namespace) -> argparse.Namespace:
    """The sizes alone."""
    names = ("pods", "pairs", "fleets", "most_fleets")
    return argparse.Namespace(**{name: getattr(options, name) for name in names})


def run_all(cluster: Cluster, sizes: argparse.Namespace, log: Path) -> dict[str, Any]:
    """All measurements."""
    client = Client(cluster.kubeconfig)
    operator = Operator(cluster, log)
    ours, theirs = Namespace(client, "ours"), Namespace(client, "theirs")
    try:
        for namespace in (ours, theirs):
            namespace.create()
        bench = Bench(cluster, client, operator, ours, theirs)
        template = bench.template()
        found = _big(bench, template, sizes)
        return {**found, **_many(bench, template, sizes, log)}
    except BaseException:
        sys.stderr.write(operator.log()[-4000:])
        raise
    finally:
        operator.stop()
        client.close()


def _big(bench: Bench, template: list[dict[str, Any]], sizes: argparse.Namespace) -> dict[str, Any]:
    big.plain_round(bench, template, max(10, sizes.pods // 4))
    _say("warm")
    rounds: list[dict[str, Any]] = []
    for number in range(sizes.pairs):
        made: dict[str, Any] = {"load": round(os.getloadavg()[0], 1)}
        for name, measure in (
            ("peer", partial(big.plain_round, bench, template)),
            ("fleet", partial(big.fleet_round, bench)),
            ("byHand", partial(big.by_hand_round, bench, template)),
        ):
            made[name] = measure(sizes.pods)
            _say(f"round {number + 1} of {sizes.pods} pods: {name}: {made[name]['seconds']}")
        rounds.append(made)
    return {"big": rounds}


def _many(
    bench: Bench, template: list[dict[str, Any]], sizes: argparse.Namespace, log: Path
) -> dict[str, Any]:
    by_hand = many.by_hand_round(bench, template, sizes.fleets)
    _say(f"the objects of {sizes.fleets} fleets by hand: {by_hand['seconds']}")
    mark = bench.cluster.audit_mark()
    fleets = many.fleet_round(bench, [bench.ours], 0, sizes.fleets)
    _say(f"{sizes.fleets} fleets: {fleets['seconds']}")
    resync.wait_until_quiet(bench, 3.0)
    first = many.calls_summary(many.calls_by_fleet(bench, mark))
    _say(f"calls of each fleet: {first['min']} to {first['max']}")
    found: dict[str, Any] = {"many": {"byHand": by_hand, "fleet": fleets, "calls": first}}
    if sizes.most_fleets > sizes.fleets:
        spaces = [Namespace(bench.client, f"team-{number}") for number in range(_TEAMS)]
        for space in spaces:
            space.create()
        more = many.fleet_round(bench, spaces, sizes.fleets, sizes.most_fleets, routers=1)
        _say(f"{sizes.most_fleets} fleets: {more['seconds']}")
        found["more"] = more
    resync.wait_until_quiet(bench, resync.QUIET_S)
    found["allCalls"] = many.calls_summary(many.calls_by_fleet(bench, mark))
    nothing = resync.restarted(bench, log, sizes.most_fleets, every_s=_RESYNC_EVERY_S)
    _say(f"restart and resync of {sizes.most_fleets} fleets: {nothing['writes']} writes")
    return {**found, "nothing": nothing}


_begun = time.monotonic()


def _say(line: str) -> None:
    sys.stderr.write(f"{time.monotonic() - _begun:6.1f} s  {line}\n")
    sys.stderr.flush()


def main(argv: list[str]) -> int:
    """Measure in the cluster of this name."""
    parser = argparse.ArgumentParser()
    parser.add_argument("cluster")
    parser.add_argument("--log", type=Path, required=True, help="of the operator")
    add_size_arguments(parser)
    options = parser.parse_args(argv)
    found = run_all(attach(options.cluster), options, options.log)
    sys.stdout.write(json.dumps(found) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
