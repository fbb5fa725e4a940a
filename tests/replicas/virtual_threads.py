"""Threads in virtual time, one at a time, in an order that a seed draws.

A `VirtualThreads` takes the places of the modules `threading` and `time` in modules under test,
which stay as they are. A thread goes on until it waits; then another does. Time passes when nobody
can go on before. A lock may let others go first, so that runs differ in more than their waits.
Where nobody can ever go on the main thread gets DeadlockError: what hangs takes no time to find.
"""

from __future__ import annotations

import heapq
import random
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import partial
from typing import Any

_JITTER_S = 0.0002
"""At most so long after what it waited for a thread goes on."""
_YIELDS = 0.03
"""The share of locks that let others go first."""
_END_S = 10.0


class DeadlockError(AssertionError):
    """All threads wait for each other."""


class _EndedError(BaseException):
    """The run is over: no more of a thread is run."""


class _Task:
    """One thread, which runs while its gate is open. `turn` counts its runs: what was to wake it in
    an earlier wait does nothing."""

    def __init__(self) -> None:
        self.gate = threading.Lock()
        self.gate.acquire()
        self.turn = 0
        self.is_over = False


class VirtualThreads:
    """All threads of one run; the one that makes it is the main thread."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.now_s = 0.0
        self.errors: list[BaseException] = []
        """What ended a thread."""
        self.current = self._main = _Task()
        self.is_over = False
        self._is_stuck = False
        self._due: list[tuple[float, float, int, _Task, int]] = []
        self._count = 0
        self._threads: list[tuple[_Task, threading.Thread]] = []
        self.Lock = partial(_Lock, self, is_reentrant=False)
        self.RLock = partial(_Lock, self, is_reentrant=True)
        self.Condition = partial(_Condition, self)
        self.Event = partial(_Event, self)
        self.Thread = partial(_Thread, self)
        self.ThreadPoolExecutor = partial(_Pool, self)

    def monotonic(self) -> float:
        """The time."""
        return self.now_s

    def sleep(self, seconds: float) -> None:
        """Let others go on for so long."""
        until_s = self.now_s + seconds
        while self.now_s < until_s or seconds == 0:
            self.park(until_s)
            if seconds == 0:
                return

    def park(self, until_s: float | None) -> None:
        """The current thread waits until `wake`, or that time, or for nothing: callers look."""
        if until_s is not None:
            self._push(self.current, until_s)
        self._switch()

    def wake(self, task: _Task) -> None:
        """It goes on soon."""
        self._push(task, self.now_s + self.rng.random() * _JITTER_S)

    def start(self, run: Callable[[], object]) -> _Task:
        """A new thread that makes this call."""
        task = _Task()

        def whole() -> None:
            task.gate.acquire()
            try:
                if not self.is_over:
                    run()
            except _EndedError:
                pass
            except BaseException as error:  # the thread's edge: the test sees it
                self.errors.append(error)
            task.is_over = True
            if not self.is_over:
                self._switch()

        thread = threading.Thread(target=whole, daemon=True)
        self._threads.append((task, thread))
        thread.start()
        self.wake(task)
        return task

    def _push(self, task: _Task, when_s: float) -> None:
        self._count += 1
        entry = (max(when_s, self.now_s), self.rng.random(), self._count, task, task.turn)
        heapq.heappush(self._due, entry)

    def _next(self) -> _Task:
        while self._due:
            when_s, _, _, task, turn = heapq.heappop(self._due)
            if turn == task.turn and not task.is_over:
                self.now_s = when_s
                return task
        self._is_stuck = True
        return self._main

    def _switch(self) -> None:
        """Another thread runs, until it is this one's turn again."""
        if self.is_over:
            raise _EndedError
        mine, task = self.current, self._next()
        task.turn += 1
        if task is not mine:
            self.current = task
            task.gate.release()
            if mine.is_over:
                return
            mine.gate.acquire()
        if self.is_over:
            raise _EndedError
        if self._is_stuck and mine is self._main:
            raise DeadlockError

    def end(self) -> None:
        """End all threads but the main one, wherever they are."""
        self.is_over = True
        for task, thread in self._threads:
            if not task.is_over:
                task.gate.release()
            thread.join(_END_S)


class _Waiters:
    """Threads that wait for something, in the order in which they came."""

    def __init__(self, threads: VirtualThreads) -> None:
        self._threads = threads
        self._tasks: dict[_Task, None] = {}

    def wait_for(self, holds: Callable[[], bool], timeout_s: float | None = None) -> bool:
        threads = self._threads
        until_s = None if timeout_s is None else threads.now_s + timeout_s
        while not holds():
            if until_s is not None and threads.now_s >= until_s:
                return False
            self._tasks[threads.current] = None
            threads.park(until_s)
        return True

    def wake(self) -> None:
        tasks, self._tasks = self._tasks, {}
        for task in tasks:
            self._threads.wake(task)


