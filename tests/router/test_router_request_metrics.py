"""Figures per instance: what is counted, under which name, and how many series there may be."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from xpyd_core.messages import Heartbeat
from xpyd_router import request_metrics
from xpyd_router.access_log import Trace
from xpyd_router.fleet.instances import Instance, InstanceKey
from xpyd_router.metrics import RouterMetrics
from xpyd_router.request_metrics import Exposition, InstanceTable, RequestTable


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def instance(kind: str, name: str, incarnation: str = "1") -> Instance:
    beat = Heartbeat(
        type=kind,
        http_address="10.0.0.1:20001",
        zmq_address="10.0.0.1:21001",
        instance=name,
        incarnation=incarnation,
    )
    key = InstanceKey(f"{name}:20001", incarnation)
    return Instance(key, beat, beat.http, beat.kv, last_beat_s=0.0, expires_at_s=9.0, period_s=3.0)


P = instance("P", "p-0")
D = instance("D", "d-0")


def samples(table: InstanceTable | RequestTable) -> dict[str, float]:
    """Series -> value, as Prometheus reads them."""
    out = Exposition()
    table.write(out)
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(out.text().decode()):
        for sample in family.samples:
            labels = ",".join(f"{key}={sample.labels[key]}" for key in sorted(sample.labels))
            series = f"{sample.name}{{{labels}}}"
            assert series not in found
            found[series] = sample.value
    return found


def test_a_streams_times_are_the_first_token_and_the_gaps() -> None:
    clock = Clock()
    table = InstanceTable(clock)
    call = table.call(D, sent_bytes=100)
    for seconds, chunks in ((0.2, 1), (0.03, 1), (0.0, 0), (0.06, 3)):
        clock.now_s += seconds
        call.streamed(chunks, 10)
    assert table.of(D).in_flight == 1
    clock.now_s += 1.0
    assert round(call.end(), 6) == 1.29
    figures = table.of(D)
    assert (figures.in_flight, figures.sent_bytes, figures.received_bytes) == (0, 100, 40)
    assert (figures.ttft_s.count, round(figures.ttft_s.sum, 6)) == (1, 0.2)
    assert (figures.itl_s.count, round(figures.itl_s.sum, 6)) == (4, 0.09)
    found = samples(table)
    bucket = "xpyd_router_engine_itl_seconds_bucket{engine=d-0,le=%s,phase=decode}"
    # Three tokens at once after 60 ms are three of 20 ms.
    assert [found[bucket % bound] for bound in ("0.015", "0.025", "0.05")] == [0, 3, 4]
    assert found["xpyd_router_engine_call_seconds_sum{engine=d-0,phase=decode}"] > 1.28


def test_a_gap_that_the_client_made_is_not_the_engines() -> None:
    clock = Clock()
    call = (table := InstanceTable(clock)).call(D, 1)
    call.streamed(1, 1)
    clock.now_s += 500.0
    call.interrupted()
    call.streamed(1, 1)
    clock.now_s += 0.01
    call.streamed(1, 1)
    assert round(table.of(D).itl_s.sum, 6) == 0.01
    assert table.of(D).ttft_s.count == 1


def test_a_client_that_stalls_before_the_first_token_leaves_its_time_whole() -> None:
    clock = Clock()
    call = (table := InstanceTable(clock)).call(D, 1)
    call.interrupted()
    clock.now_s += 0.5
    call.streamed(1, 1)
    assert table.of(D).ttft_s.sum == 0.5


def test_a_restart_goes_on_with_its_series() -> None:
    table = InstanceTable(Clock())
    for incarnation in ("1", "2"):
        table.call(instance("P", "p-0", incarnation), 1).end()
    assert samples(table)["xpyd_router_engine_requests_total{engine=p-0,phase=prefill}"] == 2


def test_series_go_when_their_instance_has_been_gone_for_a_while() -> None:
    clock = Clock()
    table = InstanceTable(clock)
    table.paired(P, D)
    table.call(P, 1).end()
    running = table.call(D, 1)
    table.keep([P, D])
    clock.now_s += request_metrics.KEEP_S
    table.keep([P])
    assert len(table) == 2
    clock.now_s += 1.0
    table.keep([P])
    assert len(table) == 2  # its call runs
    running.end()
    table.keep([P])
    assert len(table) == 1
    assert not any("d-0" in series for series in samples(table))


def test_an_instance_that_was_never_called_has_its_numbers_and_no_buckets() -> None:
    table = InstanceTable(Clock())
    table.keep([P])
    found = samples(table)
    assert found["xpyd_router_engine_in_flight{engine=p-0,phase=prefill}"] == 0
    assert not any("bucket" in series for series in found)


def test_strangers_cannot_make_series_without_end() -> None:
    clock = Clock()
    table = InstanceTable(clock)
    for number in range(request_metrics.MAX_NAMES + 10):
        table.call(instance("P", f"p-{number}"), 1).end()
    assert len(table) <= request_metrics.MAX_NAMES


def test_pairs_beyond_the_bound_are_counted_together() -> None:
    table = InstanceTable(Clock())
    ps = [instance("P", f"p-{number}") for number in range(65)]
    ds = [instance("D", f"d-{number}") for number in range(64)]
    for p in ps:
        for d in ds:
            table.paired(p, d)
    table.paired(ps[0], ds[0])
    found = {k: v for k, v in samples(table).items() if "pairs" in k}
    assert len(found) == request_metrics.MAX_PAIRS + 1
    assert found["xpyd_router_pairs_total{decode=d-0,prefill=p-0}"] == 2
    assert found["xpyd_router_pairs_total{decode=other,prefill=other}"] == 64


def test_names_with_quotes_and_of_any_length_stay_readable() -> None:
    table = InstanceTable(Clock())
    table.call(instance("P", 'a"b\\c'), 1).end()
    table.call(instance("P", "x" * 512), 1).end()
    found = samples(table)
    assert found['xpyd_router_engine_requests_total{engine=a"b\\c,phase=prefill}'] == 1
    assert max(map(len, found)) < 300


def test_failures_are_counted_by_phase_and_by_engine() -> None:
    metrics = RouterMetrics(Clock())
    metrics.failed(P, "reset")
    metrics.failed(P, "connect")
    metrics.retried(P)
    text = metrics.render([P]).decode()
    for line in (
        'xpyd_router_errors_total{cause="reset",phase="prefill"} 1.0',
        'xpyd_router_engine_errors_total{cause="connect",engine="p-0",phase="prefill"} 1',
        'xpyd_router_engine_retries_total{engine="p-0",phase="prefill"} 1',
        "xpyd_router_retries_total 1.0",
        'xpyd_router_instances{state="Ready",type="P"} 1.0',
    ):
        assert f"\n{line}\n" in text


def test_an_endpoints_requests_are_counted_with_their_times_bytes_and_tokens() -> None:
    table = RequestTable()
    stream, refused = Trace("chat", 10.0), Trace("chat", 11.0)
    stream.first_s, stream.body_bytes, stream.sent_bytes = 0.25, 100, 300
    stream.prompt_tokens, stream.output_tokens = 7, 5
    for trace, status, now_s in ((stream, 200, 12.0), (refused, 429, 11.5)):
        table.began()
        table.ended(trace, status, now_s)
    table.began()
    found = samples(table)
    wanted = {
        "in_flight{}": 1,
        "requests_total{endpoint=chat,status=200}": 1,
        "requests_total{endpoint=chat,status=429}": 1,
        "request_seconds_count{endpoint=chat}": 2,
        "request_seconds_sum{endpoint=chat}": 2.5,
        # Only a stream has a first token.
        "ttft_seconds_count{endpoint=chat}": 1,
        "ttft_seconds_sum{endpoint=chat}": 0.25,
        "request_bytes_total{endpoint=chat}": 100,
        "response_bytes_total{endpoint=chat}": 300,
        "prompt_tokens_total{endpoint=chat}": 7,
        "output_tokens_total{endpoint=chat}": 5,
    }
    assert {name: found[f"xpyd_router_{name}"] for name in wanted} == wanted
