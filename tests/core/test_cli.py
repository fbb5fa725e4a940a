"""The `xpyd` command: sub-commands, version, exit statuses, missing extras."""

from importlib.metadata import EntryPoint

import pytest

from xpyd_core import __version__, cli
from xpyd_core.errors import UserError


def test_version_prints_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["version"]) == 0
    assert capsys.readouterr().out == f"xpyd {__version__}\n"


def test_no_command_is_a_usage_error() -> None:
    with pytest.raises(SystemExit) as exit_info:
        cli.main([])
    assert exit_info.value.code == 2


def test_a_missing_extra_is_answered_with_the_pip_line() -> None:
    entry = EntryPoint("thing", "no_such_module_here:command [thing]", cli.GROUP)
    command = cli.load_command(entry)
    with pytest.raises(UserError, match=r"pip install 'xpyd\[thing\]'"):
        command.run(None)  # pyright: ignore[reportArgumentType]  # not looked at
    assert "xpyd[thing]" in command.help
