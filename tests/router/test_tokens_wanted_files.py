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


def wished(shelf: WantedFiles, now: float) -> tuple[str, str] | None:
    fetch = shelf.next_fetch(now)
    return None if fetch is None else (fetch.key, fetch.source.instance.http)


def expect(shelf: WantedFiles, now: float) -> NextFetch:
    fetch = shelf.next_fetch(now)
    assert fetch is not None
    return fetch


def test_files_are_wished_for_when_an_engine_with_them_is_first_seen() -> None:
    shelf = WantedFiles()
    assert shelf.is_empty
    assert wished(shelf, 0) is None
    shelf.see([engine(1)])
    assert not shelf.is_empty
    assert not shelf.is_loaded("k")
    assert wished(shelf, 0) == ("k", "10.0.0.1:20001")
    shelf.loaded(expect(shelf, 0), 0)
    assert shelf.is_loaded("k")
    assert wished(shelf, 1e9) is None


def test_engines_that_are_not_ready_or_name_no_key_are_not_asked() -> None:
    shelf = WantedFiles()
    shelf.see([engine(1, state="Starting"), engine(2, state="Draining"), engine(3, "")])
    assert shelf.is_empty
    assert wished(shelf, 0) is None


def test_after_a_failure_another_engine_is_asked_later_and_later() -> None:
    shelf = WantedFiles()
    shelf.see([engine(1), engine(2)])
    now, asked, pauses_s = 0.0, list[str](), list[float]()
    for _ in range(12):
        fetch = expect(shelf, now)
        asked.append(fetch.source.instance.http)
        shelf.failed(fetch, now)
        pause_s = next(s for s in range(1, 1000) if shelf.next_fetch(now + s) is not None)
        assert shelf.next_fetch(now + pause_s - 0.001) is None
        pauses_s.append(pause_s)
        now += pause_s
    assert asked[:3] == ["10.0.0.1:20001", "10.0.0.2:20001", "10.0.0.1:20001"]
    assert pauses_s == [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 512, 512]


def test_when_the_engine_of_the_files_leaves_they_are_fetched_anew_and_used_meanwhile() -> None:
    shelf = WantedFiles()
    shelf.see([engine(1), engine(2)])
    shelf.loaded(expect(shelf, 0), 0)
    shelf.see([engine(2)])
    assert shelf.is_loaded("k")
    assert wished(shelf, 9.9) is None  # a fleet that restarts is not asked at once
    assert wished(shelf, 10) == ("k", "10.0.0.2:20001")
    shelf.see([engine(2, incarnation="j")])
    shelf.loaded(expect(shelf, 10), 10)
    shelf.see([engine(2, incarnation="j")])
    assert wished(shelf, 1e9) is None
    shelf.see([engine(2, incarnation="restarted")])
    assert wished(shelf, 1e9) == ("k", "10.0.0.2:20001")


def test_another_checkpoint_is_fetched_beside_the_first() -> None:
    shelf = WantedFiles()
    shelf.see([engine(1)])
    shelf.loaded(expect(shelf, 0), 0)
    assert shelf.see([engine(1), engine(2, "other")]) == []
    assert wished(shelf, 0) == ("other", "10.0.0.2:20001")
    assert shelf.is_loaded("k")


def test_of_too_many_checkpoints_one_without_engines_makes_room() -> None:
    shelf = WantedFiles(max_kept=2)
    assert shelf.see([engine(1, "a"), engine(2, "b"), engine(3, "c")]) == []
    for _ in range(2):
        shelf.loaded(expect(shelf, 0), 0)
    assert wished(shelf, 1e9) is None
    assert not shelf.is_loaded("c")
    assert shelf.see([engine(2, "b"), engine(3, "c")]) == ["a"]
    assert not shelf.is_loaded("a")
    assert shelf.is_loaded("b")
    assert wished(shelf, 0) == ("c", "10.0.0.3:20001")


def test_when_the_child_ended_all_is_fetched_again_and_what_it_died_of_later_and_later() -> None:
    shelf = WantedFiles()
    shelf.see([engine(1, "good"), engine(2, "bad")])
    now, pauses_s = 0.0, list[int]()
    for _ in range(4):
        while (fetch := shelf.next_fetch(now)) is not None:
            shelf.loaded(fetch, now)
        shelf.lost("bad", now)
        assert not shelf.is_loaded("good")
        shelf.loaded(expect(shelf, now), now)
        assert shelf.is_loaded("good")
        pauses_s.append(next(s for s in range(1, 100) if shelf.next_fetch(now + s) is not None))
        now += pauses_s[-1]
    assert pauses_s == [1, 2, 4, 8]


def test_files_that_were_forgotten_meanwhile_are_not_taken_for_loaded() -> None:
    shelf = WantedFiles(max_kept=1)
    shelf.see([engine(1, "a")])
    fetch = expect(shelf, 0)
    shelf.see([])
    assert shelf.see([engine(2, "b")]) == ["a"]
    shelf.loaded(fetch, 0)
    shelf.failed(fetch, 0)
    assert not shelf.is_loaded("a")
    assert wished(shelf, 0) == ("b", "10.0.0.2:20001")
