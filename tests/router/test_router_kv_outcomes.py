"""What became of a request's KV: in the access log, in the metrics, at /instances."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from tests.router.fakes import Fleet, HttpEngine, answer, fleet, pair, until
from xpyd_core.kv_outcome import KvPeer
from xpyd_router.access_log import AccessLog

pytestmark = pytest.mark.usefixtures("both_ways")
METRIC = "xpyd_router_kv_outcomes_total"


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[dict[str, str]]]:
    """The fields of the access log's lines so far."""
    written: list[Any] = []

    def add(_self: AccessLog, trace: Any, _status: int, now_s: float) -> None:
        written.append(trace.extra(now_s))

    monkeypatch.setattr(AccessLog, "add", add)
    return lambda: written


def counted(made: Fleet) -> dict[tuple[str, str, str, str], float]:
    """The metric's values by P, D, outcome and cause."""
    text = made.router.state.metrics.render([]).decode()
    found: dict[tuple[str, str, str, str], float] = {}
    for line in text.splitlines():
        if line.startswith(METRIC + "{"):
            labels = dict(re.findall(r'(\w+)="([^"]*)"', line))
            key = (labels["prefill"], labels["decode"], labels["outcome"], labels["cause"])
            found[key] = float(line.rpartition(" ")[2])
    return found


async def ask(made: Fleet, *, stream: bool, **body: Any) -> None:
    await (made.events(**body) if stream else made.json(**body))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("said", "not_sent", "outcome", "cause"),
    [
        ("moved", "", "moved", ""),
        ("recomputed; reason=timeout", "", "recomputed", "timeout"),
        # D only knows that nothing was sent; P knows why.
        ("recomputed; reason=not_sent", "unreachable", "recomputed", "unreachable"),
        ("recomputed; reason=not_sent", "auth", "recomputed", "key"),
        ("recomputed; reason=not_sent", "", "recomputed", "not_sent"),
        ("recomputed; reason=unsigned", "", "recomputed", "key"),
        ("recomputed; reason=of-a-newer-version", "", "recomputed", "other"),
        # A D of an older version says nothing.
        ("", "unreachable", "recomputed", "unreachable"),
        ("", "", "unreported", ""),
    ],
)
async def test_a_pairs_request_shows_what_became_of_its_kv(
    said: str, not_sent: str, outcome: str, cause: str, stream: bool, lines: Any
) -> None:
    async with pair() as (made, p, d):
        d.said_of_kv, p.not_sent = said, not_sent
        await ask(made, stream=stream)
        await until(lambda: bool(lines()))  # it follows the last byte
        [line] = lines()
        assert (line.get("kv"), line.get("kv_cause", "")) == (outcome, cause)
        names = (p.beat.instance, d.beat.instance)
        assert counted(made) == {(*names, outcome, cause): 1}


async def test_the_client_does_not_get_the_engines_word() -> None:
    async with pair() as (made, p, d):
        d.said_of_kv, p.not_sent = "recomputed; reason=not_sent", "unreachable"
        async with await made.post() as response:
            text = await response.text()
        assert "X-Xpyd-Kv" not in response.headers
        assert "unreachable" not in text
        [call] = d.calls
        assert "reason" not in call.body["kv_transfer_params"]


async def test_kv_without_an_offer_has_the_cause_that_p_beats() -> None:
    async with pair() as (made, p, d):
        d.said_of_kv = "recomputed; reason=no_offer"
        await made.json()
        peer = KvPeer(peer=d.beat.zmq_address, last="unreachable", failed={"unreachable": 1})
        await made.beat(p, kv_peers=(peer,))
        await made.json()
        names = (p.beat.instance, d.beat.instance)
        assert counted(made) == {
            (*names, "recomputed", "no_offer"): 1,
            (*names, "recomputed", "unreachable"): 1,
        }
        async with made.http.get(made.admin + "/instances") as response:
            [row] = [r for r in (await response.json())["instances"] if r["type"] == "P"]
        assert row["kv"] == [{"peer": d.beat.zmq_address, "moved": 0, "failed": {"unreachable": 1}}]


