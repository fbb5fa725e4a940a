"""A rank's process, from when the fork server has forked it.

    main thread: start-up, then steps     links' thread: what the engine's process says     beats

Signals are handled by the engine's process: this one ends when that says so, when it fails, or with
that process. Only the program (program.py) knows torch.
"""

from __future__ import annotations

import logging
import os
import queue
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, NoReturn, TypeVar

from xpyd_core.errors import UserError
from xpyd_core.logs import set_up_logging
from xpyd_core.process import set_name, set_title
from xpyd_kv.ranks.engine import Channel
from xpyd_worker.engine.executor import LayerExperts
from xpyd_worker.parallel.api import GroupError
from xpyd_worker.ranks.link.frames import Frame, Kind
from xpyd_worker.ranks.link.links import Link, LinkChannel, Links
from xpyd_worker.ranks.link.responses import Answers
from xpyd_worker.ranks.link.ring import RingReader
from xpyd_worker.ranks.loss import RANK_FAILED, RANK_MISSES_OTHERS, Failure
from xpyd_worker.ranks.start.messages import (
    Agreed,
    ExpertsChosen,
    Failed,
    Fits,
    FromRank,
    Measure,
    Meet,
    Opened,
    Start,
    ToRank,
    WeightsLoaded,
    decode_to_rank,
    encode,
)
from xpyd_worker.ranks.watch.beats import BeatPage, MainWatch, Slot, beat_forever

if TYPE_CHECKING:
    from xpyd_worker.ranks.compute.work import RankStep
    from xpyd_worker.ranks.start.program import RankProgram

_log = logging.getLogger(__name__)
_FLUSH_S = 2.0
_TELL_S = 1.0

_T = TypeVar("_T")


GiveUp = Callable[[str], None]
"""Ends this process, from any thread, and says why."""
MakeProgram = Callable[[Start, Channel, GiveUp], "RankProgram"]


class _Main:
    """The link to the engine's process, as this one's main thread has it."""

    def __init__(self, sock: socket.socket, rank: int) -> None:
        self._rank = rank
        self._come: queue.SimpleQueue[ToRank] = queue.SimpleQueue()
        self._links = Links(f"rank-{rank}-link")
        self._link: Link = self._links.add(sock, self._take, self._lose)
        self.channel = LinkChannel(rank, self._link.post)

    def tell(self, message: FromRank) -> None:
        """Say it."""
        self._link.post(Frame(Kind.CONTROL, self._rank, encode(message)))

    def hear(self) -> ToRank:
        """The next that it says; this process ends with it."""
        return self._come.get()

    def give_up(self, reason: str) -> None:
        """See GiveUp. Does not return."""
        _log.critical("this rank cannot go on: %s", reason)
        self.tell(Failed(Failure(reason)))
        self.close()
        os._exit(RANK_FAILED)

    def close(self) -> None:
        """Send what was posted."""
        self._links.close(_FLUSH_S)

    def _take(self, frame: Frame) -> None:
        if frame.kind == Kind.CONTROL:
            self._come.put(decode_to_rank(frame.body))
        else:
            self.channel.take(frame.body)

    def _lose(self, reason: str) -> None:
        # No process is left to report to, and nothing here must outlive the instance.
        os._exit(RANK_FAILED)


