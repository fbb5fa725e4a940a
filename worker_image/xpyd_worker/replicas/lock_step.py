"""Lock step between the engines of one process: waves, their coordinator, and the finish check.

    engine's thread --latest state, news--> coordinator's thread --START--> inbox of another engine
           ^ `-- a vote each 24 iterations: FinishCheck --'  `--statistics--> front end

All engines are threads here, so a report is a value that the coordinator reads, a START an item in
an inbox, and the finish check a meeting of threads. None of it is needed twice, and what gets lost
is made up for (ADR 0118). Where engines are in several processes, `Reduce` is what a CPU group of
their ranks does. Replicas come and go at a finish check, from which all make the same next forward
(`LockStep.resize`, ADR 0128). It must not know requests, tensors or ranks. See docs/adr/0122.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from xpyd_core.errors import UserError, XpydError
from xpyd_worker.engine.executor import Resize
from xpyd_worker.replicas.coordinator import PUBLISH_S, Coordinator, Statistics
from xpyd_worker.replicas.waves import ReplicaWave, Report, Vote

_log = logging.getLogger(__name__)
CHECK_DEADLINE_S = 120.0
"""As of a step: the others are at most the steps under way behind."""
REPAIR_DEADLINE_S = 20.0
"""Until a rank that is stopped counts as lost, and more."""
RESIZE_DEADLINE_S = 600.0
"""Until replicas have come or gone: 24 forwards until the check, and the one in which ranks read
experts, whose own deadline is shorter."""

Put = Callable[[Callable[[], None]], object]
"""Has a call made on an engine's thread before its next step."""
Reduce = Callable[[Vote], Vote]
"""The maximum of each number of all replicas' votes; each calls it once for a check. Raises
OutOfStepError."""


class OutOfStepError(XpydError):
    """Another replica does not come to the finish check. The engine ends, and all others do."""


class FinishCheck:
    """A Reduce among threads."""

    def __init__(self, replicas: int, *, deadline_s: float = CHECK_DEADLINE_S) -> None:
        self._replicas = replicas
        self._deadline_s = deadline_s
        self._changed = threading.Condition()
        self._votes: list[Vote] = []
        self._checks = 0
        self._result = Vote(0, 0)
        self._meeting = 0
        self._failure = ""

    def reduce(self, vote: Vote) -> Vote:
        """See Reduce."""
        with self._changed:
            check = self._checks
            if vote.known < self._meeting:
                return self._interrupted(vote)
            self._votes.append(vote)
            if len(self._votes) == self._replicas:
                self._result = Vote(*map(max, zip(*self._votes, strict=True)))
                self._votes.clear()
                self._checks += 1
                self._changed.notify_all()
            self._changed.wait_for(
                lambda: self._checks > check or vote.known < self._meeting or bool(self._failure),
                self._deadline_s,
            )
            # The next check needs this vote's replica, so the result is still this one's.
            if self._checks > check:
                return self._result
            if vote.known < self._meeting and not self._failure:
                return self._interrupted(vote)
            text = self._failure or (
                f"{len(self._votes)} of {self._replicas} replicas came to the finish check within "
                f"{self._deadline_s:g} s"
            )
            raise OutOfStepError(text)

    def _interrupted(self, vote: Vote) -> Vote:
        return Vote(1, vote.wave, known=self._meeting)

    def resize(self, replicas: int) -> None:
        """So many come to the next check. Behind one, and before any can come to the next."""
        with self._changed:
            self._replicas = replicas

    def interrupt(self, meeting: int, replicas: int) -> None:
        """A replica is lost: no check ends before those that are left have made this change. Who
        waits in one goes on as if others had requests."""
        with self._changed:
            self._votes.clear()
            self._replicas, self._meeting = replicas, meeting
            self._changed.notify_all()

    def fail(self, reason: str) -> None:
        """No replica waits from now on."""
        with self._changed:
            self._failure = self._failure or reason
            self._changed.notify_all()


