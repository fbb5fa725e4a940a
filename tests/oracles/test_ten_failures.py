"""Article fact 67: the page of ten failures has the facts of each, and the tests it names exist."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from xpyd_worker.ranks.start.preflight import ADVISED_FILES

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/parallel-failures.md").read_text()
# Symptom and cause of each, and what its section must name.
FAILURES = [
    ("hangs for 10 minutes in NCCL", "sockets", ("Using network Socket", "NCCL_IB_DISABLE")),
    ("10 times slower", "ring", ("NCCL_COLLNET_ENABLE", "NCCL_DEBUG=INFO")),
    ("30 %", "too few micro-batches", ("nsys", "--max-num-seqs")),
    ("too many open files at TP 8", "file limit", ("ulimit -n", f"{ADVISED_FILES:,}")),
    ("never becomes ready", "not enough devices", ("Unschedulable", "resources.gpus")),
    ("prefix cache hits collapse", "session affinity", ("SessionAffinity",)),
    ("all-to-all", "top_k x batch", ("top_k", "--max-num-seqs")),
    ("over 300 ms per token", "TP across nodes", ("parallelism.tensor", "resources.gpus")),
    ("custom all-reduce is off", "no NVLink", ("nvidia-smi topo -m", "`NV`")),
    ("hangs, rarely", "graph", ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "--enforce-eager")),
]
NUMBERS = range(1, 11)


def row(number: int) -> list[str]:
    """Symptom and cause in the page's table."""
    found = re.search(rf"^\| \[{number}\]\(#[^)]*\) \| (.*) \| (.*) \|$", PAGE, re.M)
    assert found is not None
    return [found[1], found[2]]


def section(number: int) -> str:
    """All that stands below the failure's heading."""
    found = re.search(rf"^## {number}\. .*?(?=^## |\Z)", PAGE, re.M | re.S)
    assert found is not None
    return found[0]


@cache
def functions_of(path: str) -> frozenset[str]:
    """Names of the test functions in a file."""
    module = ast.parse((ROOT / path).read_text())
    return frozenset(each.name for each in module.body if isinstance(each, ast.FunctionDef))


def test_there_are_ten_failures() -> None:
    """Article fact 67."""
    assert len(FAILURES) == len(NUMBERS)
    numbers = re.findall(r"^## (\d+)\. ", PAGE, re.M)
    assert [int(number) for number in numbers] == list(NUMBERS)


@pytest.mark.parametrize("number", NUMBERS)
def test_each_has_its_symptom_its_cause_and_what_shows_it(number: int) -> None:
    """Article fact 67."""
    symptom, cause, names = FAILURES[number - 1]
    shown = row(number)
    assert symptom in shown[0]
    assert cause in shown[1]
    text = section(number)
    assert text.splitlines()[0].removeprefix(f"## {number}. ").lower() == shown[0].lower()
    for part in ("See", "By design", "Fix", "Tests"):
        assert f"- **{part}**: " in text
    for name in names:
        assert name in text


@pytest.mark.parametrize("number", NUMBERS)
def test_the_tests_that_a_failure_names_exist(number: int) -> None:
    """Article fact 67."""
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", section(number))
    assert named
    for path, name in named:
        assert name in functions_of(path), f"{path}::{name}"


@pytest.mark.parametrize("number", NUMBERS)
def test_the_links_of_the_table_lead_to_the_sections(number: int) -> None:
    """Article fact 67."""
    heading = section(number).splitlines()[0].removeprefix("## ")
    anchor = re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
    assert f"[{number}](#{anchor})" in PAGE


def test_what_is_out_of_date_is_not_advised() -> None:
    # Out of date in the articles: an algorithm list enables nothing; limits.conf takes no commands.
    assert "`NCCL_ALGO=Tree,Ring` forbids" in PAGE
    assert "not the shell's command" in section(4)
    assert "is the name of older versions" in section(10)
