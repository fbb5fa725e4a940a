"""The chart as helm renders it, for tests that look at objects instead of text."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
CHART = ROOT / "helm" / "xpyd"
TIMEOUT_S = 60
PLAIN: Mapping[str, Any] = {"images": {"local": True}}
"""The least that the chart asks for."""

Obj = dict[str, Any]


@dataclass(frozen=True)
class Refused(Exception):
    """helm rendered nothing; `text` is what it said."""

    text: str

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class Helm:
    """A helm binary that talks to no cluster."""

    binary: Path
    work: Path
    rendered: dict[str, str] = field(default_factory=dict[str, str])
    """What `template` printed, by its arguments and values: many tests look at the same."""

    def run(self, *args: str) -> str:
        """Its standard output; Refused with its standard error where it fails."""
        home = str(self.work)
        done = subprocess.run(
            [str(self.binary), *args],
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            cwd=self.work,
            env={"HOME": home, "PATH": "/usr/bin:/bin", "KUBECONFIG": "/dev/null"},
        )
        if done.returncode:
            raise Refused(done.stderr)
        return done.stdout

    def render(
        self,
        values: Mapping[str, Any] | None = None,
        *,
        release: str = "xpyd",
        namespace: str = "xpyd-system",
        kube_version: str = "1.34.0",
    ) -> list[Obj]:
        """The objects of the chart with `values` on top of PLAIN; hooks are among them."""
        file = self.values_file(values)
        args = ("template", release, str(CHART), f"--namespace={namespace}")
        args = (*args, f"--kube-version={kube_version}", f"--values={file}")
        key = " ".join(args) + file.read_text()
        if key not in self.rendered:
            self.rendered[key] = self.run(*args)
        text = self.rendered[key]
        return [obj for obj in yaml.load_all(text, _StrictLoader) if obj]

    def notes(self, values: Mapping[str, Any] | None = None) -> str:
        """What `helm install` prints at its end."""
        text = self.run(
            "install",
            "xpyd",
            str(CHART),
            "--namespace=xpyd-system",
            "--dry-run=client",
            f"--values={self.values_file(values)}",
        )
        return text.partition("NOTES:\n")[2]

    def values_file(self, values: Mapping[str, Any] | None) -> Path:
        """A file with `values` over PLAIN, for --values."""
        file = self.work / "values.json"
        file.write_text(json.dumps(merged(PLAIN, values or {})))
        return file


class _StrictLoader(yaml.CSafeLoader):
    """Refuses a key that stands twice: helm and the API server disagree on which one counts."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        twice = {key for key in keys if keys.count(key) > 1}
        assert not twice, f"{node.start_mark}: {twice} twice"
        return super().construct_mapping(node, deep)


def merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """`over` on top of `base`, as helm merges values."""
    result = dict(base)
    for key, value in over.items():
        below = result.get(key)
        both = isinstance(below, Mapping) and isinstance(value, Mapping)
        result[key] = merged(below, value) if both else value
    return result


def at(path: str, value: object) -> dict[str, Any]:
    """Values with `value` at the dotted `path`."""
    for name in reversed(path.split(".")):
        value = {name: value}
    assert isinstance(value, dict)
    return value


def of_kind(objects: Iterable[Obj], *kinds: str) -> list[Obj]:
    """The objects of these kinds."""
    return [obj for obj in objects if obj["kind"] in kinds]


def one(objects: Iterable[Obj], kind: str, name: str) -> Obj:
    """The only object of that kind and name."""
    found = [obj for obj in of_kind(objects, kind) if obj["metadata"]["name"] == name]
    assert len(found) == 1, f"{kind} {name}: {len(found)}"
    return found[0]


def pods(objects: Iterable[Obj]) -> Iterator[tuple[str, Obj]]:
    """kind/name and pod spec of everything that becomes a pod."""
    for obj in objects:
        name = f"{obj['kind']}/{obj['metadata']['name']}"
        if obj["kind"] == "Pod":
            yield name, obj["spec"]
        elif "template" in obj.get("spec", {}):
            yield name, obj["spec"]["template"]["spec"]


def leaves(values: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted path and value of every scalar, list and empty map."""
    for key, value in values.items():
        here = f"{path}.{key}".lstrip(".")
        if isinstance(value, Mapping) and value:
            yield from leaves(value, here)
        else:
            yield here, value
