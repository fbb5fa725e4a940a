"""Changes the product in small ways, one at a time, and says which test notices.

    .venv/bin/python scripts/mutate.py --seed 7 --count 20 --package xpyd_router

A mutant is one change of one line: a comparison's border, an operator, a constant, a condition
negated, a call dropped. The seed chooses which. Each is made in a copy of the tree, never in the
tree itself. The tests that import the changed module run first, then all other quick tests of its
package, each part under a time limit. A test that fails with the mutant must pass without it.

Survivors say what no quick test asserts: a test is missing, or the mutant changes nothing that can
be seen. Modules that need a GPU are left out.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import itertools
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = {
    "xpyd_core": "core",
    "xpyd_kv": "kv_transfer",
    "xpyd_router": "router",
    "xpyd_worker": "worker_image",
    "xpyd_operator": "operator",
    "xpyd_tools": "tools",
}
NEEDS_GPU = re.compile(r"kernels/gpu/|/cuda\.py|/cuda_ipc\.py|copy_kernel|gpu_peers|peer_memory")
NOT_QUICK = "not gpu and not cluster and not vllm and not soak and not slow"
SLOW_FOLDERS = ("cluster", "e2e", "gpu", "bench", "docs", "images", "repo", "journeys")
NEAREST = 12  # test files of the first run at most

_COMPARE: dict[type[ast.cmpop], tuple[str, str]] = {
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.Is: ("is", "is not"),
    ast.IsNot: ("is not", "is"),
    ast.In: ("in", "not in"),
    ast.NotIn: ("not in", "in"),
}
_ARITHMETIC: dict[type[ast.operator], tuple[str, str]] = {
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", "//"),
    ast.FloorDiv: ("//", "*"),
    ast.Div: ("/", "*"),
    ast.Mod: ("%", "//"),
}
_LOGGING = re.compile(r"(\w+\.)*_?log(ger)?\.\w+\(|warnings\.warn\(")


@dataclass(frozen=True)
class Mutant:
    """One change: the text from `start` to `end` (offsets in the file) becomes `new`."""

    file: str
    line: int
    kind: str
    start: int
    end: int
    old: str
    new: str

    def applied(self, source: str) -> str:
        assert source[self.start : self.end] == self.old
        return source[: self.start] + self.new + source[self.end :]

    @property
    def change(self) -> str:
        old, new = (" ".join(text.split()) for text in (self.old, self.new))
        return f"{old[:40]} -> {new[:44]}"


@dataclass(frozen=True)
class Result:
    """`outcome`: caught, survived or timeout. `by`: the test that fails with the mutant."""

    mutant: Mutant
    outcome: str
    by: str
    seconds: float


class _Sites(ast.NodeVisitor):
    """Where a file can be changed."""

    def __init__(self, file: str, source: str) -> None:
        self._file, self._source = file, source
        self._lines = source.splitlines(keepends=True)
        self._starts = [0, *itertools.accumulate(map(len, self._lines))]
        self.found: list[Mutant] = []

    def _offset(self, line: int, column_bytes: int) -> int:
        text = self._lines[line - 1].encode()[:column_bytes].decode()
        return self._starts[line - 1] + len(text)

    def _span(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
        assert node.end_lineno is not None and node.end_col_offset is not None  # noqa: PT018
        end = self._offset(node.end_lineno, node.end_col_offset)
        return self._offset(node.lineno, node.col_offset), end

    def _add(self, kind: str, start: int, end: int, new: str) -> None:
        old, line = self._source[start:end], self._source.count("\n", 0, start) + 1
        self.found.append(Mutant(self._file, line, kind, start, end, old, new))

    def _between(self, kind: str, left: ast.expr, right: ast.expr, words: tuple[str, str]) -> None:
        """The operator between two operands, whatever brackets are around them."""
        start, end = self._span(left)[1], self._span(right)[0]
        word = re.escape(words[0]).replace(r"\ ", r"\s+")
        edge = r"\b" if words[0][0].isalpha() else ""
        if found := re.search(edge + word + edge, self._source[start:end]):
            self._add(kind, start + found.start(), start + found.end(), words[1])

    def visit_Compare(self, node: ast.Compare) -> None:
        if len(node.ops) == 1:
            words = _COMPARE[type(node.ops[0])]
            self._between("comparison", node.left, node.comparators[0], words)
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        is_text = any(
            isinstance(side, ast.JoinedStr)
            or (isinstance(side, ast.Constant) and isinstance(side.value, str))
            for side in (node.left, node.right)
        )
        if type(node.op) in _ARITHMETIC and not is_text:
            self._between("operator", node.left, node.right, _ARITHMETIC[type(node.op)])
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        words = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
        self._between("and/or", node.values[0], node.values[1], words)
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        start, end = self._span(node)
        if isinstance(node.value, bool):
            self._add("constant", start, end, str(not node.value))
        elif isinstance(node.value, int):
            self._add("constant", start, end, str(node.value + 1))

    def visit_If(self, node: ast.If) -> None:
        self._negate(node.test)
        self.generic_visit(node)

    def visit_IfExp(self, node: ast.IfExp) -> None:
        self._negate(node.test)
        self.generic_visit(node)

    def _negate(self, test: ast.expr) -> None:
        start, end = self._span(test)
        if (text := self._source[start:end]) not in (
            "TYPE_CHECKING",
            "__name__ == '__main__'",
            '__name__ == "__main__"',
        ):
            self._add("condition", start, end, f"not ({text})")

    def visit_Expr(self, node: ast.Expr) -> None:
        called = node.value.value if isinstance(node.value, ast.Await) else node.value
        start, end = self._span(node)
        if isinstance(called, ast.Call):
            if _LOGGING.match(self._source[start:end]):
                return
            self._add("call", start, end, "pass")
        self.generic_visit(node)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        for part in node.body:  # not the decorators, nor `frozen=True` of a Struct
            self.visit(part)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)  # an annotation is no behaviour


def mutants_of(file: str, source: str) -> list[Mutant]:
    """Every mutant of one file, in order of place."""
    sites = _Sites(file, source)
    sites.visit(ast.parse(source))
    return sorted(set(sites.found), key=lambda mutant: (mutant.start, mutant.end, mutant.kind))


def is_code(mutant: Mutant) -> bool:
    """Whether Python takes the changed file."""
    try:
        compile(mutant.applied((ROOT / mutant.file).read_text()), mutant.file, "exec")
    except (SyntaxError, ValueError):
        return False
    return True


def chosen(
    mutants: Sequence[Mutant],
    *,
    seed: int,
    count: int,
    compiles: Callable[[Mutant], bool] = is_code,
) -> list[Mutant]:
    """`count` mutants: each kind as often as the others, at most one on a line."""
    rng = random.Random(seed)
    by_kind: dict[str, list[Mutant]] = {}
    for mutant in mutants:
        by_kind.setdefault(mutant.kind, []).append(mutant)
    for some in by_kind.values():
        rng.shuffle(some)
    found: dict[tuple[str, int], Mutant] = {}
    while len(found) < count and any(by_kind.values()):
        kind = rng.choice([kind for kind, some in sorted(by_kind.items()) if some])
        mutant = by_kind[kind].pop()
        if compiles(mutant):
            found.setdefault((mutant.file, mutant.line), mutant)
    return list(found.values())


def module_of(file: str) -> str:
    """The dotted name of a file; that of a test begins with `tests`."""
    parts = Path(file).with_suffix("").parts
    parts = parts if parts[0] == "tests" else parts[1:]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(source: str) -> set[str]:
    """Modules of the product and of the tests that a file imports, anywhere in it."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return {name for name in found if name.split(".")[0] in (*PACKAGES, "tests")}


