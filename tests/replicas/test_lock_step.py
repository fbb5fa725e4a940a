"""Engines in lock step, with their threads: the k-th forward of each meets the k-th of the others.
tests/replicas/test_simulation.py plays the rules in virtual time; tests/e2e has real ranks."""

from __future__ import annotations

import random
import threading
from collections.abc import Sequence
from functools import partial
from typing import Any, cast

import pytest

from tests.replicas.engines import DEADLINE_S, running
from tests.worker.engine_driver import StepFailed, seeds
from xpyd_core.errors import UserError
from xpyd_worker.engine.core import Deliver
from xpyd_worker.engine.executor import Resize
from xpyd_worker.engine.inbox import Item
from xpyd_worker.load.engine import LoadedEngine
from xpyd_worker.ranks.loss import Loss, RankLostError
from xpyd_worker.replicas.coordinator import Coordinator
from xpyd_worker.replicas.lock_step import FinishCheck, LockStep, OutOfStepError, Reduce
from xpyd_worker.replicas.waves import Report, Vote


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_replicas_without_requests_make_dummies_until_nobody_has_any(depth: int) -> None:
    with running(3, depth=depth) as instance:
        instance.submit("a", replica=1, tokens=30)
        instance.until_finished("a")
        instance.until_idle()
        instance.assert_as_alone("a")
        instance.assert_in_step()
        steps = len(instance.executors[1].inner.steps)
        assert steps == 30
        assert [one.dummies for one in instance.executors] == [48, 18, 48]
        # Others could have as many steps under way; who has one of its own waits for that.
        assert [one.most_under_way for one in instance.executors] == [depth] * 3
        assert [one.latest.wave for one in instance.members] == [1, 1, 1]


@pytest.mark.parametrize("depth", [1, 2])
def test_a_prompt_on_one_replica_is_a_step_beside_a_token_on_another(depth: int) -> None:
    with running(2, depth=depth) as instance:
        names = [f"r{n}" for n in range(9)]
        for n, name in enumerate(names):
            instance.submit(name, tokens=3 + 5 * n)
        instance.until_finished(*names)
        instance.until_idle()
        instance.assert_as_alone(*names)
        instance.assert_in_step()
        assert all(one.inner.steps for one in instance.executors)


def test_a_lost_start_is_sent_again() -> None:
    """The others wait in their first forward meanwhile; without it they hang."""
    with running(2) as instance:
        lost: list[Item] = []

        def loses(item: Item) -> bool:
            lost.append(item)
            return len(lost) == 1

        instance.inboxes[1].loses = loses
        instance.submit("a", replica=0)
        instance.until_finished("a")
        assert len(lost) > 1
        instance.until_idle()
        instance.assert_in_step()


def test_a_request_between_the_finish_check_and_the_wave_s_end_is_served() -> None:
    """The check says that nobody has any when it comes; it starts the next wave."""
    came: list[str] = []

    def around(reduce: Reduce) -> Reduce:
        def checked(vote: Vote) -> Vote:
            result = reduce(vote)
            if not result.unfinished and not came:
                came.append("b")
                instance.submit("b", replica=1, tokens=3)
            return result

        return checked

    with running(2, reduce=around) as instance:
        instance.submit("a", replica=0, tokens=5)
        instance.until_finished("a")
        instance.until(lambda: "b" in instance.requests)
        instance.until_finished("b")
        instance.until_idle()
        instance.assert_as_alone("a", "b")
        instance.assert_in_step()
        assert [one.latest.wave for one in instance.members] == [2, 2]


def test_replicas_wait_for_a_slow_one_and_go_on_with_it() -> None:
    """Nothing times the slow one out: the others are as many steps ahead as may be under way."""
    allowed = threading.Semaphore(0)
    with running(2) as instance:

        def hold(replica: int) -> None:
            if replica == 1:
                assert allowed.acquire(timeout=DEADLINE_S)

        instance.forwards.hold = hold
        instance.submit("a", replica=0, tokens=40)
        for done in range(48):
            instance.until(lambda done=done: instance.forwards.launched[0] == done + 1)
            assert instance.forwards.launched == [done + 1, done]
            allowed.release()
        instance.until_finished("a")
        instance.until_idle()
        instance.assert_in_step()


