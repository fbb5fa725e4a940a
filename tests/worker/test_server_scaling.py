"""POST /scale_elastic_ep: who may ask, what is refused, and what requests may name meanwhile."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, cast

import pytest
from msgspec.structs import replace

from tests.router.fakes import until
from tests.worker.server_fakes import KEY, nobody_parts, serving
from xpyd_core.errors import UserError
from xpyd_core.heartbeat import Parting
from xpyd_core.keys import call_mac
from xpyd_core.messages import ReplicaBeat
from xpyd_core.request_id import Address
from xpyd_worker.server.http.admission import Lifecycle
from xpyd_worker.server.http.inference import Api
from xpyd_worker.server.http.scaling import Scaling
from xpyd_worker.server.service import KvPlace

WAIT_S = 20.0
MINE = "my-inc"


class Replicas:
    """What scales: when it is let, or not at all."""

    lets_go = False
    size = 1

    def __init__(self, *, error: Exception | None = None, cut: int = 0) -> None:
        self.asked: list[tuple[int, float]] = []
        self.begun, self.go_on = threading.Event(), threading.Event()
        self.error, self._cut = error, cut

    def scale(self, size: int, *, drain_s: float, let_go: Callable[[float], Future[None]]) -> int:
        self.asked.append((size, drain_s))
        if self.lets_go:
            let_go(drain_s).result(WAIT_S)
        self.begun.set()
        assert self.go_on.wait(WAIT_S)
        if self.error is not None:
            raise self.error
        self.size = size
        return self._cut


async def named(server: Any, replica: int) -> int:
    headers = {"X-data-parallel-rank": str(replica)}
    body = {"prompt": "hi", "max_tokens": 1}
    return (await server.post("/v1/completions", body, **headers)).status_code


@pytest.mark.parametrize(("size", "known"), [(4, 4), (1, 2)])
async def test_requests_name_replicas_that_are_there_or_were(size: int, known: int) -> None:
    replicas = Replicas(cut=3)
    async with serving(keys=(), replicas=2, scalable=replicas) as server:
        body = {"new_data_parallel_size": size, "drain_timeout": 7}
        asked = asyncio.create_task(server.post("/scale_elastic_ep", body))
        await asyncio.to_thread(replicas.begun.wait, WAIT_S)
        assert (await server.post("/is_scaling_elastic_ep", {})).json() == {
            "is_scaling_elastic_ep": True
        }
        assert [await named(server, n) == 200 for n in range(4)] == [n < 2 for n in range(4)]
        second = await server.post("/scale_elastic_ep", body)
        assert (second.status_code, second.json()["error"]["code"]) == (409, "is_scaling")
        replicas.go_on.set()
        answer = await asked
        assert answer.status_code == 200
        assert answer.json() == {"message": f"Scaled to {size} data parallel engines", "cut": 3}
        assert replicas.asked == [(size, 7)]
        # The engine answers 503 for one that has left.
        assert [await named(server, n) == 200 for n in range(4)] == [n < known for n in range(4)]
        assert server.api.service is not None
        assert server.api.service.max_requests == 4 * size + 1024
        assert (await server.post("/is_scaling_elastic_ep", {})).json() == {
            "is_scaling_elastic_ep": False
        }


async def test_the_engine_is_told_when_routers_have_let_go_and_which_said_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    replicas, given = Replicas(), list[float]()
    replicas.lets_go = True
    replicas.go_on.set()

    async def part(timeout_s: float) -> Parting:
        given.append(timeout_s)
        return Parting((Address("10.0.0.9", 30001),), in_flight=2)

    async with serving(keys=(), replicas=2, scalable=replicas, part=part) as server:
        body = {"new_data_parallel_size": 1, "drain_timeout": 7}
        assert (await server.post("/scale_elastic_ep", body)).status_code == 200
    assert given == [7]
    said = "\n".join(caplog.messages)
    assert "no word of 10.0.0.9:30001: these routers may still name replicas that leave" in said
    assert "routers have 2 requests for replicas that leave" in said


async def test_replicas_follow_a_file_and_heartbeats_say_what_cannot_be(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    replicas = Replicas()
    replicas.go_on.set()
    scaling, size_file = Scaling(Api(Lifecycle()), 4), tmp_path / "data"
    scaling.bind(replicas, nobody_parts)
    scaling.follow(size_file, 7.0)

    async def asked(*sizes: int) -> None:
        await until(lambda: [size for size, _ in replicas.asked] == [*sizes])
        await until(lambda: not scaling.problem)

    try:
        size_file.write_text("2\n")
        await asked(2)
        assert replicas.asked == [(2, 7.0)]
        size_file.write_text("65")
        await until(lambda: "expected 1 to 64, got '65'" in scaling.problem)
        size_file.write_text("2")
        await asked(2)
        replicas.error = RuntimeError("a defect")
        size_file.write_text("4")
        await until(lambda: "was not followed" in caplog.text)
        replicas.error = None
        size_file.write_text("2")
        await asked(2, 4)
        replicas.error = UserError("--kv-cache-memory:\nno room")
        size_file.write_text("3")
        await until(lambda: scaling.problem == "--kv-cache-memory: no room")
        replicas.error = None
        size_file.write_text("2")
        await asked(2, 4, 3)
    finally:
        scaling.close()


async def test_heartbeats_say_which_replica_was_lost(
    tmp_path: Path,
) -> None:
    """Else the operator would wait for it, and nobody know why."""
    serving = ReplicaBeat(zmq_address="tcp://10.0.0.1:21001")
    lost, leaving = replace(serving, serving=0), replace(serving, serving=0, draining=1)
    scaling = Scaling(Api(Lifecycle()), 4)
    assert scaling.why_fewer((serving, lost)) == "of 2 replicas these were lost: 1"
    scaling.bind(Replicas(), nobody_parts)
    scaling.follow(tmp_path / "data", 7.0)
    try:
        assert scaling.why_fewer((serving, leaving)) == ""
        found = scaling.why_fewer((serving, lost, lost))
        assert found == "of 3 replicas these were lost: 1, 2"
        scaling.problem = "no room"
        assert scaling.why_fewer((serving, lost)) == "no room"
    finally:
        scaling.close()


async def test_the_file_stands_where_somebody_asks_for_another_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("xpyd_worker.server.http.scaling._LOOK_S", 0.01)
    replicas = Replicas()
    replicas.go_on.set()
    scaling, size_file = Scaling(Api(Lifecycle()), 4), tmp_path / "data"
    size_file.write_text("2")
    scaling.bind(replicas, nobody_parts)
    scaling.follow(size_file, 7.0)
    try:
        await until(lambda: replicas.size == 2 and not scaling.is_scaling)
        replicas.go_on.clear()
        called = asyncio.create_task(scaling.scale(4, 1.0))
        await until(lambda: (4, 1.0) in replicas.asked)
        await asyncio.sleep(0.1)  # several looks
        assert not scaling.problem
        replicas.go_on.set()
        await called
        await until(lambda: replicas.size == 2)
        await asyncio.sleep(0.1)
        assert replicas.asked == [(2, 7.0), (4, 1.0), (2, 7.0)]
    finally:
        scaling.close()


@pytest.mark.parametrize("error", [UserError("no room"), RuntimeError("no room")])
async def test_a_number_that_fails_slowly_is_not_tried_again_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    monkeypatch.setattr("xpyd_worker.server.http.scaling._LOOK_S", 0.01)
    monkeypatch.setattr("xpyd_worker.server.http.scaling._REST_S", 0.5)
    replicas = Replicas(error=error)
    scaling, size_file = Scaling(Api(Lifecycle()), 4), tmp_path / "data"
    size_file.write_text("2")
    scaling.bind(replicas, nobody_parts)
    scaling.follow(size_file, 7.0)
    try:
        await until(replicas.begun.is_set)
        await asyncio.sleep(0.6)
        replicas.go_on.set()
        await until(lambda: "no room" in scaling.problem)
        await asyncio.sleep(0.2)
        assert len(replicas.asked) == 1
        await until(lambda: len(replicas.asked) > 1)
    finally:
        scaling.close()


async def test_a_probe_for_a_replica_that_has_left_is_for_another_try() -> None:
    async def probe(_address: Address) -> Any:
        raise AssertionError("the replica is gone")

    place = KvPlace(Address("127.0.0.1", 21001), "i", cast("Any", probe))
    async with serving(role="Prefill", replicas=2, kv_places=[place]) as server:
        body = {"address": "127.0.0.1:21009"}
        mac = {"X-Xpyd-Mac": call_mac(KEY, "kv-probe", body["address"])}
        answer = await server.post("/kv/probe", body, **mac, **{"X-data-parallel-rank": "1"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "replica_lost")


async def test_what_cannot_be_changes_nothing() -> None:
    replicas = Replicas(error=UserError("--kv-cache-memory: no room"))
    replicas.go_on.set()
    async with serving(keys=(), replicas=2, scalable=replicas) as server:
        for size in (1, 3):
            answer = await server.post("/scale_elastic_ep", {"new_data_parallel_size": size})
            assert answer.status_code == 409
            error = answer.json()["error"]
            assert (error["code"], error["message"]) == (
                "cannot_scale",
                "--kv-cache-memory: no room",
            )
        assert [await named(server, n) for n in range(3)] == [200, 200, 400]
        assert replicas.asked == [(1, 120), (3, 120)]


async def test_an_instance_that_was_not_started_for_it_says_the_flag() -> None:
    async with serving(keys=()) as server:
        answer = await server.post("/scale_elastic_ep", {"new_data_parallel_size": 2})
        assert answer.status_code == 409
        assert "--enable-elastic-ep" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "new_data_parallel_size"),
        *(
            ({"new_data_parallel_size": one}, "new_data_parallel_size")
            for one in (0, 65, "2", True)
        ),
        *(
            ({"new_data_parallel_size": 2, "drain_timeout": one}, "drain_timeout")
            for one in (-1, 3601, 0.5)
        ),
    ],
)
async def test_bad_numbers_are_refused_by_name(body: dict[str, Any], param: str) -> None:
    replicas = Replicas()
    async with serving(keys=(), scalable=replicas) as server:
        answer = await server.post("/scale_elastic_ep", body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert replicas.asked == []


async def test_with_a_key_the_mac_is_over_the_number_too() -> None:
    replicas = Replicas()
    replicas.go_on.set()
    body = {"incarnation": MINE, "new_data_parallel_size": 2}
    async with serving(scalable=replicas) as server:
        for text in (MINE, f"{MINE}/3"):
            mac = {"X-Xpyd-Mac": call_mac(KEY, "scale", text)}
            assert (await server.post("/scale_elastic_ep", body, **mac)).status_code == 403
        assert replicas.asked == []
        mac = {"X-Xpyd-Mac": call_mac(KEY, "scale", f"{MINE}/2")}
        hurried = body | {"drain_timeout": 0}
        assert (await server.post("/scale_elastic_ep", hurried, **mac)).status_code == 403
        assert (await server.post("/scale_elastic_ep", body, **mac)).status_code == 200
        mac = {"X-Xpyd-Mac": call_mac(KEY, "scale", f"{MINE}/2/0")}
        assert (await server.post("/scale_elastic_ep", hurried, **mac)).status_code == 200
