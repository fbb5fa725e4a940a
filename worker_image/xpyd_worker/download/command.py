"""`xpyd model`: downloads a checkpoint, for people and for the Jobs and pods of a fleet.

People see a bar; machines read JSON lines, the last of which says how it ended. With a progress
port the same lines are answered to GETs, which the operator sends to the pod of a Job.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import socket
import sys
import threading
import time
from collections.abc import Generator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import msgspec

from xpyd_core.checkpoints import cache_root, checkpoint_folder
from xpyd_core.cli import EXIT_USAGE, Command
from xpyd_core.errors import UserError
from xpyd_worker.download.plan import DownloadError, size_text
from xpyd_worker.download.transfer import Downloaded, Limits, Progress, Want, download

_EPILOG = """examples:
  xpyd model download hf://Qwen/Qwen3-0.6B
  xpyd model download s3://models/qwen3-0.6b --to /models/qwen3-0.6b
  AWS_ACCESS_KEY_ID=... AWS_SECRET_ACCESS_KEY=... \\
    xpyd model download s3://models/qwen3-0.6b --endpoint-url https://minio.example:9000
  xpyd model download hf://Qwen/Qwen3-0.6B --revision v2 --output json

A download that was cut or killed goes on where it was. Two at once download once. A whole folder
is not downloaded again; --verify also reads all of its bytes.
"""
_LINE_EVERY_S = 10.0
_BAR_EVERY_S = 0.2
_ANSWER_S = 2.0
_BAR_WIDTH = 30


def configure(parser: argparse.ArgumentParser) -> None:
    """`xpyd model download URI`."""
    actions = parser.add_subparsers(metavar="ACTION", required=True, title="actions")
    get = actions.add_parser(
        "download",
        help="bring a checkpoint into a folder",
        description="Bring a checkpoint into a folder; print the folder.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    get.add_argument("uri", metavar="URI", help="s3://bucket/folder or hf://organisation/name")
    get.add_argument(
        "--to", metavar="FOLDER", help="the folder to make (default: one in ~/.cache/xpyd/models)"
    )
    get.add_argument(
        "--revision",
        default="",
        help="branch, tag or commit of hf://; of s3:// a text of your own: another one downloads"
        " again",
    )
    get.add_argument(
        "--endpoint-url", default="", metavar="URL", help="the S3 store, where it is not AWS"
    )
    get.add_argument("--verify", action="store_true", help="read all bytes of a whole folder, too")
    get.add_argument(
        "--parallel", type=int, default=8, help="parts fetched at once, 1 to 64 (default: 8)"
    )
    get.add_argument(
        "--retry-seconds",
        type=float,
        default=Limits.retry_s,
        help="how long a part that gets no byte is tried again (default: 300)",
    )
    get.add_argument(
        "--wait-seconds",
        type=float,
        default=Limits.wait_s,
        help="how long another program's download is waited for (default: 21600)",
    )
    get.add_argument(
        "--progress-port",
        type=int,
        help="answer GET /progress here, on XPYD_POD_IP (default: nowhere)",
    )
    get.add_argument(
        "--output", choices=("text", "json"), default="text", help="json: one object a line"
    )


def _want(args: argparse.Namespace) -> Want:
    if not 1 <= args.parallel <= 64:
        raise UserError(f"--parallel: {args.parallel} is not 1 to 64")
    for flag in ("retry_seconds", "wait_seconds"):
        if not 0 <= getattr(args, flag) <= 7 * 86400:
            raise UserError(f"--{flag.replace('_', '-')}: at least 0 and at most 604800 seconds")
    folder = args.to or cache_root() / checkpoint_folder(args.uri, args.revision, args.endpoint_url)
    limits = Limits(parallel=args.parallel, retry_s=args.retry_seconds, wait_s=args.wait_seconds)
    return Want(args.uri, Path(folder), args.revision, args.endpoint_url, args.verify, limits)


def snapshot(progress: Progress) -> dict[str, Any]:
    """The progress as machines read it."""
    return {
        "phase": progress.phase,
        "doneBytes": progress.done_bytes,
        "totalBytes": progress.total_bytes,
        "files": progress.files,
        "totalFiles": progress.total_files,
        **({"reason": progress.reason} if progress.reason else {}),
        **({"message": progress.message} if progress.message else {}),
    }


def words(progress: Progress) -> str:
    """The progress in a line for people."""
    if progress.phase == "Waiting":
        return f"waits for the download by {progress.message or 'another program'}"
    if progress.phase == "Listing":
        return "looks what there is"
    done, total = progress.done_bytes, progress.total_bytes
    percent = 100 * done // total if total else 0
    files = f"{progress.files}/{progress.total_files} files"
    return f"{percent:3d} %  {size_text(done)} of {size_text(total)}, {files}"


class _Display(threading.Thread):
    """Shows a progress till it is ended: a bar on a terminal, else a line now and then."""

    def __init__(self, progress: Progress, *, output: str) -> None:
        super().__init__(name="progress", daemon=True)
        self._progress = progress
        self._json = output == "json"
        self._is_terminal = not self._json and sys.stderr.isatty()
        self._ended = threading.Event()
        self._last = ""

    def run(self) -> None:
        """Draw."""
        every_s = _BAR_EVERY_S if self._is_terminal else _LINE_EVERY_S
        while not self._ended.wait(every_s):
            self._draw()

    def end(self) -> None:
        """Draw the last state of a bar, and stop."""
        self._ended.set()
        self.join()
        if self._is_terminal and self._last:
            self._draw()
            sys.stderr.write("\n")

    def _draw(self) -> None:
        if self._json:
            print_json(snapshot(self._progress))
            return
        line = words(self._progress)
        if line == self._last and not self._is_terminal:
            return
        self._last = line
        if not self._is_terminal:
            sys.stderr.write(f"{line}\n")
            return
        total = self._progress.total_bytes
        full = _BAR_WIDTH * self._progress.done_bytes // total if total else 0
        sys.stderr.write(f"\r\x1b[K[{'#' * full}{'.' * (_BAR_WIDTH - full)}] {line}")
        sys.stderr.flush()


def print_json(record: dict[str, Any]) -> None:
    """One line to standard output, at once."""
    sys.stdout.write(msgspec.json.encode(record).decode() + "\n")
    sys.stdout.flush()


@contextlib.contextmanager
def served(progress: Progress, port: int | None) -> Generator[int]:
    """Answer GET /progress while the download runs; the port, 0 where there is none."""
    if port is None:
        yield 0
        return

    class Answer(BaseHTTPRequestHandler):
        timeout = _ANSWER_S

        def do_GET(self) -> None:
            body = msgspec.json.encode(snapshot(progress)) if self.path == "/progress" else b""
            self.send_response(200 if body else 404)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002
            """Progress is asked every few seconds: no log."""

    host = os.environ.get("XPYD_POD_IP") or "127.0.0.1"

    class Server(HTTPServer):
        address_family = socket.AF_INET6 if ":" in host else socket.AF_INET

    try:
        server = Server((host, port), Answer)
    except (OSError, OverflowError) as error:
        raise UserError(f"--progress-port: cannot listen on {port}: {error}") from error
    thread = threading.Thread(target=server.serve_forever, name="http", daemon=True)
    thread.start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _run(args: argparse.Namespace) -> int:
    want, progress = _want(args), Progress()
    display = _Display(progress, output=args.output)
    begun = time.monotonic()
    with served(progress, args.progress_port):
        display.start()
        try:
            done = download(want, progress)
        except UserError as error:
            progress.phase, progress.message = "Failed", str(error)
            progress.reason = error.reason if isinstance(error, DownloadError) else "InvalidModel"
            display.end()
            if args.output == "text":
                raise
            # The last line: a Job's pod carries it as its termination message.
            print_json(snapshot(progress))
            return EXIT_USAGE
        display.end()
    _say(done, progress, args.output, time.monotonic() - begun)
    return 0


def _say(done: Downloaded, progress: Progress, output: str, took_s: float) -> None:
    if output == "json":
        print_json({**snapshot(progress), "folder": str(done.folder)})
        return
    size = size_text(done.fetched_bytes)
    what = f"downloaded {size} in {took_s:.0f} s" if done.fetched_bytes else "nothing to download"
    sys.stderr.write(f"{what}; whole:\n")
    sys.stdout.write(f"{done.folder}\n")


command = Command(
    help="download checkpoints from S3 or the Hugging Face hub",
    configure=configure,
    run=_run,
)
