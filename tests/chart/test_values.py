"""values.yaml, its schema and its table say the same, and what is wrong is refused by name."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from tests.chart.render import CHART, Helm, Refused, at, leaves, merged

VALUES: dict[str, Any] = yaml.safe_load((CHART / "values.yaml").read_text())
SCHEMA: dict[str, Any] = json.loads((CHART / "values.schema.json").read_text())

REFUSED = [
    ("image", "x", "'image' not allowed"),
    ("images.operater", {}, "'operater' not allowed"),
    ("images.registry", "https://registry.example.com", "does not match"),
    ("images.registry", "registry example", "does not match"),
    ("images.local", "yes", "want boolean"),
    ("images.worker.repository", "", "does not match"),
    ("images.worker.tag", "a b", "does not match"),
    ("images.worker.digest", "sha256:12", "does not match"),
    ("images.worker.name", "x", "'name' not allowed"),
    ("images.worker", None, "missing property 'worker'"),
    ("images.router.repository", None, "missing property 'repository'"),
    ("operator", None, "missing property 'operator'"),
    ("imagePullPolicy", "IfAbsent", "must be one of"),
    ("imagePullSecrets", [{"name": "x"}], "want string"),
    ("imagePullSecrets", ["x", "x"], "items at 0 and 1 are equal"),
    ("watchNamespaces", "serving", "want array"),
    ("watchNamespaces", ["Serving"], "does not match"),
    ("watchNamespaces", ["*"], "does not match"),
    ("watchNamespaces", ["a", "a"], "items at 0 and 1 are equal"),
    ("nameOverride", "a_b", "does not match"),
    ("fullnameOverride", "-a", "does not match"),
    ("operator.workers", 0, "minimum"),
    ("operator.workers", 65, "maximum"),
    ("operator.workers", "8", "want integer"),
    ("operator.resyncSeconds", 9, "minimum"),
    ("operator.resyncSeconds", "10m", "want integer"),
    ("operator.logLevel", "DEBUG", "must be one of"),
    ("operator.logFormat", "yaml", "must be one of"),
    ("operator.replicas", 9, "maximum"),
    ("operator.leaseSeconds", 4, "minimum"),
    ("operator.upgradeFleets", "all", "want integer"),
    ("operator.leader", True, "'leader' not allowed"),
    ("resources.limits.memory", "1Gb", "does not match"),
    ("resources.memory", "1Gi", "'memory' not allowed"),
    ("nodeSelector", {"gpu": True}, "want string"),
    ("tolerations", {"key": "x"}, "want array"),
    ("affinity", {"nodeAfinity": {}}, "'nodeAfinity' not allowed"),
    ("topologySpreadConstraints", ["x"], "want object"),
    ("priorityClassName", "A", "does not match"),
    ("podLabels", {"a": 1}, "want string"),
    ("podAnnotations", ["a"], "want object"),
    ("serviceAccount", {"create": False}, "minLength: got 0, want 1"),
    ("serviceAccount.name", "a/b", "does not match"),
    ("serviceAccount.annotations", {"a": None}, "want string"),
    ("rbac.userRoles", "true", "want boolean"),
    ("rbac.create", True, "'create' not allowed"),
    ("crds.install", 1, "want boolean"),
    ("crds.keep", "no", "want boolean"),
    ("uninstall.timeoutSeconds", 5, "minimum"),
    ("uninstall.timeoutSeconds", "5m", "want integer"),
    ("uninstall.deleteFleets", "false", "want boolean"),
    ("metrics.enabled", True, "'enabled' not allowed"),
    ("metrics.serviceMonitor.interval", "30", "does not match"),
    ("metrics.podMonitor.labels", {"release": 1}, "want string"),
    ("metrics.prometheusRule.lostKVPercent", 101, "want 100"),
    ("grafana.dashboard.enabled", "on", "want boolean"),
    ("grafana.dashboards", {}, "'dashboards' not allowed"),
    ("test.fleet", "Chat", "does not match"),
    ("test.namespace", "a.b", "does not match"),
    ("test.port", 0, "minimum"),
    ("test.scheme", "tcp", "'http', 'https'"),
]


@pytest.fixture(scope="module")
def complaints(helm: Helm) -> list[str]:
    """helm's complaints about all of REFUSED, which it names together, a set of paths at a time."""
    said: list[str] = []
    rest = list(REFUSED)
    while rest:
        values: dict[str, Any] = {}
        later: list[tuple[str, Any, str]] = []
        taken: list[str] = []
        for path, value, words in rest:
            if any(_overlap(path, other) for other in taken):
                later.append((path, value, words))
            else:
                taken.append(path)
                values = merged(values, at(path, value))
        with pytest.raises(Refused) as refused:
            helm.render(values)
        lines = (line.strip() for line in refused.value.text.splitlines())
        said += [line for line in lines if line.startswith("- at ")]
        rest = later
    return said


def _overlap(a: str, b: str) -> bool:
    return f"{a}.".startswith(f"{b}.") or f"{b}.".startswith(f"{a}.")


