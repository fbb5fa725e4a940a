"""`xpyd key`: makes keys of clients, for the file of `xpyd router --api-key-file`, and has the
operator rotate the key of a fleet in a cluster."""

from __future__ import annotations

import argparse
import fcntl
import getpass
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from xpyd_core.cli import Command
from xpyd_core.errors import UserError
from xpyd_router.keys.lines import OPTIONS, line_of, new_key, options_of, parse_keys
from xpyd_router.keys.watch import read_key_file

_EPILOG = """examples:
  xpyd key new team-a                                  the key, once, and its line
  xpyd key new team-a --requests 8 --weight 2 --append keys.txt
  xpyd key new alice --chosen < key.txt                the line of a key that alice chose
  xpyd router --kv-key-file kv.key --api-key-file keys.txt
  xpyd key rotate chat -n llm                          a new key for the engines of a fleet"""
ROTATE = "xpyd.dev/rotate-key"
"""The annotation of a fleet that asks for another key: any new text does."""
BEGIN_S = 30.0
"""An operator begins with a wish within a second or two."""
_KUBECTL_S = 60.0
_LOOK_S = 0.5
_CONDITION = '{.status.conditions[?(@.type=="KeyRotated")]'
_HELP = {
    "requests": "its requests in flight",
    "tokens": "its tokens in flight, of prompts and allowed outputs",
    "tokens-per-minute": "its tokens of prompts and outputs",
    "priority": "the earliest place in line that it may ask for; lower is earlier",
    "weight": "its share of a full fleet, beside the other keys",
    "models": "the models that it may use, with commas between them",
    "salt": "keys with one salt share cached prefixes",
}


def _configure(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(dest="what", metavar="COMMAND", required=True)
    new = commands.add_parser("new", help="make a key, and its line for the file")
    new.add_argument("name", metavar="NAME", help="whose it is: in the access log and in metrics")
    for option in OPTIONS:
        new.add_argument(f"--{option}", metavar="VALUE", help=_HELP[option])
    new.add_argument(
        "--chosen",
        action="store_true",
        help="ask for a key that a person chose, or read it from standard input; its hash is slow",
    )
    new.add_argument("--append", type=Path, metavar="FILE", help="add the line to this file")
    new.add_argument("--output", "-o", choices=("text", "json"), default="text")
    new.set_defaults(act=_new)
    rotate = commands.add_parser(
        "rotate",
        help="have the operator replace the key by which a fleet's engines know each other",
    )
    rotate.add_argument("fleet", metavar="FLEET", help="an InferenceFleet; kubectl must reach it")
    rotate.add_argument("--namespace", "-n", metavar="NAME", help="default: kubectl's own")
    rotate.add_argument("--context", metavar="NAME", help="kubectl's context")
    rotate.set_defaults(act=_rotate)


def append_line(path: Path, line: str) -> None:
    """Add `line` to the file, which is made if it is not there: readers have the old one or the new
    one, and of two that add at a time both lines are there. UserError where the file is wrong then.
    """
    target = Path(os.path.realpath(path))
    try:
        # Another file than the one that is replaced: whoever waits would lock the old one.
        with target.with_name(f".{target.name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            text = read_key_file(target) if target.exists() else ""
            text += "\n" if text and not text.endswith("\n") else ""
            text += f"{line}\n"
            parse_keys(text, str(path))
            _replace(target, text)
    except OSError as error:
        raise UserError(f"--append {path}: {error.strerror}") from error


def _replace(target: Path, text: str) -> None:
    mode = target.stat().st_mode & 0o777 if target.exists() else 0o600
    with tempfile.NamedTemporaryFile("w", dir=target.parent, delete=False) as part:
        try:
            part.write(text)
            part.flush()
            os.fsync(part.fileno())
            os.fchmod(part.fileno(), mode)
            os.replace(part.name, target)
        except BaseException:
            os.unlink(part.name)
            raise


def _chosen() -> str:
    key = getpass.getpass("key: ") if sys.stdin.isatty() else sys.stdin.readline()
    key = key.strip()
    if len(key) < 12 or not key.isascii() or not key.isprintable() or " " in key:
        raise UserError("--chosen: expected a key of at least 12 printable characters, no spaces")
    return key


def _run(args: argparse.Namespace) -> int:
    status: int = args.act(args)
    return status


def _rotate(args: argparse.Namespace) -> int:
    """Asks, and waits until the operator has begun: from then on the fleet's condition KeyRotated
    is that of this rotation, not of the one before."""
    place = [f"--namespace={args.namespace}"] if args.namespace else []
    place += [f"--context={args.context}"] if args.context else []
    fleet, wish = f"inferencefleet.xpyd.dev/{args.fleet}", f"{time.time_ns() // 1_000_000}"
    shown = f"{_CONDITION}.status}} {_CONDITION}.message}}"
    look = [*place, "get", fleet, "--output", f"jsonpath={shown}"]
    before = _kubectl(look, wish)
    _kubectl([*place, "annotate", "--overwrite", fleet, f"{ROTATE}={wish}"], wish)
    until = time.monotonic() + BEGIN_S
    # One that is False now is of this wish, or of one that is fulfilled first.
    while not before.startswith("False") and _kubectl(look, wish) == before:
        if time.monotonic() > until:
            raise UserError(
                f"the fleet is annotated, and after {BEGIN_S:g} s its operator has not begun: does "
                "it run, and is its version one that rotates keys?"
            )
        time.sleep(_LOOK_S)
    wait = " ".join(["kubectl", *place, "get", f"fleet/{args.fleet}"])
    sys.stdout.write(f"asked; how far it is: {wait} -o jsonpath='{_CONDITION}.message}}'\n")
    return 0


def _kubectl(words: list[str], wish: str) -> str:
    """What kubectl says. UserError where it fails."""
    argv = ["kubectl", *words]
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=_KUBECTL_S, check=False)
    except FileNotFoundError as error:
        raise UserError(
            f"kubectl is not in PATH; annotate the fleet by other means: {ROTATE}={wish}"
        ) from error
    except subprocess.TimeoutExpired as error:
        raise UserError(f"kubectl did not answer within {_KUBECTL_S:g} s") from error
    if done.returncode != 0:
        raise UserError(f"kubectl: {done.stderr.strip() or done.returncode}")
    return done.stdout


def _new(args: argparse.Namespace) -> int:
    given = {name: getattr(args, name.replace("-", "_")) for name in OPTIONS}
    options = {name: value for name, value in given.items() if value is not None}
    if not options and args.append is not None and args.append.exists():
        # A second key of a client: its limits outlive the line of the first.
        options = options_of(read_key_file(args.append), args.name)
    key = _chosen() if args.chosen else new_key()
    line = line_of(args.name, key, options, is_chosen=args.chosen)
    if args.append is not None:
        append_line(args.append, line)
    shown = {"name": args.name, "line": line} | ({} if args.chosen else {"key": key})
    if args.output == "json":
        sys.stdout.write(json.dumps(shown) + "\n")
        return 0
    if not args.chosen:
        sys.stdout.write(f"key (shown this once): {key}\n")
    where = "line, added" if args.append is not None else "line for the key file"
    sys.stdout.write(f"{where}: {line}\n")
    return 0


command = Command(
    help="make keys of clients, or rotate the key of a fleet",
    configure=_configure,
    run=_run,
    epilog=_EPILOG,
)
