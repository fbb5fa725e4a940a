"""The good and bad documents of tests/testdata/fleets (its README says what is in them)."""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tests.operator.fleets import Document, changed

FOLDER = Path(__file__).parents[1] / "testdata" / "fleets"
FLEET: Document = {
    "apiVersion": "xpyd.dev/v1alpha1",
    "kind": "InferenceFleet",
    "metadata": {"name": "chat"},
    "spec": {
        "model": {"uri": "hf://org/name"},
        "pools": [
            {"name": "prefill", "role": "Prefill"},
            {"name": "decode", "role": "Decode", "replicas": 3},
        ],
    },
}
POOL: Document = {
    "apiVersion": "xpyd.dev/v1alpha1",
    "kind": "InferenceFleetPool",
    "metadata": {"name": "chat-prefill"},
    "spec": {"fleetName": "chat", "poolName": "prefill", "role": "Prefill", "replicas": 1},
}


@dataclass(frozen=True)
class BadFleet:
    """A document with one mistake; `old`: what it would replace."""

    name: str
    object: Document
    old: Document | None
    says: str
    also: tuple[str, ...]

    @property
    def kind(self) -> str:
        """InferenceFleet or InferenceFleetPool."""
        return self.object["kind"]


def good_fleets() -> dict[str, Path]:
    """Name -> file."""
    return {path.stem: path for path in sorted((FOLDER / "good").glob("*.yaml"))}


def bad_fleets() -> list[BadFleet]:
    """All cases of all tables."""
    cases = [case for path in sorted((FOLDER / "bad").glob("*.yaml")) for case in _table(path)]
    return [_bad_fleet(case) for case in cases]


def _bad_fleet(case: dict[str, Any]) -> BadFleet:
    good = POOL if case.get("kind") == "pool" else FLEET
    return BadFleet(
        name=case["name"],
        object=changed(good, case["set"]),
        old=copy.deepcopy(good) if case.get("update") else None,
        says=case["says"],
        also=tuple(case.get("also", ())),
    )


class _Loader(yaml.SafeLoader):
    """SafeLoader with the tables' short forms of what is large."""


def _repeat(loader: yaml.SafeLoader, node: yaml.SequenceNode) -> str:
    head, text, times = loader.construct_sequence(node)
    return head + text * times


def _list(loader: yaml.SafeLoader, node: yaml.MappingNode) -> list[Any]:
    short = loader.construct_mapping(node, deep=True)
    text = json.dumps(short["of"])
    return [json.loads(text.replace("{}", str(index))) for index in range(short["times"])]


def _map(loader: yaml.SafeLoader, node: yaml.MappingNode) -> dict[str, Any]:
    short = loader.construct_mapping(node, deep=True)
    return {f"k{index}": short["of"] for index in range(short["times"])}


_Loader.add_constructor("!repeat", _repeat)
_Loader.add_constructor("!list", _list)
_Loader.add_constructor("!map", _map)


def _table(path: Path) -> list[dict[str, Any]]:
    return yaml.load(path.read_text(), Loader=_Loader)
