"""The thread that starts an instance's ranks, watches them, and takes all down when one goes."""

from __future__ import annotations

import logging
import os
import queue
import select
import threading
import time
from collections.abc import Callable, Sequence

from xpyd_worker.ranks.loss import EXIT_RANK_ENDED, Loss
from xpyd_worker.ranks.pods.pod import Pod
from xpyd_worker.ranks.watch.beats import Beat
from xpyd_worker.ranks.watch.judge import LOOK_S, Judge

_log = logging.getLogger(__name__)
_END_S = 5.0
Report = Callable[[Judge], None]


class Watch:
    """Watches the ranks of `pod`. Its thread ends with them."""

    def __init__(
        self,
        pod: Pod,
        judge: Judge,
        *,
        others: Callable[[], Sequence[Beat]],
        lost: Callable[[Loss], None],
        elsewhere: Callable[[], Sequence[Beat]] = tuple,
    ) -> None:
        """`others`: what the ranks of other pods showed last, which come behind those of `pod`;
        `elsewhere`: see Judge.look. `lost` is called once, on the watch's thread, when all of `pod`
        are gone."""
        self._pod = pod
        self._judge = judge
        self._others = others
        self._elsewhere = elsewhere
        self._lost = lost
        self._reports: queue.SimpleQueue[Report] = queue.SimpleQueue()
        self._waker = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._is_closing = False
        self._ends_in_order = False
        self._thread: threading.Thread | None = None

    def start(self, spawn: Callable[[], None]) -> None:
        """Start the processes by `spawn`, on the watch's thread, and watch them."""
        self._thread = threading.Thread(
            target=self._run, args=(spawn,), name="rank-watch", daemon=True
        )
        self._thread.start()

    @property
    def thread_ident(self) -> int:
        """The thread's threading.get_ident(); 0 before the start."""
        return 0 if self._thread is None else self._thread.ident or 0

    def report(self, report: Report) -> None:
        """Give the judge a report before its next look. Any thread."""
        self._reports.put(report)
        os.eventfd_write(self._waker, 1)

    def close(self, *, in_order: bool) -> None:
        """End the ranks: `in_order` when no step is under way. Nothing is a loss any more."""
        self._ends_in_order = in_order
        self._is_closing = True
        os.eventfd_write(self._waker, 1)
        if self._thread is not None:
            self._thread.join(2 * _END_S)

    def release(self) -> None:
        """When closed, and after the last report."""
        os.close(self._waker)

    # --- its thread

    def _run(self, spawn: Callable[[], None]) -> None:
        loss: Loss | None
        try:
            spawn()
            loss = self._watch()
        except OSError as error:
            loss = Loss(f"a rank cannot be started: {error}", EXIT_RANK_ENDED)
        except Exception as error:  # the thread's edge: without a watch nothing may go on
            _log.exception("the watch over the ranks failed")
            loss = Loss(f"the ranks cannot be watched: {error!r}", EXIT_RANK_ENDED)
        if loss is None and self._ends_in_order:
            self._pod.end(_END_S)
        else:
            self._pod.kill()
        if loss is not None:
            self._lost(loss)

    def _watch(self) -> Loss | None:
        pod, judge = self._pod, self._judge
        pod.ends.register(self._waker, select.POLLIN)
        next_look_s = time.monotonic()
        while not self._is_closing:
            pod.ends.poll(max(0.0, next_look_s - time.monotonic()) * 1000)
            self._hear()
            ended = pod.take_ended()
            for rank, returncode in ended:
                judge.ended(rank, returncode)
            now_s = time.monotonic()
            if not ended and now_s < next_look_s:
                continue
            next_look_s = now_s + LOOK_S
            loss = judge.look([*pod.look(), *self._others()], self._elsewhere())
            if loss is not None:
                return loss
        return None

    def _hear(self) -> None:
        try:
            os.eventfd_read(self._waker)
        except BlockingIOError:
            return
        while not self._reports.empty():
            self._reports.get()(self._judge)
