"""Which request kills instances: suspicion, proof, and the ones that had bad luck."""

from __future__ import annotations

import random

from xpyd_router.fleet.poison import KILLS, MEMORY_S, REFUSED_S, Poison, fingerprint
from xpyd_router.fleet.registry import InstanceKey


def instance(number: int) -> InstanceKey:
    return InstanceKey(f"10.0.0.{number}:20001", "inc")


def kill(poison: Poison, number: int, *suspects: bytes, now: float = 0.0) -> None:
    for suspect in suspects:
        poison.blame(instance(number), suspect, now)
    poison.died(instance(number), now)


def test_a_fingerprint_depends_on_body_and_key() -> None:
    found = {fingerprint(body, key) for body in (b"a", b"b") for key in (b"1", b"2")}
    assert len(found) == 4
    assert fingerprint(b"a", b"1") in found


def test_one_death_convicts_nobody_and_two_do() -> None:
    poison = Poison()
    kill(poison, 1, b"bad")
    assert poison.judge(b"bad", 0.0) == "innocent"
    kill(poison, 2, b"bad")
    assert poison.judge(b"bad", 0.0) == "guilty"
    assert poison.judge(b"other", 0.0) == "innocent"


def test_two_deaths_of_one_instance_count_once() -> None:
    poison = Poison()
    kill(poison, 1, b"bad")
    kill(poison, 1, b"bad")
    assert poison.judge(b"bad", 0.0) == "innocent"


def test_it_is_open_until_a_probe_tells() -> None:
    poison = Poison()
    kill(poison, 1, b"bad")
    poison.blame(instance(2), b"bad", 1.0)
    assert poison.judge(b"bad", 1.0) == "open"
    poison.lives(instance(2))
    assert poison.judge(b"bad", 1.0) == "innocent"


def test_who_was_cleared_is_no_suspect_of_what_comes_after() -> None:
    poison = Poison()
    poison.blame(instance(1), b"cut", 0.0)
    poison.lives(instance(1))
    kill(poison, 1, b"bad", now=1.0)
    kill(poison, 2, b"cut", b"bad", now=2.0)
    assert poison.judge(b"cut", 2.0) == "innocent"
    assert poison.judge(b"bad", 2.0) == "guilty"


def test_an_instance_that_answers_and_is_then_replaced_was_the_next_process() -> None:
    poison = Poison()
    kill(poison, 1, b"bad")
    poison.blame(instance(2), b"bad", 1.0)
    poison.lives(instance(2))
    poison.died(instance(2), 5.0)
    assert poison.judge(b"bad", 5.0) == "guilty"


def test_a_death_long_after_an_answered_probe_is_another_matter() -> None:
    poison = Poison()
    kill(poison, 1, b"bad")
    poison.blame(instance(2), b"bad", 1.0)
    poison.lives(instance(2))
    poison.died(instance(2), 60.0)
    assert poison.judge(b"bad", 60.0) == "innocent"


def test_where_instances_die_anyway_two_deaths_convict_nobody() -> None:
    poison = Poison()
    kill(poison, 1, b"unlucky")
    kill(poison, 2)
    kill(poison, 3, b"unlucky")
    assert poison.judge(b"unlucky", 0.0) == "guilty"  # one other death may be chance
    kill(poison, 4)
    assert poison.judge(b"unlucky", 0.0) == "innocent"


def test_other_deaths_long_before_do_not_speak_for_a_request() -> None:
    poison = Poison()
    for number in range(1, 5):
        kill(poison, number, now=0.0)
    kill(poison, 5, b"bad", now=31.0)
    kill(poison, 6, b"bad", now=32.0)
    assert poison.judge(b"bad", 32.0) == "guilty"


def test_deaths_are_forgotten() -> None:
    poison = Poison()
    kill(poison, 1, b"bad", now=0.0)
    kill(poison, 2, b"bad", now=MEMORY_S - 1)
    assert poison.judge(b"bad", MEMORY_S - 1) == "guilty"
    assert poison.judge(b"bad", MEMORY_S) == "innocent"


def test_a_convicted_request_is_refused_for_a_while() -> None:
    poison = Poison()
    assert poison.is_empty
    poison.convict(b"bad", 10.0)
    assert not poison.is_empty
    assert poison.left_s(b"bad", 11.0) == REFUSED_S - 1
    assert poison.left_s(b"other", 11.0) == 0.0
    assert poison.left_s(b"bad", 10.0 + REFUSED_S) == 0.0
    poison.tick(10.0 + REFUSED_S)
    assert poison.is_empty


def test_what_it_keeps_is_bounded() -> None:
    poison = Poison()
    for number in range(3000):
        poison.convict(number.to_bytes(2, "big"), float(number) / 100)
        poison.blame(instance(number), b"x", 0.0)
        poison.blame(instance(-1), number.to_bytes(2, "big"), 0.0)
    assert len(poison._convicted) == 1024
    assert poison.left_s((2999).to_bytes(2, "big"), 30.0) > 0.0
    assert len(poison._deaths) == 256
    assert max(len(death.suspects) for death in poison._deaths.values()) <= 1024


def test_random_walk_convicts_only_who_was_there() -> None:
    """Nobody is guilty without KILLS sure deaths that it was suspected of."""
    draw = random.Random(3)
    verdicts: set[str] = set()
    for _ in range(300):
        poison, now = Poison(), 0.0
        sure: dict[bytes, set[InstanceKey]] = {}
        waiting: dict[InstanceKey, set[bytes]] = {}
        dead: dict[InstanceKey, set[bytes]] = {}
        for _ in range(30):
            now += draw.random()
            key, suspect = instance(draw.randrange(6)), draw.choice([b"a", b"b", b"c"])
            act = draw.choice(["blame", "blame", "died", "lives"])
            if act == "blame":
                poison.blame(key, suspect, now)
                waiting.setdefault(key, set()).add(suspect)
            elif act == "died":
                poison.died(key, now)
                dead.setdefault(key, set()).update(waiting.get(key, set()))
            else:
                poison.lives(key)
            for key_, blamed in dead.items():
                for one in blamed | waiting.get(key_, set()):
                    sure.setdefault(one, set()).add(key_)
            verdict = poison.judge(suspect, now)
            verdicts.add(verdict)
            if verdict == "guilty":
                assert len(sure.get(suspect, set())) >= KILLS
    assert verdicts == {"innocent", "open", "guilty"}