class _Lock:
    def __init__(self, threads: VirtualThreads, *, is_reentrant: bool) -> None:
        self._threads, self._is_reentrant = threads, is_reentrant
        self._owner: _Task | None = None
        self._depth = 0
        self._waiters = _Waiters(threads)

    def _is_free(self) -> bool:
        mine = self._is_reentrant and self._owner is self._threads.current
        return self._owner is None or mine

    def acquire(self, blocking: bool = True) -> bool:
        threads = self._threads
        if not self._depth and threads.rng.random() < _YIELDS:
            threads.sleep(0)
        if not blocking and not self._is_free():
            return False
        self._waiters.wait_for(self._is_free)
        self._owner = threads.current
        self._depth += 1
        return True

    def release(self) -> None:
        self._depth -= 1
        if not self._depth:
            self._owner = None
            if not self._threads.is_over:
                self._waiters.wake()

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()

    def let_go(self) -> int:
        """Release it whole; how deep it was held."""
        depth, self._depth = self._depth, 1
        self.release()
        return depth

    def take_back(self, depth: int) -> None:
        self.acquire()
        self._depth = depth


class _Condition(_Lock):
    def __init__(self, threads: VirtualThreads) -> None:
        super().__init__(threads, is_reentrant=True)
        self._sleepers = _Waiters(threads)
        self._notices = 0

    def wait(self, timeout: float | None = None) -> bool:
        notices = self._notices
        depth = self.let_go()
        is_noticed = self._sleepers.wait_for(lambda: self._notices > notices, timeout)
        self.take_back(depth)
        return is_noticed

    def wait_for(self, predicate: Callable[[], bool], timeout: float | None = None) -> bool:
        until_s = None if timeout is None else self._threads.now_s + timeout
        while not predicate():
            left_s = None if until_s is None else until_s - self._threads.now_s
            if left_s is not None and left_s <= 0:
                return False
            self.wait(left_s)
        return True

    def notify_all(self) -> None:
        self._notices += 1
        self._sleepers.wake()


class _Event:
    def __init__(self, threads: VirtualThreads) -> None:
        self._waiters = _Waiters(threads)
        self._is_set = False

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        self._is_set = True
        self._waiters.wake()

    def clear(self) -> None:
        self._is_set = False

    def wait(self, timeout: float | None = None) -> bool:
        return self._waiters.wait_for(self.is_set, timeout)


class _Thread:
    def __init__(
        self, threads: VirtualThreads, *, target: Callable[[], object], **_: object
    ) -> None:
        self._threads, self._target = threads, target
        self._over = threads.Event()
        self.ident: int | None = None

    def start(self) -> None:
        self.ident = 1

        def run() -> None:
            try:
                self._target()
            finally:
                if not self._threads.is_over:
                    self._over.set()

        self._threads.start(run)

    def is_alive(self) -> bool:
        return self.ident is not None and not self._over.is_set()

    def join(self, timeout: float | None = None) -> None:
        self._over.wait(timeout)


class _Call:
    """As a Future."""

    def __init__(self, threads: VirtualThreads, call: Callable[[], Any]) -> None:
        self._result: Any = None
        self._error: BaseException | None = None

        def run() -> None:
            try:
                self._result = call()
            except Exception as error:  # its caller's, as with a Future
                self._error = error

        self.thread = threads.Thread(target=run)
        self.thread.start()

    def done(self) -> bool:
        return not self.thread.is_alive()

    def exception(self) -> BaseException | None:
        self.thread.join()
        return self._error

    def result(self) -> Any:
        if (error := self.exception()) is not None:
            raise error
        return self._result


class _Pool:
    """As a ThreadPoolExecutor with a thread for each call."""

    def __init__(self, threads: VirtualThreads, *_: object) -> None:
        self._threads = threads
        self._calls: list[_Call] = []

    def submit(self, call: Callable[..., Any], *args: Any, **options: Any) -> _Call:
        self._calls.append(_Call(self._threads, partial(call, *args, **options)))
        return self._calls[-1]

    def __enter__(self) -> _Pool:
        return self

    def __exit__(self, *_: object) -> None:
        for call in self._calls:
            call.thread.join()


@contextmanager
def virtual_threads(seed: int, *places: tuple[Any, str]) -> Generator[VirtualThreads]:
    """Within, each place (a module and a name in it) has them. Raises what ended a thread."""
    threads = VirtualThreads(seed)
    before = [(module, name, getattr(module, name)) for module, name in places]
    for module, name in places:
        pool = threads.ThreadPoolExecutor if name == "ThreadPoolExecutor" else threads
        setattr(module, name, pool)
    try:
        yield threads
    finally:
        threads.end()
        for module, name, value in before:
            setattr(module, name, value)
    if threads.errors:
        raise threads.errors[0]
