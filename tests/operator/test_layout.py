"""The folder `operator/` must never become a package."""

from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_no_init_file_shadows_pythons_own_operator_module():
    assert (ROOT / "operator" / "xpyd_operator" / "__init__.py").is_file()
    assert not (ROOT / "operator" / "__init__.py").exists()
