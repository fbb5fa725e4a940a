"""Which tokenizer files are to be fetched, when, and from whom."""

from __future__ import annotations

from typing import Any

from xpyd_core.messages import Heartbeat
from xpyd_router.fleet.instances import Instance, InstanceKey
from xpyd_router.tokens.wanted_files import NextFetch, WantedFiles


def engine(number: int, key: str = "k", **beat: Any) -> Instance:
    address = f"10.0.0.{number}:20001"
    said = Heartbeat(
        type="P", http_address=address, zmq_address="10.0.0.1:21001", compatibility=key, **beat
    )
    incarnation = beat.get("incarnation", "i")
    return Instance(InstanceKey(address, incarnation), said, said.http, said.kv, 0, 9, 3)


def wished(wanted: WantedFiles, now: float) -> tuple[str, str] | None:
    fetch = wanted.next_fetch(now)
    return None if fetch is None else (fetch.key, fetch.source.instance.http)


def expect(wanted: WantedFiles, now: float) -> NextFetch:
    fetch = wanted.next_fetch(now)
    assert fetch is not None
    return fetch


def test_files_are_wished_for_when_an_engine_with_them_is_first_seen() -> None:
    wanted = WantedFiles()
    assert wanted.is_empty
    assert wished(wanted, 0) is None
    wanted.see([engine(1)])
    assert not wanted.is_empty
    assert not wanted.is_loaded("k")
    assert wished(wanted, 0) == ("k", "10.0.0.1:20001")
    wanted.loaded(expect(wanted, 0), 0)
    assert wanted.is_loaded("k")
    assert wished(wanted, 1e9) is None


def test_engines_that_are_not_ready_or_name_no_key_are_not_asked() -> None:
    wanted = WantedFiles()
    wanted.see([engine(1, state="Starting"), engine(2, state="Draining"), engine(3, "")])
    assert wanted.is_empty
    assert wished(wanted, 0) is None


def test_an_engine_that_has_no_files_is_not_asked_again() -> None:
    wanted = WantedFiles()
    engines = [engine(1), engine(2)]
    wanted.see(engines)
    wanted.lacks(expect(wanted, 0))
    assert wished(wanted, 0) == ("k", "10.0.0.2:20001"), "the other is asked at once"
    wanted.lacks(expect(wanted, 0))
    wanted.see(engines)
    assert wanted.is_empty, "no child is kept for it"
    assert wished(wanted, 1e9) is None
    wanted.see([engine(1, incarnation="another"), engine(2)])
    assert wished(wanted, 1e9) == ("k", "10.0.0.1:20001")


def test_engines_that_cannot_be_asked_are_noticed() -> None:
    wanted = WantedFiles()
    wanted.see([engine(1), engine(2, "", state="Starting")])
    assert wanted.without is None
    wanted.see([engine(2, "vllm 0.32.0", incarnation="")])
    assert wanted.without == InstanceKey("10.0.0.2:20001", "")
    assert wanted.is_empty


def test_after_a_failure_another_engine_is_asked_later_and_later() -> None:
    wanted = WantedFiles()
    wanted.see([engine(1), engine(2)])
    now, asked, pauses_s = 0.0, list[str](), list[float]()
    for _ in range(12):
        fetch = expect(wanted, now)
        asked.append(fetch.source.instance.http)
        wanted.failed(fetch, now)
        pause_s = next(s for s in range(1, 1000) if wanted.next_fetch(now + s) is not None)
        assert wanted.next_fetch(now + pause_s - 0.001) is None
        pauses_s.append(pause_s)
        now += pause_s
    assert asked[:3] == ["10.0.0.1:20001", "10.0.0.2:20001", "10.0.0.1:20001"]
    assert pauses_s == [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 512, 512]


def test_when_the_engine_of_the_files_leaves_they_are_fetched_anew_and_used_meanwhile() -> None:
    wanted = WantedFiles()
    wanted.see([engine(1), engine(2)])
    wanted.loaded(expect(wanted, 0), 0)
    wanted.see([engine(2)])
    assert wanted.is_loaded("k")
    assert wished(wanted, 9.9) is None  # a fleet that restarts is not asked at once
    assert wished(wanted, 10) == ("k", "10.0.0.2:20001")
    wanted.see([engine(2, incarnation="j")])
    wanted.loaded(expect(wanted, 10), 10)
    wanted.see([engine(2, incarnation="j")])
    assert wished(wanted, 1e9) is None
    wanted.see([engine(2, incarnation="restarted")])
    assert wished(wanted, 1e9) == ("k", "10.0.0.2:20001")


def test_another_checkpoint_is_fetched_beside_the_first() -> None:
    wanted = WantedFiles()
    wanted.see([engine(1)])
    wanted.loaded(expect(wanted, 0), 0)
    assert wanted.see([engine(1), engine(2, "other")]) == []
    assert wished(wanted, 0) == ("other", "10.0.0.2:20001")
    assert wanted.is_loaded("k")


def test_of_too_many_checkpoints_one_without_engines_makes_room() -> None:
    wanted = WantedFiles(max_kept=2)
    assert wanted.see([engine(1, "a"), engine(2, "b"), engine(3, "c")]) == []
    for _ in range(2):
        wanted.loaded(expect(wanted, 0), 0)
    assert wished(wanted, 1e9) is None
    assert not wanted.is_loaded("c")
    assert wanted.see([engine(2, "b"), engine(3, "c")]) == ["a"]
    assert not wanted.is_loaded("a")
    assert wanted.is_loaded("b")
    assert wished(wanted, 0) == ("c", "10.0.0.3:20001")


def test_when_the_child_ended_all_is_fetched_again_and_what_it_died_of_later_and_later() -> None:
    wanted = WantedFiles()
    wanted.see([engine(1, "good"), engine(2, "bad")])
    now, pauses_s = 0.0, list[int]()
    for _ in range(4):
        while (fetch := wanted.next_fetch(now)) is not None:
            wanted.loaded(fetch, now)
        wanted.lost("bad", now)
        assert not wanted.is_loaded("good")
        wanted.loaded(expect(wanted, now), now)
        assert wanted.is_loaded("good")
        pauses_s.append(next(s for s in range(1, 100) if wanted.next_fetch(now + s) is not None))
        now += pauses_s[-1]
    assert pauses_s == [1, 2, 4, 8]


def test_files_that_were_forgotten_meanwhile_are_not_taken_for_loaded() -> None:
    wanted = WantedFiles(max_kept=1)
    wanted.see([engine(1, "a")])
    fetch = expect(wanted, 0)
    wanted.see([])
    assert wanted.see([engine(2, "b")]) == ["a"]
    wanted.loaded(fetch, 0)
    wanted.failed(fetch, 0)
    assert not wanted.is_loaded("a")
    assert wished(wanted, 0) == ("b", "10.0.0.2:20001")