def test_a_step_that_cannot_be_sent_is_a_dummy_for_the_others() -> None:
    with running(2) as instance:
        instance.executors[0].inner.refuse_with = StepFailed("too long")
        instance.submit("a", replica=0)
        instance.submit("b", replica=1)
        instance.until_finished("a", "b")
        instance.until_idle()
        assert instance.outputs["a"][-1].error_kind == "internal"
        instance.assert_as_alone("b")
        instance.assert_in_step()
        assert instance.executors[0].dummies == 24


def test_an_abort_of_the_only_request_ends_the_wave() -> None:
    with running(2) as instance:
        instance.submit("a", replica=0, tokens=300)
        instance.until(lambda: "a" in instance.outputs)
        instance.engine.abort("a")
        instance.until_idle()
        instance.assert_in_step()
        instance.submit("b", replica=1)
        instance.until_finished("b")
        instance.assert_as_alone("b")


def test_prefixes_are_forgotten_within_a_wave() -> None:
    with running(2) as instance:
        instance.submit("a", replica=0, tokens=100)
        instance.until(lambda: "a" in instance.outputs)
        said = threading.Event()
        instance.engine.reset_prefix_cache(lambda _: said.set())
        assert said.wait(DEADLINE_S)
        instance.until_finished("a")
        instance.until_idle()
        instance.engine.reset_prefix_cache(lambda success: said.clear() if success else None)
        instance.until(lambda: not said.is_set())


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("busy", [(), (0,), (0, 1, 2)])
def test_replicas_that_are_closed_in_a_wave_end_in_order(busy: tuple[int, ...], depth: int) -> None:
    """None leaves while another needs its forwards, and every request gets its last output."""
    with running(3, depth=depth) as instance:
        for replica in busy:
            instance.submit(f"r{replica}", replica=replica, tokens=390)
        instance.until(lambda: len(instance.outputs) == len(busy))
        instance.engine.close(engine_s=DEADLINE_S, kv_s=0.0)
        assert [instance.core(n).failure for n in range(3)] == [None] * 3
        assert [instance.core(n).is_running for n in range(3)] == [False] * 3
        assert not instance.fell
        last = [instance.outputs[f"r{replica}"][-1].choices[0] for replica in busy]
        assert [one.finish_reason for one in last] == ["abort"] * len(busy)
        instance.assert_in_step()
        instance.submit("late", replica=0)
        assert instance.outputs["late"][-1].error_kind == "replica_lost"


@pytest.mark.parametrize("busy", [False, True])
def test_replicas_come_and_go_with_one_forward(busy: bool) -> None:
    """All make the one with the change at once, also where none has a request; those that stay go
    on with theirs, and those that came get some."""
    with running(2) as instance:
        first = ["a", "b"] if busy else []
        for replica, name in enumerate(first):
            instance.submit(name, replica=replica, tokens=300 - 100 * replica)
        assert instance.scale(4) == 0
        assert len(instance.members) == 4
        instance.submit("c", replica=3)
        instance.until_finished("c")
        assert instance.executors[3].inner.steps
        assert instance.scale(1, drain_s=DEADLINE_S) == 0
        gone = [instance.executors[replica].inner for replica in (1, 2, 3)]
        steps = [len(one.steps) for one in gone]
        instance.submit("d")
        instance.until_finished(*first, "c", "d")
        instance.until_idle()
        instance.assert_as_alone(*first, "c", "d")
        assert [len(one.steps) for one in gone] == steps
        assert instance.scale(2) == 0
        instance.submit("e", replica=1)
        instance.until_finished("e")
        assert not instance.fell


def test_a_replica_that_goes_ends_what_it_has_when_its_time_is_over() -> None:
    with running(2) as instance:
        instance.submit("a", replica=1, tokens=390)
        instance.submit("b", replica=0, tokens=390)
        instance.until(lambda: len(instance.outputs) == 2)
        instance.forwards.hold = lambda _: threading.Event().wait(0.005) and None
        assert instance.scale(1) == 1
        assert instance.outputs["a"][-1].error_kind == "replica_lost"
        instance.forwards.hold = lambda _: None
        instance.until_finished("b")
        instance.assert_as_alone("b")


@pytest.mark.parametrize("depth", [1, 2])
def test_a_replica_without_requests_leaves_while_others_have_some(depth: int) -> None:
    """It makes dummies until it has left. Under load nobody may wait for the end of a wave."""
    with running(2, depth=depth) as instance:
        instance.submit("a", replica=0, tokens=390)
        instance.until(lambda: bool(instance.outputs))
        instance.forwards.hold = lambda _: threading.Event().wait(0.005) and None
        assert instance.scale(1, drain_s=DEADLINE_S) == 0
        assert not instance.is_finished("a")
        instance.forwards.hold = lambda _: None
        instance.until_finished("a")
        instance.assert_as_alone("a")


