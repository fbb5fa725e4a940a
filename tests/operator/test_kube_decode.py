"""Documents that are deeper than Python can read."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xpyd_operator.kube.decode import MAX_DEPTH, measured, parse, shallow

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
