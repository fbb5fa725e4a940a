"""Each numbered fact of the articles on ranks, and on what layouts cost, has a test.

xpyd was built after a series of articles; their facts and figures are numbered. A test of a fact
names the number in its docstring: `Article fact 36.`, `Article facts 14 and 16.`
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
NUMBERS = [*range(31, 60), *range(61, 68)]
_NAMED = re.compile(r"Article facts? (\d+(?: and \d+)*)\.")


@pytest.fixture(scope="module")
def tested() -> dict[int, list[str]]:
    """The tests of each fact, by its number."""
    found: dict[int, list[str]] = {}
    for path in TESTS.rglob("test_*.py"):
        for node in ast.parse(path.read_text()).body:
            if not isinstance(node, ast.FunctionDef) or not node.name.startswith("test_"):
                continue
            for named in _NAMED.findall(ast.get_docstring(node) or ""):
                for number in re.findall(r"\d+", named):
                    found.setdefault(int(number), []).append(f"{path.name}::{node.name}")
    return found


@pytest.mark.parametrize("number", NUMBERS)
def test_the_fact_has_a_test(number: int, tested: dict[int, list[str]]) -> None:
    assert tested.get(number), f"no test under {TESTS.name} says 'Article fact {number}.'"
