"""Replicas in lock step that go on where one of them is lost, and take it in again."""

from __future__ import annotations

import random
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.replicas.engines import DEADLINE_S, running
from tests.worker.engine_driver import seeds
from xpyd_core.errors import UserError
from xpyd_worker.load.engine import LoadedEngine
from xpyd_worker.replicas.lock_step import LockStep, OutOfStepError


@pytest.mark.parametrize("seed", seeds(6, 40))
def test_the_others_go_on_without_a_lost_replica_and_it_comes_again(seed: int) -> None:
    rng = random.Random(seed)
    lost = rng.choice([1, 2])
    with running(3, outlives=True) as instance:
        tokens = {n: rng.choice([0, 40, 200]) for n in range(3)}
        names = {n: f"r{n}" for n, count in tokens.items() if count}
        for n, name in names.items():
            instance.submit(name, replica=n, tokens=tokens[n])
        forwards = rng.randrange(60) if names else 0
        instance.until(lambda: instance.forwards.launched[0] >= min(forwards, max(tokens.values())))
        instance.lose(lost, frozenset(rng.sample([0, 3 - lost], rng.randrange(3))))
        others = [name for n, name in names.items() if n != lost]
        instance.until_finished(*names.values())
        instance.assert_as_alone(*others)
        if lost in names and instance.outputs[names[lost]][-1].error:
            assert instance.outputs[names[lost]][-1].error_kind == "replica_lost"
        instance.until(lambda: instance.engine.replicas[lost].restarts == 1)
        assert [one.replica for one in instance.members] == [0, 3 - lost, lost]
        for replica in range(3):
            instance.submit(f"again {replica}", replica=replica, tokens=30)
        again = [f"again {replica}" for replica in range(3)]
        instance.until_finished(*again)
        instance.assert_as_alone(*again)
        instance.until_idle()
        assert not instance.fell


def test_a_step_of_the_lost_replica_itself_waits_for_no_repair() -> None:
    """One of its ranks lives, and says that the step broke."""
    lock_step = LockStep(3, clock=lambda: 0.0, fell=lambda _: None, outlives=lambda _: 1)
    lock_step.start(lambda _: None)
    ended = threading.Event()

    def waits() -> None:
        with pytest.raises(OutOfStepError):
            lock_step.members[1].await_repair()
        ended.set()

    waiting = threading.Thread(target=waits, daemon=True)
    waiting.start()
    try:
        assert not ended.wait(0.1)
        assert lock_step.lose(1)
        assert ended.wait(1.0)
    finally:
        lock_step.close(DEADLINE_S)


@pytest.mark.parametrize("is_started", [False, True])
def test_another_is_lost_while_one_comes_again(is_started: bool) -> None:
    """The one that comes began with a change that is no more: it tries anew."""
    with running(3, outlives=True) as instance:
        load, losses = instance.engine._load_one, [2]

        def load_and_lose(*args: Any) -> LoadedEngine:
            loaded = load(*args)
            if losses and not is_started:
                instance.lose(losses.pop())
            return loaded

        def begin_and_lose(*args: Any) -> None:
            if losses and is_started:
                instance.lose(losses.pop())
            resize(*args)

        resize, instance.lock_step.resize = instance.lock_step.resize, begin_and_lose
        instance.engine._load_one = load_and_lose
        instance.submit("a", replica=0, tokens=400)
        instance.until(lambda: "a" in instance.outputs)
        instance.lose(1)
        instance.until_finished("a")
        instance.assert_as_alone("a")
        instance.until(lambda: [one.restarts for one in instance.engine.replicas] == [0, 1, 1])
        for replica in range(3):
            instance.submit(f"b{replica}", replica=replica, tokens=30)
        instance.until_finished("b0", "b1", "b2")
        instance.assert_as_alone("b0", "b1", "b2")
        assert not instance.fell


def test_one_that_comes_again_gets_no_requests_before_it_is_with_the_others() -> None:
    """It would make a forward that the others do not make."""
    with running(2, outlives=True) as instance:
        resize = instance.lock_step.resize

        def ask_and_resize(*args: Any) -> None:
            instance.submit("named", replica=1)
            for name in names:
                instance.submit(name)
            instance.until_finished("named", *names)
            resize(*args)

        names = [f"r{n}" for n in range(4)]
        instance.lock_step.resize = ask_and_resize
        instance.lose(1)
        instance.until(lambda: instance.engine.replicas[1].restarts == 1)
        assert instance.outputs["named"][-1].error_kind == "replica_lost"
        instance.assert_as_alone(*names)
        instance.submit("b", replica=1)
        instance.until_finished("b")
        instance.until_idle()
        instance.assert_as_alone("b")
        assert not instance.fell


def cannot(*_: object) -> Any:
    raise UserError("no memory")


def test_replicas_do_not_come_or_go_while_one_is_lost() -> None:
    with running(2, outlives=True) as instance:
        instance.engine._load_one = cannot
        instance.lose(1)
        with pytest.raises(UserError, match="try again when it has"):
            instance.scale(3)
        instance.submit("a", replica=0)
        instance.until_finished("a")
        instance.assert_as_alone("a")


def test_a_call_while_one_that_was_lost_loads_is_refused_at_once() -> None:
    with running(2, outlives=True) as instance:
        load = instance.engine._load_one
        loads, go_on = threading.Event(), threading.Event()

        def held(*args: Any) -> LoadedEngine:
            loads.set()
            assert go_on.wait(DEADLINE_S)
            return load(*args)

        instance.engine._load_one = held
        instance.lose(1)
        assert loads.wait(DEADLINE_S)
        with ThreadPoolExecutor(1) as pool:
            scaled = pool.submit(instance.scale, 3)
            try:
                with pytest.raises(UserError, match="try again when it has"):
                    scaled.result(2.0)
            finally:
                go_on.set()
        instance.until(lambda: instance.engine.replicas[1].restarts == 1)
        assert instance.scale(3) == 0


def test_one_that_was_refused_is_no_part_of_the_ranks_world() -> None:
    with running(2, outlives=True) as instance:
        resize = instance.lock_step.resize
        instance.lock_step.resize = cannot
        with pytest.raises(UserError, match="no memory"):
            instance.scale(3)
        assert instance.world.members == {0, 1}
        instance.lock_step.resize = resize
        assert instance.scale(3) == 0
        assert instance.world.members == {0, 1, 2}


def test_replicas_that_were_to_go_serve_where_another_is_lost_meanwhile() -> None:
    with running(3, outlives=True) as instance:
        resize, losses = instance.lock_step.resize, [1]

        def lose_and_resize(*args: Any) -> None:
            if losses:
                instance.lose(losses.pop())
            resize(*args)

        instance.lock_step.resize = lose_and_resize
        with pytest.raises(UserError, match="a replica was lost meanwhile"):
            instance.scale(2)
        there = instance.engine.replicas[2]
        assert (there.is_leaving, there.is_closed) == (False, False)
        instance.submit("a", replica=2)
        instance.until_finished("a")
        instance.assert_as_alone("a")
        instance.until(lambda: instance.engine.replicas[1].restarts == 1)
        assert instance.scale(1) == 0


def test_the_instance_falls_where_the_others_cannot_go_on() -> None:
    """The first replica has the store of all ranks."""
    with running(2, outlives=True) as instance:
        instance.submit("a", replica=1, tokens=300)
        instance.until(lambda: "a" in instance.outputs)
        instance.lose(0)
        instance.until(lambda: instance.engine.loss is not None, may_fall=True)
        instance.until_finished("a")
        assert instance.fell[0] == "a rank was ended by SIGKILL"