class _Rank(logging.Filter):
    """Says in each line which rank it is of."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self._rank = rank

    def filter(self, record: logging.LogRecord) -> bool:
        record.rank = self._rank
        return True


def run_steps(
    program: RankProgram,
    ring: RingReader,
    answers: Answers,
    slot: Slot,
    *,
    is_output: bool,
    depth: int,
) -> None:
    """Steps as they come, until an empty message. The output rank finishes a step as soon as it is
    over, or no other has come; the others when so many are under way that the engine must have had
    the answer: what they finish waits for the last stage, and the next step must not wait for that.

    An answer never waits for a step behind it: the engine fills the pipeline with what it learns,
    and the stages before this one would stand still for as long."""
    under_way: deque[RankStep] = deque()

    def finish() -> None:
        output = under_way.popleft().finish()
        if output is not None:
            answers.done(output)

    while True:
        message = ring.read(0 if under_way and is_output else None)
        if message == b"":
            return
        slot.begin()
        if message is None or len(under_way) == depth:
            finish()
        if message is not None:
            under_way.append(program.launch(message))
            slot.launched()
            if why := under_way[-1].broke:
                _log.warning("a step is made again without a lost replica: %s", why)
                under_way.pop()
                answers.broke(program.meeting)
                slot.end()
                continue
            if is_output and under_way[0].is_over:
                finish()
        slot.end()


def serve(main: _Main, start: Start, make_program: MakeProgram) -> int:
    """The life of a rank that knows what it is; its exit status."""
    sizes, rank = start.sizes, start.rank
    page = BeatPage(start.pod_ranks, start.beats)
    slot = page.slot(start.pod_rank)
    watch = MainWatch(page.maker, start.pod_rank)
    is_running = False
    beat_forever(slot, lambda: watch.look(is_serving=is_running))
    answers = Answers(start.responses)
    try:
        program = make_program(start, main.channel, main.give_up)
        ring = RingReader(start.ring)
        main.tell(Opened())
        _expect(main, Meet)
        program.load()
        main.tell(WeightsLoaded())
        _expect(main, Measure)
        main.tell(Fits(program.measure()))
        ready = program.make(_expect(main, Agreed).blocks)
        main.tell(ready)
        is_running = True
        tell_chosen(program.experts_chosen, main.tell)
        depth = sizes.depth(ready.depth)
        is_output = rank == sizes.output_rank
        run_steps(program, ring, answers, slot, is_output=is_output, depth=depth)
        is_running = False
        program.close()
    except Exception as error:  # the process' edge: the engine's process ends all
        misses = isinstance(error, GroupError)
        is_user_error = isinstance(error, UserError)
        if not misses and not is_user_error:
            _log.exception("rank %d fails", rank)
        failure = Failure(str(error) or repr(error), is_user_error, misses)
        if is_running:
            answers.failed(failure)
        else:
            main.tell(Failed(failure))
        return RANK_MISSES_OTHERS if misses else RANK_FAILED
    return 0


def tell_chosen(
    chosen: Callable[[], tuple[LayerExperts, ...]], tell: Callable[[ExpertsChosen], None]
) -> None:
    """Start the thread that tells what experts were chosen for, once a second while that changes;
    until the process ends. No thread where there are no experts."""
    told = chosen()
    if not told:
        return

    def run() -> None:
        last = told
        while True:
            time.sleep(_TELL_S)
            now = chosen()
            if now != last:
                tell(ExpertsChosen(now))
            last = now

    tell(ExpertsChosen(told))
    threading.Thread(target=run, name="experts", daemon=True).start()


def _expect(main: _Main, kind: type[_T]) -> _T:
    message = main.hear()
    assert isinstance(message, kind), f"{message!r} where {kind} was to come"
    return message


def live(rank: int, link: int, make_program: MakeProgram, *, note: str = "") -> NoReturn:
    """The whole life of rank `rank`, whose link is the descriptor `link`. `note`: what its log has
    to say of how it was started."""
    set_name(f"xpyd-rank-{rank}")
    main = _Main(socket.socket(fileno=link), rank)
    start = _expect(main, Start)
    place, sizes = start.sizes.coordinates(rank), start.sizes
    number = start.config.first_rank + rank  # among all replicas
    where = f"stage {place.stage} of {sizes.pipeline}, share {place.tensor} of {sizes.tensor}"
    set_name(f"xpyd-rank-{number}")
    set_title(f"xpyd rank {number}: {where}")
    set_up_logging(start.logs.level, start.logs.format)
    logging.getLogger().handlers[0].addFilter(_Rank(number))
    if note:
        _log.warning(note)
    status = serve(main, start, make_program)
    main.close()
    logging.shutdown()
    sys.stdout.flush()
    # What is left is memory; unloading torch module by module would take a second.
    os._exit(status)