def test_replicas_that_cannot_come_leave_the_others_as_they_were() -> None:
    with running(2) as instance:
        load = instance.engine._load_one

        def cannot(replica: int, deliver: Deliver, incarnation: str) -> LoadedEngine:
            if replica == 3:
                raise UserError("no memory")
            return load(replica, deliver, incarnation)

        instance.engine._load_one = cannot
        instance.submit("a", replica=0, tokens=200)
        with pytest.raises(UserError, match="no memory"):
            instance.scale(4)
        instance.until_finished("a")
        instance.until_idle()
        instance.assert_as_alone("a")
        assert [one.replica for one in instance.members] == [0, 1]
        instance.engine._load_one = load
        assert instance.scale(3) == 0
        instance.submit("b", replica=2)
        instance.until_finished("b")
        instance.assert_as_alone("b")


@pytest.mark.parametrize("is_lost", [False, True])
def test_a_replica_that_ends_before_it_comes_is_no_loss_of_the_others(is_lost: bool) -> None:
    """Its rank, or its engine, behind the load."""
    with running(2) as instance:
        load = instance.engine._load_one

        class EndsAtOnce:
            """The one that is to come."""

            def __init__(self, loaded: LoadedEngine) -> None:
                self.loaded, self.engine, self.loss = loaded, loaded.engine, None

            def start(self) -> None:
                self.loaded.start()
                if is_lost:
                    self.loss = Loss("rank 2 was ended by SIGKILL", 12)
                    return
                put = cast("Any", self.engine)._inbox.put
                put(partial(_raise, StepFailed("it cannot go on")))
                instance.until(lambda: not self.engine.is_running)

            def close(self, *, engine_s: float, kv_s: float) -> None:
                self.loaded.close(engine_s=engine_s, kv_s=kv_s)

        instance.engine._load_one = lambda *args: cast("Any", EndsAtOnce(load(*args)))
        instance.submit("a", replica=0, tokens=200)
        why = "SIGKILL" if is_lost else "replica 2 ended before it served"
        with pytest.raises((UserError, RankLostError), match=why):
            instance.scale(3)
        assert not instance.fell
        instance.engine._load_one = load
        assert instance.scale(3) == 0
        instance.submit("b", replica=2)
        instance.until_finished("a", "b")
        instance.assert_as_alone("a", "b")


@pytest.mark.parametrize(("replicas", "replica"), [(3, 1), (3, 2), (1, 1)])
def test_a_failure_in_the_change_ends_all(replicas: int, replica: int) -> None:
    """Of one that stays, comes or goes, in the forward with the change."""
    with running(2) as instance:
        launch = instance.forwards.launch

        def fails(number: int, resize: Resize | None) -> tuple[int, int]:
            if resize is not None and number == replica:
                raise StepFailed("no experts")
            return launch(number, resize)

        instance.forwards.launch = fails
        with pytest.raises(OutOfStepError, match=f"replica {replica} of the instance failed"):
            instance.scale(replicas)
        instance.until(lambda: bool(instance.fell))
        assert "no experts" in instance.fell[0]