class Member:
    """A replica's end, which its EngineCore has: see LockStep there. The engine's thread calls all
    but what says otherwise."""

    def __init__(self, replica: int, lock_step: LockStep, reduce: Reduce) -> None:
        self.replica = replica
        self._lock_step, self._reduce = lock_step, reduce
        self._wave = ReplicaWave(rank=replica)
        self._put: Put | None = None
        self.latest = Report(0, is_running=False)
        """Its state. Any thread reads it."""
        self.dummy_forwards = 0
        """Forwards that it made for the others. Any thread reads it."""
        self.resize: Resize | None = None
        """See EngineCore's LockStep."""
        self.failure = ""
        """Why its engine ended by itself."""
        self._is_in = True
        self._known = 0
        """The last change that it has made, or makes with its next forward."""
        self._repair: tuple[Resize, int] | None = None
        """Of it, to be made, and the wave."""
        self._changed = threading.Condition()

    # --- EngineCore

    def bind(self, put: Put) -> None:
        """See EngineCore's LockStep; before the engine starts."""
        self._put = put

    def submitted(self, wave: int) -> None:
        """See EngineCore's LockStep."""
        self._set(is_news=self._wave.take_request(wave))

    @property
    def in_wave(self) -> bool:
        """See EngineCore's LockStep."""
        return self._is_in and self._wave.is_running

    def end_iteration(self, *, waiting: int, running: int, is_dummy: bool) -> None:
        """See EngineCore's LockStep."""
        self.dummy_forwards += is_dummy
        resize, self.resize = self.resize, None
        if resize is not None:
            # The ranks have it, with the forward that was made.
            if self.replica not in resize.replicas:
                self.leave()
            self._lock_step.resized(self.replica)
        is_news = False
        if self._is_in and self._wave.end_iteration():
            due = self._lock_step.meeting
            has_unfinished = bool(waiting or running)
            vote = self._wave.vote(has_unfinished=has_unfinished, meeting=due, known=self._known)
            result = self._reduce(vote)
            is_news = self._wave.settle(result)
            if result.meeting:
                self.resize = self._lock_step.begin_resize(result)
                self._known = self.resize.meeting
        self._set(is_news=is_news, waiting=waiting, running=running)

    @property
    def may_leave(self) -> bool:
        """See EngineCore's LockStep."""
        return not self._is_in or self._lock_step.may_leave

    def failed(self, why: str) -> None:
        """See EngineCore's LockStep."""
        self._lock_step.failed(self, why)

    def leave(self) -> None:
        """Be none of the others, any more or yet."""
        self._is_in = False
        self._wave.leave()

    # --- the coordinator

    def enter(self, resize: Resize, wave: int) -> None:
        """Come to the others with the next forward, which is of `wave`. Any thread."""
        assert self._put is not None, "its engine runs"

        def entered() -> None:
            self._is_in, self.resize, self._known = True, resize, resize.meeting
            self._wave.enter(wave)
            self._set(is_news=True)

        self._put(entered)

    def repair(self, resize: Resize, wave: int) -> None:
        """Another replica is lost. The next forward is one with those that are left, or, where one
        broke, that made again (`await_repair`). Any thread."""
        with self._changed:
            self._repair = (resize, wave)
            self._changed.notify_all()
        if self._put is not None:
            self._put(lambda: self._take_repair() and self._set(is_news=True))

    def await_repair(self) -> Resize:
        """A forward broke: what is to be told to the ranks, with which they make it again. On the
        engine's thread, within it."""
        with self._changed:
            # Where this replica is the lost one there is none to come.
            self._changed.wait_for(
                lambda: self._repair is not None or self.may_leave, REPAIR_DEADLINE_S
            )
        repair = self._take_repair()
        if repair is None:
            raise OutOfStepError("a step broke, and no replica is known to be lost")
        return repair

    def _take_repair(self) -> Resize | None:
        with self._changed:
            repair, self._repair = self._repair, None
        if repair is None:
            return None
        self.resize, self._known = repair[0], repair[0].meeting
        self._wave.enter(repair[1])
        return self.resize

    def start(self, wave: int) -> None:
        """Send START_DP_WAVE `wave`. Any thread."""

        def started() -> None:
            if self._is_in:
                self._set(is_news=self._wave.take_start(wave))

        if self._put is not None:
            self._put(started)

    def wake(self) -> None:
        """Have the engine look again whether it may leave. Any thread."""
        with self._changed:
            self._changed.notify_all()
        if self._put is not None:
            self._put(lambda: None)

    def _set(self, *, is_news: bool, waiting: int = 0, running: int = 0) -> None:
        self.latest = self._wave.report(waiting=waiting, running=running)
        if is_news:
            self._lock_step.news()


