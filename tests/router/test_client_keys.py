"""Client keys apart from HTTP: lines of the file, who a key is of, limits, `xpyd key`."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import pytest

from xpyd_core.errors import ApiError, UserError
from xpyd_operator.manifests.names import ANNOTATION_ROTATE
from xpyd_router.fair_queue import Cost
from xpyd_router.keys import command as key_command
from xpyd_router.keys.client import KEY_COLUMNS, KEY_SLOTS, Client
from xpyd_router.keys.command import append_line, command
from xpyd_router.keys.lines import KeyOptions, line_of, new_key, parse_keys, salted
from xpyd_router.keys.ring import KeyRing, Refused
from xpyd_router.processes.shared_loads import Rows, size_bytes

KEY, OTHER = new_key(), new_key()


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def bearer(key: str) -> list[tuple[bytes, bytes]]:
    return [(b"host", b"x"), (b"authorization", f"Bearer {key}".encode())]


def ring_of(*lines: str, clock: Clock | None = None, rows: Any = None) -> KeyRing:
    ring = KeyRing(clock or Clock(), rows)
    ring.take(parse_keys("\n".join(lines), "keys"))
    return ring


def client_of(ring: KeyRing, key: str = KEY) -> Client:
    found = ring.find(bearer(key))
    assert isinstance(found, Client)
    return found


def refused(ring: KeyRing, headers: list[tuple[bytes, bytes]]) -> str:
    found = ring.find(headers)
    assert isinstance(found, Refused)
    assert found.error.status == 401
    return found.reason


def test_a_line_has_a_name_a_hash_and_options() -> None:
    options = {
        "requests": "8",
        "tokens": "100000",
        "tokens-per-minute": "5000",
        "priority": "-5",
        "weight": "3",
        "models": "a,b/c",
        "salt": "team",
    }
    file = parse_keys(f"# a comment\n\n{line_of('team-a', KEY, options)}\n", "keys")
    assert file.options == {
        "team-a": KeyOptions(8, 100000, 5000, -5, 3, ("a", "b/c"), "team"),
    }
    assert list(file.by_digest.values()) == ["team-a"]


@pytest.mark.parametrize(
    ("lines", "complaint"),
    [
        (["a"], "line 1: expected sha256:HEX or scrypt"),
        (["a sha256:12"], "line 1: expected sha256:HEX or scrypt"),
        (["-a sha256:" + "0" * 64], "expected a name"),
        (["# x", "a sha256:" + "0" * 64 + " speed=3"], "line 2: 'speed=3': expected one of"),
        (["a sha256:" + "0" * 64 + " requests=0"], "requests: expected a whole number, 1 to"),
        (["a sha256:" + "0" * 64 + " weight=1 weight=2"], "weight: given twice"),
        (["a sha256:" + "0" * 64 + " models=a,,b"], "models: expected names"),
        (["a sha256:" + "0" * 64, "b sha256:" + "0" * 64], "b: another name has the same key"),
        (["a sha256:" + "0" * 64, "a sha256:" + "1" * 64 + " weight=2"], "a: other options than"),
        (["a scrypt:15:8:1:" + "0" * 32 + ":" + "0" * 64], "expected N a power of 2"),
        (["a scrypt:65536:1:1:" + "0" * 32 + ":" + "0" * 64], "below 2 ** (16 * R)"),
        (["a scrypt:8388608:8:1:" + "0" * 32 + ":" + "0" * 64], "at most 64 MiB"),
    ],
)
def test_a_mistake_names_the_line_and_the_fix_and_shows_no_hash(
    lines: list[str], complaint: str
) -> None:
    with pytest.raises(UserError, match="keys, line") as caught:
        parse_keys("\n".join(lines), "keys")
    assert complaint in str(caught.value)
    assert "0" * 16 not in str(caught.value)


def test_a_key_is_found_by_either_header_and_authorization_wins() -> None:
    ring = ring_of(line_of("a", KEY, {}), line_of("b", OTHER, {}))
    assert client_of(ring).name == "a"
    by_header = ring.find([(b"x-api-key", OTHER.encode())])
    assert isinstance(by_header, Client)
    assert by_header.name == "b"
    both = ring.find([(b"x-api-key", OTHER.encode()), *bearer(KEY)])
    assert isinstance(both, Client)
    assert both.name == "a"


async def test_a_ring_without_a_file_yet_knows_nobody_and_says_so() -> None:
    """One that began while the file had a mistake; other processes go by the last good one."""
    ring = KeyRing(lambda: 0.0)
    assert ring.find(bearer(KEY)) is None
    answer = await ring.verify(bearer(KEY))
    assert isinstance(answer, ApiError)
    assert (answer.status, answer.retry_after_s) == (503, 2)
    assert isinstance(await ring.verify([]), Refused)
    ring.take(parse_keys(f"a sha256:{'0' * 64}", "f"))
    assert isinstance(await ring.verify(bearer(KEY)), Refused)
    ring.close()


def test_no_key_an_unknown_one_and_a_revoked_one_are_refused_with_a_reason() -> None:
    ring = ring_of(line_of("a", KEY, {}), line_of("b", OTHER, {}))
    assert refused(ring, []) == "no key"
    assert refused(ring, [(b"authorization", b"Basic abc")]) == "no key"
    assert refused(ring, bearer(KEY + "x")) == "unknown key"
    ring.take(parse_keys(line_of("b", OTHER, {}), "keys"))
    assert refused(ring, bearer(KEY)) == "revoked key of a"
    ring.take(parse_keys(line_of("a", KEY, {}), "keys"))
    assert client_of(ring).name == "a", "a key may come back"


def test_two_keys_of_one_name_are_one_client() -> None:
    ring = ring_of(line_of("a", KEY, {"weight": "2"}), line_of("a", OTHER, {}))
    assert client_of(ring, KEY) is client_of(ring, OTHER)
    assert client_of(ring).account.weight == 2
    same = client_of(ring)
    assert ring.take(parse_keys(line_of("a", OTHER, {}), "keys")) == []
    assert client_of(ring, OTHER) is same, "what it has in flight stays counted"


async def test_a_key_that_a_person_chose_is_hashed_once() -> None:
    ring = ring_of(line_of("alice", "correct-horse", {}, is_chosen=True))
    assert ring.find(bearer("correct-horse")) is None
    found = await ring.verify(bearer("correct-horse"))
    assert isinstance(found, Client)
    assert ring.find(bearer("correct-horse")) is found
    wrong = await ring.verify(bearer("battery-staple"))
    assert isinstance(wrong, Refused)
    assert refused(ring, bearer("battery-staple")) == "unknown key"
    ring.take(parse_keys(line_of("b", OTHER, {}), "keys"))
    assert refused(ring, bearer("correct-horse")) == "unknown key"
    ring.close()


def refusal(client: Client, cost: Cost) -> tuple[str, int | None]:
    with pytest.raises(ApiError) as caught:
        client.enter(cost)
    assert caught.value.status == 429
    return caught.value.message, caught.value.retry_after_s


def test_limits_at_once_are_given_back_and_shared_by_routers() -> None:
    ring = ring_of(line_of("a", KEY, {"requests": "4", "tokens": "1000"}))
    ring.set_routers(2)
    client = client_of(ring)
    first = client.enter(Cost(1, 100))
    second = client.enter(Cost(1, 400))
    assert dict(client.headers())[b"x-ratelimit-remaining-requests"] == b"0"
    assert "2 requests at once" in refusal(client, Cost(1, 1))[0]
    client.leave(second, 400, 10)
    assert "500 tokens at once" in refusal(client, Cost(1, 401))[0]
    client.leave(first, 100, None)
    alone = client.enter(Cost(1, 9000))
    assert alone == Cost(1, 500), "one larger than the limit runs alone"
    client.leave(alone, 9000, 0)
    assert dict(client.headers()) == {
        b"x-ratelimit-limit-requests": b"2",
        b"x-ratelimit-remaining-requests": b"2",
        b"x-ratelimit-reset-requests": b"0s",
        b"x-ratelimit-limit-tokens": b"500",
        b"x-ratelimit-remaining-tokens": b"500",
        b"x-ratelimit-reset-tokens": b"0s",
    }
    ring.set_routers(1)
    assert dict(client.headers())[b"x-ratelimit-limit-requests"] == b"4"


def test_tokens_per_minute_are_charged_at_the_start_and_settled_at_the_end() -> None:
    clock = Clock()
    client = client_of(ring_of(line_of("a", KEY, {"tokens-per-minute": "600"}), clock=clock))
    held = client.enter(Cost(1, 500))
    message, retry_s = refusal(client, Cost(1, 200))
    assert ("600 tokens per minute" in message, retry_s) == (True, 10)
    client.leave(held, 500, 100)
    headers = dict(client.headers())
    assert headers[b"x-ratelimit-remaining-tokens"] == b"500"
    assert headers[b"x-ratelimit-reset-tokens"] == b"10s"
    client.leave(client.enter(Cost(1, 200)), 200, 1100)
    assert dict(client.headers())[b"x-ratelimit-remaining-tokens"] == b"0"
    assert refusal(client, Cost(1, 1))[1] == 60, "it took more than it may: that is owed"
    clock.now_s += 120
    client.enter(Cost(1, 50_000))
    assert refusal(client, Cost(1, 50_000))[1] == 60


def test_processes_count_together_by_name_also_while_their_files_differ() -> None:
    rows = Rows(memoryview(bytearray(size_bytes(2))), 2)
    assert len(rows.keys(0)) == KEY_SLOTS * KEY_COLUMNS
    clock = Clock()
    line = line_of("a", KEY, {"requests": "2", "tokens-per-minute": "600"})
    mine = ring_of(line, clock=clock, rows=(rows.keys(0), rows.other_keys(0)))
    theirs = ring_of(line, clock=clock, rows=(rows.keys(1), rows.other_keys(1)))
    held = client_of(theirs).enter(Cost(1, 400))
    assert dict(client_of(mine).headers())[b"x-ratelimit-remaining-requests"] == b"1"
    assert "tokens per minute" in refusal(client_of(mine), Cost(1, 300))[0]
    client_of(mine).enter(Cost(1, 100))
    assert "2 requests at once" in refusal(client_of(theirs), Cost(1, 1))[0]
    theirs.take(parse_keys(f"{line}\n{line_of('b', OTHER, {})}", "keys"))
    client_of(theirs).leave(held, 400, 0)
    assert dict(client_of(mine).headers())[b"x-ratelimit-remaining-requests"] == b"1"
    mine.refresh()
    assert dict(client_of(mine).headers())[b"x-ratelimit-remaining-tokens"] == b"500"
    theirs.take(parse_keys("", "keys"))
    assert not any(rows.keys(1)), "a name that is gone leaves its cells empty"


def test_the_salt_is_of_the_name_or_of_what_the_line_says() -> None:
    ring = ring_of(line_of("a", KEY, {}), line_of("b", OTHER, {"salt": "a"}))
    salts = [bytes(client_of(ring, key).salt).decode() for key in (KEY, OTHER)]
    assert salts == [f'"{salted("a")}"'] * 2
    assert salted("a") != salted("b")


def made(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, str]:
    parser = argparse.ArgumentParser()
    command.configure(parser)
    assert command.run(parser.parse_args(["new", *words, "--output", "json"])) == 0
    return json.loads(capsys.readouterr().out)


def test_xpyd_key_new_gives_a_key_and_its_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "keys.txt"
    file.write_text("# no end of line")
    first = made(capsys, "a", "--requests", "8", "--append", str(file))
    second = made(capsys, "b", "--append", str(file))
    assert first["line"].endswith(" requests=8")
    ring = ring_of(file.read_text())
    assert client_of(ring, first["key"]).name == "a"
    assert client_of(ring, second["key"]).name == "b"
    assert first["key"] not in file.read_text()
    with pytest.raises(UserError, match="a: other options than in the first line"):
        made(capsys, "a", "--weight", "2", "--append", str(file))
    with pytest.raises(UserError, match="weight: expected a whole number"):
        made(capsys, "c", "--weight", "0")
    assert len(file.read_text().splitlines()) == 3


def test_a_clients_next_key_has_its_limits_when_the_line_of_the_first_is_gone(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "keys.txt"
    limits = ("--requests", "8", "--models", "x,y")
    first = made(capsys, "a", *limits, "--append", str(file))
    second = made(capsys, "a", "--append", str(file))
    both = ring_of(file.read_text())
    assert client_of(both, first["key"]).name == client_of(both, second["key"]).name == "a"
    file.write_text("".join(file.read_text().splitlines(keepends=True)[1:]))
    left = parse_keys(file.read_text(), "keys").options["a"]
    assert (left.requests, left.models) == (8, ("x", "y"))


@pytest.fixture
def kubectl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A kubectl that writes down its annotations. An operator takes the wish up the third time
    that somebody looks, unless its fleet is `idle`."""
    program, said, looks = tmp_path / "kubectl", tmp_path / "said", tmp_path / "looks"
    program.write_text(f"""#!/bin/sh
case "$*" in
*missing*) echo 'fleets "missing" not found' >&2; exit 1;;
*idle*) exit 0;;
*own*) echo "False the key is in a Secret of yours"; exit 0;;
*annotate*) echo "$@" >> {said};;
*get*) echo >> {looks}; [ -e {said} ] && echo "True $(($(wc -l < {looks}) / 5))";;
esac
exit 0
""")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    return said


