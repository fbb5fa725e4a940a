"""The `xpyd` command: finds its sub-commands through the entry-point group `xpyd.commands`.

A sub-command's module must import cheaply; what is heavy it imports in `run`. One that cannot load
because its extra is not installed answers with the pip line that brings it.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import Any, TypeVar, cast

from xpyd_core import __version__
from xpyd_core.errors import UserError

GROUP = "xpyd.commands"
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130
"""After Ctrl-C, as a shell has it: 128 + SIGINT."""
_VERSION = "version"
"""The one sub-command that is no entry point."""
_T = TypeVar("_T")


@dataclass(frozen=True)
class Command:
    """One sub-command. `run` returns the exit status; a UserError from it is printed, status 2."""

    help: str
    configure: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]
    epilog: str = ""


def _missing_extra(entry: EntryPoint, error: ImportError) -> Command:
    extra = ",".join(entry.extras) or entry.name
    hint = f"needs an extra that is not installed: pip install 'xpyd[{extra}]'"

    def fail(_: argparse.Namespace) -> int:
        raise UserError(f"`xpyd {entry.name}` {hint} ({error})")

    def accept_anything(parser: argparse.ArgumentParser) -> None:
        # No word is a flag: which flags there are, only the missing extra knows.
        parser.prefix_chars = "\0"
        parser.add_argument("rest", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)

    return Command(f"({hint})", accept_anything, fail)


def load_command(entry: EntryPoint) -> Command:
    """The command behind `entry`, or one that says which extra it needs."""
    try:
        return entry.load()
    except ImportError as error:
        return _missing_extra(entry, error)


def parse_flag(name: str, parse: Callable[[str], _T], text: str) -> _T:
    """`parse(text)`; a UserError gets the name of the flag or argument that the text is from."""
    try:
        return parse(text)
    except UserError as error:
        raise UserError(f"{name}: {error}") from error


def json_object(text: str) -> dict[str, Any]:
    """A flag's `type` of argparse."""
    try:
        value: object = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"expected a JSON object: {error}") from error
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"expected a JSON object, got {text!r}")
    return cast("dict[str, Any]", value)


class _HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Keeps the epilog's lines, and says a flag's default where its help does not."""

    def _get_help_string(self, action: argparse.Action) -> str:
        text = action.help or ""
        is_plain = action.default not in (None, False, argparse.SUPPRESS, [])
        if action.option_strings and is_plain and "default" not in text:
            text += " (default: %(default)s)"
        return text


class _Parser(argparse.ArgumentParser):
    """argparse takes `FLEET MESSAGE` or `--flag FLEET MESSAGE`, but gives up on `FLEET --flag
    MESSAGE`, which people write: what is left over there goes to the positional of nargs "*"."""

    def parse_known_args(  # pyright: ignore[reportIncompatibleMethodOverride]  # stub's overloads
        self,
        args: Sequence[str] | None = None,
        namespace: argparse.Namespace | None = None,
    ) -> tuple[argparse.Namespace, list[str]]:
        """Parse as argparse does, with the words behind a flag added to the last positional."""
        namespace = argparse.Namespace() if namespace is None else namespace
        found, rest = super().parse_known_args(args, namespace)
        lists = [a for a in self._get_positional_actions() if a.nargs == argparse.ZERO_OR_MORE]
        if rest and lists and not any(word.startswith("-") for word in rest):
            getattr(found, lists[-1].dest).extend(rest)
            rest = []
        if rest:
            self.error(f"unrecognized arguments: {' '.join(rest)}")
        return found, rest


def _version_command() -> Command:
    def run(_: argparse.Namespace) -> int:
        sys.stdout.write(f"xpyd {__version__}\n")
        return 0

    return Command("print the version", lambda _: None, run)


def build_parser(
    only: str = "", *, prog: str = "xpyd", offered: Mapping[str, Command] | None = None
) -> argparse.ArgumentParser:
    """The parser with every installed sub-command, or with the one that `only` names, where it is
    one: the others need not be imported then. `offered`: those that `prog` has in their place."""
    parser = argparse.ArgumentParser(
        prog=prog, description="LLM fleets with prefill and decode apart."
    )
    parser.add_argument("--version", action="version", version=f"xpyd {__version__}")
    commands = parser.add_subparsers(
        title="commands", metavar="COMMAND", required=True, parser_class=_Parser
    )
    found = offered
    if found is None:
        entries = entry_points(group=GROUP)
        if only in {*entries.names, _VERSION}:
            entries = entries.select(name=only)
        found = {entry.name: load_command(entry) for entry in entries}
    for name, command in sorted({**found, _VERSION: _version_command()}.items()):
        sub = commands.add_parser(
            name,
            help=command.help,
            description=command.help,
            epilog=command.epilog,
            formatter_class=_HelpFormatter,
            # A flag cut short is not seen by who looks for it in a fleet document's engine.args.
            allow_abbrev=False,
        )
        command.configure(sub)
        sub.set_defaults(run_command=command.run)
    return parser


def main(
    argv: Sequence[str] | None = None,
    *,
    prog: str = "xpyd",
    offered: Mapping[str, Command] | None = None,
) -> int:
    """Run one sub-command; the exit status is its own, 2 for wrong input, 130 after Ctrl-C."""
    if os.getpid() == 1:
        # A container's first process gets only signals that it handles: this one ends it as it
        # ends any other, till the sub-command handles it.
        signal.signal(signal.SIGTERM, lambda number, _: os._exit(128 + number))
    try:
        words = sys.argv[1:] if argv is None else argv
        only = words[0] if words else ""
        args = build_parser(only, prog=prog, offered=offered).parse_args(words)
        return args.run_command(args)
    except UserError as error:
        sys.stderr.write(f"xpyd: {error}\n")
        return EXIT_USAGE
    except KeyboardInterrupt:
        # Who presses twice must not get a traceback from the interpreter's end.
        try:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        except KeyboardInterrupt:  # the second came just before
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        return EXIT_INTERRUPTED
