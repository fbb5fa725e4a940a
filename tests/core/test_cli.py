"""The `xpyd` command: sub-commands, version, exit statuses, missing extras."""

import argparse
import ast
import subprocess
import sys
from importlib.metadata import EntryPoint

import pytest

from xpyd_core import __version__, cli
from xpyd_core.errors import UserError


def test_version_prints_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["version"]) == 0
    assert capsys.readouterr().out == f"xpyd {__version__}\n"


def test_a_command_does_not_wait_for_the_imports_of_others() -> None:
    program = (
        "import sys; from xpyd_core.cli import main; main(['version']);"
        "print(sorted(name for name in sys.modules if name.startswith('xpyd_')))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    loaded = ast.literal_eval(done.stdout.splitlines()[-1])
    assert {name.partition(".")[0] for name in loaded} == {"xpyd_core"}


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


@pytest.mark.parametrize("words", [[], ["word", "--flag"], ["--flag", "value"], ["--help"]])
def test_without_its_extra_a_command_takes_any_words(words: list[str]) -> None:
    # Its flags are not known: refusing them would hide what is missing.
    entry = EntryPoint("thing", "no_such_module_here:command [thing]", cli.GROUP)
    parser = argparse.ArgumentParser()
    cli.load_command(entry).configure(parser)
    assert parser.parse_args(words).rest == words


@pytest.mark.parametrize(
    "words",
    [
        ["demo", "--max-tokens", "8", "what", "now?"],
        ["--max-tokens", "8", "demo", "what", "now?"],
        ["demo", "what", "now?", "--max-tokens", "8"],
    ],
)
def test_flags_may_stand_between_a_commands_words(words: list[str]) -> None:
    args = cli.build_parser().parse_args(["chat", *words])
    assert (args.fleet, args.message, args.max_tokens) == ("demo", ["what", "now?"], 8)


def test_unknown_flags_are_still_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        cli.main(["chat", "demo", "--max-tokns", "8"])
    assert exit_info.value.code == 2
    assert "--max-tokns" in capsys.readouterr().err


def test_flags_cut_short_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """Who looks for a flag in a fleet document's engine.args would not see them."""
    with pytest.raises(SystemExit) as exit_info:
        cli.main(["worker", "--model", "demo", "--tensor-parallel=2"])
    assert exit_info.value.code == 2
    assert "--tensor-parallel=2" in capsys.readouterr().err


def test_help_names_every_default(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["router", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert "removal (default: 3)" in text
    assert "least level to print (default: info)" in text
    assert "the fleet's secret (default: XPYD_KV_KEY_FILE)" in text
    assert "None" not in text
