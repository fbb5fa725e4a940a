"""The pure parts of a router of several processes: events, rows, loads, merged metrics, lines."""

from __future__ import annotations

import random
from dataclasses import fields
from pathlib import Path

import pytest
from msgspec.structs import replace
from prometheus_client.parser import text_string_to_metric_families

from xpyd_core.errors import ProtocolError
from xpyd_core.messages import Heartbeat
from xpyd_router.config import RouterConfig
from xpyd_router.fleet.health import HealthRules
from xpyd_router.fleet.instances import InstanceKey
from xpyd_router.fleet.loads import Work
from xpyd_router.fleet.registry import Registry
from xpyd_router.processes import events
from xpyd_router.processes.events import (
    Beat,
    Failed,
    HealthChanged,
    Splitter,
    frame,
    to_parent,
    to_worker,
)
from xpyd_router.processes.gathered_metrics import merge, parse, retire
from xpyd_router.processes.shared_loads import (
    SLOTS,
    Rows,
    SharedLoadTable,
    Slots,
    cell_of,
    size_bytes,
    total,
)
from xpyd_router.processes.worker import MOST_BYTES, pieces
from xpyd_router.processes.worker_view import WorkerView

KEY = InstanceKey("127.0.0.1:1", "a")
OTHER = InstanceKey("127.0.0.1:9", "b")
BEAT = Heartbeat(type="D", http_address="127.0.0.1:1", zmq_address="127.0.0.1:2", incarnation="a")


# --- events


def test_events_come_out_as_they_went_in_however_the_stream_is_cut() -> None:
    sent = [
        Beat(BEAT, 12.5, True, (7, 8)),
        HealthChanged(KEY, "Ejected", "connect", 3.25, "Open", 9.5, True),
        events.Weights(((KEY, 0.25),)),
        events.Present(),
        events.Metrics(3, b"x" * 100_000),
    ]
    stream = b"".join(map(frame, sent))
    draw = random.Random(1)
    splitter, found, at = Splitter(), list[object](), 0
    while at < len(stream):
        end = at + draw.choice((1, 3, 10, 1000))
        found += [to_worker.decode(body) for body in splitter.feed(stream[at:end])]
        at = end
    assert found == sent


def test_an_event_of_a_worker_comes_out_as_it_went_in() -> None:
    sent = Failed(KEY, "reset", b"\x00" * 16)
    assert [to_parent.decode(body) for body in Splitter().feed(frame(sent))] == [sent]


def test_a_frame_above_the_bound_is_refused_before_it_is_held() -> None:
    splitter = Splitter()
    assert list(splitter.feed((events.MAX_FRAME_BYTES).to_bytes(4, "little"))) == []
    with pytest.raises(ProtocolError, match="bytes"):
        list(Splitter().feed((events.MAX_FRAME_BYTES + 1).to_bytes(4, "little")))


def test_a_worker_gets_every_flag_as_it_was_given() -> None:
    config = RouterConfig(
        processes=3,
        kv_key_file=Path("/some/key"),
        forward_headers=("x-one",),
        health=HealthRules(slow_start_s=0.5),
        on_no_prefill="Reject",
    )
    found = events.decode_config(events.encode_config(config))
    assert found == config
    assert isinstance(found.kv_key_file, Path)
    assert len(fields(found)) == len(fields(RouterConfig))


# --- rows and slots


def rows(processes: int) -> Rows:
    return Rows(memoryview(bytearray(size_bytes(processes))), processes)


def test_a_row_is_its_own_and_a_dead_ones_is_zeroed() -> None:
    made = rows(3)
    for number in range(3):
        row, cell = made.row(number), cell_of(SLOTS - 1)
        row[cell], row[cell + 1], row[cell + 2] = 1, 10 * number, 100
        made.admission(number)[0] = number + 1
    assert total(made.others(1), cell_of(SLOTS - 1)) == Work(2, 20, 200)
    assert [row[0] for row in made.other_admissions(0)] == [2, 3]
    made.zero(2)
    assert total(made.others(1), cell_of(SLOTS - 1)) == Work(1, 0, 100)
    assert [row[0] for row in made.other_admissions(0)] == [2, 0]


