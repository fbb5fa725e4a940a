"""DATA frames wait at P for their turn, so that a cancelled transfer's are gone at once."""

from __future__ import annotations

from functools import partial

from xpyd_kv.session.outgoing import Outbox


class Bench:
    def __init__(self, ahead_bytes: int) -> None:
        self.given: list[str] = []
        self.outbox = Outbox(ahead_bytes)

    def put(self, name: str, length: int, owner: str = "a") -> None:
        self.outbox.put(owner, length, partial(self.given.append, name))


def test_no_more_than_its_bytes_are_with_the_endpoint_in_order() -> None:
    bench = Bench(10)
    for name in "abcd":
        bench.put(name, 4)
    assert bench.given == ["a", "b"]
    bench.outbox.done(4)
    assert bench.given == ["a", "b", "c"]
    bench.outbox.done(4)
    bench.outbox.done(4)
    bench.outbox.done(4)
    assert bench.given == ["a", "b", "c", "d"]


def test_of_longer_frames_two_are_there() -> None:
    bench = Bench(10)
    for name in "abcd":
        bench.put(name, 50)
    assert bench.given == ["a", "b"]
    bench.outbox.done(50)
    assert bench.given == ["a", "b", "c"]


def test_dropped_frames_are_never_given_and_counted() -> None:
    bench = Bench(8)
    bench.put("a1", 4, "a")
    bench.put("b1", 4, "b")
    bench.put("a2", 4, "a")
    bench.put("b2", 4, "b")
    assert bench.outbox.drop("a") == 1
    assert bench.given == ["a1", "b1"]
    bench.outbox.done(4)
    bench.outbox.done(4)
    bench.outbox.done(4)
    assert bench.given == ["a1", "b1", "b2"]
    assert bench.outbox.drop("a") == 0
