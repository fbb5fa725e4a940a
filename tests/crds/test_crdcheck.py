"""The CRDs and the table of fleets under the API server's own validation, without a server."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from typing import Any, cast

import pytest
import yaml

from tests.cluster.needs import skip_for
from tests.crds.crdcheck_program import Report, crdcheck, why_no_crdcheck
from tests.crds.fleets import FLEET, BadFleet, bad_fleets, good_fleets
from tests.operator.fleets import Document, changed
from xpyd_core.errors import UserError
from xpyd_operator.document.engine import Engine
from xpyd_operator.document.load import as_sent, load_fleet, parse_fleet, parse_object
from xpyd_operator.document.pod_template import QUANTITY_PATTERN, pod_mistakes

pytestmark = pytest.mark.cluster
NOT_ALL_CHECKED = (
    "<nil>: Invalid value: null: some validation rules were not checked because the object was "
    "invalid; correct the existing errors to complete validation"
)
CASES = bad_fleets()
GOOD = good_fleets()


@pytest.fixture(scope="module", autouse=True)
def _crdcheck_can_run() -> None:
    skip_for(why_no_crdcheck())


@pytest.fixture(scope="module")
def bad() -> Report:
    return crdcheck((case.object, case.old) for case in CASES)


@pytest.fixture(scope="module")
def good() -> Report:
    texts = (yaml.safe_load(path.read_text()) for path in GOOD.values())
    # What kubectl sends: dates are text in JSON.
    return crdcheck((as_sent(json.loads(json.dumps(text, default=str))), None) for text in texts)


def test_the_api_server_takes_the_crds(bad: Report) -> None:
    # Structure, defaults, and rules that compile and cost little enough.
    assert bad.crds == {"inferencefleets.xpyd.dev": [], "inferencefleetpools.xpyd.dev": []}


@pytest.mark.parametrize("index", range(len(CASES)), ids=[case.name for case in CASES])
def test_the_api_server_refuses_a_bad_fleet_for_its_one_mistake(bad: Report, index: int) -> None:
    case = CASES[index]
    errors = [line for line in bad.verdicts[index].errors if line != NOT_ALL_CHECKED]
    assert sorted(errors) == sorted((case.says, *case.also))


@pytest.mark.parametrize("index", range(len(GOOD)), ids=list(GOOD))
def test_a_good_fleet_has_the_same_defaults_for_the_api_server_and_for_us(
    good: Report, index: int
) -> None:
    verdict = good.verdicts[index]
    assert verdict.errors == ()
    ours = load_fleet(list(GOOD.values())[index])
    assert parse_object(verdict.object).spec.model_dump() == ours.spec.model_dump()


def test_what_one_of_the_two_refuses_the_other_refuses_too() -> None:
    documents = list(_random_documents(random.Random(4), 1500))
    report = crdcheck((document, None) for document in documents)
    both = {"taken": 0, "refused": 0}
    for document, verdict in zip(documents, report.verdicts, strict=True):
        ours = _is_refused(document)
        assert ours == bool(verdict.errors), (document, verdict.errors)
        both["refused" if ours else "taken"] += 1
    assert min(both.values()) > 100, both


def _is_refused(document: Document) -> bool:
    try:
        fleet = parse_fleet(json.dumps(document).encode(), source="f")
    except UserError:
        return True
    templates = (fleet.spec.router.template, *(pool.template for pool in fleet.spec.pools))
    return any(list(pod_mistakes("", (template or {}).get("spec"))) for template in templates)


BAD_TEMPLATES: dict[str, tuple[Document, str, str]] = {
    "a misspelt field of a container": (
        {"containers": [{"name": "engine", "resorces": {"limits": {"cpu": 1}}}]},
        'unknown field "AT.containers[0].resorces"',
        "AT.containers[0].resorces: not a field of Container; did you mean resources?",
    ),
    "a misspelt field of the pod": (
        {"nodeSelectors": {"a": "b"}},
        'unknown field "AT.nodeSelectors"',
        "AT.nodeSelectors: not a field of PodSpec; did you mean nodeSelector?",
    ),
    "a number as the value of a variable": (
        {"containers": [{"name": "engine", "env": [{"name": "A", "value": 1}]}]},
        'AT.containers[0].env[0].value: Invalid value: "integer": '
        'AT.containers[0].env[0].value in body must be of type string: "integer"',
        "AT.containers[0].env[0].value: expected string, got 1",
    ),
    "text in place of a list": (
        {"tolerations": "gpu"},
        'AT.tolerations: Invalid value: "string": '
        'AT.tolerations in body must be of type array: "string"',
        "AT.tolerations: expected a list",
    ),
    "text in place of a map": (
        {"affinity": {"nodeAffinity": "gpu"}},
        'AT.affinity.nodeAffinity: Invalid value: "string": '
        'AT.affinity.nodeAffinity in body must be of type object: "string"',
        "AT.affinity.nodeAffinity: expected a map",
    ),
    "text in place of a boolean": (
        {"hostNetwork": "yes"},
        'AT.hostNetwork: Invalid value: "string": '
        'AT.hostNetwork in body must be of type boolean: "string"',
        "AT.hostNetwork: expected boolean, got 'yes'",
    ),
    "a number as a node's label": (
        {"nodeSelector": {"gpus": 8}},
        'AT.nodeSelector.gpus: Invalid value: "integer": '
        'AT.nodeSelector.gpus in body must be of type string: "integer"',
        "AT.nodeSelector[gpus]: expected string, got 8",
    ),
    "a size of an unknown unit": (
        {"overhead": {"memory": "4GB"}},
        'AT.overhead.memory: Invalid value: "4GB": '
        f"AT.overhead.memory in body should match '{QUANTITY_PATTERN}'",
        "AT.overhead[memory]: expected a quantity like 500m, 2 or 4Gi, got '4GB'",
    ),
}


@pytest.mark.parametrize(("spec", "servers", "ours"), BAD_TEMPLATES.values(), ids=BAD_TEMPLATES)
@pytest.mark.parametrize("place", ["pools.0", "router"])
def test_a_mistake_in_a_template_is_refused_when_the_document_is_applied(
    place: str, spec: Document, servers: str, ours: str
) -> None:
    """It showed when the Deployment was applied, or when its pods were made."""
    bad = changed(FLEET, {f"spec.{place}.template.spec": spec})
    at = "spec.pools[0].template.spec" if place == "pools.0" else "spec.router.template.spec"
    (verdict,) = crdcheck([(bad, None)]).verdicts
    errors = [line for line in verdict.errors if line != NOT_ALL_CHECKED]
    assert errors == [servers.replace("AT", at)]
    assert list(pod_mistakes(at, spec)) == [ours.replace("AT", at)]


def test_what_pod_templates_may_say_is_taken_with_its_values() -> None:
    """Sizes as numbers, ports by name, maps of any keys; null is absent."""
    spec = {
        "nodeSelector": {"gpu.example/kind": "h200"},
        "serviceAccountName": None,
        "tolerations": [{"key": "gpu", "operator": "Exists", "tolerationSeconds": 30}],
        "topologySpreadConstraints": [
            {"maxSkew": 1, "labelSelector": {"matchLabels": {"a": "b"}}, "topologyKey": "zone"}
        ],
        "containers": [
            {
                "name": "engine",
                "resources": {"limits": {"cpu": 0.5, "memory": "200Gi"}, "requests": {"cpu": 2}},
                "startupProbe": {"failureThreshold": 900},
                "securityContext": {"runAsUser": 7, "capabilities": {"add": ["IPC_LOCK"]}},
                "lifecycle": {"preStop": {"httpGet": {"port": "http", "path": "/x"}}},
            }
        ],
        "volumes": [
            {"name": "a", "emptyDir": {"sizeLimit": 1000000}},
            {"name": "b", "csi": {"driver": "d", "volumeAttributes": {"x": "y"}}},
            {
                "name": "c",
                "ephemeral": {"volumeClaimTemplate": {"spec": {"storageClassName": "s"}}},
            },
        ],
    }
    (verdict,) = crdcheck([(changed(FLEET, {"spec.pools.0.template.spec": spec}), None)]).verdicts
    assert verdict.errors == ()
    kept = verdict.object["spec"]["pools"][0]["template"]["spec"]
    assert kept == {key: value for key, value in spec.items() if value is not None}
    assert list(pod_mistakes("spec", spec)) == []


def _with_args(args: list[str], connector: str) -> Document:
    engine = {"type": "VLLM", "connector": connector, "image": "v", "args": args}
    return changed(FLEET, {"spec.engine": engine, "spec.model.uri": "file:///m"})


@pytest.mark.parametrize("connector", ["Xpyd", "Nixl"])
def test_the_api_server_reads_the_name_of_a_flag_as_we_do(connector: str) -> None:
    """Whole, cut short, longer, in other letters, with what may be behind it."""
    lists = [re.match(r"leave out (-[^:]+): ", rule.message) for rule in Engine.rules]
    names = {name.strip("*") for found in lists if found for name in found[1].split(", ")}
    starts = {name[:end] for name in names for end in range(len(name) + 1)} | {"-dc", "-ep"}
    ends = ("", "x", "=1", ".a=1", "_")
    args = sorted({f"{start}{end}" for start in starts for end in ends})
    args += [arg.replace("-", "_").replace("__", "--", 1) for arg in args]
    args = random.Random(7).sample(args, 150)
    documents = [_with_args([arg], connector) for arg in args]
    verdicts = crdcheck((document, None) for document in documents).verdicts
    refused = [bool(verdict.errors) for verdict in verdicts]
    assert refused == [_is_refused(document) for document in documents]
    assert min(refused.count(True), refused.count(False)) > 20


@pytest.mark.parametrize("start", ["", "--", "--x="])
def test_as_many_and_as_long_flags_as_may_be_cost_the_api_server_little_enough(start: str) -> None:
    args = [start + "_" * (1024 - len(start))] * 128
    (verdict,) = crdcheck([(_with_args(args, "Xpyd"), None)]).verdicts
    assert verdict.errors == ()


def _random_documents(rng: random.Random, count: int) -> Iterator[Document]:
    """A good document with values of good and bad cases, and junk, in places where they may be."""
    known = list(_values())
    junk: list[Any] = [None, True, 0, -1, 7, 2**40, "", "a", "A b", "7Gi", "50%", [], {}, ["a"]]
    for _ in range(count):
        document = FLEET
        for _ in range(rng.randint(1, 3)):
            path, value = rng.choice(known)
            chosen = rng.choice(junk) if rng.random() < 0.3 else value
            try:
                document = changed(document, {path: chosen})
            except (TypeError, AttributeError, KeyError, IndexError):
                continue  # an earlier change took the place away
        yield document


def _values() -> Iterator[tuple[str, Any]]:
    """Dotted path and value of every leaf of every good and bad document."""
    documents: list[Any] = [yaml.safe_load(path.read_text()) for path in GOOD.values()]
    documents += [case.object for case in CASES if _is_small(case)]
    for document in documents:
        yield from _leaves(document["spec"], "spec")


def _is_small(case: BadFleet) -> bool:
    spec: Any = case.object.get("spec")
    return case.kind == "InferenceFleet" and isinstance(spec, dict) and len(str(case)) < 2000


def _is_map(item: object) -> bool:
    return isinstance(item, dict)


def _leaves(node: Any, path: str) -> Iterator[tuple[str, Any]]:
    children: list[tuple[str, Any]] = []
    if isinstance(node, dict):
        fields = cast("Document", node)
        children = [(key, child) for key, child in fields.items() if "." not in key]
    elif isinstance(node, list):
        items = cast("list[Any]", node)
        children = [(str(i), item) for i, item in enumerate(items[:2]) if _is_map(item)]
    for key, child in children:
        yield from _leaves(child, f"{path}.{key}")
    if not children and not isinstance(node, float):
        yield path, json.loads(json.dumps(node, default=str))
