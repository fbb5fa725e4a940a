"""`xpyd bench`, the pure parts: arrivals, percentiles, goodput, prompts, the HTTP parser."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path
from statistics import fmean, pvariance

import pytest

from xpyd_core.errors import UserError
from xpyd_tools.bench.client import BadAnswer, EventParser
from xpyd_tools.bench.load import arrival_times, random_requests, read_requests
from xpyd_tools.bench.summary import (
    Sample,
    parse_objectives,
    percentile,
    serve_table,
    summarize,
    token_gaps,
)


def gaps(burstiness: float) -> list[float]:
    times = arrival_times(20_000, rate_per_s=4, burstiness=burstiness, seed=1)
    return [after - before for before, after in pairwise(times)]


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_gaps_have_the_mean_of_the_rate_and_the_variance_of_the_shape(burstiness: float) -> None:
    found = gaps(burstiness)
    assert fmean(found) == pytest.approx(0.25, rel=0.06)
    assert pvariance(found) == pytest.approx(0.25**2 / burstiness, rel=0.15)


def test_shape_one_is_a_poisson_process() -> None:
    # Exponential gaps: the share of those above x mean gaps is e^-x (Kolmogorov-Smirnov, 1 %).
    found = sorted(gaps(1.0))
    far = max(
        abs((index + 1) / len(found) - (1 - math.exp(-gap * 4))) for index, gap in enumerate(found)
    )
    assert far < 1.63 / math.sqrt(len(found))


def test_an_infinite_rate_sends_all_at_once_and_the_first_always_comes_at_zero() -> None:
    assert arrival_times(3, rate_per_s=math.inf, burstiness=1, seed=0) == (0, 0, 0)
    times = arrival_times(5, rate_per_s=2, burstiness=1, seed=0)
    assert times[0] == 0
    assert list(times) == sorted(times)
    assert times == arrival_times(5, rate_per_s=2, burstiness=1, seed=0)
    assert times != arrival_times(5, rate_per_s=2, burstiness=1, seed=1)
    with pytest.raises(ValueError, match="above 0"):
        arrival_times(5, rate_per_s=0, burstiness=1, seed=0)


def test_a_percentile_lies_between_ranks_in_proportion() -> None:
    values = [30.0, 10.0, 20.0, 40.0]
    assert percentile(values, 0) == 10
    assert percentile(values, 50) == 25
    assert percentile(values, 99) == pytest.approx(39.7)
    assert percentile([7.0], 99) == 7
    assert percentile([], 50) == 0


SAMPLES = [
    Sample(10.0, ttft_s=0.1, gaps_s=(0.02, 0.04), e2e_s=0.16, input_tokens=5, output_tokens=3),
    Sample(10.5, ttft_s=0.5, gaps_s=(0.1,), e2e_s=0.6, input_tokens=7, output_tokens=2),
    Sample(10.6, ttft_s=0.2, e2e_s=0.2, input_tokens=1, output_tokens=1),
    Sample(9.0, error="gone"),
]


def test_a_run_is_summed_up_without_its_failures() -> None:
    found = summarize(SAMPLES)
    assert (found.requests, found.failed) == (3, 1)
    assert found.seconds == pytest.approx(2.1)
    assert (found.input_tokens, found.output_tokens) == (13, 6)
    assert found.output_tokens_per_s == pytest.approx(6 / 2.1)
    assert found.tokens_per_s == pytest.approx(19 / 2.1)
    assert found.ttft_ms.p50 == pytest.approx(200)
    assert found.itl_ms.mean == pytest.approx(160 / 3)
    assert found.tpot_ms.mean == pytest.approx((30 + 100) / 2)
    assert found.goodput is None
    assert "goodput" not in serve_table(found)


def test_tokens_that_come_together_share_the_time_since_the_last_ones() -> None:
    gaps_s = token_gaps([(1.0, 3), (1.5, 1), (2.1, 3)])
    assert gaps_s == pytest.approx([0.5, 0.2, 0.2, 0.2])
    assert token_gaps([(1.0, 5)]) == ()


def test_goodput_counts_requests_that_meet_every_objective() -> None:
    objectives = parse_objectives(["ttft:300", "tpot:50"])
    found = summarize(SAMPLES, objectives)
    assert found.goodput == pytest.approx(2 / 2.1)
    assert summarize(SAMPLES, {"ttft": 300, "tpot": 29}).goodput == pytest.approx(1 / 2.1)
    assert summarize(SAMPLES, {"e2e": 1}).goodput == 0
    assert "goodput, requests/s" in serve_table(found)
    for word in ("ttft", "itl:5", "ttft:fast", "ttft:-1", "ttft:0"):
        with pytest.raises(UserError, match=f"--goodput {word}: expected NAME:MILLISECONDS"):
            parse_objectives([word])


def test_random_prompts_have_their_length_and_share_no_beginning() -> None:
    def draw(seed: int) -> list[object]:
        requests = random_requests(
            50, input_tokens=32, output_tokens=9, vocabulary=range(300, 1000), seed=seed
        )
        assert all(request.output_tokens == 9 for request in requests)
        return [request.prompt for request in requests]

    found = draw(1)
    assert all(isinstance(ids, tuple) and len(ids) == 32 for ids in found)
    assert all(300 <= token < 1000 for ids in found for token in ids)  # type: ignore[attr-defined]
    assert len({ids[:4] for ids in found}) == 50  # type: ignore[index]
    assert draw(1) == found != draw(2)


def test_a_dataset_is_read_line_by_line_and_begins_again(tmp_path: Path) -> None:
    file = tmp_path / "requests.jsonl"
    file.write_text(
        '{"prompt": "a \u2028text"}\n\n{"prompt": [1, 2], "output_tokens": 4}\n'
        '{"messages": [{"role": "user", "content": "hi"}]}\n',
        encoding="utf-8",
    )
    requests = read_requests(file, 4, output_tokens=7)
    assert [request.prompt for request in requests[:2]] == ["a \u2028text", (1, 2)]
    assert requests[2].prompt == [{"role": "user", "content": "hi"}]
    assert requests[3] == requests[0]
    assert [request.output_tokens for request in requests] == [7, 4, 7, 7]
    for wrong in ("{", "[]", '{"prompt": 5}', '{"prompt": "a", "output_tokens": 0}'):
        file.write_text('{"prompt": "a"}\n' + wrong)
        with pytest.raises(UserError, match="line 2: "):
            read_requests(file, 1, output_tokens=7)
    file.write_text("\n")
    with pytest.raises(UserError, match="it has no prompts"):
        read_requests(file, 1, output_tokens=7)


CHUNKED = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
    b'd\r\ndata: {"a":1}\r\n7;x=y\r\n\n\ndata:\r\n10\r\n {"b":2}\r\n\r\n: no\r\n'
    b"10\r\n\ndata: [DONE]\n\n\n\r\n0\r\n\r\n"
)
PLAIN = b'HTTP/1.1 200 OK\r\n\r\ndata: {"a":1}\n\ndata: {"b":2}\r\n\r\ndata: [DONE]\n\n'


@pytest.mark.parametrize("answer", [CHUNKED, PLAIN], ids=["chunked", "until-the-end"])
@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_events_are_found_wherever_the_bytes_are_cut(answer: bytes, size: int) -> None:
    parser = EventParser()
    found = [
        event for at in range(0, len(answer), size) for event in parser.feed(answer[at : at + size])
    ]
    assert found == [b'{"a":1}', b'{"b":2}', b"[DONE]"]
    assert parser.ended == (answer is CHUNKED)


def test_an_answer_that_is_no_stream_is_kept_as_text() -> None:
    parser = EventParser()
    head = b"HTTP/1.1 404 Not Found\r\nContent-Length: 14\r\n\r\n"
    assert parser.feed(head + b"data: nothing\nrest") == []
    assert (parser.status, parser.text, parser.ended) == (404, "data: nothing\n", True)
    with pytest.raises(BadAnswer, match="no HTTP answer"):
        EventParser().feed(b"SSH-2.0\r\n\r\n")
    with pytest.raises(BadAnswer, match="no chunk size"):
        EventParser().feed(CHUNKED.replace(b"\r\nd\r\n", b"\r\nzz\r\n"))
    with pytest.raises(BadAnswer, match="does not end"):
        EventParser().feed(b"HTTP/1.1 200 OK\r\n" + b"a" * 70_000)
