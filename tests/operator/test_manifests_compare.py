"""desired_hash and contains: what the API server adds is no drift, what somebody changed is."""

from __future__ import annotations

import copy
from fractions import Fraction
from typing import Any

import pytest

from tests.operator.object_samples import objects_of, sample_fleet
from xpyd_operator.controller.decision.compare import contains, desired_hash, quantity_value


@pytest.mark.parametrize(
    ("observed", "desired"),
    [
        ({"a": 1, "b": 2}, {"a": 1}),
        ({"a": {"b": 1, "c": 2}}, {"a": {"b": 1}}),
        ({}, {"a": False, "b": 0, "c": "", "d": {}, "e": [], "f": None}),
        ({"a": None}, {"a": {}}),
        ({"a": [1, 2]}, {"a": [1, 2]}),
        ({"env": [{"name": "X"}]}, {"env": [{"name": "X", "value": ""}]}),
        # Others may add items where items have names.
        (
            {"ports": [{"name": "a", "port": 1}, {"name": "b", "port": 2, "nodePort": 3}]},
            {"ports": [{"name": "b", "port": 2}]},
        ),
        ({"o": [{"uid": "2"}, {"uid": "1", "x": 1}]}, {"o": [{"uid": "1"}]}),
        # One volume may be mounted twice: the path tells the mounts apart.
        (
            {"m": [{"name": "v", "mountPath": "/a"}, {"name": "v", "mountPath": "/b"}]},
            {"m": [{"name": "v", "mountPath": "/b"}, {"name": "v", "mountPath": "/a"}]},
        ),
        ({"from": [{"podSelector": {}, "x": 1}]}, {"from": [{"podSelector": {}}]}),
        ({"limits": {"cpu": "500m"}}, {"limits": {"cpu": 0.5}}),
        ({"limits": {"cpu": "2"}}, {"limits": {"cpu": 2}}),
        ({"requests": {"memory": "1Gi"}}, {"requests": {"memory": "1024Mi"}}),
        ({"requests": {"memory": "8e9"}}, {"requests": {"memory": "8G"}}),
        ({"emptyDir": {"sizeLimit": "64Mi"}}, {"emptyDir": {"sizeLimit": "67108864"}}),
        ({"requests": {"odd": "x"}}, {"requests": {"odd": "x"}}),
    ],
)
def test_what_is_wanted_is_there(observed, desired):
    assert contains(observed, desired)


@pytest.mark.parametrize(
    ("observed", "desired"),
    [
        ({"a": 1}, {"a": 2}),
        ({}, {"a": 1}),
        ({"a": "1"}, {"a": 1}),
        ({"a": True}, {"a": 1}),
        ({"a": 1}, {"a": True}),
        ({"a": 1}, {"a": 0}),
        ({"a": True}, {"a": False}),
        ({"a": {"b": 1}}, {"a": 1}),
        ({"a": 1}, {"a": {"b": 1}}),
        ({"a": 1}, {"a": [1]}),
        ({"a": [1, 2]}, {"a": [2, 1]}),
        ({"a": [1, 2]}, {"a": [1]}),
        ({"a": [{"x": 1}, {"x": 2}]}, {"a": [{"x": 1}]}),
        ({"a": [{"name": "x", "v": 1}]}, {"a": [{"name": "x", "v": 2}]}),
        ({"a": [{"name": "y"}]}, {"a": [{"name": "x"}]}),
        # Two of one name: in order, since the name does not tell them apart.
        ({"a": [{"name": "x", "v": 1}]}, {"a": [{"name": "x"}, {"name": "x"}]}),
        ({"limits": {"cpu": "501m"}}, {"limits": {"cpu": 0.5}}),
        ({"limits": {"cpu": "m"}}, {"limits": {"cpu": 0.5}}),
        ({"limits": {"cpu": "1"}}, {"limits": {"cpu": True}}),
        # Only quantities are compared by value.
        ({"labels": {"rev": "1e3"}}, {"labels": {"rev": "1000"}}),
        (None, {"a": 1}),
    ],
)
def test_what_is_wanted_is_not_there(observed, desired):
    assert not contains(observed, desired)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1", 1), (2, 2), (0.5, Fraction(1, 2)), ("500m", Fraction(1, 2)), ("1.5Gi", 3 * 2**29),
        ("8e9", 8 * 10**9), ("1E3", 1000), ("1E", 10**18), ("1k", 1000), ("5n", Fraction("5e-9")),
        ("-1", -1), (".5", Fraction(1, 2)), ("3u", Fraction(3, 10**6)), ("1Ei", 2**60),
        ("", None), ("x", None), ("1K", None), ("1 Gi", None), (True, None), (None, None),
        ([], None), ("1e", None), ("--1", None),
    ],
)  # fmt: skip
def test_quantities_are_read_exactly(text, value):
    assert quantity_value(text) == value


