"""Rules about the tree itself that no linter checks."""

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
MAX_LINES = 500
# Made from the CRDs, and as long as these.
GENERATED = ROOT / "docs/api.md"


def _tracked(*patterns: str) -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", *patterns],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        timeout=30,
    )
    return [ROOT / line for line in listed.stdout.splitlines() if (ROOT / line).is_file()]


def test_no_file_is_over_500_lines() -> None:
    files = _tracked("*.py", "*.sh", "*.md", "Makefile")
    lines = {str(f): len(f.read_text().splitlines()) for f in files if f != GENERATED}
    long = {name: count for name, count in lines.items() if count > MAX_LINES}
    assert files
    assert not long


def test_operator_is_no_package_of_its_own() -> None:
    # It would shadow Python's `operator` for everything started in the root.
    assert (ROOT / "operator/xpyd_operator/__init__.py").exists()
    assert not (ROOT / "operator/__init__.py").exists()


def test_every_make_target_is_explained() -> None:
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^([a-z-]+):", makefile, re.M))
    explained = set(re.findall(r"^([a-z-]+):.*## ", makefile, re.M))
    assert targets == explained
    phony = re.search(r"^\.PHONY: (.*)$", makefile, re.M)
    assert phony is not None
    assert targets == set(phony[1].split())


def test_only_the_folders_that_make_names_have_tests_for_a_cluster() -> None:
    makefile = (ROOT / "Makefile").read_text()
    named = re.search(r"^CLUSTER_TESTS := (.*)$", makefile, re.M)
    assert named is not None
    folders = tuple(ROOT / folder for folder in named[1].split())
    marked = [f for f in _tracked("tests/*.py") if "mark.cluster" in f.read_text()]
    outside = [f for f in marked if not any(f.is_relative_to(folder) for folder in folders)]
    assert len(marked) > 10
    assert outside == [Path(__file__)]


def test_every_module_says_what_it_is_for() -> None:
    sources = [f for f in _tracked("*.py") if f.parts[len(ROOT.parts)] != "tests"]
    silent = [
        str(f) for f in sources if not f.read_text().lstrip().startswith(('"""', "# pyright"))
    ]
    assert sources
    assert not silent


def test_the_extra_vllm_brings_what_the_transfer_needs_and_vllm_does_not() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    listed = [*project["dependencies"], *project["optional-dependencies"]["vllm"]]
    brought = {re.split(r"[^a-z0-9_-]", requirement)[0] for requirement in listed}
    # nixl has an extra of its own.
    by_vllm = {"vllm", "torch", "triton", "numpy", "typing_extensions", "nixl", "zmq"}
    by_vllm |= {"huggingface_hub"}
    needed: set[str] = set()
    for source in _tracked("core/*.py", "kv_transfer/*.py"):
        tree = ast.parse(source.read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                needed.update(alias.name.partition(".")[0] for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                needed.add(node.module.partition(".")[0])
    # Type checkers bring `_typeshed`; no program imports it.
    needed -= {*sys.stdlib_module_names, "_typeshed", "xpyd_core", "xpyd_kv", *by_vllm}
    assert needed == brought


def test_the_commands_help_loads_no_heavy_library() -> None:
    # `xpyd status` must not wait for torch; import-linter cannot see that an import is lazy.
    code = (
        "import sys; from xpyd_core.cli import build_parser; build_parser();"
        "print(sorted({'torch', 'transformers', 'quart', 'aiohttp'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "[]"
