"""scripts/mutate.py: what it changes, what it chooses, which tests it would run first."""

from __future__ import annotations

import pytest

from scripts import mutate
from scripts.mutate import chosen, imports_of, module_of, mutants_of, ranked

SOURCE = '''"""Text with 1 number and a < b."""

_log.info("é %d", 3)
size: tuple[int, ...] = (a) < (b)


@dataclass(frozen=True)
class C(Struct, frozen=True):
    limit: int = 4


async def f(a, b):
    if a is not None and b not in a:
        await stop(a)
    return "é" + text if not a else a - b
'''


def test_each_kind_of_change_is_found_where_it_is() -> None:
    found = [(m.line, m.kind, m.change) for m in mutants_of("f.py", SOURCE)]
    assert found == [
        (4, "comparison", "< -> <="),
        (9, "constant", "4 -> 5"),
        (13, "condition", "a is not None and b not in a -> not (a is not None and b not in a)"),
        (13, "comparison", "is not -> is"),
        (13, "and/or", "and -> or"),
        (13, "comparison", "not in -> in"),
        (14, "call", "await stop(a) -> pass"),
        (15, "condition", "not a -> not (not a)"),
        (15, "operator", "- -> +"),
    ]


def test_a_mutant_changes_its_own_place_only() -> None:
    mutant = next(m for m in mutants_of("f.py", SOURCE) if m.kind == "call")
    changed = mutant.applied(SOURCE)
    assert changed == SOURCE.replace("await stop(a)", "pass")


def test_a_seed_chooses_the_same_mutants_again_and_one_of_a_line() -> None:
    mutants = mutants_of("f.py", SOURCE)

    def lines(seed: int) -> list[int]:
        return [m.line for m in chosen(mutants, seed=seed, count=5, compiles=lambda _: True)]

    assert lines(1) == lines(1)
    assert len(set(lines(1))) == 5
    assert any(lines(seed) != lines(1) for seed in range(2, 9))


def test_what_python_refuses_is_not_chosen() -> None:
    mutants = mutants_of("f.py", SOURCE)
    found = chosen(mutants, seed=1, count=99, compiles=lambda m: m.kind == "constant")
    assert {m.line for m in found} == {9}


def test_the_nearest_tests_come_first() -> None:
    sources = {
        "tests/kv/test_session.py": "from xpyd_kv.session import buddy",
        "tests/kv/test_buddy.py": "from xpyd_kv.memory.buddy import Buddy",
        "tests/kv/test_store.py": "from tests.kv.kit import a",
        "tests/kv/test_walk.py": "import xpyd_kv.memory.buddy",
        "tests/kv/kit.py": "from xpyd_kv.memory.buddy import Buddy",
        "tests/router/test_x.py": "import xpyd_router.fleet",
        "tests/e2e/test_buddy.py": "import xpyd_kv.memory.buddy",
    }
    imports = {file: imports_of(source) for file, source in sources.items()}
    assert ranked("xpyd_kv.memory.buddy", imports) == [
        (0, "tests/kv/test_buddy.py"),
        (1, "tests/kv/test_walk.py"),
        (2, "tests/kv/test_store.py"),
        (3, "tests/kv/test_session.py"),
    ]


def test_a_module_has_the_name_that_imports_use() -> None:
    assert module_of("kv_transfer/xpyd_kv/memory/buddy.py") == "xpyd_kv.memory.buddy"
    assert module_of("router/xpyd_router/fleet/__init__.py") == "xpyd_router.fleet"
    assert module_of("tests/kv/kit.py") == "tests.kv.kit"


def test_a_run_that_was_cut_off_goes_on_where_it_was(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def listed(*options: str) -> list[str]:
        argv = ["mutate.py", "--package", "xpyd_core", "--count", "5", "--list", *options]
        monkeypatch.setattr("sys.argv", argv)
        mutate.main()
        return capsys.readouterr().out.splitlines()

    assert len(listed()) == 5
    assert listed("--first", "4") == listed()[3:]
