"""The measured part of docs/benchmarks/operator.md, as tables."""

from __future__ import annotations

from typing import Any

from bench.operator.report import MOST_CALLS

BEGIN = "<!-- measured: `make bench-operator` writes it -->\n"
END = "<!-- end of what is measured -->\n"
_RATIOS = {
    "podsCreated": "pods created",
    "podsReady": "Ready",
    "podsGone": "pods gone",
    "cpuUp": "processor time of all, up",
    "cpuDown": "processor time of all, down",
}


def with_measured(page: str, made: dict[str, Any], sizes: dict[str, int]) -> str:
    """The page with the tables of this report in place of those that it has."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return before + BEGIN + _measured(made, sizes) + END + after


def _measured(made: dict[str, Any], sizes: dict[str, int]) -> str:
    return "\n".join(
        [
            "",
            _where(made),
            "",
            *_ratio_table(made, sizes),
            "",
            *_operator_table(made, sizes),
            "",
            "",
        ]
    )


def _where(made: dict[str, Any]) -> str:
    machine, versions, others = made["machine"], made["versions"], made["othersCpu"]
    return (
        f"{made['date']}: {machine['cores']} cores ({machine['processor']}), "
        f"{machine['memoryGiB']} GiB, Linux {machine['linux']}, Kubernetes "
        f"{versions['kubernetes']}, Python {versions['python']}, kopf {versions['kopf']}.\n"
        f"Programs that have nothing to do with it used {others['min']:.0%} to "
        f"{others['max']:.0%} of the machine."
    )


def _ratio_table(made: dict[str, Any], sizes: dict[str, int]) -> list[str]:
    ratios, many = made["ratios"], made["ratios"]["manyFleetsToSameObjects"]
    lines = [
        f"| a fleet of {sizes['pods']} pods, {sizes['pairs']} rounds: min / median / max | "
        "to one Deployment | to the same objects by hand |",
        "|---|---|---|",
    ]
    for name, words in _RATIOS.items():
        cells = (_spread(ratios[peer][name]) for peer in ("toDeployment", "toSameObjects"))
        lines.append(f"| {words} | {' | '.join(cells)} |")
    first = f"| {sizes['fleets']} fleets at once: Ready, processor time of all | |"
    return [*lines, f"{first} {many['podsReady']}, {many['cpuUp']} |"]


def _operator_table(made: dict[str, Any], sizes: dict[str, int]) -> list[str]:
    calls, operator = made["callsPerFleet"], made["operator"]
    cpu, memory = operator["cpuSeconds"], operator["memoryMiB"]
    pods, fleets, most = sizes["pods"], sizes["fleets"], sizes["most_fleets"]
    up, down = cpu["bigFleetUp"]["median"], cpu["bigFleetDown"]["median"]
    return [
        "| the operator | |",
        "|---|---|",
        f"| API calls of each of {fleets} fleets until all are Ready; at most {MOST_CALLS} "
        f"| {calls['min']} to {calls['max']} |",
        f"| writes when it starts with {most} fleets and lists all again; none "
        f"| {made['writesOfRestartAndResync']} |",
        f"| memory at its most: a fleet of {pods} pods; {most} fleets "
        f"| {memory['bigFleet']:.0f} MiB; {memory['mostFleets']:.0f} MiB |",
        f"| processor time: {pods} pods up; down | {up} s; {down} s |",
        f"| processor time: {fleets} fleets to Ready | {cpu['manyFleets']} s |",
        f"| processor time: start with {most} fleets; a look at all of them "
        f"| {cpu['start']} s; {cpu['resync']} s |",
        f"| cores while nothing happens to {most} fleets | {operator['idleCores']} |",
    ]


def _spread(found: dict[str, float]) -> str:
    return " / ".join(f"{found[name]:.2f}" for name in ("min", "median", "max"))
