"""The local sub-commands of `xpyd`: flags and help. What they do is imported when they run."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path

from xpyd_core.cli import Command, parse_flag
from xpyd_core.errors import UserError, XpydError
from xpyd_core.logs import add_logging_arguments
from xpyd_core.pod_env import read_pod_env
from xpyd_core.sizes import format_bytes, parse_bytes

_FLEET_HELP = "the fleet's name; not needed while only one runs"


def _configure_up(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("-f", "--file", required=True, type=Path, help="an InferenceFleet document, YAML or JSON")
    add("--port", type=int, help="the router's port (default: 10001, or the next free one)")
    text = "keys of clients, in place of spec.router.auth (default: they need none here)"
    add("--api-key-file", type=Path, metavar="FILE", help=text)
    text = "serve HTTPS with this certificate, in place of spec.router.tls (default: HTTP)"
    add("--ssl-certfile", type=Path, metavar="FILE", help=text)
    text = "its key, without a password (default: it is in --ssl-certfile)"
    add("--ssl-keyfile", type=Path, metavar="FILE", help=text)
    add("--detach", "-d", action="store_true", help="return when the fleet is ready")
    add("--timeout", type=float, default=300.0, metavar="SECONDS", help="longest wait for that")
    add_logging_arguments(parser)
    add("--log-max-size", metavar="SIZE", help="cut the log of a pod at this size (default: 8Mi)")
    text = "files of one pod's log, with the one that is written to (default: 2)"
    add("--log-max-files", type=int, metavar="N", help=text)
    add("--vllm", metavar="COMMAND", help="vLLM's, for engines of type VLLM (default: vllm)")


def _run_up(args: argparse.Namespace) -> int:
    from xpyd_core.tls import ServerFiles, WatchedContext
    from xpyd_operator.up.logs import LEAST_LOG_BYTES, MOST_LOG_FILES
    from xpyd_operator.up.run import UpOptions, run_up

    if args.port is not None and not 0 < args.port < 65536:
        raise UserError(f"--port {args.port}: expected 1 to 65535")
    if args.log_max_files is not None and not 0 < args.log_max_files <= MOST_LOG_FILES:
        raise UserError(f"--log-max-files {args.log_max_files}: expected 1 to {MOST_LOG_FILES}")
    size = args.log_max_size
    log_max_bytes = None if size is None else parse_flag("--log-max-size", parse_bytes, size)
    if log_max_bytes is not None and log_max_bytes < LEAST_LOG_BYTES:
        raise UserError(f"--log-max-size {size}: expected at least {format_bytes(LEAST_LOG_BYTES)}")
    if args.ssl_keyfile is not None and args.ssl_certfile is None:
        raise UserError("--ssl-keyfile: needs --ssl-certfile")
    if args.ssl_certfile is not None:  # what the router refuses is said before anything starts
        WatchedContext(ServerFiles(args.ssl_certfile, args.ssl_keyfile), "--ssl-certfile")
    options = UpOptions(
        file=str(args.file.absolute()),
        port=args.port,
        log_level=args.log_level,
        log_format=args.log_format,
        log_max_bytes=log_max_bytes,
        log_max_files=args.log_max_files,
        timeout_s=args.timeout,
        api_key_file=_absolute(args.api_key_file),
        ssl_certfile=_absolute(args.ssl_certfile),
        ssl_keyfile=_absolute(args.ssl_keyfile),
        # A path is where this command was given, wherever the fleet's document is handed over.
        vllm=os.path.abspath(args.vllm) if "/" in (args.vllm or "") else args.vllm,
    )
    return run_up(options, detach=args.detach)


def _absolute(path: Path | None) -> str | None:
    return None if path is None else str(path.absolute())


def _configure_status(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("fleet", nargs="?", help=_FLEET_HELP)
    parser.add_argument("--output", "-o", choices=("table", "json"), default="table")


def _run_status(args: argparse.Namespace) -> int:
    from xpyd_operator.up.client import show_status

    return show_status(args.fleet, as_json=args.output == "json")


def _configure_scale(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("pool", metavar="FLEET-POOL", help="the pool, such as demo-decode")
    parser.add_argument("--replicas", type=int, required=True, help="instances it shall have")
    parser.add_argument(
        "--timeout", type=float, default=300.0, metavar="SECONDS", help="longest wait for them"
    )


def _run_scale(args: argparse.Namespace) -> int:
    from xpyd_operator.up.client import scale

    return scale(args.pool, args.replicas, timeout_s=args.timeout)


def _configure_logs(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    words = "a fleet, a pod or a pool, such as demo, demo-decode-0 or decode (default: all pods)"
    add("pods", nargs="*", metavar="NAME", help=words)
    add("-f", "--follow", action="store_true", help="go on until Ctrl-C")
    add("--since", metavar="SPAN", help="only what is younger: 30s, 5m, 2h, 1d")
    add("--fleet", help=_FLEET_HELP)


def _run_logs(args: argparse.Namespace) -> int:
    from xpyd_operator.up.client import show_logs
    from xpyd_operator.up.folder import FleetFolder, state_root
    from xpyd_operator.up.logs import parse_span

    since = None if args.since is None else parse_span(args.since)
    fleet: str | None = args.fleet
    pods: list[str] = args.pods
    if fleet is None and pods and FleetFolder(state_root() / pods[0]).logs.is_dir():
        fleet, *pods = pods
    return show_logs(pods, fleet=fleet, follow=args.follow, since=since)


def _configure_chat(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("fleet", nargs="?", help=_FLEET_HELP)
    add("message", nargs="*", metavar="MESSAGE", help="one question; without: a conversation")
    add("--url", help="an OpenAI endpoint instead of a fleet, such as http://127.0.0.1:10001")
    add("--model", default="", help="the model's name (default: the first that is served)")
    add("--max-tokens", type=int, metavar="N", help="longest answer")
    add("--temperature", type=float, default=0.3, help="0 always takes the likeliest token")
    add("--system", help="text of the system message")
    add("--api-key", default="", metavar="KEY", help="the client key (default: XPYD_API_KEY)")
    text = "authorities of the endpoint's certificate (default: SSL_CERT_FILE, or the system's)"
    add("--ca-file", type=Path, metavar="FILE", help=text)


def _run_chat(args: argparse.Namespace) -> int:
    from xpyd_operator.up.chat import Conversation, run_chat
    from xpyd_operator.up.client import current_view
    from xpyd_operator.up.folder import find_fleet, find_fleets, state_root

    words: list[str] = [word for word in (args.fleet, *args.message) if word is not None]
    url: str | None = args.url
    if url is None:
        names = {state.fleet for state in find_fleets(state_root())}
        named = words.pop(0) if words and words[0] in names else None
        url = current_view(find_fleet(state_root(), named)).endpoint
    key = args.api_key or read_pod_env().api_key
    conversation = Conversation(
        url, args.model, args.max_tokens, args.temperature, api_key=key, ca_file=args.ca_file
    )
    if args.system:
        conversation.messages.append({"role": "system", "content": args.system})
    message = " ".join(words) if words else None
    return run_chat(conversation, message, stdin=sys.stdin, out=sys.stdout)


def _configure_down(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("fleet", nargs="?", help=_FLEET_HELP)
    parser.add_argument(
        "--timeout",
        type=float,
        metavar="SECONDS",
        help="kill what has not drained by then (default: the document's drain.timeoutSeconds)",
    )


def _run_down(args: argparse.Namespace) -> int:
    from xpyd_operator.up.client import take_fleet_down

    if args.timeout is not None and args.timeout < 0:
        raise UserError(f"--timeout {args.timeout}: expected 0 or more")
    return take_fleet_down(args.fleet, args.timeout)


def check_platform(platform: str) -> None:
    """Refuse where one machine has one loopback address only."""
    if platform != "linux":
        raise UserError(
            "local fleets run on Linux, where each pod gets an address 127.1.f.n of its own; "
            "elsewhere use a Linux container or virtual machine"
        )


def _reporting(
    run: Callable[[argparse.Namespace], int], *, anywhere: bool = False
) -> Callable[[argparse.Namespace], int]:
    """Report a fleet that failed with its reason and status 1. Not `anywhere`: Linux only."""

    def reported(args: argparse.Namespace) -> int:
        if not anywhere:
            check_platform(sys.platform)
        try:
            return run(args)
        except UserError:
            raise
        except BrokenPipeError:  # `xpyd logs | head`: the reader is gone, also at exit
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 0
        except OSError as error:
            from xpyd_operator.up.folder import explained, state_root

            if not str(error.filename).startswith(str(state_root())):
                raise
            with explained(state_root()):
                raise
        except XpydError as error:
            sys.stderr.write(f"xpyd: {error}\n")
            return 1

    return reported


up = Command(
    help="run a fleet on this machine, one process for each pod",
    configure=_configure_up,
    run=_reporting(_run_up),
    epilog="""examples:
  xpyd up -f examples/demo/fleet.yaml            logs here; Ctrl-C drains, twice kills
  xpyd up -f examples/demo/fleet.yaml --detach   returns when it is ready
  xpyd up -f fleet.yaml                          again, changed: only what changed is replaced""",
)
status = Command(
    help="show a local fleet: its pools, pods and endpoint",
    configure=_configure_status,
    run=_reporting(_run_status),
    epilog="""examples:
  xpyd status
  xpyd status demo --output json""",
)
scale = Command(
    help="change how many instances a pool of a local fleet has",
    configure=_configure_scale,
    run=_reporting(_run_scale),
    epilog="""examples:
  xpyd scale demo-decode --replicas 2

Holds until the document declares other replicas than it did. No other instance is touched.""",
)
logs = Command(
    help="show what the pods of a local fleet log",
    configure=_configure_logs,
    run=_reporting(_run_logs),
    epilog="""examples:
  xpyd logs -f                      all pods, as it comes
  xpyd logs decode --since 5m       the pods of one pool
  xpyd logs demo-decode-0 --fleet demo""",
)
chat = Command(
    help="talk to a local fleet or to any OpenAI endpoint",
    configure=_configure_chat,
    run=_reporting(_run_chat, anywhere=True),
    epilog="""examples:
  xpyd chat                         a conversation with the only running fleet
  xpyd chat demo "What does os.path.join do?"
  echo "Hello" | xpyd chat --url http://127.0.0.1:10001 --max-tokens 40""",
)
down = Command(
    help="drain and stop a local fleet, or what a dead supervisor left of it",
    configure=_configure_down,
    run=_reporting(_run_down),
    epilog="""examples:
  xpyd down demo
  xpyd down demo --timeout 5        kill what has not drained in 5 s""",
)
