"""The program that forks ranks: `python -m xpyd_worker.ranks.start.fork_server`. ADR 0033.

    processes --starts--> fork server: imports what ranks need, once --forks--> each rank
      ^                     ends, and leaves the ranks to the pod's process --------|

Its main thread is the only thread here, so what a rank inherits is whole: torch's modules and the
pages they are on, no locks, no pools of threads, no CUDA. A forked rank waits until the fork server
is gone before it does anything: it is then a child of the pod's process, which learns how it ends,
and it ends with that process.
"""

from __future__ import annotations

import argparse
import gc
import os
import select
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import NamedTuple, NoReturn

from xpyd_core.process import bind_to, set_name, thread_names
from xpyd_kv.ranks.engine import Channel
from xpyd_worker.ranks.loss import RANK_FAILED
from xpyd_worker.ranks.start.messages import Start
from xpyd_worker.ranks.start.processes import report_pid
from xpyd_worker.ranks.start.rank_main import MakeProgram, live
from xpyd_worker.ranks.watch.beats import BeatPage, Slot
from xpyd_worker.system import prepare_for_torch

_ORPHANED_S = 60.0
"""The time in which a fork server that has forked all ranks ends; it has nothing else to do."""

Prepare = Callable[[], MakeProgram]
"""Imports what ranks need; what makes their program."""


class _Child(NamedTuple):
    """A rank that is not forked yet: its number, its link, and all descriptors that are its own."""

    rank: int
    link: int
    descriptors: frozenset[int]


class _ImportBeats(MetaPathFinder):
    """Reports each search for a module as a sign of life of all ranks: to import torch may take
    long, and no thread may run here."""

    def __init__(self, slots: Sequence[Slot]) -> None:
        self._slots = slots

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None, /
    ) -> ModuleSpec | None:
        """Find nothing: the next finder does."""
        for slot in self._slots:
            slot.live()
        return None


def main(prepare: Prepare) -> None:
    """Fork the ranks that the arguments name, each of which runs what `prepare` returns. Does not
    return."""
    args = _parse()
    children = [_child(text) for text in args.rank]
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    bind_to(args.parent, status=RANK_FAILED)
    set_name("xpyd-forkserver")
    # Collections would write to pages that are to be shared, and find nothing.
    gc.disable()
    page = BeatPage(len(children), args.beats)
    slots = [page.slot(index) for index in range(len(children))]
    make_program: MakeProgram | None = None
    if not args.threads:
        make_program = _prepared(prepare, slots)
        names = thread_names()
        if len(names) > 1:
            # What such a thread holds would be held for ever behind a fork: each rank imports.
            again = ("--threads", ",".join(names))
            os.execv(sys.executable, [*sys.orig_argv, *again])
    gc.freeze()
    ended = os.pidfd_open(os.getpid())
    for child, slot in zip(children, slots, strict=True):
        pid = os.fork()
        if pid:
            report_pid(args.pids, child.rank, pid)
            continue
        try:
            report_pid(args.pids, child.rank, os.getpid())
            _leave(args, child, children, ended)
            make = make_program or _prepared(prepare, [slot])
            live(child.rank, child.link, make, note=_note(args.threads, child.rank))
        except BaseException:  # the edge of this process, which must not go on as the fork server
            traceback.print_exc()
        finally:
            os._exit(RANK_FAILED)
    # Unloading torch module by module would take a second.
    os._exit(0)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="xpyd fork server")
    parser.add_argument("--parent", type=int, required=True, help="the process that started it")
    parser.add_argument("--pids", type=int, required=True, help="descriptor of the pipe for pids")
    parser.add_argument("--beats", type=int, required=True, help="descriptor of the beats' memory")
    parser.add_argument(
        "--rank",
        action="append",
        required=True,
        metavar="NUMBER:LINK,...",
        help="a rank's number, and the descriptors that are its own, its link first",
    )
    parser.add_argument(
        "--threads", default="", help="found once all was imported; each rank imports by itself"
    )
    return parser.parse_args()


def _child(text: str) -> _Child:
    rank, _, rest = text.partition(":")
    descriptors = [int(one) for one in rest.split(",")]
    return _Child(int(rank), descriptors[0], frozenset(descriptors))


def _prepared(prepare: Prepare, slots: Sequence[Slot]) -> MakeProgram:
    """What `prepare` returns. Where it fails, what makes each rank report that over its link."""
    beats = _ImportBeats(slots)
    sys.meta_path.insert(0, beats)
    try:
        return prepare()
    except Exception as error:
        failed = error
    finally:
        sys.meta_path.remove(beats)

    def fail(_start: Start, _channel: Channel, _give_up: Callable[[str], None]) -> NoReturn:
        raise failed

    return fail


def _leave(args: argparse.Namespace, child: _Child, children: Sequence[_Child], ended: int) -> None:
    """Become a rank: close what belongs to the others, and end with the pod's process."""
    others = frozenset[int]().union(*(one.descriptors for one in children)) - child.descriptors
    for descriptor in (args.pids, *others):
        os.close(descriptor)
    gone = select.poll()
    gone.register(ended, select.POLLIN)
    gone.poll(_ORPHANED_S * 1000)
    os.close(ended)
    bind_to(args.parent, status=RANK_FAILED)
    gc.enable()


def _note(threads: str, rank: int) -> str:
    if not threads or rank:
        return ""
    return f"each rank imports torch by itself, for the import starts threads: {threads}"


def _import_program() -> MakeProgram:
    prepare_for_torch()
    from xpyd_worker.ranks.start.program import RankProgram

    return RankProgram


if __name__ == "__main__":
    main(_import_program)
