"""`xpyd kv-probe`: does KV get from this Prefill instance to that Decode instance?

It asks the Prefill instance's `POST /kv/probe`, signed with the fleet's key. Needs no extra, so it
works wherever xpyd is installed.
"""

from __future__ import annotations

import argparse
import http.client
import json
import ssl
import sys
from contextlib import closing
from pathlib import Path
from typing import Any, cast
from urllib.parse import urlsplit

from xpyd_core.cli import Command
from xpyd_core.errors import UserError
from xpyd_core.keys import call_mac, check_keys_given, fleet_keys
from xpyd_core.pod_env import read_pod_env
from xpyd_core.tls import add_engine_arguments, engine_context, read_engine_files

EXIT_FAILED = 1
# The engine answers within 5 s, or says that it cannot.
_TIMEOUT_S = 20.0
# Of engines with many ranks: 200 bytes for each pair.
_MAX_ANSWER_BYTES = 1024 * 1024
_EPILOG = """examples:
  xpyd kv-probe --engine http://127.1.1.2:20001 --peer 127.1.1.3:21001 --kv-key-file kv.key
  xpyd kv-probe --engine http://10.0.0.5:20001 --peer 10.0.0.6:21001 --output json
  xpyd kv-probe --engine https://10.0.0.5:20001 --peer 10.0.0.6:21001 \\
    --engine-ca-file ca.crt --engine-server-name chat-engines.llm.svc

Exit status: 0 the block arrived, 1 it did not, 2 the question was wrong.
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's flags."""
    add = parser.add_argument
    add("--engine", required=True, metavar="URL", help="a Prefill instance's HTTP address")
    add("--peer", required=True, metavar="IP:PORT", help="a Decode instance's KV address")
    add("--kv-key-file", type=Path, metavar="FILE", help="default: XPYD_KV_KEY_FILE")
    add("--kv-insecure", action="store_true", help="the fleet has no secret")
    add_engine_arguments(parser)
    add("--output", "-o", choices=("text", "json"), default="text", help="for people or programs")


def _run(args: argparse.Namespace) -> int:
    path = args.kv_key_file or read_pod_env().kv_key_file
    check_keys_given(path, insecure=args.kv_insecure, who="who asks an engine")
    key = fleet_keys(path, insecure=args.kv_insecure)[0]
    mac = call_mac(key, "kv-probe", args.peer)
    with closing(_connection(args)) as connection:
        status, answer = _ask(connection, args.engine, args.peer, mac)
    if status != 200:
        error = answer.get("error")
        fields = cast("dict[str, Any]", error) if isinstance(error, dict) else {}
        wrong_port = status == 400 and args.engine.startswith("http:")
        why = fields.get("message", "does it serve HTTPS?" if wrong_port else "no reason")
        raise UserError(f"{args.engine} refuses ({status}): {why}")
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


class _TlsConnection(http.client.HTTPConnection):
    """To an address whose certificate is verified by a name that all engines share."""

    default_port = http.client.HTTPS_PORT

    def __init__(self, host: str, port: int | None, context: ssl.SSLContext, name: str) -> None:
        super().__init__(host, port, timeout=_TIMEOUT_S)
        self._context, self._name = context, name

    def connect(self) -> None:
        super().connect()
        self.sock = self._context.wrap_socket(self.sock, server_hostname=self._name)


def _connection(args: argparse.Namespace) -> http.client.HTTPConnection:
    """Not yet open."""
    files, name = read_engine_files(args), cast("str | None", args.engine_server_name)
    scheme, host, port = _address(args.engine)
    if scheme == "https":
        return _TlsConnection(host, port, engine_context(files), name or host)
    if files is not None or name:
        raise UserError("--engine: the flags of TLS need an https:// URL")
    return http.client.HTTPConnection(host, port, timeout=_TIMEOUT_S)


def _address(url: str) -> tuple[str, str, int | None]:
    """Scheme, host and port."""
    try:
        parts = urlsplit(url)
        if parts.scheme in ("http", "https") and parts.hostname:
            return parts.scheme, parts.hostname, parts.port
    except ValueError:
        pass  # a bad port or IPv6 address
    raise UserError(f"--engine: {url!r} is not a URL, e.g. http://10.0.0.5:20001")


def _ask(
    connection: http.client.HTTPConnection, engine: str, peer: str, mac: str
) -> tuple[int, dict[str, Any]]:
    path = f"{urlsplit(engine).path.rstrip('/')}/kv/probe"
    headers = {"Content-Type": "application/json", "X-Xpyd-Mac": mac}
    try:
        connection.request("POST", path, json.dumps({"address": peer}).encode(), headers)
        answer = connection.getresponse()
        return answer.status, _object(answer.read(_MAX_ANSWER_BYTES))
    except ssl.SSLCertVerificationError as error:
        raise UserError(
            f"--engine {engine}: its certificate is refused: {error.verify_message}"
            " (see --engine-ca-file and --engine-server-name)"
        ) from error
    except (OSError, ValueError, http.client.HTTPException) as error:
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
