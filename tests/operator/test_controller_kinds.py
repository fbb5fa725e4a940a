"""Documents that are deeper than Python can read."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xpyd_operator.controller.decision.kinds import (
    FLEET,
    MAX_DEPTH,
    POD,
    Kind,
    measured,
    parse,
    parse_event,
    shallow,
    trim,
)

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=20,
)


def depth_of(value: Any) -> int:
    if isinstance(value, dict):
        value = list(value.values())
    return 1 + max(map(depth_of, value), default=0) if isinstance(value, list) else 0


def nested(levels: int) -> bytes:
    return b'{"a":' * levels + b"1" + b"}" * levels


@pytest.mark.parametrize("levels", [MAX_DEPTH + 1, 400, 1200, 9000])
def test_what_lies_too_deep_is_read_as_null_and_the_rest_is_kept(levels: int) -> None:
    body = b'{"items":[{"name":"bad","spec":' + nested(levels) + b'},{"name":"good"}]}'
    found = parse(body, measured)
    assert isinstance(found, dict)
    assert [item["name"] for item in found["items"]] == ["bad", "good"]
    assert depth_of(found) == MAX_DEPTH
    assert json.loads(shallow(body)) == found


def test_what_the_reader_cannot_walk_is_read_again_in_a_shallow_form() -> None:
    def walk(value: Any) -> Any:
        return {key: walk(inner) for key, inner in value.items()} if value.__class__ is dict else 1

    assert depth_of(parse(nested(900), walk)) == MAX_DEPTH


@given(JSON)
def test_what_is_not_deep_stays_as_it_is(value: Any) -> None:
    body = json.dumps({"a": value}).encode()
    assert shallow(body) == body
    assert parse(body, measured) == {"a": value}


@pytest.mark.parametrize("ready", [True, False])
def test_what_is_kept_of_a_pod_is_all_there_though_its_event_is_read_in_part(ready: bool) -> None:
    container = {"name": "engine", "image": "i", "args": ["x"], "resources": {"limits": {"a": "1"}}}
    pod = {
        "metadata": {
            **{name: name for name in ("name", "namespace", "uid", "resourceVersion")},
            **{name: {"a": "b"} for name in ("labels", "annotations")},
            "creationTimestamp": "2026-01-01T00:00:00Z",
            "deletionTimestamp": None if ready else "2026-01-01T00:00:00Z",
            "deletionGracePeriodSeconds": None if ready else 330,
            "finalizers": ["f"],
            "ownerReferences": [{"uid": "u"}],
            "managedFields": [{"manager": "m"}],
        },
        "spec": {
            "nodeName": "n",
            "volumes": [{"name": "v"}],
            "resourceClaims": [{"name": "c"}],
            "readinessGates": [{"conditionType": "g"}],
            "initContainers": [container],
            "containers": [container],
            "tolerations": [{"key": "t"}],
        },
        "status": {
            "phase": "Running",
            "conditions": [{"type": "Ready", "status": str(ready)}],
            "containerStatuses": [{"name": "engine", "ready": ready, "state": {}}],
        },
    }
    line = json.dumps({"type": "MODIFIED", "object": pod}).encode()
    event = parse_event(POD, line, lambda found: found)
    assert "managedFields" not in event["object"]["metadata"]
    assert trim(POD, event["object"]) == trim(POD, json.loads(line)["object"])


@pytest.mark.parametrize("kind", [POD, FLEET])
def test_an_error_in_a_watch_is_no_object_and_can_be_read(kind: Kind) -> None:
    gone = {"kind": "Status", "metadata": {}, "code": 410, "message": "too old"}
    line = json.dumps({"type": "ERROR", "object": gone}).encode()
    assert parse_event(kind, line, lambda found: found["type"]) == "ERROR"
