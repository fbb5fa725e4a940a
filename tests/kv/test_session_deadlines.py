"""The deadlines' and the tombstones' containers."""

from __future__ import annotations

import random

from xpyd_kv.session.deadlines import Deadlines, Remembered


def test_deadlines_agree_with_a_dict_in_a_random_walk() -> None:
    rng = random.Random(7)
    deadlines: Deadlines[int] = Deadlines()
    model: dict[int, float] = {}
    now = 0.0
    for _ in range(5000):
        key = rng.randrange(20)
        move = rng.random()
        if move < 0.6:
            at = now + rng.choice([0.0, 0.5, 1.0, 2.0, 5.0])
            deadlines.set(key, at)
            model[key] = at
        elif move < 0.8:
            deadlines.clear(key)
            model.pop(key, None)
        else:
            now += rng.random()
            due = deadlines.due(now)
            assert sorted(due) == sorted(key for key, at in model.items() if at <= now)
            for expired in due:
                del model[expired]
        assert deadlines.next() == min(model.values(), default=None)
        assert len(deadlines) == len(model)


def test_a_deadline_that_moves_for_ever_takes_no_memory() -> None:
    deadlines: Deadlines[str] = Deadlines()
    for step in range(10_000):
        deadlines.set("one", float(step))
    assert len(vars(deadlines)["_heap"]) < 200
    assert deadlines.next() == 9999.0


def test_what_is_remembered_again_is_remembered_longer() -> None:
    remembered: Remembered[str, int] = Remembered(60)
    remembered.set("a", 1, now=0)
    remembered.set("b", 2, now=10)
    remembered.set("a", 3, now=20)
    assert remembered.get("b", now=69) == 2
    remembered.purge(now=75)
    assert len(remembered) == 1
    assert remembered.get("a", now=75) == 3
    assert remembered.get("a", now=80) is None
    remembered.purge(now=80)
    assert len(remembered) == 0
