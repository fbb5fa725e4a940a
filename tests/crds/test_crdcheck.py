"""The CRDs and the table of fleets under the API server's own validation, without a server."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any, cast

import pytest
import yaml

from tests.cluster.needs import skip_for
from tests.crds.crdcheck_program import Report, crdcheck, why_no_crdcheck
from tests.crds.fleets import FLEET, BadFleet, bad_fleets, good_fleets
from tests.operator.fleets import Document, changed
from xpyd_core.errors import UserError
from xpyd_operator.document.load import as_sent, load_fleet, parse_fleet, parse_object

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
        parse_fleet(json.dumps(document).encode(), source="f")
    except UserError:
        return True
    return False


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
