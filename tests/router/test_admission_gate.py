"""Admission's decisions: bounds, order, displacement, and how long it will last."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from xpyd_router.admission import REQUESTS, TOKENS, WAITING, AdmissionLimits, Gate, Row
from xpyd_router.fair_queue import Account, Cost, Entry

ACCOUNT = Account()
"""Of requests without keys."""


def gate(limits: AdmissionLimits, *others: Row) -> tuple[Gate[Entry], Row]:
    row: Row = [0, 0, 0, 0]
    return Gate[Entry](limits, row, others), row


def entry(tokens: int = 0, priority: int = 0, body_bytes: int = 0) -> Entry:
    return Entry(Cost(1, tokens, body_bytes), priority, ACCOUNT)


def test_without_limits_everybody_goes_on_and_is_counted():
    found, row = gate(AdmissionLimits())
    assert all(found.enter(Cost(1, 10**9), 0, ACCOUNT) for _ in range(1000))
    assert row == [1000, 1000 * 10**9, 0, 0]
    found.leave(Cost(1, 10**9), 1.0, ACCOUNT)
    assert row == [999, 999 * 10**9, 0, 0]


def test_a_place_goes_to_the_first_in_line_and_not_to_who_comes_just_then():
    found, _ = gate(AdmissionLimits(requests=1))
    assert found.enter(Cost(), 0, ACCOUNT)
    waiter = entry()
    assert found.enqueue(waiter) == (True, None)
    found.leave(Cost(), 1.0, ACCOUNT)
    assert not found.enter(Cost(), 0, ACCOUNT), "the place belongs to the waiter"
    assert found.admit() == [waiter]


def test_a_large_request_at_the_head_is_not_overtaken_by_small_ones():
    found, _ = gate(AdmissionLimits(tokens=100))
    assert found.enter(Cost(1, 60), 0, ACCOUNT)
    large, small = entry(80), entry(10)
    found.enqueue(large)
    assert not found.enter(small.cost, 0, ACCOUNT), "10 would fit, but 80 came first"
    found.enqueue(small)
    assert found.admit() == []
    found.leave(Cost(1, 60), 1.0, ACCOUNT)
    assert found.admit() == [large, small]


def test_a_higher_priority_goes_before_the_line_where_it_fits():
    found, _ = gate(AdmissionLimits(tokens=100))
    assert found.enter(Cost(1, 60), 0, ACCOUNT)
    found.enqueue(entry(80))
    assert found.enter(Cost(1, 10), -1, ACCOUNT)
    assert not found.enter(Cost(1, 50), -1, ACCOUNT)


def test_a_request_larger_than_the_limit_runs_alone():
    found, _ = gate(AdmissionLimits(tokens=100))
    cost = found.bounded(Cost(3, 5000, 7))
    assert cost == Cost(3, 100, 7)
    assert found.enter(cost, 0, ACCOUNT)
    assert not found.enter(Cost(1, 1), 0, ACCOUNT)


def test_a_bounded_cost_fits_in_a_shared_row():
    found, _ = gate(AdmissionLimits())
    assert found.bounded(Cost(10**30, 10**30)) == Cost(2**40, 2**40)
    assert found.bounded(Cost(1, 10**9)) == Cost(1, 10**9)


def test_who_leaves_the_line_lets_those_behind_go():
    found, _ = gate(AdmissionLimits(tokens=100))
    assert found.enter(Cost(1, 60), 0, ACCOUNT)
    large, small = entry(80), entry(10)
    found.enqueue(large)
    found.enqueue(small)
    assert found.remove(large)
    assert found.admit() == [small]
    assert not found.remove(large)


@pytest.mark.parametrize(
    ("newcomer", "is_queued", "leaves"),
    [
        (entry(priority=5), False, None),
        (entry(priority=6), False, None),
        (entry(priority=4), True, 2),
        (entry(priority=4, body_bytes=41), False, None),
        (entry(priority=4, body_bytes=40), True, 2),
    ],
    ids=["equal", "lower", "higher", "higher but its body is too long", "higher and fits"],
)
def test_a_full_line_gives_up_its_newest_lowest_for_a_higher_one(
    newcomer: Entry, is_queued: bool, leaves: int | None
):
    found, row = gate(AdmissionLimits(requests=1, queue_entries=3, queue_bytes=100))
    found.enter(Cost(), 0, ACCOUNT)
    line = [
        entry(priority=0, body_bytes=30),
        entry(priority=5, body_bytes=30),
        entry(priority=5, body_bytes=30),
    ]
    for one in line:
        assert found.enqueue(one) == (True, None)
    assert found.enqueue(newcomer) == (is_queued, None if leaves is None else line[leaves])
    assert found.waiting == row[WAITING] == 3


def test_the_line_is_bounded_in_bytes():
    found, _ = gate(AdmissionLimits(requests=1, queue_bytes=100))
    found.enter(Cost(), 0, ACCOUNT)
    assert found.enqueue(entry(body_bytes=100)) == (True, None)
    assert found.enqueue(entry(body_bytes=1)) == (False, None)
    assert found.enqueue(entry(body_bytes=0)) == (True, None)


@pytest.mark.parametrize(
    ("mean_s", "waiting", "expected_s"),
    [(None, 3, 1), (0.1, 3, 1), (2.0, 0, 1), (2.0, 9, 5), (2.0, 10, 6), (300.0, 9, 60)],
)
def test_retry_after_is_the_lines_length_by_the_rate_within_bounds(
    mean_s: float | None, waiting: int, expected_s: int
):
    found, _ = gate(AdmissionLimits(requests=4))
    for _ in range(4):
        found.enter(Cost(), 0, ACCOUNT)
    if mean_s is not None:
        found.leave(Cost(), mean_s, ACCOUNT)
        found.enter(Cost(), 0, ACCOUNT)
    for _ in range(waiting):
        found.enqueue(entry())
    # 4 in flight, each 2 s: two leave per second.
    assert found.retry_after_s() == expected_s


def test_retry_after_counts_the_lines_and_places_of_all_processes():
    theirs: Row = [4, 0, 0, 0]
    found, _ = gate(AdmissionLimits(requests=8), theirs)
    for held_s in (2.0, None):
        assert all(found.enter(Cost(), 0, ACCOUNT) for _ in range(4))
        if held_s is not None:
            for _ in range(4):
                found.leave(Cost(), held_s, ACCOUNT)
    theirs[WAITING] = 9
    assert found.retry_after_s() == 3, "10 by 8 / 2 s"


def test_the_mean_time_follows_what_is_seen():
    found, _ = gate(AdmissionLimits(requests=1))
    found.enter(Cost(), 0, ACCOUNT)
    for _ in range(200):
        found.leave(Cost(), 30.0, ACCOUNT)
        found.enter(Cost(), 0, ACCOUNT)
    assert found.retry_after_s() == 30
    for _ in range(200):
        found.leave(Cost(), 4.0, ACCOUNT)
        found.enter(Cost(), 0, ACCOUNT)
    found.leave(Cost(), None, ACCOUNT)
    found.enter(Cost(), 0, ACCOUNT)
    found.leave(Cost(), 100.0, ACCOUNT)
    found.enter(Cost(), 0, ACCOUNT)
    assert found.retry_after_s() == 11, "4 + 96 / 16, rounded up"


def test_limits_count_what_other_processes_have_in_flight():
    theirs: Row = [2, 70, 0, 0]
    found, row = gate(AdmissionLimits(requests=3, tokens=100), theirs)
    assert not found.enter(Cost(1, 31), 0, ACCOUNT)
    waiter = entry(31)
    found.enqueue(waiter)
    assert found.admit() == []
    theirs[TOKENS] = 69
    assert found.admit() == [waiter]
    assert row == [1, 31, 0, 0]
    theirs[REQUESTS] = 0
    theirs[WAITING] = 1
    assert not found.enter(Cost(), 0, ACCOUNT), "somebody waits in another process: no barging"


@dataclass
class Model:
    """The same rules by lists and sorting."""

    requests: int
    tokens: int
    limits: AdmissionLimits
    line: list[Entry] = field(default_factory=list[Entry])
    running: list[Cost] = field(default_factory=list[Cost])

    def room(self, cost: Cost) -> bool:
        tokens = sum(other.tokens for other in [*self.running, cost])
        return len(self.running) < self.requests and tokens <= self.tokens

    def ordered(self) -> list[Entry]:
        return sorted(self.line, key=lambda one: one.priority)  # stable: FIFO within one

    def admit(self) -> list[Entry]:
        admitted: list[Entry] = []
        while self.line and self.room(self.ordered()[0].cost):
            first = self.ordered()[0]
            self.line.remove(first)
            self.running.append(first.cost)
            admitted.append(first)
        return admitted

    def enter(self, one: Entry) -> bool:
        is_first = all(one.priority < other.priority for other in self.line)
        if is_first and self.room(one.cost):
            self.running.append(one.cost)
            return True
        return False

    def enqueue(self, one: Entry) -> tuple[bool, Entry | None]:
        def fits(line: list[Entry]) -> bool:
            held = sum(other.cost.body_bytes for other in line) + one.cost.body_bytes
            return len(line) < self.limits.queue_entries and held <= self.limits.queue_bytes

        if fits(self.line):
            self.line.append(one)
            return True, None
        last = self.ordered()[-1] if self.line else None
        if last is None or last.priority <= one.priority:
            return False, None
        if not fits([other for other in self.line if other is not last]):
            return False, None
        self.line.remove(last)
        self.line.append(one)
        return True, last


@pytest.mark.parametrize("seed", range(40))
def test_random_walks_do_as_the_model_does(seed: int):
    draw = random.Random(seed)
    requests, tokens = draw.randint(1, 5), 100
    limits = AdmissionLimits(requests=requests, tokens=tokens, queue_entries=8, queue_bytes=400)
    found, row = gate(limits)
    model = Model(requests, tokens, limits)
    for _ in range(400):
        action = draw.random()
        if action < 0.55:
            one = entry(draw.choice((0, 5, 30, 90)), draw.randint(-1, 2), draw.randint(0, 150))
            entered = found.enter(one.cost, one.priority, ACCOUNT)
            assert entered == model.enter(one)
            if not entered:
                assert found.enqueue(one) == model.enqueue(one)
        elif action < 0.9 and model.running:
            cost = model.running.pop(draw.randrange(len(model.running)))
            found.leave(cost, draw.random(), ACCOUNT)
            assert found.admit() == model.admit()
        elif model.line:
            one = draw.choice(model.line)
            model.line.remove(one)
            assert found.remove(one)
            assert found.admit() == model.admit()
        in_flight = sum(cost.tokens for cost in model.running)
        waiting_bytes = sum(one.cost.body_bytes for one in model.line)
        assert row == [len(model.running), in_flight, len(model.line), waiting_bytes]
        assert row[REQUESTS] <= requests
        assert row[TOKENS] <= tokens


@pytest.mark.parametrize(
    ("theirs", "fits"),
    [([0, 0, 2, 0], True), ([0, 0, 3, 0], False), ([0, 0, 0, 90], True), ([0, 0, 0, 91], False)],
    ids=["room for one", "no place", "bytes for one", "no bytes"],
)
def test_the_queues_bounds_hold_for_all_processes_together(theirs: Row, fits: bool) -> None:
    found, _ = gate(AdmissionLimits(requests=1, queue_entries=3, queue_bytes=100), theirs)
    assert found.enqueue(entry(body_bytes=10))[0] is fits
