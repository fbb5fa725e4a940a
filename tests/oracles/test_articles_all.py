"""Each number of the oracles on ranks, and on what layouts cost, has tests of its name."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
NUMBERS = [*range(31, 54), *range(61, 68)]


@pytest.fixture(scope="module")
def named() -> dict[int, list[str]]:
    """By number, what is named after it."""
    found: dict[int, list[str]] = {}
    for path in TESTS.rglob("test_*.py"):
        for node in ast.parse(path.read_text()).body:
            name = node.name if isinstance(node, ast.FunctionDef) else ""
            if match := re.match(r"test_((?:\d+_(?:and_)?)+)", name):
                for number in re.findall(r"\d+", match[1]):
                    found.setdefault(int(number), []).append(f"{path.name}::{name}")
    return found


@pytest.mark.parametrize("number", NUMBERS)
def test_it_has_a_test(number: int, named: dict[int, list[str]]) -> None:
    assert named.get(number), f"no test_{number}_... in {TESTS.name}"