def defaulted(obj: dict[str, Any]) -> dict[str, Any]:
    """The object as an API server and its controllers give it back."""
    found = copy.deepcopy(obj)
    found["metadata"] |= {
        "uid": "u",
        "resourceVersion": "7",
        "generation": 1,
        "creationTimestamp": "2026-01-01T00:00:00Z",
        "annotations": {"deployment.kubernetes.io/revision": "1"},
        "managedFields": [{"manager": "xpyd-operator"}],
    }
    found["status"] = {"conditions": []}
    match obj["kind"]:
        case "Deployment":
            _default_pod(found["spec"]["template"])
        case "Service":
            found["spec"] |= {
                "clusterIP": obj["spec"].get("clusterIP", "10.96.0.7"),
                "clusterIPs": ["10.96.0.7"],
                "ipFamilies": ["IPv4"],
                "sessionAffinity": "None",
                "internalTrafficPolicy": "Cluster",
            }
            found["spec"]["ports"][0]["nodePort"] = 30007
        case _:
            pass
    return found


def _default_pod(template: dict[str, Any]) -> None:
    template["metadata"]["creationTimestamp"] = None
    spec = template["spec"]
    spec |= {
        "restartPolicy": "Always",
        "dnsPolicy": "ClusterFirst",
        "schedulerName": "default-scheduler",
        "serviceAccount": spec["serviceAccountName"],
    }
    for container in spec["containers"]:
        container |= {"terminationMessagePath": "/dev/termination-log"}
        container["env"] = [
            {k: v for k, v in item.items() if v != ""} for item in container.get("env", [])
        ]
        for item in container["env"]:
            if "fieldRef" in item.get("valueFrom", {}):
                item["valueFrom"]["fieldRef"]["apiVersion"] = "v1"
        for mount in container.get("volumeMounts", []):
            if mount.get("readOnly") is False:
                del mount["readOnly"]
        for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
            if probe in container:
                container[probe] |= {"successThreshold": 1}
                container[probe]["httpGet"]["scheme"] = "HTTP"
        for kind in container.get("resources", {}).values():
            if isinstance(kind, dict):
                kind |= {name: str(value) for name, value in kind.items()}


@pytest.mark.parametrize("name", ["minimal", "full", "cpu", "pvc", "dra"])
def test_defaults_of_the_api_server_are_no_drift(name):
    for obj in objects_of(sample_fleet(name)):
        assert contains(defaulted(obj), obj)


def scalars(part: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The paths of all values that are no map and no list."""
    if isinstance(part, dict):
        return [p for key, value in part.items() for p in scalars(value, (*path, key))]
    if isinstance(part, list):
        return [p for index, value in enumerate(part) for p in scalars(value, (*path, index))]
    return [path]


@pytest.mark.parametrize("name", ["minimal", "full", "cpu", "pvc", "dra"])
def test_every_value_that_somebody_changes_or_removes_is_noticed(name):
    for obj in objects_of(sample_fleet(name)):
        for *above, last in scalars(obj):
            for change in (change_value, remove_value):
                found = defaulted(obj)
                below: Any = found
                for key in above:
                    below = below[key]
                before = copy.deepcopy(below)
                change(below, last)
                same = below == before or not obj_value(obj, (*above, last))
                assert contains(found, obj) is (same and change is remove_value), (above, last)


def obj_value(obj: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        obj = obj[key]
    return obj


def change_value(below: Any, last: Any) -> None:
    below[last] = "somebody's"


def remove_value(below: Any, last: Any) -> None:
    if isinstance(below, list) or last in below:
        del below[last]


def test_a_hash_is_of_the_whole_object_and_of_nothing_else():
    obj = {"metadata": {"name": "a", "annotations": {"x": "y"}}, "spec": {"b": 1, "a": 2}}
    turned = {"spec": {"a": 2, "b": 1}, "metadata": {"annotations": {"x": "y"}, "name": "a"}}
    assert desired_hash(obj) == desired_hash(turned)
    assert desired_hash(obj) != desired_hash({**obj, "spec": {"b": 1, "a": 3}})
    assert len(desired_hash(obj)) == 16
