"""From measurements to the numbers that are kept, with what they were measured on."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Iterable
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

MOST_CALLS = 25
"""Of one fleet, from its document to Ready."""


def report(found: dict[str, Any], kubernetes: str) -> dict[str, Any]:
    """The JSON that a run ends with. `kubernetes`: the version of the server."""
    calls, nothing = found["many"]["calls"], found["nothing"]
    return {
        "benchmark": "operator",
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "ratios": ratios(found),
        "callsPerFleet": {name: calls[name] for name in ("min", "median", "max")},
        "writesOfRestartAndResync": nothing["writes"],
        "operator": operator(found),
        "versions": {
            "xpyd": version("xpyd"),
            "kubernetes": kubernetes,
            "python": platform.python_version(),
            "kopf": version("kopf"),
            "aiohttp": version("aiohttp"),
        },
        "machine": machine(),
        "othersCpu": _spread(
            used
            for one in found["big"]
            for name in ("peer", "fleet", "byHand")
            for used in one[name]["others"].values()
        ),
    }


def ratios(found: dict[str, Any]) -> dict[str, Any]:
    """Ours by the peers', each round for itself. `cpu...`: of all programs together."""
    many, by_hand = found["many"]["fleet"], found["many"]["byHand"]
    return {
        "toDeployment": _ratios(found["big"], "peer"),
        "toSameObjects": _ratios(found["big"], "byHand"),
        "manyFleetsToSameObjects": {
            "podsReady": round(many["seconds"]["ready"] / by_hand["seconds"]["ready"], 2),
            "cpuUp": round(_sum(many["cpuSeconds"]) / _sum(by_hand["cpuSeconds"]), 2),
        },
    }


def _ratios(rounds: list[dict[str, Any]], peer: str) -> dict[str, Any]:
    def seconds(name: str) -> dict[str, float]:
        return _spread(r["fleet"]["seconds"][name] / r[peer]["seconds"][name] for r in rounds)

    def cpu(name: str) -> dict[str, float]:
        return _spread(
            _sum(r["fleet"]["cpuSeconds"][name]) / _sum(r[peer]["cpuSeconds"][name]) for r in rounds
        )

    return {
        "podsCreated": seconds("created"),
        "podsReady": seconds("ready"),
        "podsGone": seconds("down"),
        "cpuUp": cpu("up"),
        "cpuDown": cpu("down"),
    }


def _sum(cpu_seconds: dict[str, float]) -> float:
    return sum(cpu_seconds.values())


def operator(found: dict[str, Any]) -> dict[str, Any]:
    """What the operator itself used."""
    fleets, nothing = [pair["fleet"] for pair in found["big"]], found["nothing"]
    return {
        "memoryMiB": {
            "bigFleet": max(fleet["memoryMiB"]["peak"] for fleet in fleets),
            "mostFleets": nothing["memoryMiB"]["peak"],
        },
        "cpuSeconds": {
            "bigFleetUp": _spread(fleet["cpuSeconds"]["up"]["operator"] for fleet in fleets),
            "bigFleetDown": _spread(fleet["cpuSeconds"]["down"]["operator"] for fleet in fleets),
            "manyFleets": found["many"]["fleet"]["cpuSeconds"]["operator"],
            "start": nothing["start"]["cpuSeconds"],
            "resync": nothing["resync"]["cpuSeconds"],
        },
        "idleCores": nothing["idleCores"],
    }


def broken(made: dict[str, Any]) -> list[str]:
    """What must hold on every machine and does not."""
    found: list[str] = []
    if made["callsPerFleet"]["max"] > MOST_CALLS:
        found.append(f"a fleet took {made['callsPerFleet']['max']} calls, more than {MOST_CALLS}")
    if made["writesOfRestartAndResync"]:
        found.append(f"{made['writesOfRestartAndResync']} writes although nothing had changed")
    return found


def machine() -> dict[str, Any]:
    """Processors, memory and how busy they are."""
    cpu = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.M)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "cores": len(os.sched_getaffinity(0)),
        "processor": cpu[1] if cpu else platform.machine(),
        "memoryGiB": round(memory / 2**30),
        "linux": ".".join(platform.release().split(".")[:2]),
    }


def _spread(values: Iterable[float]) -> dict[str, float]:
    found = list(values)
    return {
        "min": round(min(found), 2),
        "median": round(median(found), 2),
        "max": round(max(found), 2),
    }
