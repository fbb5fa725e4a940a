"""Which broken calls were deaths, which requests they convict, and which bodies are refused."""

from __future__ import annotations

import random
from collections import Counter

from xpyd_router.fleet.instances import InstanceKey
from xpyd_router.fleet.poison import KILLS, REFUSED_S, Break, Poison, fingerprint, judge


def instance(number: int) -> InstanceKey:
    return InstanceKey(f"10.0.0.{number}:20001", "inc")


def test_a_fingerprint_depends_on_body_and_key() -> None:
    found = {fingerprint(body, key) for body in (b"a", b"b") for key in (b"1", b"2")}
    assert len(found) == 4
    assert fingerprint(b"a", b"1") in found


def test_one_death_convicts_nobody_and_two_do() -> None:
    poison = Poison()
    first = poison.broke(instance(1), 0.0)
    poison.died(instance(1), 0.0)
    assert judge([first]) == "innocent"
    second = poison.broke(instance(2), 1.0)
    assert judge([first, second]) == "open"
    poison.died(instance(2), 1.0)
    assert judge([first, second]) == "guilty"


def test_who_was_there_at_one_of_two_deaths_is_innocent() -> None:
    """As many send the same body: each is judged by what it met itself."""
    poison = Poison()
    both: list[Break] = []
    for number in (1, 2):
        both.append(poison.broke(instance(number), 0.0))
        poison.died(instance(number), 0.0)
    assert [judge([one]) for one in both] == ["innocent", "innocent"]


def test_calls_that_break_off_together_met_one_death() -> None:
    poison = Poison()
    broken = poison.broke(instance(1), 0.0)
    assert poison.broke(instance(1), 0.1) is broken
    poison.died(instance(1), 0.2)
    assert poison.broke(instance(1), 0.3) is broken


def test_an_instance_that_answers_was_not_killed() -> None:
    poison = Poison()
    cut = poison.broke(instance(1), 0.0)
    poison.lives(instance(1))
    assert cut.fate == "alive"
    again = poison.broke(instance(1), 20.0)
    poison.died(instance(1), 20.0)
    assert (cut.fate, again.fate) == ("alive", "dead")


def test_an_instance_that_answers_and_is_then_replaced_was_the_next_process() -> None:
    poison = Poison()
    broken = poison.broke(instance(1), 1.0)
    poison.lives(instance(1))
    poison.died(instance(1), 5.0)
    assert broken.fate == "dead"


def test_a_death_long_after_an_answered_probe_is_another_matter() -> None:
    poison = Poison()
    broken = poison.broke(instance(1), 1.0)
    poison.lives(instance(1))
    poison.died(instance(1), 60.0)
    assert broken.fate == "alive"


def test_an_instance_that_was_taken_for_dead_and_answers_has_no_death_to_answer_for() -> None:
    poison = Poison()
    frozen = poison.broke(instance(1), 1.0)
    poison.died(instance(1), 2.0)
    poison.lives(instance(1))
    assert poison.death_of(instance(1)) is None
    assert frozen.fate == "dead"
    assert poison.broke(instance(1), 5.0).fate == "open"


def test_a_death_is_known_for_a_while_to_calls_that_end_with_it() -> None:
    poison = Poison()
    assert poison.death_of(instance(1)) is None
    poison.died(instance(1), 0.0)
    death = poison.death_of(instance(1))
    assert death is not None
    assert death.fate == "dead"
    poison.tick(61.0)
    assert poison.death_of(instance(1)) is None


def test_a_convicted_body_is_refused_for_a_while() -> None:
    poison = Poison()
    assert not poison.refused
    poison.convict(b"bad", 10.0)
    assert poison.refused
    assert poison.left_s(b"bad", 11.0) == REFUSED_S - 1
    assert poison.left_s(b"other", 11.0) == 0.0
    assert poison.left_s(b"bad", 10.0 + REFUSED_S) == 0.0
    poison.tick(10.0 + REFUSED_S)
    assert not poison.refused


def test_a_body_that_is_served_after_all_is_refused_no_more() -> None:
    poison = Poison()
    poison.convict(b"unlucky", 10.0)
    poison.acquit(b"other")
    assert poison.left_s(b"unlucky", 10.0) == REFUSED_S
    poison.acquit(b"unlucky")
    assert not poison.refused


def test_what_it_keeps_is_bounded() -> None:
    poison = Poison()
    for number in range(6000):
        poison.convict(number.to_bytes(2, "big"), float(number) / 100)
        poison.broke(instance(number), 0.0)
    assert len(poison.refused) == 1024
    assert poison.left_s((5999).to_bytes(2, "big"), 60.0) > 0.0
    assert len(poison._last) == 4096


def test_random_walk_convicts_only_who_was_there() -> None:
    """Nobody is guilty without KILLS deaths of instances at which it broke off."""
    draw = random.Random(3)
    verdicts: set[str] = set()
    for _ in range(300):
        poison, now = Poison(), 0.0
        breaks: dict[str, set[Break]] = {"a": set(), "b": set(), "c": set()}
        visited: dict[str, set[InstanceKey]] = {"a": set(), "b": set(), "c": set()}
        deaths: Counter[InstanceKey] = Counter()
        for _ in range(30):
            now += draw.random()
            key, request = instance(draw.randrange(6)), draw.choice("abc")
            act = draw.choice(["broke", "broke", "died", "lives"])
            if act == "broke":
                breaks[request].add(poison.broke(key, now))
                visited[request].add(key)
            elif act == "died":
                poison.died(key, now)
                deaths[key] += 1
            else:
                poison.lives(key)
            verdict = judge(breaks[request])
            verdicts.add(verdict)
            if verdict == "guilty":
                assert sum(deaths[key] for key in visited[request]) >= KILLS
    assert verdicts == {"innocent", "open", "guilty"}
