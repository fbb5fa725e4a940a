"""docs/troubleshooting.md has every reason that the operator gives, and shows what it says."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "troubleshooting.md"
LIFE = Path(__file__).parent / "testdata" / "status" / "life.txt"
PARTS = [
    *(ROOT / "operator/xpyd_operator/status").glob("*.py"),
    *(ROOT / "operator/xpyd_operator/controller").rglob("*.py"),
]
_CAMEL = re.compile(r"[A-Z][A-Za-z]{3,}")
_POD = re.compile(r"chat-(\w+)-[0-9a-f]{8}-5d9c7b8f4d-\w+")
KUBERNETES = {"Evicted"}
KUBERNETES |= {"NotFound", "AccessDenied", "VolumeFull", "ChecksumMismatch", "InvalidModel"}
"""What others write and we pass on; the page explains what is common."""
KINDS = {
    "KVTransferVerified",
    "Waiting",
    "Capacity",
    "Degraded",
    "Drifted",
    "Progressing",
    "Available",
}
KINDS |= {
    "CapacityAvailable",
    "FieldsIgnored",
    "KeyRotated",
    "OtherRelease",
    "RolesReady",
    "UpToDate",
}
PULLS = {"RegistryUnavailable", "SignatureValidationFailed"}
"""Kubelet's names of what is told as ImagePullBackOff."""


def _words(node: ast.AST) -> Iterator[str]:
    for part in ast.walk(node):
        if isinstance(part, ast.Constant) and isinstance(part.value, str):
            yield part.value


def _of_code() -> set[str]:
    """Every CamelCase word that is given to what makes reasons, or named in a table of them."""
    found: set[str] = set()
    for file in PARTS:
        for node in ast.walk(ast.parse(file.read_text())):
            called = (
                node.func.id
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
                else ""
            )
            if called in ("Problem", "Finding", "_Verdict", "KvVerdict", "Crash", "camel"):
                assert isinstance(node, ast.Call)
                found |= {word for argument in node.args[:3] for word in _words(argument)}
            names = _assigned(node)
            if names & {"reason", "_CANNOT_START", "MISSING_APIS", "INVALID", "INVALID_TEMPLATE"}:
                found |= set(_words(node))
            if names & {
                "_REASONS",
                "_LOOP",
                "RECREATED",
                "_OUT_OF_MEMORY",
                "_DRAINING",
                "LOST_ROLES",
                "_STAND_INS",
                "CUT",
                "NO_PAIR",
                "STANDS_BY",
                "UNDONE",
            }:
                found |= set(_words(node))
            if isinstance(node, ast.FunctionDef) and node.name == "_movement":
                found |= set(_words(node))
    return {word for word in found if _CAMEL.fullmatch(word)} - KINDS - PULLS


def _assigned(node: ast.AST) -> set[str]:
    targets = node.targets if isinstance(node, ast.Assign) else []
    if isinstance(node, ast.AnnAssign):
        targets = [node.target]
    return {target.id for target in targets if isinstance(target, ast.Name)}


def _of_page() -> set[str]:
    """The first cells of the tables of reasons."""
    cells = re.findall(r"^\| ([A-Z][A-Za-z, ]+?) \|", PAGE.read_text(), re.M)
    named = {word for cell in cells for word in _CAMEL.findall(cell)}
    return named - KINDS


def test_every_reason_is_on_the_page_and_the_page_has_no_other() -> None:
    code, page = _of_code(), _of_page()
    assert {"CrashLoopBackOff", "NameConflict", "Recovering", "Serving"} <= code
    told_elsewhere = {"Unschedulable", "Sufficient"}
    assert code - page == told_elsewhere
    assert page - code == KUBERNETES
    for reason in told_elsewhere:
        assert reason in PAGE.read_text()


def test_conditions_shown_on_the_page_are_told_so_in_a_fleets_life() -> None:
    golden = _POD.sub(r"\1-POD", LIFE.read_text())
    shown = re.findall(r"^(\w+)=(\w+) (\w+: .*)$", PAGE.read_text(), re.M)
    assert len(shown) > 8
    for kind, status, words in shown:
        told = _POD.sub(r"\1-POD", words)
        # One line of the page may be a part of a longer one.
        lines = [line for line in golden.splitlines() if re.match(rf"  {kind} +{status} ", line)]
        reason, _, message = told.partition(": ")
        assert any(reason in line and message in line for line in lines), (kind, told)
