"""The fair queue: turns of keys by tokens and weight, and that one key's flood delays itself."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from xpyd_router.admission import AdmissionLimits, Gate
from xpyd_router.fair_queue import Account, Cost, Entry, FairQueue


def entry(account: Account, tokens: int = 100, priority: int = 0) -> Entry:
    return Entry(Cost(1, tokens), priority, account)


def served(queue: FairQueue[Entry]) -> Entry:
    """Admit the first."""
    first = queue.first
    queue.remove(first)
    queue.charge(first.account, first.cost.tokens)
    return first


@pytest.mark.parametrize("weights", [(1, 1), (1, 3), (2, 5), (1, 10)])
@pytest.mark.parametrize("seed", range(3))
def test_accounts_that_wait_share_the_tokens_by_weight(weights: tuple[int, int], seed: int) -> None:
    draw, queue = random.Random(seed), FairQueue[Entry]()
    accounts = [Account(weight) for weight in weights]
    for account in accounts:
        for _ in range(50):
            queue.add(entry(account, draw.randint(10, 500)))
    tokens = dict.fromkeys(accounts, 0)
    for _ in range(3000):
        first = served(queue)
        used = draw.randint(1, first.cost.tokens * 2)
        queue.settle(first.account, first.cost.tokens, used)
        tokens[first.account] += used
        queue.add(entry(first.account, draw.randint(10, 500)))
    shares = [tokens[account] / account.weight for account in accounts]
    assert max(shares) / min(shares) < 1.1


def test_a_key_that_comes_seldom_is_next_whatever_the_flood_has_waiting() -> None:
    queue, flood, other = FairQueue[Entry](), Account(), Account()
    for _ in range(1000):
        queue.add(entry(flood))
    for _ in range(100):
        served(queue)
    for _ in range(20):
        mine = entry(other, 100)
        queue.add(mine)
        assert served(queue) is mine
        queue.settle(other, 100, 20)
        assert served(queue).account is flood
        queue.settle(flood, 100, 100)


def test_an_idle_account_saves_nothing_up() -> None:
    queue, busy, idle = FairQueue[Entry](), Account(), Account()
    for _ in range(100):
        queue.add(entry(busy))
    for _ in range(50):
        served(queue)
    for _ in range(40):
        queue.add(entry(idle))
    order = [served(queue).account for _ in range(40)]
    assert 19 <= order.count(idle) <= 21


def test_an_account_that_took_less_than_it_was_charged_moves_up() -> None:
    queue, one, two = FairQueue[Entry](), Account(), Account()
    for _ in range(5):
        queue.add(entry(one, 1000))
        queue.add(entry(two, 100))
    assert {served(queue).account, served(queue).account} == {one, two}
    queue.settle(one, 1000, 10)
    assert served(queue).account is one, "10 tokens are less than 100"


def test_an_account_within_a_priority_keeps_its_order_and_priorities_come_first() -> None:
    queue, one, two = FairQueue[Entry](), Account(), Account()
    entries = [entry(one), entry(one), entry(two, priority=5), entry(one, priority=-1)]
    for each in entries:
        queue.add(each)
    assert [served(queue) for _ in entries] == [entries[3], entries[0], entries[1], entries[2]]


def test_a_full_queue_has_room_for_a_key_that_has_less_in_it() -> None:
    gate = Gate[Entry](AdmissionLimits(requests=1, queue_entries=4), [0, 0, 0, 0])
    flood, other = Account(), Account()
    assert gate.enter(Cost(), 0, flood)
    line = [entry(flood) for _ in range(4)]
    assert all(gate.enqueue(each) == (True, None) for each in line)
    assert gate.enqueue(entry(flood)) == (False, None)
    assert gate.enqueue(entry(other)) == (True, line[3])
    assert gate.enqueue(entry(other)) == (True, line[2])
    assert gate.enqueue(entry(other)) == (False, None), "both have two now"


def test_a_request_of_another_key_passes_a_large_one_for_which_there_is_no_room() -> None:
    gate = Gate[Entry](AdmissionLimits(tokens=100), [0, 0, 0, 0])
    one, two = Account(), Account()
    assert gate.enter(Cost(1, 60), 0, one)
    large, small = entry(one, 80), entry(two, 10)
    gate.enqueue(large)
    gate.enqueue(small)
    assert gate.is_next(small)
    assert gate.admit() == [small]


def test_a_part_of_the_places_is_kept_for_keys_that_have_few_running() -> None:
    gate = Gate[Entry](AdmissionLimits(requests=32, tokens=3200), [0] * 4, keeps_spare=True)
    flood, other = Account(), Account()
    held = [gate.enter(Cost(1, 10), 0, flood) for _ in range(31)]
    assert held == [True] * 30 + [False], "the last two are kept"
    gate.enqueue(entry(flood))
    assert gate.admit() == []
    first = entry(other, 10)
    gate.enqueue(first)
    assert gate.is_next(first)
    assert gate.admit() == [first]
    gate.leave(Cost(1, 10), 1.0, flood)
    assert gate.admit() == [], "29 of the flood and one of the other"
    gate.leave(Cost(1, 10), 1.0, flood)
    assert [one.account for one in gate.admit()] == [flood]


def in_processes(many: int) -> list[Account]:
    """One key's account in each process."""
    cells, accounts = [[0] for _ in range(many)], [Account() for _ in range(many)]
    for at, account in enumerate(accounts):
        account.place(cells[at], lambda at=at: sum(cell[0] for cell in cells) - cells[at][0])
    return accounts


