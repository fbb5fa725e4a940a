"""The program that forks: `python -m xpyd_core.fork_server`. ADR 0045.

    xpyd_core.children --starts--> fork server: imports, once --forks--> a child that does nothing
        ^                                                                   |--forks--> the program
        |---------- the program is its child once the one between has ended ---------------|

It imports what its children need while its main thread is all that runs in it, then forks a program
for each request until the other end of its socket closes. What runs in a fork is what
`python -m MODULE` runs, with its own arguments, environment, session, output and descriptors; and
it is a child of the process that asked, which is its subreaper meanwhile. The program itself sends
the answer, its pid, and goes on when that is sent: no program runs without its owner's knowledge,
and none is known that does not run, at whatever moment the fork server is killed.
"""

from __future__ import annotations

import argparse
import atexit
import fcntl
import gc
import json
import os
import runpy
import select
import socket
import sys
import threading
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from types import ModuleType
from typing import Any, NoReturn

from xpyd_core.process import set_name, set_title, thread_names

MOST_BYTES = 1 << 18
MOST_DESCRIPTORS = 250
ROOM = "." * 2048
"""The last argument: the room in which a fork's own command line is written for `ps`."""
PYTHON = (sys.executable, "-P", "-m")
"""How a command line begins that can be forked; the module follows."""
_EXIT_FAILED = 1


def main() -> int:
    """Prepare, then fork until the socket ends; the exit status."""
    args = _parse()
    set_name("xpyd-forkserver")
    # Collections would write to pages that are to be shared, and find nothing.
    gc.disable()
    for name in args.prepare:
        module, _, function = name.partition(":")
        getattr(import_module(module), function)()
    if len(names := thread_names()) > 1:
        # What such a thread holds would be held for ever behind a fork.
        sys.stderr.write(f"fork server: an import started threads: {', '.join(names)}\n")
        return _EXIT_FAILED
    gc.freeze()
    files = _files()
    with socket.socket(fileno=args.socket) as requests:
        while True:
            text, descriptors, flags, _ = socket.recv_fds(requests, MOST_BYTES, MOST_DESCRIPTORS)
            # Who asks starts the program as ever when the socket ends without an answer.
            if not text or flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC) or files != _files():
                return 0
            _fork(requests, json.loads(text), descriptors)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="xpyd fork server")
    parser.add_argument("--socket", type=int, required=True, help="descriptor of the requests")
    parser.add_argument(
        "--prepare",
        action="append",
        default=[],
        metavar="MODULE:FUNCTION",
        help="what imports what the programs need",
    )
    parser.add_argument("room", help="long enough for a program's own command line")
    return parser.parse_args()


def _files() -> Mapping[str, int]:
    """The files of what is imported, and when each was changed: a fork runs no outdated code."""
    found: dict[str, int] = {}
    modules: list[object] = list(sys.modules.values())
    for module in modules:
        # Some libraries put other objects there, which answer to any name.
        file = vars(module).get("__file__") if isinstance(module, ModuleType) else None
        if isinstance(file, str):
            with suppress(OSError):
                found[file] = os.stat(file).st_mtime_ns
    return found


def _fork(requests: socket.socket, request: Mapping[str, Any], descriptors: list[int]) -> None:
    """Fork the program, which answers; or answer why there is none. A program that is killed just
    behind its answer causes a second answer, which is ignored."""
    done, answered = os.pipe()
    failed = "the forked process ended"
    try:
        between = os.fork()
        if not between:
            os.close(done)
            _be_between(requests, request, descriptors, answered=answered)
        os.waitpid(between, 0)
    except OSError as error:
        failed = f"cannot fork: {error.strerror}"
    os.close(answered)
    if not os.read(done, 1):
        with suppress(BrokenPipeError):
            requests.send(json.dumps({"of": request["number"], "error": failed}).encode())
    for descriptor in (done, *descriptors):
        os.close(descriptor)


def _be_between(
    requests: socket.socket,
    request: Mapping[str, Any],
    descriptors: list[int],
    *,
    answered: int,
) -> NoReturn:
    """Fork the program and end, which makes it a child of the process that asked."""
    code = _EXIT_FAILED
    try:
        ended = os.pidfd_open(os.getpid())
        if os.fork():
            os._exit(0)
        os.setsid()
        gone = select.poll()
        gone.register(ended, select.POLLIN)
        gone.poll()
        os.close(ended)
        # This fails where the other end is closed, and the program never runs.
        answer = {"of": request["number"], "pid": os.getpid()}
        requests.send(json.dumps(answer).encode())
        requests.close()
        with suppress(BrokenPipeError):  # the fork server has been killed meanwhile
            os.write(answered, b"1")
        os.close(answered)
        code = _become(request, descriptors)
    except BrokenPipeError:
        code = _EXIT_FAILED
    except BaseException:  # the edge of this process, which must not go on as the fork server
        traceback.print_exc()
    finally:
        # Unloading modules one by one would take a second.
        os._exit(code)


def _become(request: Mapping[str, Any], descriptors: Sequence[int]) -> int:
    """Be the program; the exit status."""
    # They come under any number, and then get the number that the request names.
    numbers: list[int] = request["descriptors"]
    above = 1 + max([*numbers, *descriptors])  # not a fixed one: a limit on files may be low
    aside = [fcntl.fcntl(one, fcntl.F_DUPFD, above) for one in descriptors]
    for descriptor in descriptors:
        os.close(descriptor)
    for number, descriptor in zip(numbers, aside, strict=True):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.environ.clear()
    os.environ.update(request["environ"])
    argv: list[str] = request["argv"]
    module = argv[len(PYTHON)]
    sys.orig_argv[:] = argv
    sys.argv[:] = argv[len(PYTHON) :]
    set_name("python")
    set_title(*argv)
    gc.enable()
    return run_module(module)


def run_module(module: str) -> int:
    """Be `python -m MODULE`, with sys.argv as it is, to its end; the exit status."""
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as end:
        code = _exit_code(end)
    except BaseException:  # the edge of this process
        traceback.print_exc()
        code = _EXIT_FAILED
    # What an interpreter does at its end, in its order, but for the unloading.
    # (Both are silenced: Python has no public names for them.)
    threading._shutdown()  # pyright: ignore
    atexit._run_exitfuncs()  # pyright: ignore[reportPrivateUsage]
    sys.stdout.flush()
    sys.stderr.flush()
    return code


def _exit_code(end: SystemExit) -> int:
    if end.code is None or isinstance(end.code, int):
        return end.code or 0
    sys.stderr.write(f"{end.code}\n")
    return _EXIT_FAILED


if __name__ == "__main__":
    sys.exit(main())
