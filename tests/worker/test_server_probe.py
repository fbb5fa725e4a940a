"""`POST /kv/probe`: who may ask, what is answered, and that nobody waits for ever."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.worker.server_fakes import KEY, Running, kv_probe, serving
from xpyd_core.keys import call_mac
from xpyd_core.request_id import Address
from xpyd_kv.session.probing import BUSY, PairProbe, ProbeResult
from xpyd_worker.server.http import admin
from xpyd_worker.server.service import KvPlace

PEER = "10.0.0.7:21001"
GOOD = {"X-Xpyd-Mac": call_mac(KEY, "kv-probe", PEER)}


class FakeProbe:
    """The transfer library's: answers on a thread of its own, as the I/O thread does."""

    def __init__(self, result: ProbeResult | None) -> None:
        self.result = result
        self.asked: list[Address] = []

    def __call__(self, address: Address, done: Callable[[ProbeResult], None]) -> None:
        self.asked.append(address)
        if self.result is not None:
            threading.Thread(target=done, args=(self.result,)).start()


def give(server: Running, probe: FakeProbe) -> FakeProbe:
    service = server.api.ready_service()
    server.api.service = replace(service, probe=probe)
    return probe


async def ask(server: Running, body: Any = None, **headers: str) -> Any:
    return await server.post("/kv/probe", {"address": PEER} if body is None else body, **headers)


async def test_the_answer_is_what_the_probe_found() -> None:
    async with serving(role="Prefill") as server:
        probe = give(server, FakeProbe(ProbeResult(True, "shm", 65536, 0.0012345678, True)))
        answer = await ask(server, **GOOD)
        assert answer.status_code == 200
        assert answer.json() == {
            "ok": True,
            "transport": "shm",
            "bytes": 65536,
            "seconds": 0.001235,
            "digest_matches": True,
            "reason": "",
        }
        assert probe.asked == [Address("10.0.0.7", 21001)]
        probe.result = ProbeResult(reason="unreachable")
        answer = await ask(server, **GOOD)
        assert answer.status_code == 200
        assert (answer.json()["ok"], answer.json()["reason"]) == (False, "unreachable")


async def test_between_ranks_each_pair_is_answered_and_one_that_failed_is_named(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    near, far = Address("10.0.0.7", 21002), Address("10.0.0.8", 21003)
    well = ProbeResult(True, "uds", 65536, 0.002, True)
    pairs = (PairProbe(0, 0, near, well), PairProbe(0, 1, far, ProbeResult(reason="unreachable")))
    result = replace(well, transport="tcp", ok=False, reason="unreachable", pairs=pairs)
    key_file = tmp_path / "key"
    key_file.write_bytes(KEY)

    async with serving(role="Prefill") as server:
        give(server, FakeProbe(result))
        found = (await ask(server, **GOOD)).json()
        assert (found["ok"], found["reason"], found["transport"]) == (
            False,
            "unreachable",
            "tcp",
        )
        assert [(p["from_rank"], p["to_rank"], p["address"]) for p in found["pairs"]] == [
            (0, 0, "10.0.0.7:21002"),
            (0, 1, "10.0.0.8:21003"),
        ]
        assert [(p["ok"], p["transport"], p["reason"]) for p in found["pairs"]] == [
            (True, "uds", ""),
            (False, "", "unreachable"),
        ]
        asked = ("--engine", str(server.client.base_url), "--peer", PEER)
        assert await asyncio.to_thread(kv_probe, *asked, "--kv-key-file", str(key_file)) == 1
    assert capsys.readouterr().out.splitlines() == [
        f"{PEER}: failed after 2.0 ms: unreachable",
        "  rank 0 to rank 0 at 10.0.0.7:21002: 65536 bytes arrived over uds in 2.0 ms",
        "  rank 0 to rank 1 at 10.0.0.8:21003: failed after 0.0 ms: unreachable",
    ]


@pytest.mark.parametrize(
    "mac",
    [
        "",
        "x",
        call_mac(b"x" * 32, "kv-probe", PEER),
        call_mac(KEY, "kv-probe", "10.0.0.8:21001"),
        call_mac(KEY, "kv-release", PEER),
    ],
    ids=["none", "junk", "another key", "another address", "another purpose"],
)
async def test_without_the_mac_of_this_address_nothing_is_dialled(mac: str) -> None:
    async with serving(role="Prefill") as server:
        probe = give(server, FakeProbe(ProbeResult(True)))
        answer = await ask(server, **{"X-Xpyd-Mac": mac})
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "wrong_mac")
        assert not probe.asked


@pytest.mark.parametrize("role", ["Decode", "Aggregated"])
async def test_who_is_no_p_says_whom_to_ask(role: Any) -> None:
    async with serving(role=role) as server:
        answer = await ask(server, **GOOD)
        assert answer.status_code == 409
        assert "ask a Prefill instance" in answer.json()["error"]["message"]
        assert role in answer.json()["error"]["message"]
        assert (await ask(server)).status_code == 403


@pytest.mark.parametrize(
    "body", [{}, {"address": 3}, {"address": "name:21001"}, {"address": "10.0.0.7:80"}, []]
)
async def test_an_address_that_may_not_be_dialled_is_refused_by_name(body: Any) -> None:
    async with serving(role="Prefill") as server:
        probe = give(server, FakeProbe(ProbeResult(True)))
        answer = await ask(server, body, **GOOD)
        assert answer.status_code == 400
        assert not probe.asked


async def test_too_many_are_told_to_come_again() -> None:
    async with serving(role="Prefill") as server:
        give(server, FakeProbe(ProbeResult(reason=BUSY)))
        answer = await ask(server, **GOOD)
        assert (answer.status_code, answer.headers["Retry-After"]) == (429, "1")


async def test_a_thread_that_does_not_answer_costs_a_503(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admin, "_ANSWER_S", 0.05)

    async with serving(role="Prefill") as server:
        probe = give(server, FakeProbe(None))
        assert (await ask(server, **GOOD)).status_code == 503
        assert probe.asked
        # Its late answer finds nobody.
        await asyncio.sleep(0)


async def test_the_replica_that_the_caller_names_is_the_one_that_probes() -> None:
    probes = [FakeProbe(ProbeResult(reason=f"of {number}")) for number in range(2)]
    own = Address("127.0.0.1", 21001)
    places = [KvPlace(own, "i", probes[0]), KvPlace(own, "i", probes[1]), KvPlace(own)]
    async with serving(role="Prefill", replicas=3, kv_places=places) as server:
        give(server, probes[0])
        for header in ("0", "1"):
            answer = await ask(server, **GOOD, **{"X-data-parallel-rank": header})
            assert answer.json()["reason"] == f"of {header}"
        assert (await ask(server, **GOOD)).json()["reason"] == "of 0"
        gone = await ask(server, **GOOD, **{"X-data-parallel-rank": "2"})
        assert (gone.status_code, gone.json()["error"]["code"]) == (503, "replica_lost")
        wrong = await ask(server, **GOOD, **{"X-data-parallel-rank": "3"})
        assert wrong.status_code == 400