@pytest.mark.parametrize("at", range(4))
def test_of_several_processes_a_flood_in_all_leaves_a_place_to_a_key_in_any(at: int) -> None:
    rows, limits = [[0] * 4 for _ in range(4)], AdmissionLimits(requests=64)
    gates = [
        Gate[Entry](limits, row, [o for o in rows if o is not row], keeps_spare=True)
        for row in rows
    ]
    flood, other = in_processes(4), in_processes(4)
    taken = [
        sum(gate.enter(Cost(1, 10), 0, key) for _ in range(16))
        for gate, key in zip(gates, flood, strict=True)
    ]
    assert taken == [16, 16, 16, 12], "the last four are kept, for the router's other keys"
    for gate, key in zip(gates, flood, strict=True):
        gate.enqueue(entry(key, 10))
        assert gate.admit() == []
    some = [entry(other[at], 10) for _ in range(5)]
    for one in some:
        gates[at].enqueue(one)
    assert gates[at].is_next(some[0])
    assert gates[at].admit() == some[:4], "also behind the flood's next"


def test_a_part_of_the_tokens_is_kept_for_keys_that_have_nothing_running() -> None:
    gate = Gate[Entry](AdmissionLimits(tokens=1600), [0] * 4, keeps_spare=True)
    flood, other = Account(), Account()
    assert gate.enter(Cost(1, 1550), 0, flood), "the first of a key may take all"
    assert not gate.enter(Cost(1, 10), 0, flood)
    assert gate.enter(Cost(1, 50), 0, other)


def test_without_keys_no_place_is_kept() -> None:
    gate, account = Gate[Entry](AdmissionLimits(requests=32), [0] * 4), Account()
    assert all(gate.enter(Cost(), 0, account) for _ in range(32))
    assert not gate.enter(Cost(), 0, account)


@dataclass
class Model:
    """The same in the plainest way."""

    waiting: list[Entry] = field(default_factory=list[Entry])

    def firsts(self) -> list[Entry]:
        """Each account's first of the first priority that has the least served."""
        top = min(each.priority for each in self.waiting)
        line = [each for each in self.waiting if each.priority == top]
        least = min(each.account.served for each in line)
        found: dict[Account, Entry] = {}
        for each in line:
            found.setdefault(each.account, each)
        return [each for account, each in found.items() if account.served == least]


@pytest.mark.parametrize("seed", range(20))
def test_random_walks_agree_with_a_plain_search(seed: int) -> None:
    draw, queue, model = random.Random(seed), FairQueue[Entry](), Model()
    accounts = [Account(draw.choice([1, 2, 7])) for _ in range(6)]
    running: list[Entry] = []
    for _ in range(2000):
        what = draw.random()
        if what < 0.45 or not model.waiting:
            new = entry(draw.choice(accounts), draw.randint(0, 50))
            queue.add(new)
            model.waiting.append(new)
        elif what < 0.6:
            gone = draw.choice(model.waiting)
            assert queue.remove(gone)
            assert not queue.remove(gone)
            model.waiting.remove(gone)
        elif what < 0.8 or not running:
            assert queue.first in model.firsts()
            model.waiting.remove(first := served(queue))
            running.append(first)
        else:
            ended = running.pop(draw.randrange(len(running)))
            queue.settle(ended.account, ended.cost.tokens, draw.randint(0, 80))
        assert len(queue) == len(model.waiting)
        if model.waiting:
            lengths = {f: sum(e.account is f for e in model.waiting) for f in accounts}
            assert lengths[queue.last.account] == max(lengths.values())