def test_an_engine_that_ended_before_the_change_is_seen_by_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Between the last look at those that come and the change."""
    monkeypatch.setattr("xpyd_worker.replicas.lock_step.RESIZE_DEADLINE_S", DEADLINE_S)
    lock_step = LockStep(1, clock=lambda: 0.0, fell=lambda _: None)
    lock_step.member(1).failed("it ended")
    with pytest.raises(OutOfStepError, match="replica 1 of the instance failed: it ended"):
        lock_step.resize(1, (0, 1))


def _raise(error: Exception) -> Any:
    raise error


def test_engines_leave_only_when_none_can_be_started_any_more() -> None:
    """Neither by a request in an inbox nor by a START on its way; the coordinator's turns by
    hand."""
    lock_step = LockStep(2, clock=lambda: 0.0, fell=lambda _: None, reduce=lambda vote: vote)
    inboxes: list[list[Item]] = [[], []]
    for member, inbox in zip(lock_step.members, inboxes, strict=True):
        member.bind(inbox.append)
    are_idle = False
    lock_step.begin_end(lambda: are_idle)
    lock_step.turn()
    assert not lock_step.may_leave
    lock_step.ask(0)
    are_idle = True
    lock_step.turn()
    assert not lock_step.may_leave
    for member, inbox in zip(lock_step.members, inboxes, strict=True):
        inbox.pop()()
        assert member.in_wave
    lock_step.turn()
    assert not lock_step.may_leave
    for member in lock_step.members:
        for _ in range(24):
            member.end_iteration(waiting=0, running=0, is_dummy=True)
        assert not member.in_wave
    lock_step.turn()
    assert lock_step.may_leave


def test_a_coordinator_without_a_memory_goes_on_in_a_wave() -> None:
    """It learns the wave from what replicas say of themselves."""
    with running(3) as instance:
        instance.submit("a", replica=0, tokens=390)
        instance.until(lambda: "a" in instance.outputs)
        instance.lock_step._coordinator = Coordinator(3)
        instance.submit("b", replica=1)
        instance.until_finished("b")
        instance.lock_step._coordinator = Coordinator(3)
        instance.until_finished("a")
        instance.until_idle()
        instance.lock_step._coordinator = Coordinator(3)
        instance.submit("c", replica=2)
        instance.until_finished("c")
        instance.until_idle()
        instance.assert_as_alone("a", "b", "c")
        instance.assert_in_step()


def test_the_instance_falls_with_the_coordinator() -> None:
    """It is a thread of the process that serves, and starts waves: without it they would hang."""
    with running(2) as instance:
        instance.submit("a", replica=0, tokens=390)
        instance.until(lambda: "a" in instance.outputs)
        instance.lock_step._coordinator = _Fails(2)
        instance.until(lambda: bool(instance.fell), may_fall=True)
        assert instance.fell[0] == "the coordinator of the replicas failed: KeyError(7)"
        assert all(member.may_leave for member in instance.members)


class _Fails(Coordinator):
    def heard(self, replica: int, report: Report) -> Sequence[int]:
        raise KeyError(7)


def test_all_end_with_an_engine_that_fails() -> None:
    """In a forward, in the finish check and idle: nobody waits for a deadline."""
    with running(3) as instance:
        for name, replica in (("a", 0), ("b", 1)):
            instance.submit(name, replica=replica, tokens=300)
        instance.until(lambda: len(instance.outputs) == 2)
        instance.executors[0].inner.fail_with = RuntimeError("a kernel")
        instance.until(
            lambda: not any(instance.core(n).is_running for n in range(3)), may_fall=True
        )
        assert instance.fell[0] == "replica 0 of the instance failed: RuntimeError('a kernel')"
        assert instance.engine.failure is not None
        assert [instance.outputs[name][-1].error_kind for name in "ab"] == ["replica_lost"] * 2


def test_a_replica_that_does_not_come_to_the_finish_check_is_missed_by_the_others() -> None:
    check = FinishCheck(3, deadline_s=0.05)
    with pytest.raises(
        OutOfStepError, match=r"1 of 3 replicas came to the finish check within 0\.05"
    ):
        check.reduce(Vote(1, 0))


def test_a_check_takes_the_maximum_of_each_number() -> None:
    check = FinishCheck(2, deadline_s=DEADLINE_S)
    found: list[Vote] = []
    other = threading.Thread(target=lambda: found.append(check.reduce(Vote(1, 3))))
    other.start()
    found.append(check.reduce(Vote(0, 5)))
    other.join(DEADLINE_S)
    assert found == [Vote(1, 5)] * 2


@pytest.mark.parametrize("seed", seeds(3, 60))
def test_random_requests_on_random_replicas_are_all_served_in_step(seed: int) -> None:
    rng = random.Random(seed)
    size, depth = rng.choice([2, 3, 4]), rng.choice([1, 1, 2, 3])
    with running(size, depth=depth) as instance:
        kept: list[str] = []
        for n in range(25):
            name = f"r{n}"
            named = rng.randrange(size) if rng.random() < 0.5 else None
            instance.submit(name, replica=named, tokens=rng.randint(1, 40))
            if rng.random() < 0.2:
                instance.engine.abort(name)
            else:
                kept.append(name)
            if rng.random() < 0.3:
                instance.until_finished(*rng.sample(kept, min(2, len(kept))))
            if rng.random() < 0.1:
                instance.until_idle()
        instance.until_finished(*kept)
        instance.until_idle()
        instance.assert_as_alone(*kept)
        instance.assert_in_step()
