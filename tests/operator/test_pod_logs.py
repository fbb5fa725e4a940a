"""Log files: bounded, followed through a cut, chosen by time in both formats."""

from __future__ import annotations

import io
from datetime import UTC, datetime, timedelta

import pytest

from tests.small_disk import fill
from xpyd_core.errors import UserError
from xpyd_operator.up.logs import (
    LogFollower,
    LogLimit,
    LogStreamer,
    PrefixWriter,
    line_time,
    lines_since,
    older,
    parse_span,
    rotate,
)

NOON = datetime(2026, 1, 2, 12, 0, tzinfo=UTC)


@pytest.mark.parametrize(
    ("line", "time"),
    [
        ("2026-01-02T12:00:00.000+00:00 INFO x: y", NOON),
        ('{"time": "2026-01-02T12:00:00.000+00:00", "level": "info"}', NOON),
        ("2026-01-02T13:00:00+01:00 INFO", NOON),
        ("2026-01-02 12:00:00 naive is UTC", NOON),
        ("Traceback (most recent call last):", None),
        ('{"time": 3}', None),
        ("{half", None),
        ("[1]", None),
        ("2026-99-02T12:00:00 no such day", None),
        ("", None),
    ],
)
def test_the_time_of_a_line_is_found_in_both_formats(line, time):
    assert line_time(line) == time


def test_since_keeps_lines_without_a_time_with_the_line_before_them(tmp_path):
    log = tmp_path / "p.log"
    older(log).write_text("2026-01-02T10:00:00+00:00 first\n")
    log.write_text(
        "  File old\n2026-01-02T11:00:00+00:00 second\n"
        "2026-01-02T12:00:00+00:00 third\n  File new\n"
    )
    assert list(lines_since(log, NOON)) == ["2026-01-02T12:00:00+00:00 third", "  File new"]
    assert len(list(lines_since(log, None))) == 5
    assert list(lines_since(log, NOON + timedelta(1))) == []


@pytest.mark.parametrize(
    ("text", "span"),
    [("30s", timedelta(seconds=30)), ("5m", timedelta(minutes=5)), ("2h", timedelta(hours=2)),
     ("1d", timedelta(days=1))],
)  # fmt: skip
def test_spans_are_read(text, span):
    assert parse_span(text) == span


@pytest.mark.parametrize("text", ["", "5", "m", "-5m", "5 m", "5w", "9999999d"])
def test_other_spans_are_refused(text):
    with pytest.raises(UserError, match="expected a span such as 30s, 5m, 2h or 1d"):
        parse_span(text)


def test_a_follower_gives_whole_lines_once_and_goes_on_after_a_cut(tmp_path):
    log = tmp_path / "p.log"
    follower = LogFollower(log)
    assert follower.poll() == []
    log.write_bytes(b"one\ntw")
    assert follower.poll() == ["one"]
    with log.open("ab") as file:
        file.write(b"o\n\xff\n")
        file.flush()
        assert follower.poll() == ["two", "\ufffd"]
        assert rotate(log, LogLimit(5))
        file.write(b"x\n")
    assert follower.poll() == ["x"]
    assert older(log).read_bytes() == b"one\ntwo\n\xff\n"
    assert not rotate(log, LogLimit(5))
    assert not rotate(tmp_path / "nowhere", LogLimit(5))


@pytest.mark.parametrize("files", [1, 2, 3])
def test_a_log_that_is_cut_again_and_again_keeps_so_many_files_in_order(tmp_path, files):
    log = tmp_path / "p.log"
    for number in range(5):
        with log.open("a") as file:
            file.write(f"line {number}\n")
        assert rotate(log, LogLimit(5, files))
    log.write_text("last\n")
    kept = [f"line {number}" for number in range(5)][5 - (files - 1) :]
    assert list(lines_since(log, None)) == [*kept, "last"]
    assert len(list(tmp_path.iterdir())) == files


def test_a_log_on_a_full_disk_is_cut_though_it_cannot_be_copied(small_disk):
    folder = small_disk("64k")
    log = folder / "p.log"
    older(log).write_bytes(b"o" * 20_000)
    fill(folder, leave=30_000)
    log.write_bytes(b"a" * 24_000)
    assert rotate(log, LogLimit(5_000, 3))
    assert log.stat().st_size == 0
    assert not older(log).exists()
    assert older(log, 2).read_bytes() == b"o" * 20_000


def test_a_line_without_end_is_cut_instead_of_kept_for_ever(tmp_path):
    log = tmp_path / "p.log"
    log.write_bytes(b"a" * 100_000)
    assert [len(line) for line in LogFollower(log).poll()] == [100_000]


def test_lines_are_written_behind_their_pods_name(tmp_path):
    out = io.StringIO()
    streamer = LogStreamer(PrefixWriter(out, width=4), from_end=True)
    a, b = tmp_path / "a.log", tmp_path / "b.log"
    a.write_text("old\n")
    streamer.poll([("a", a)])
    with a.open("a") as file:
        file.write("new\n")
    b.write_text("first\n")
    streamer.poll([("a", a), ("b", b)])
    assert out.getvalue() == "a    | new\nb    | first\n"