@pytest.mark.parametrize("slot", [-1, SLOTS])
def test_a_slot_outside_the_row_is_refused(slot: int) -> None:
    with pytest.raises(ValueError, match="no slot"):
        cell_of(slot)


def test_a_slot_that_was_given_back_rests_until_all_others_had_their_turn() -> None:
    slots = Slots()
    first = slots.of(KEY)
    assert slots.of(KEY) == first
    slots.free(KEY)
    later = [slots.of(InstanceKey(f"127.0.0.1:{n}", "b")) for n in range(1, SLOTS)]
    assert first not in later
    assert len(set(later)) == SLOTS - 1
    assert slots.of(InstanceKey("127.0.0.1:65000", "b")) == first


# --- loads


def two_tables() -> tuple[SharedLoadTable, SharedLoadTable]:
    made = rows(2)
    tables = SharedLoadTable(made, 0), SharedLoadTable(made, 1)
    for table in tables:
        table.bind(KEY, 5)
        table.take(KEY, BEAT)
    return tables


def test_a_worker_sees_its_own_calls_at_once_and_anothers_when_it_looks() -> None:
    mine, theirs = two_tables()
    mine.of(KEY).begin(100, 20)
    theirs.of(KEY).begin(7)
    assert mine.of(KEY).ours == 1
    mine.refresh()
    assert (mine.of(KEY).ours, mine.of(KEY).active) == (2, 2)
    idle = mine.of(KEY).queued_tokens
    theirs.of(KEY).end(7)
    mine.refresh()
    assert (mine.of(KEY).ours, idle - mine.of(KEY).queued_tokens) == (1, 7)
    mine.of(KEY).end(100, 20)
    theirs.refresh()
    assert theirs.of(KEY).ours == 0


def test_requests_that_met_a_death_keep_apart_over_all_workers() -> None:
    mine, theirs = two_tables()
    mine.suspect([KEY, OTHER])  # the other one has left meanwhile
    mine.suspect([KEY])
    theirs.suspect([KEY])
    assert (mine.suspected(), theirs.suspected()) == ({KEY, OTHER}, {KEY})
    mine.clear([KEY, OTHER])
    theirs.clear([KEY])
    assert (mine.suspected(), theirs.suspected()) == ({KEY}, {KEY})
    mine.clear([KEY])
    assert not mine.suspected() | theirs.suspected()


def test_the_next_instance_in_a_slot_has_no_suspects_of_the_one_before() -> None:
    mine, theirs = two_tables()
    mine.suspect([KEY])
    for table in (mine, theirs):
        table.keep([])
        table.bind(OTHER, 5)
        table.take(OTHER, BEAT)
    assert not theirs.suspected()
    mine.clear([KEY])
    assert not mine.suspected() | theirs.suspected()


def test_a_beat_counts_as_foreign_only_what_no_worker_sent() -> None:
    mine, theirs = two_tables()
    theirs.of(KEY).begin(1)
    theirs.of(KEY).begin(1)
    mine.take(KEY, replace(BEAT, running=3))
    assert mine.of(KEY).foreign_requests == 1


def test_who_left_gives_its_slot_back_and_calls_that_still_run_write_nowhere() -> None:
    made = rows(2)
    table = SharedLoadTable(made, 0)
    table.bind(KEY, 5)
    table.take(KEY, BEAT)
    load = table.of(KEY)
    load.begin(100)
    assert table.keep(()) == [KEY]
    assert total([made.row(0)], cell_of(5)) == Work()
    load.begin(3)
    load.end(3)
    load.end(100)
    assert total([made.row(0)], cell_of(5)) == Work()
    assert load.own == Work()