def ranked(module: str, imports: dict[str, set[str]]) -> list[tuple[int, str]]:
    """The test files that matter to `module`, the nearest first: 0 imports it and has its name,
    1 imports it, 2 imports it through a helper, 3 imports something of its package. `imports` is
    imports_of by file, tests and their helpers."""
    helpers = {module_of(file): file for file in imports}
    package, stem = module.split(".")[0], module.split(".")[-1]

    def through_helpers(file: str, seen: set[str]) -> set[str]:
        found = set(imports[file])
        for name in imports[file] & set(helpers):
            if helpers[name] not in seen:
                seen.add(helpers[name])
                found |= through_helpers(helpers[name], seen)
        return found

    ranks: list[tuple[int, str]] = []
    for file in imports:
        if not Path(file).name.startswith("test_") or Path(file).parts[1] in SLOW_FOLDERS:
            continue
        everything = through_helpers(file, {file})
        if module in imports[file]:
            ranks.append((0 if stem in Path(file).stem else 1, file))
        elif module in everything:
            ranks.append((2, file))
        elif any(name.split(".")[0] == package for name in everything):
            ranks.append((3, file))
    return sorted(ranks)


class Copy:
    """A copy of the tree, for one mutant after the other."""

    def __init__(self, folder: Path, *, limit_s: float, workers: int) -> None:
        self.root = folder / "tree"
        self._limit_s, self._workers = limit_s, workers
        leave_out = shutil.ignore_patterns(
            ".git", ".venv", ".*_cache", "__pycache__", ".hypothesis"
        )
        shutil.copytree(ROOT, self.root, ignore=leave_out, symlinks=True)
        (self.root / ".venv").symlink_to(ROOT / ".venv")
        paths = [str(self.root / path) for path in (".", *PACKAGES.values())]
        self._environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(paths),
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        files = sorted((self.root / "tests").rglob("*.py"))
        texts = {str(file.relative_to(self.root)): file.read_text() for file in files}
        self._imports = {name: imports_of(text) for name, text in texts.items()}

    def judge(self, mutant: Mutant) -> Result:
        """Run the tests with the mutant, the nearest first, until one fails."""
        began = time.monotonic()
        path = self.root / mutant.file
        source = path.read_text()
        tests = ranked(module_of(mutant.file), self._imports)
        near = [file for rank, file in tests if rank < 2][:NEAREST]
        rest = [file for _, file in tests if file not in near]
        outcome, by = "survived", ""
        for files in (near, rest):
            try:
                by = self._caught_by(mutant, path, source, files) if files else ""
            except subprocess.TimeoutExpired:
                outcome = "timeout"
                continue
            finally:
                path.write_text(source)
            if by:
                outcome = "caught"
                break
        return Result(mutant, outcome, by, time.monotonic() - began)

    def _caught_by(self, mutant: Mutant, path: Path, source: str, files: Sequence[str]) -> str:
        """The test that fails with the mutant, and again, and passes without it; empty: none. One
        that fails now and then is left out."""
        unsteady: list[str] = []
        while len(unsteady) < 4:
            path.write_text(mutant.applied(source))
            failed = self._first_failure([*files, *(f"--deselect={test}" for test in unsteady)])
            if not failed or self._first_failure([failed]):
                path.write_text(source)
                if not failed or not self._first_failure([failed]):
                    return failed
            unsteady.append(failed)
        return ""

    def _first_failure(self, tests: Sequence[str]) -> str:
        """The id of the first test that fails; empty: none does."""
        command = [str(ROOT / ".venv/bin/python"), "-m", "pytest", "-x", "-q", "-m", NOT_QUICK]
        if len(tests) > NEAREST:
            command += ["-n", str(self._workers), "--dist", "loadfile"]
        process = subprocess.Popen(
            [*command, "-p", "no:cacheprovider", "--tb=no", *tests],
            cwd=self.root,
            env=self._environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            output, _ = process.communicate(timeout=self._limit_s)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # what a test has left behind, too
            process.wait()
        if process.returncode in (0, 5):  # 5: no test was selected
            return ""
        found = re.search(r"^(?:FAILED|ERROR) (\S+?(?:\.py)(?:::[^\s\[]+)?)", output, re.M)
        return found[1] if found else tests[0]


def all_mutants(packages: Sequence[str]) -> Iterator[Mutant]:
    for package in packages:
        for path in sorted((ROOT / PACKAGES[package] / package).rglob("*.py")):
            file = str(path.relative_to(ROOT))
            if not NEEDS_GPU.search(file):
                yield from mutants_of(file, path.read_text())


def table(results: Sequence[Result]) -> str:
    rows = [
        (f"{r.mutant.file}:{r.mutant.line}", r.mutant.change, r.by or r.outcome.upper())
        for r in results
    ]
    counts = {
        word: sum(r.outcome == word for r in results) for word in ("caught", "survived", "timeout")
    }
    sums = ", ".join(f"{count} {word}" for word, count in counts.items())
    return "\n".join([*("  ".join(row) for row in rows), f"{len(results)} mutants: {sums}"])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=60, help="mutants (default 60)")
    parser.add_argument(
        "--first", type=int, default=1, metavar="N", help="go on with the N-th of them (default 1)"
    )
    parser.add_argument(
        "--package", action="append", choices=PACKAGES, help="only of this; repeat it"
    )
    parser.add_argument("--list", action="store_true", help="print the mutants and run nothing")
    parser.add_argument("--limit", type=float, default=300.0, help="seconds of one run of tests")
    parser.add_argument("--workers", type=int, default=2, help="processes of a package's tests")
    parser.add_argument("--output", choices=("text", "json"), default="text")
    options = parser.parse_args()
    everything = list(all_mutants(options.package or list(PACKAGES)))
    mutants = chosen(everything, seed=options.seed, count=options.count)
    numbered = list(enumerate(mutants, start=1))[options.first - 1 :]
    if options.list:
        for number, mutant in numbered:
            print(f"{number}  {mutant.file}:{mutant.line}  {mutant.kind}  {mutant.change}")
        return
    results: list[Result] = []
    with tempfile.TemporaryDirectory(prefix="xpyd-mutate-") as folder:
        copy = Copy(Path(folder), limit_s=options.limit, workers=options.workers)
        for number, mutant in numbered:
            result = copy.judge(mutant)
            results.append(result)
            place = f"{mutant.file}:{mutant.line}  {mutant.change}"
            said = f"{result.outcome} {result.by} ({result.seconds:.0f} s)"
            print(f"{number}/{len(mutants)}  {place}  {said}", file=sys.stderr, flush=True)
    print(json.dumps([asdict(r) for r in results]) if options.output == "json" else table(results))


if __name__ == "__main__":
    main()
