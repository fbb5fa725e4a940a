"""`xpyd kv-probe`: does KV get from this Prefill instance to that Decode instance?

It asks the Prefill instance's `POST /kv/probe`, signed with the fleet's key. Needs no extra, so it
works wherever xpyd is installed.
"""

from __future__ import annotations

import argparse
import json
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any, cast

from xpyd_core.cli import Command
from xpyd_core.errors import UserError
from xpyd_core.keys import call_mac, check_keys_given, fleet_keys
from xpyd_core.pod_env import read_pod_env

EXIT_FAILED = 1
# The engine answers within 5 s, or says that it cannot.
_TIMEOUT_S = 20.0
# Of engines with many ranks: 200 bytes for each pair.
_MAX_ANSWER_BYTES = 1024 * 1024
_EPILOG = """examples:
  xpyd kv-probe --engine http://127.1.1.2:20001 --peer 127.1.1.3:21001 --kv-key-file kv.key
  xpyd kv-probe --engine http://10.0.0.5:20001 --peer 10.0.0.6:21001 --output json

Exit status: 0 the block arrived, 1 it did not, 2 the question was wrong.
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's flags."""
    add = parser.add_argument
    add("--engine", required=True, metavar="URL", help="a Prefill instance's HTTP address")
    add("--peer", required=True, metavar="IP:PORT", help="a Decode instance's KV address")
    add("--kv-key-file", type=Path, metavar="FILE", help="default: XPYD_KV_KEY_FILE")
    add("--kv-insecure", action="store_true", help="the fleet has no secret")
    add("--output", "-o", choices=("text", "json"), default="text", help="for people or programs")


def _run(args: argparse.Namespace) -> int:
    path = args.kv_key_file or read_pod_env().kv_key_file
    check_keys_given(path, insecure=args.kv_insecure, who="who asks an engine")
    key = fleet_keys(path, insecure=args.kv_insecure)[0]
    status, answer = _ask(args.engine, args.peer, call_mac(key, "kv-probe", args.peer))
    if status != 200:
        error = answer.get("error")
        fields = cast("dict[str, Any]", error) if isinstance(error, dict) else {}
        raise UserError(f"{args.engine} refuses ({status}): {fields.get('message', 'no reason')}")
    if args.output == "json":
        sys.stdout.write(json.dumps(answer) + "\n")
    else:
        sys.stdout.write(_text(args.peer, answer))
    return 0 if answer.get("ok") is True else EXIT_FAILED


def _text(peer: str, answer: dict[str, Any]) -> str:
    """A line for the connection of the engines, and one for each pair of ranks."""
    text = f"{peer}: {_said(answer)}\n"
    pairs = answer.get("pairs")
    for pair in cast("list[dict[str, Any]]", pairs) if isinstance(pairs, list) else []:
        ranks = f"rank {pair.get('from_rank')} to rank {pair.get('to_rank')}"
        text += f"  {ranks} at {pair.get('address')}: {_said(pair)}\n"
    return text


def _said(result: dict[str, Any]) -> str:
    milliseconds = 1000 * float(result.get("seconds", 0))
    if result.get("ok") is True:
        size, over = result.get("bytes"), result.get("transport")
        return f"{size} bytes arrived over {over} in {milliseconds:.1f} ms"
    return f"failed after {milliseconds:.1f} ms: {result.get('reason')}"


def _ask(engine: str, peer: str, mac: str) -> tuple[int, dict[str, Any]]:
    if not engine.startswith(("http://", "https://")):
        raise UserError(f"--engine: {engine!r} is not a URL, e.g. http://10.0.0.5:20001")
    request = urllib.request.Request(
        f"{engine.rstrip('/')}/kv/probe",
        data=json.dumps({"address": peer}).encode(),
        headers={"Content-Type": "application/json", "X-Xpyd-Mac": mac},
    )
    try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as response:
            return response.status, _object(response.read(_MAX_ANSWER_BYTES))
    except urllib.error.HTTPError as error:
        with error:
            return error.code, _object(error.read(_MAX_ANSWER_BYTES))
    except (OSError, ValueError) as error:
        raise UserError(f"--engine {engine}: no answer: {error}") from error


def _object(data: bytes) -> dict[str, Any]:
    try:
        found: object = json.loads(data)
    except ValueError:
        return {}
    return cast("dict[str, Any]", found) if isinstance(found, dict) else {}


command = Command(
    help="test the way of KV from a Prefill to a Decode instance",
    configure=configure,
    run=_run,
    epilog=_EPILOG,
)