def test_a_pick_sees_loads_no_older_than_a_millisecond() -> None:
    mine, theirs = two_tables()
    now = 5.0
    fleet = WorkerView(
        *(Registry(period_s=3.0, missed_beats=3), lambda: now, mine, HealthRules()),
        secret=b"",
        send=lambda _: None,
    )
    seen: list[int] = []
    for at_s in (5.0, 5.0005, 5.0011):
        now = at_s
        theirs.of(KEY).begin(1)
        _ = fleet.snapshot  # what a pick is made of
        seen.append(mine.of(KEY).ours)
    assert seen == [1, 1, 3]


# --- metrics


def text(requests: int, seconds: int, waiting: int, created: float = 5.5) -> bytes:
    return f"""# HELP x_requests_total Requests
# TYPE x_requests_total counter
x_requests_total{{endpoint="a b",status="200"}} {requests}
# HELP x_seconds Time
# TYPE x_seconds histogram
x_seconds_bucket{{le="+Inf"}} {seconds}
x_seconds_count {seconds}
x_seconds_sum {seconds * 0.25}
# HELP x_waiting Who waits
# TYPE x_waiting gauge
x_waiting {waiting}.0
# HELP x_created When
# TYPE x_created gauge
x_created {created}
# HELP xpyd_router_instances Known
# TYPE xpyd_router_instances gauge
xpyd_router_instances{{type="P"}} 4.0
""".encode()


def samples(data: bytes) -> dict[str, float]:
    families = text_string_to_metric_families(data.decode())
    return {s.name: s.value for family in families for s in family.samples}


def test_shares_are_summed_and_what_all_know_is_taken_once() -> None:
    found = merge(parse(text(0, 0, 0, 9.0)), [parse(text(3, 2, 1, 7.0)), parse(text(4, 5, 2))])
    assert samples(found) == {
        "x_requests_total": 7,
        "x_seconds_bucket": 7,
        "x_seconds_count": 7,
        "x_seconds_sum": 1.75,
        "x_waiting": 3,
        "x_created": 5.5,
        "xpyd_router_instances": 4,
    }
    assert found.count(b"# TYPE x_requests_total counter") == 1


def test_counters_do_not_fall_when_a_process_ends_but_gauges_do() -> None:
    past = retire(retire({}, parse(text(3, 2, 1))), parse(text(10, 0, 9)))
    found = samples(merge(parse(text(0, 0, 0)), [parse(text(4, 5, 2))], past))
    assert (found["x_requests_total"], found["x_seconds_count"], found["x_waiting"]) == (17, 7, 2)
    again = samples(merge(parse(text(0, 0, 0)), [parse(text(4, 5, 2))], past))
    assert again == found, "a scrape adds nothing to the past"


def test_a_process_that_ends_changes_nothing_under_a_merge_in_another_thread() -> None:
    past = retire({}, parse(text(3, 2, 1)))
    before = merge({}, [], past)
    ended = text(10, 0, 9).replace(b'"200"', b'"500"')
    both = retire(past, parse(ended))
    assert merge({}, [], past) == before
    found = parse(merge({}, [], both))["x_requests_total"].samples
    assert sorted(found.values()) == [3, 10]


# --- lines


def test_lines_are_written_whole_and_at_most_a_pipes_worth_at_once() -> None:
    draw = random.Random(2)
    lines = [b"%d" % n * draw.randint(1, 400) + b"\n" for n in range(500)]
    lines.insert(100, b"long" * 2000 + b"\n")
    data = b"".join(lines)
    found = list(pieces(data))
    assert b"".join(found) == data
    assert all(piece.endswith(b"\n") for piece in found)
    assert [piece for piece in found if len(piece) > MOST_BYTES] == [lines[100]]
    assert len(found) < len(data) / (MOST_BYTES / 2) + 2