class LockStep:
    """All replicas' members and their coordinator. `start` it before the engines, `close` it behind
    them."""

    def __init__(
        self,
        replicas: int,
        *,
        clock: Callable[[], float],
        fell: Callable[[str], None],
        reduce: Reduce | None = None,
        outlives: Callable[[int], int | None] = lambda _: None,
    ) -> None:
        """`fell`: a replica failed, so none can go on. `reduce`: FinishCheck's where it is None.
        `outlives`: asked for the replica, whether the others go on without it, and the number of
        that change."""
        self._check = FinishCheck(replicas)
        self._reduce = reduce or self._check.reduce
        self.members = [Member(replica, self, self._reduce) for replica in range(replicas)]
        """Replaced whole where replicas come or go. Any thread reads it."""
        self._coming: dict[int, Member] = {}
        self._due: Resize | None = None
        self._begun = 0
        """The last meeting that began."""
        self._missing: set[int] = set()
        self._gone: set[int] = set()
        """Lost, and not come again."""
        self._resized = threading.Event()
        self._failure = ""
        self._coordinator = Coordinator(replicas)
        self._clock, self._fell, self._outlives = clock, fell, outlives
        self._publish: Callable[[Statistics], None] = lambda _: None
        self._next_s = 0.0
        self._published: tuple[int, bool] | None = None
        self._lock = threading.Lock()
        self._asked: int | None = None
        self._are_idle: Callable[[], bool] | None = None
        self._news = threading.Event()
        self._closing = False
        self.may_leave = False
        """Whether engines may end: all are idle and none can be started any more, or all is lost.
        Any thread."""
        self._thread = threading.Thread(target=self._run, name="coordinator", daemon=True)

    def start(self, publish: Callable[[Statistics], None]) -> None:
        """Start the coordinator. `publish` gets the statistics, each PUBLISH_S while a wave is on
        and when one begins or ends, on its thread."""
        self._publish = publish
        self._thread.start()

    def news(self) -> None:
        """A replica's state changed. Any thread."""
        self._news.set()

    def ask(self, wave: int) -> None:
        """A front end that knows `wave` and of no running one has sent a request. Any thread."""
        with self._lock:
            self._asked = wave if self._asked is None else max(wave, self._asked)
        self._news.set()

    def member(self, replica: int) -> Member:
        """The end of a replica; a new one for each start of one that is to come."""
        if found := [one for one in self.members if one.replica == replica]:
            return found[0]
        coming = self._coming[replica] = Member(replica, self, self._reduce)
        coming.leave()
        return coming

    def resize(self, meeting: int, replicas: tuple[int, ...]) -> None:
        """Have these replicas, and return when all have made a forward together. Those that come
        have their engines started; those that go have no requests. OutOfStepError, where none goes
        on any more; UserError, and nothing has changed, where one was lost since `meeting` was
        begun. One call at a time."""
        with self._lock:
            known = {*self._coming, *(one.replica for one in self.members)}
            if meeting < self._begun or self._due is not None or not known.issuperset(replicas):
                raise UserError("a replica was lost meanwhile: try again when it has come again")
            self._missing = {*replicas, *(one.replica for one in self.members)}
            self._resized.clear()
            self._due = Resize(meeting, replicas)
            failed = [one for one in self._coming.values() if one.failure]
        self._news.set()
        for one in failed:
            self.failed(one, one.failure)
        if not self._resized.wait(RESIZE_DEADLINE_S):
            text = f"the replicas have not become {len(replicas)} within {RESIZE_DEADLINE_S:g} s"
            self.fail(text)
            self._fell(text)
        if self._failure:
            raise OutOfStepError(self._failure)

    @property
    def replicas(self) -> tuple[int, ...]:
        """Those that make forwards together, in the order of their ranks. Any thread."""
        return tuple(one.replica for one in self.members)

    @property
    def meeting(self) -> int:
        """The number of the change that is due; 0: none. Any thread."""
        due = self._due
        return 0 if due is None or due.meeting == self._begun else due.meeting

    def begin_resize(self, result: Vote) -> Resize:
        """A finish check has found that one is due: what ranks are told with the next forward. Each
        member that was in the check calls it before anything else; the first makes the change."""
        with self._lock:
            due = self._due
            assert due is not None, "none is over before all are in it"
            if self._begun == due.meeting:
                return due
            self._begun = due.meeting
            self._check.resize(len(due.replicas))
            have = {one.replica: one for one in self.members}
            for replica in due.replicas:
                if replica not in have:
                    have[replica] = self._coming.pop(replica)
                    have[replica].enter(due, result.wave)
            self.members = [have[replica] for replica in due.replicas]
        return due

    def lose(self, replica: int) -> bool:
        """A replica is lost: whether the others go on without it. Its engine ends by itself. Not
        while others come or go: ranks may be anywhere then. Any thread."""
        with self._lock:
            members = [one for one in self.members if one.replica != replica]
            if len(members) == len(self.members):
                # Nobody makes forwards with it before a change that lets it come has begun.
                is_apart = self._due is None or self._due.is_repair
                return is_apart and (replica in self._gone or replica in self._coming)
            is_on = self._thread.ident is not None and not self._failure
            is_possible = bool(members) and self._due is None and is_on
            meeting = self._outlives(replica) if is_possible else None
            if meeting is None:
                return False
            self._gone.add(replica)
            for one in self.members:
                if one.replica == replica:
                    one.leave()
                    one.wake()
            repair = Resize(meeting, tuple(one.replica for one in members), is_repair=True)
            self._missing = {*repair.replicas}
            self._resized.clear()
            self._due, self._begun, self.members = repair, meeting, members
            wave = max(one.latest.wave for one in members)
            self._check.interrupt(meeting, len(members))
            for one in members:
                one.repair(repair, wave)
        self._news.set()
        return True

    def await_repaired(self) -> None:
        """Until those that are left have made a forward behind `lose`. OutOfStepError."""
        if not self._resized.wait(RESIZE_DEADLINE_S) or self._failure:
            raise OutOfStepError(self._failure or "the others do not go on")

    def resized(self, replica: int) -> None:
        """The ranks of a replica have changed with the others', or have left them."""
        with self._lock:
            self._missing.discard(replica)
            if not self._missing and self._due is not None:
                self._gone -= {*self._due.replicas}
                self._due = None
                self._resized.set()

    def begin_end(self, are_idle: Callable[[], bool]) -> None:
        """No request comes any more, and engines that are asked to stop wait for `may_leave`.
        `are_idle`: whether no engine has a request, in its inbox neither. Any thread."""
        self._are_idle = are_idle
        self._news.set()

    def failed(self, member: Member, why: str) -> None:
        """A replica's engine cannot go on, so none can; one that is still to come, or has left, is
        no part of the others. Any thread."""
        with self._lock:
            member.failure = why
            if not (member in self.members or member.replica in self._missing):
                return
        if self.lose(member.replica):
            return
        text = f"replica {member.replica} of the instance failed: {why}"
        self.fail(text)
        self._fell(text)

    def fail(self, reason: str) -> None:
        """None can go on: what waits for others ends. Any thread."""
        self._failure = self._failure or reason
        self._check.fail(reason)
        self._resized.set()
        self._let_leave()

    def close(self, within_s: float) -> None:
        """End the coordinator, and whatever still waits."""
        self._closing = True
        self.fail("the engine was stopped")
        self._news.set()
        if self._thread.ident is not None:
            self._thread.join(within_s)

    # --- the coordinator's thread

    def _run(self) -> None:
        try:
            while not self._closing:
                self._news.wait(PUBLISH_S if self._is_on else None)
                self._news.clear()
                self.turn()
        except Exception as error:  # the thread's edge: nothing would start waves any more
            _log.exception("the coordinator failed")
            self.fail("the coordinator failed")
            self._fell(f"the coordinator of the replicas failed: {error!r}")

    @property
    def _is_on(self) -> bool:
        """Whether something may have to be sent again, or published."""
        is_wanted = self._are_idle is not None or self._due is not None
        return is_wanted or not self._coordinator.may_end()

    def turn(self) -> None:
        """Take in all states, and send START where it is due. Public for tests, which run it
        without the thread."""
        with self._lock:
            asked, self._asked = self._asked, None
        # First: behind it nothing but a START, which is sent here, can wake an idle engine.
        are_idle = self._are_idle is not None and self._are_idle()
        members, due = self.members, set[int]()
        self._coordinator.resize([member.replica for member in members])
        for member in members:
            due.update(self._coordinator.heard(member.replica, member.latest))
        if self.meeting:
            # It needs a finish check, so a wave.
            due.update(self._coordinator.asked(self._coordinator.wave))
        if asked is not None:
            due.update(self._coordinator.asked(asked))
        now_s = self._clock()
        is_due = now_s >= self._next_s
        if is_due:
            self._next_s = now_s + PUBLISH_S
            due.update(self._coordinator.missing())
        for member in members:
            if member.replica in due:
                member.start(self._coordinator.wave)
        state = (self._coordinator.wave, self._coordinator.is_running)
        if is_due or state != self._published:
            self._published = state
            self._publish(self._coordinator.statistics())
        if are_idle and self._coordinator.may_end() and not due:
            self._let_leave()

    def _let_leave(self) -> None:
        if not self.may_leave:
            self.may_leave = True
            for member in [*self.members, *self._coming.values()]:
                member.wake()