async def alone(
    made: Fleet, engines: dict[str, HttpEngine], **body: Any
) -> tuple[str, str, str, str]:
    """The one new count of a request, by roles instead of names."""
    before = counted(made)
    await made.json(**body)
    new = {key: n for key, n in counted(made).items() if n != before.get(key, 0)}
    [(prefill, decode, outcome, cause)] = new
    roles = {"": "", **{e.beat.instance: kind for kind, e in engines.items()}}
    return roles[prefill], roles[decode], outcome, cause


async def test_a_request_of_one_instance_shows_why_it_was_alone(lines: Any) -> None:
    async with fleet(local_prefill_tokens=60) as made:
        engines = {kind: await made.engine(kind) for kind in "PD"}
        long = "a prompt that is long enough" * 20
        found = await alone(made, engines, prompt=long, max_tokens=1)
        assert found == ("P", "", "alone", "one_token")
        found = await alone(made, engines, prompt=long, echo=True)
        assert found == ("", "D", "alone", "echo")
        assert await alone(made, engines, prompt="a") == ("", "D", "alone", "short_prompt")
        engines["P"].stop_at = {0: 1}
        found = await alone(made, engines, prompt=long)
        assert found == ("P", "", "alone", "first_token")
        await until(lambda: len(lines()) == 4)
        assert [line["kv_cause"] for line in lines()] == [
            *("one_token", "echo", "short_prompt", "first_token"),
        ]


async def test_a_request_without_a_p_or_for_an_aggregated_instance_shows_it() -> None:
    async with fleet(on_no_prefill="PrefillOnDecode") as made:
        engines = {"D": await made.engine("D")}
        assert await alone(made, engines) == ("", "D", "alone", "no_prefill")
        engines["A"] = await made.engine("A")
        assert await alone(made, engines) == ("", "A", "alone", "aggregated")
    async with fleet(on_no_decode="DecodeOnPrefill") as made:
        engines = {"P": await made.engine("P")}
        assert await alone(made, engines) == ("P", "", "alone", "no_decode")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("said", "not_sent", "cause"),
    [
        ("failed; reason=timeout", "", "timeout"),
        ("failed; reason=prefix_evicted", "", "no_room"),
        ("failed; reason=not_sent", "unreachable", "unreachable"),
        ("failed; reason=no_offer", "", "key"),  # P beats why
        ("failed; reason=of-a-newer-version", "", "other"),
        # A D of an older version says nothing.
        ("", "auth", "key"),
        ("", "", "other"),
    ],
)
async def test_a_d_that_fails_because_the_kv_did_not_come_is_counted_with_the_cause(
    said: str, not_sent: str, cause: str, stream: bool, lines: Any
) -> None:
    async with pair() as (made, p, d):
        p.not_sent = not_sent
        peer = KvPeer(peer=d.beat.zmq_address, last="key", failed={"key": 1})
        await made.beat(p, kv_peers=(peer,))
        error = {"error": {"message": "no", "type": "x", "code": "kv_transfer_failed"}}
        d.script = answer(503, error, **({"X-Xpyd-Kv": said} if said else {}))
        async with await made.post(stream=stream) as response:
            await response.read()
            assert "X-Xpyd-Kv" not in response.headers
        names = (p.beat.instance, d.beat.instance)
        assert set(counted(made)) == {(*names, "failed", cause)}
        await until(lambda: bool(lines()))
        assert [(line["kv"], line["kv_cause"]) for line in lines()] == [("failed", cause)]


async def test_metrics_are_filtered_by_name() -> None:
    async with pair() as (made, _, d):
        d.said_of_kv = "moved"
        await made.json()
        names = [("name[]", METRIC), ("name[]", "xpyd_router_retries_total")]
        async with made.http.get(made.admin + "/metrics", params=names) as response:
            lines = (await response.text()).splitlines()
        assert {line.split("{")[0].split(" ")[0] for line in lines if line[0] != "#"} == {
            *(METRIC, "xpyd_router_retries_total"),
        }
        async with made.http.get(made.admin + "/metrics?name[]=unknown") as response:
            assert (response.status, await response.text()) == (200, "")


async def test_counts_of_instances_that_left_go_with_their_other_series() -> None:
    async with pair() as (made, p, _):
        await made.json()
        metrics = made.router.state.metrics
        assert len(counted(made)) == 1
        metrics.kv.keep({p.beat.instance})
        assert counted(made) == {}
