"""DATA frames wait at P for their turn, so that a cancelled transfer's are gone at once."""

from __future__ import annotations

from functools import partial

from xpyd_kv.session.outgoing import Outbox


class Driver:
    def __init__(self, ahead_bytes: int) -> None:
        self.given: list[str] = []
        self.outbox = Outbox(ahead_bytes)

    def put(self, name: str, length: int, owner: str = "a") -> None:
        self.outbox.put(owner, length, partial(self.given.append, name))


def test_no_more_than_its_bytes_are_with_the_endpoint_in_order() -> None:
    driver = Driver(10)
    for name in "abcd":
        driver.put(name, 4)
    assert driver.given == ["a", "b"]
    driver.outbox.done(4)
    assert driver.given == ["a", "b", "c"]
    driver.outbox.done(4)
    driver.outbox.done(4)
    driver.outbox.done(4)
    assert driver.given == ["a", "b", "c", "d"]


def test_of_longer_frames_two_are_there() -> None:
    driver = Driver(10)
    for name in "abcd":
        driver.put(name, 50)
    assert driver.given == ["a", "b"]
    driver.outbox.done(50)
    assert driver.given == ["a", "b", "c"]


def test_dropped_frames_are_never_given_and_counted() -> None:
    driver = Driver(8)
    driver.put("a1", 4, "a")
    driver.put("b1", 4, "b")
    driver.put("a2", 4, "a")
    driver.put("b2", 4, "b")
    assert driver.outbox.drop("a") == 1
    assert driver.given == ["a1", "b1"]
    driver.outbox.done(4)
    driver.outbox.done(4)
    driver.outbox.done(4)
    assert driver.given == ["a1", "b1", "b2"]
    assert driver.outbox.drop("a") == 0
