"""Beats that are signed with the fleet's key, over real sockets: who is taken, what is dropped."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from tests.router.fakes import Fleet, fleet, now_us, until
from xpyd_core.keys import beat_mac, key_ids
from xpyd_core.messages import Heartbeat, encode_heartbeat
from xpyd_router.fleet.registry import MAX_SKEW_S

KEY, NEXT_KEY, OTHER_KEY = b"k" * 32, b"n" * 32, b"o" * 32


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    path = tmp_path / "key"
    return write(path, KEY, NEXT_KEY)


def write(path: Path, *keys: bytes) -> Path:
    path.write_bytes(b"\n".join(keys))
    return path


def frame_of(**fields: Any) -> bytes:
    fields = {"incarnation": "a", "sent_us": now_us(), **fields}
    base = {"type": "P", "http_address": "127.0.0.1:20001", "zmq_address": "127.0.0.1:21001"}
    return encode_heartbeat(Heartbeat(**{**base, **fields}))


async def result_of(fleet_: Fleet, *frames: bytes) -> str:
    """What the router counts the message as."""
    before, taken = results(fleet_), fleet_.taken()
    await fleet_.dealer.send_multipart(frames)
    await until(lambda: fleet_.taken() > taken)
    (changed,) = {name for name, n in results(fleet_).items() if n != before.get(name, 0)}
    return changed


def results(fleet_: Fleet) -> dict[str, float]:
    samples = fleet_.router.state.metrics.heartbeats.collect()[0].samples
    return {s.labels["result"]: s.value for s in samples if s.name.endswith("_total")}


@pytest.mark.parametrize("key", [KEY, NEXT_KEY], ids=["first", "second"])
async def test_a_beat_signed_with_a_key_of_the_file_is_taken(key_file: Path, key: bytes) -> None:
    async with fleet(kv_key_file=key_file) as fleet_:
        frame = frame_of()
        assert await result_of(fleet_, frame, beat_mac(key, frame)) == "new"


async def test_the_router_follows_its_file_and_says_which_keys_it_and_engines_have(
    key_file: Path,
) -> None:
    async with fleet(kv_key_file=key_file) as fleet_:
        write(key_file, OTHER_KEY, KEY)
        said = fleet_.http.get(f"{fleet_.admin}/instances")
        assert (await (await said).json())["key_ids"] == list(key_ids((KEY, NEXT_KEY)))
        await until(lambda: fleet_.router.state.keys[0] == OTHER_KEY)
        frame = frame_of(key_ids=["one", "two"])
        assert await result_of(fleet_, frame, beat_mac(OTHER_KEY, frame)) == "new"
        said = await (await fleet_.http.get(f"{fleet_.admin}/instances")).json()
        assert said["key_ids"] == list(key_ids((OTHER_KEY, KEY)))
        assert [row["key_ids"] for row in said["instances"]] == [["one", "two"]]


@pytest.mark.parametrize(
    ("mac_of", "result"),
    [
        (lambda frame: beat_mac(OTHER_KEY, frame), "forged"),
        (lambda frame: beat_mac(b"", frame), "forged"),
        (lambda frame: beat_mac(KEY, frame + b"x"), "forged"),
        (lambda frame: bytes(32), "forged"),
        (lambda frame: b"", "unsigned"),
        (lambda frame: beat_mac(KEY, frame)[:31], "unsigned"),
    ],
    ids=["other-key", "no-secret", "other-beat", "zeros", "empty", "short"],
)
async def test_a_beat_that_is_not_signed_with_the_fleets_key_is_dropped_and_counted(
    key_file: Path, mac_of: Any, result: str
) -> None:
    async with fleet(kv_key_file=key_file) as fleet_:
        frame = frame_of()
        assert await result_of(fleet_, frame, mac_of(frame)) == result
        assert fleet_.router.state.fleet.instances == ()


@pytest.mark.parametrize(
    ("config", "result"), [({}, "unsigned"), ({"accept_unsigned_beats": True}, "new")]
)
async def test_unsigned_beats_are_taken_where_the_router_is_told_so(
    key_file: Path, config: dict[str, Any], result: str
) -> None:
    async with fleet(kv_key_file=key_file, **config) as fleet_:
        assert await result_of(fleet_, frame_of()) == result


async def test_an_unsigned_beat_does_not_end_or_move_a_signed_instance(key_file: Path) -> None:
    async with fleet(kv_key_file=key_file, accept_unsigned_beats=True) as fleet_:
        frame = frame_of()
        await result_of(fleet_, frame, beat_mac(KEY, frame))
        other = frame_of(incarnation="b")
        assert await result_of(fleet_, other, beat_mac(OTHER_KEY, other)) == "unsigned"
        for fields in ({"state": "Gone"}, {"incarnation": "b"}, {"zmq_address": "1.2.3.4:1"}):
            assert await result_of(fleet_, frame_of(**fields)) == "unsigned"
        (instance,) = fleet_.router.state.fleet.instances
        assert (instance.key.incarnation, str(instance.kv)) == ("a", "127.0.0.1:21001")


@pytest.mark.parametrize("key", [b"", KEY, None], ids=["no-secret", "a-secret", "vllm"])
async def test_a_router_without_a_secret_takes_everyone(key: bytes | None) -> None:
    async with fleet() as fleet_:
        frame = frame_of()
        frames = [frame] if key is None else [frame, beat_mac(key, frame)]
        assert await result_of(fleet_, *frames) == "new"
        (instance,) = fleet_.router.state.fleet.instances
        assert instance.is_signed == (key == b"")


async def test_a_signed_beat_that_was_kept_for_minutes_registers_nobody(key_file: Path) -> None:
    async with fleet(kv_key_file=key_file) as fleet_:
        old = frame_of(sent_us=now_us() - round(MAX_SKEW_S * 1.1e6))
        assert await result_of(fleet_, old, beat_mac(KEY, old)) == "skewed"
        timeless = frame_of(sent_us=0)
        assert await result_of(fleet_, timeless, beat_mac(KEY, timeless)) == "skewed"


async def test_a_replayed_goodbye_does_not_end_the_next_incarnation(key_file: Path) -> None:
    async with fleet(kv_key_file=key_file) as fleet_:

        async def send(**fields: Any) -> tuple[bytes, bytes]:
            frame = frame_of(**fields)
            signed = frame, beat_mac(KEY, frame)
            assert await result_of(fleet_, *signed) in ("new", "gone", "refreshed")
            return signed

        first = await send(incarnation="a")
        goodbye = await send(incarnation="a", state="Gone")
        await send(incarnation="b")
        for kept in (first, goodbye):
            assert await result_of(fleet_, *kept) == "stale"
        (instance,) = fleet_.router.state.fleet.instances
        assert instance.key.incarnation == "b"
        await send(incarnation="b")


@pytest.mark.parametrize(
    ("accepts", "key", "reason"),
    [
        (False, None, " 127.0.0.1: a beat without signature; give the engine the fleet's key"),
        (False, OTHER_KEY, " 127.0.0.1: a beat signed with another key"),
        (True, None, " 127.0.0.1 127.0.0.1:20001: a beat without the router's key"),
    ],
)
async def test_the_log_says_what_is_wrong_and_what_to_do_but_never_the_key(
    *,
    accepts: bool,
    key: bytes | None,
    reason: str,
    key_file: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with fleet(kv_key_file=key_file, accept_unsigned_beats=accepts) as fleet_:
        signed = frame_of()
        await result_of(fleet_, signed, beat_mac(KEY, signed))
        with caplog.at_level(logging.WARNING, "xpyd_router.discovery.discovery"):
            frame = frame_of()
            await result_of(fleet_, frame, *([] if key is None else [beat_mac(key, frame)]))
    (line,) = [r.getMessage() for r in caplog.records if "discovery" in r.name]
    assert reason in line
    # The advice is what this router has not got yet.
    assert ("--accept-unsigned-beats" in line) == (key is None and not accepts)
    assert KEY.decode() not in caplog.text
