"""JSON Schema's own tests: what an accepted schema lets through, and what a refusal says.

The required tests of two drafts. scripts/agent_suites.py brings them in when the test runs.
"""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from decimal import Decimal, InvalidOperation
from functools import cache
from itertools import permutations
from typing import Any

import jsonschema_rs
import pytest

from bench.environments import NotHere
from scripts.agent_suites import json_schema_tests
from tests.worker.grammar_kit import BYTES, matchers_of
from tests.worker.test_grammar_random import answer
from xpyd_core.errors import ApiError
from xpyd_worker.grammar.matcher import Matcher
from xpyd_worker.grammar.spec import json_schema_grammar

pytestmark = [pytest.mark.soak, pytest.mark.patience(300)]
VALIDATORS: dict[str, Any] = {
    "draft2020-12": jsonschema_rs.Draft202012Validator,
    "draft7": jsonschema_rs.Draft7Validator,
}
CLOSED = "objects whose schema names members have no others, where it leaves that open"
FORMATS = "a format holds; for JSON Schema it says nothing unless asked"
NUMBERS = "a whole number is written without a fraction, and a constant as the schema has it"
SIBLINGS = "draft 7 alone does not read what is beside a $ref"
TOO_STRICT = {
    "additionalProperties are allowed by default": CLOSED,
    "anyOf complex types": CLOSED,
    "object properties validation": CLOSED,
    **{
        f"{name} format": FORMATS
        for name in (
            *("email", "ipv4", "ipv6", "hostname", "uri", "uuid"),
            *("date", "date-time", "time", "duration"),
        )
    },
    "const with 0 does not match other zero-like types": NUMBERS,
    "const with 1 does not match true": NUMBERS,
    "const with -2.0 matches integer and float types": NUMBERS,
    "float and integers are equal up to 64-bit representation limits": NUMBERS,
    "enum with 0 does not match false": NUMBERS,
    "enum with [0] does not match [false]": NUMBERS,
    "enum with 1 does not match true": NUMBERS,
    "enum with [1] does not match [true]": NUMBERS,
    "integer type matches integers": NUMBERS,
    "ref overrides any sibling keywords": SIBLINGS,
    "$ref prevents a sibling $id from changing the base uri": SIBLINGS,
}
"""Groups with a valid instance that no answer can be, and why."""
TOO_LAX = {"$ref prevents a sibling $id from changing the base uri": SIBLINGS}
"""Groups with an invalid instance that an answer can be."""
SAYS = re.compile(
    r"'multipleOf'|oneOf|patternProperty|Unimplemented keys: \[\"\$|"
    r"Unknown format|schema is false|expected a JSON schema|Resource '|Anchor '"
)
"""What names a keyword, or a reference, where the place does not end with one."""


@dataclass
class Seen:
    """What became of one draft's tests."""

    counts: Counter[str] = field(default_factory=Counter)
    lax: dict[str, str] = field(default_factory=dict)
    strict: dict[str, str] = field(default_factory=dict)
    unnamed: list[str] = field(default_factory=list)


def groups(draft: str) -> Iterator[dict[str, Any]]:
    try:
        folder = json_schema_tests() / draft
    except NotHere as error:
        pytest.skip(f"JSON Schema's tests cannot be had: {error}")
    for path in sorted(folder.glob("*.json")):
        yield from json.loads(path.read_text())


def written(value: Any) -> Iterator[str]:
    """The texts of a value: compact, with the members of the outermost object in each order."""
    some = list(permutations(value.items())) if isinstance(value, dict) else [None]
    for order in some[:24]:
        one = value if order is None else dict(order)
        yield json.dumps(one, separators=(",", ":"), ensure_ascii=False)


def can_be(start: Matcher, value: Any) -> bool:
    """Whether an answer can be the value."""
    for text in written(value):
        matcher = start.copy()
        if matcher.accept(list(text.encode())) and (matcher.is_finished or matcher.is_accepting):
            return True
    return False


def is_named(error: ApiError) -> bool:
    """Whether a refusal says which keyword or reference it is about."""
    place = (error.param or "").partition(".schema.")[2]
    return bool(place) or SAYS.search(str(error)) is not None


@cache
def seen(draft: str) -> Seen:
    found = Seen()
    for group in groups(draft):
        name = group["description"]
        try:
            (start,) = matchers_of(json_schema_grammar(group["schema"]), target=BYTES.target())
        except ApiError as error:
            found.counts["schemas refused"] += 1
            if not is_named(error):
                found.unnamed.append(f"{name}: {error}")
            continue
        found.counts["schemas accepted"] += 1
        for test in group["tests"]:
            may_be, kind = can_be(start, test["data"]), "valid" if test["valid"] else "invalid"
            found.counts[f"{kind} instances {'accepted' if may_be else 'rejected'}"] += 1
            if may_be != test["valid"]:
                wrong = found.strict if test["valid"] else found.lax
                wrong[name] = f"{test['description']}: {test['data']}"
    return found


@pytest.mark.parametrize("draft", VALIDATORS)
def test_what_json_schemas_tests_call_invalid_is_no_answer(draft: str) -> None:
    found = seen(draft)
    assert found.lax.keys() <= TOO_LAX.keys(), (found.counts, found.lax)
    assert found.counts["invalid instances rejected"] > 200, found.counts


@pytest.mark.parametrize("draft", VALIDATORS)
def test_what_they_call_valid_is_an_answer_but_for_what_we_know_of(draft: str) -> None:
    found = seen(draft)
    new = found.strict.keys() - TOO_STRICT.keys()
    assert not new, (found.counts, {name: found.strict[name] for name in new})
    assert found.counts["schemas accepted"] > 140, found.counts


def test_what_we_know_of_is_still_so() -> None:
    every = [seen(draft) for draft in VALIDATORS]
    assert TOO_STRICT.keys() == {name for found in every for name in found.strict}
    assert TOO_LAX.keys() == {name for found in every for name in found.lax}


@pytest.mark.parametrize("draft", VALIDATORS)
def test_each_refusal_names_the_keyword_or_the_reference(draft: str) -> None:
    found = seen(draft)
    assert not found.unnamed, found.counts
    assert found.counts["schemas refused"] > 0


@pytest.mark.parametrize("draft", VALIDATORS)
def test_answers_drawn_at_random_are_values_of_the_accepted_schemas(draft: str) -> None:
    rng, ended = random.Random(1), 0
    for group in groups(draft):
        if group["description"] in TOO_LAX:
            continue
        try:
            text = answer(group["schema"], rng)
            if text is None:  # it did not come to its end
                continue
            # A float would be infinite, or not quite what is written.
            value = json.loads(text, parse_float=Decimal)
        except (ApiError, InvalidOperation):
            continue  # refused, or with an exponent of twenty digits
        ended += 1
        validator = VALIDATORS[draft](group["schema"], validate_formats=True)
        assert validator.is_valid(value), (group["description"], text)
    assert ended > 100, f"{ended} answers ended"