def rotated(*words: str) -> None:
    parser = argparse.ArgumentParser()
    command.configure(parser)
    assert command.run(parser.parse_args(["rotate", *words])) == 0


def test_xpyd_key_rotate_asks_the_operator_for_another_key_each_time(
    kubectl: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    rotated("chat", "-n", "llm")
    time.sleep(0.002)
    rotated("chat", "-n", "llm")
    lines = kubectl.read_text().splitlines()
    begin = (
        f"--namespace=llm annotate --overwrite inferencefleet.xpyd.dev/chat {ANNOTATION_ROTATE}="
    )
    assert [line.startswith(begin) for line in lines] == [True, True]
    assert lines[0] != lines[1]
    assert "KeyRotated" in capsys.readouterr().out
    monkeypatch.setattr(key_command, "BEGIN_S", 0.0)
    rotated("own")
    with pytest.raises(UserError, match="its operator has not begun: does it run"):
        rotated("idle")
    with pytest.raises(UserError, match='fleets "missing" not found'):
        rotated("missing")


def test_xpyd_key_rotate_without_kubectl_says_what_to_do_instead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match=f"annotate the fleet by other means: {ANNOTATION_ROTATE}="):
        rotated("chat")


def test_a_line_is_added_to_the_file_behind_a_link(tmp_path: Path) -> None:
    file, link = tmp_path / "real.txt", tmp_path / "keys.txt"
    link.symlink_to(file)
    append_line(link, line_of("a", KEY, {}))
    assert link.is_symlink()
    assert file.stat().st_mode & 0o777 == 0o600
    assert client_of(ring_of(file.read_text())).name == "a"
