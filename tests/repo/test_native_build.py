"""What is compiled when xpyd is installed, and what becomes of that without a compiler."""

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from xpyd_kv import native
from xpyd_worker.kernels.cpu.library import levels, load

ROOT = Path(__file__).parents[2]
LIBRARY = "xpyd_kv/native/copy_runs.so"
OPERATORS = "xpyd_worker/kernels/cpu/operators"
# All of it, without half a minute of optimizing: what setup made has that, and is loaded.
QUICK_CXX = "sh -c 'c++ \"$@\" -O0' --"
needs_compiler = pytest.mark.skipif(
    shutil.which("cc") is None or shutil.which("c++") is None, reason="needs compilers"
)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A copy of the clone, as git sees it."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        timeout=30,
    )
    for name in listed.stdout.splitlines():
        if not name.startswith(("tests/", "docs/")) and (ROOT / name).is_file():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


def build(tree: Path, target: str, *, cc: str = "cc", cxx: str = "false") -> tuple[Path, list[str]]:
    """The one file that was built, and the names in it. C++ takes seconds: only for who asks."""
    folder = tree / "dist" / target
    shutil.rmtree(folder, ignore_errors=True)
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "--target", target, "--directory", folder],
        cwd=tree,
        env={**os.environ, "CC": cc, "CXX": cxx},
        check=True,
        timeout=900,  # beside other work on two cores it has taken 270 s
    )
    (built,) = folder.iterdir()
    if target == "sdist":
        with tarfile.open(built) as archive:
            return built, archive.getnames()
    with zipfile.ZipFile(built) as archive:
        return built, archive.namelist()


@needs_compiler
def test_this_installation_has_what_a_compiler_makes() -> None:
    assert native.library("copy_runs") is not None
    assert all(load(level) is not None for level in levels())


@pytest.mark.slow  # compiles all of it
@needs_compiler
def test_a_wheel_with_a_library_is_for_this_platform(tree: Path) -> None:
    wheel, names = build(tree, "wheel", cxx=QUICK_CXX)
    assert LIBRARY in names
    # Those of all processors of this kind: where it runs is not where it was built.
    assert sum(name.startswith(OPERATORS) for name in names) >= len(levels())
    # For every Python 3: the library knows none.
    assert "-py3-none-linux_" in wheel.name


@pytest.mark.parametrize("cc", ["/no/such/compiler", "false", 'cc "'])
def test_without_a_compiler_that_works_the_wheel_is_for_every_platform(tree: Path, cc: str) -> None:
    old = tree / "kv_transfer" / LIBRARY
    old.write_text("of an earlier source")
    wheel, names = build(tree, "wheel", cc=cc, cxx=cc)
    assert [name for name in names if name.endswith(".so")] == []
    assert wheel.name.endswith("-py3-none-any.whl")
    assert "xpyd_kv/native/__init__.py" in names


@needs_compiler
def test_the_source_distribution_has_sources_only_and_all_of_them(tree: Path) -> None:
    build(tree, "wheel")
    assert (tree / "kv_transfer" / LIBRARY).exists()
    archive, names = build(tree, "sdist")
    assert [name for name in names if name.endswith(".so")] == []
    with tarfile.open(archive) as opened:
        opened.extractall(tree / "unpacked", filter="data")
    (unpacked,) = (tree / "unpacked").iterdir()
    assert LIBRARY in build(unpacked, "wheel")[1]