@pytest.mark.parametrize(("path", "value", "said"), REFUSED)
def test_a_wrong_value_is_refused_by_name(
    complaints: list[str], path: str, value: object, said: str
) -> None:
    parent, _, _ = path.rpartition(".")
    named = "/".join(("", *parent.split("."))) if parent else ""
    of_parent = "not allowed" in said or "missing property" in said
    named = named if of_parent else "/" + path.replace(".", "/")
    matching = [line for line in complaints if line.startswith(f"- at '{named}") and said in line]
    assert matching, (value, [line for line in complaints if named in line])


CONTRADICTIONS = [
    ({"images": {"local": False}}, "make images push REGISTRY="),
    ({"images": {"registry": "r.example.com"}}, "exclude each other"),
    ({"imagePullPolicy": "Always"}, "would ask a registry"),
    ({"uninstall": {"deleteFleets": False}}, "needs crds.keep=true"),
]


@pytest.mark.parametrize(("values", "said"), CONTRADICTIONS)
def test_values_that_contradict_each_other_are_refused(
    helm: Helm, values: dict[str, Any], said: str
) -> None:
    with pytest.raises(Refused, match=re.escape(said)):
        helm.render(values)


ACCEPTED = [
    {"global": {"anything": 1}},
    {"images": {"local": False, "registry": "registry.example.com:5000/team/a"}},
    {"imagePullPolicy": "Never"},
    {"resources": {"limits": {"cpu": 2, "memory": "1.5Gi", "nvidia.com/gpu": "1"}}},
    {"resources": {"requests": {"cpu": 0.5}}},
    {"uninstall": {"deleteFleets": False}, "crds": {"keep": True}},
    {"uninstall": {"deleteFleets": False}, "crds": {"install": False}},
    {"serviceAccount": {"create": False, "name": "made-elsewhere"}},
    {"affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {}}}},
]


@pytest.mark.parametrize("values", ACCEPTED)
def test_sensible_values_are_accepted(helm: Helm, values: dict[str, Any]) -> None:
    assert helm.render(values)


def test_the_chart_lints_without_a_warning(helm: Helm) -> None:
    said = helm.run("lint", "--strict", str(CHART), f"--values={helm.values_file({})}")
    assert "0 chart(s) failed" in said
    assert "[WARNING]" not in said


def test_a_kubernetes_that_is_too_old_is_refused(helm: Helm) -> None:
    with pytest.raises(Refused, match=r"requires kubeVersion: >=1\.29"):
        helm.render(kube_version="1.28.9")
    assert helm.render(kube_version="v1.29.0-gke.1")


def _objects(schema: dict[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Path and schema of every object with named properties, references followed."""
    if "$ref" in schema:
        schema = SCHEMA["definitions"][schema["$ref"].rpartition("/")[2]]
    if "properties" in schema:
        yield path, schema
        for name, below in schema["properties"].items():
            yield from _objects(below, f"{path}.{name}".lstrip("."))


def test_the_schema_knows_the_values_of_the_chart_and_no_others() -> None:
    named = {
        f"{path}.{name}".lstrip(".")
        for path, schema in _objects(SCHEMA)
        for name in schema["properties"]
    }
    ends = {path for path in named if not any(p.startswith(f"{path}.") for p in named)}
    free = {"affinity.nodeAffinity", "affinity.podAffinity", "affinity.podAntiAffinity", "global"}
    free |= {"resources.requests", "resources.limits", "grafana.dashboard.labels"}
    free |= {"checkov.skip", "checkov.skipInTest"}
    known = {path for path, _ in leaves(VALUES)}
    maps = ("affinity", "resources", "grafana.dashboard.labels", "checkov.")
    assert ends - free == {path for path in known if not path.startswith(maps)}


def test_the_schema_lets_nothing_through_that_it_does_not_name() -> None:
    loose = [path for path, schema in _objects(SCHEMA) if schema["additionalProperties"]]
    assert not loose


def _documented() -> dict[str, str]:
    rows = re.findall(r"^\| `([^`]+)` \| `([^`]*)` \| \S", (CHART / "README.md").read_text(), re.M)
    assert len(rows) == len(dict(rows))
    return dict(rows)


def test_every_value_is_in_the_readme_with_its_default() -> None:
    documented = {path: yaml.safe_load(text) for path, text in _documented().items()}
    for path, value in leaves(VALUES):
        # A map of quantities or labels is one row.
        row = path if path in documented else path.rpartition(".")[0]
        found: Any = VALUES
        for name in row.split("."):
            found = found[name]
        assert row in documented, f"{path} is not in README.md"
        assert documented[row] == found, row
        assert found is value or value in found.values()
    assert not [path for path in documented if _missing(path)]


def _missing(path: str) -> bool:
    found: Any = VALUES
    for name in path.split("."):
        if name not in found:
            return True
        found = found[name]
    return False


def test_the_defaults_pass_the_schema_once_the_images_are_named(helm: Helm) -> None:
    assert helm.render(merged(VALUES, {"images": {"local": True}}))
