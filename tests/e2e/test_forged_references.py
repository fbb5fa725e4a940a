"""Requests that name KV which is not theirs, at real engines: the answer is the prompt's own.

The cases of vllm#52234: a reference that never was, consumed, stale, another instance's, past its
lease. There a D answered with garbage or with the answer to another prompt; ours computes and says
so. Nobody but a router can name KV at all (tests/attack/test_pair_ids.py); the last test is of a
client. tests/kv/test_forged_references.py has the same byte by byte.
"""

from __future__ import annotations

import json
import secrets
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from tests.e2e.harness import Fleet, Process, fleet, http, wait_for
from tests.e2e.oracle import Case
from xpyd_core.keys import PAIR_MAC_HEADER, call_mac
from xpyd_core.kv_outcome import HEADER as KV_HEADER
from xpyd_core.request_id import pair_id_text

pytestmark = pytest.mark.slow

WAIT_S, LEASE_S = 1, 2


@dataclass
class Told:
    """A D's answer: the tokens, and what it says of the KV."""

    ids: tuple[int, ...]
    kv: str


class Forger:
    """Knows the fleet's key, and asks engines as a router would."""

    def __init__(self, running: Fleet) -> None:
        self.fleet = running
        self.p = running.engine("Prefill")
        self.d, self.other = (one for one in running.engines if one.role == "Decode")

    def pair_id(self, d: Process, uuid: str) -> str:
        return pair_id_text(f"{self.p.ip}:21001", f"{d.ip}:21001", uuid)

    def headers(self, request_id: str) -> dict[str, str]:
        mac = call_mac(self.fleet.key_file.read_bytes().strip(), "pair", request_id)
        return {"X-Request-Id": request_id, PAIR_MAC_HEADER: mac}

    def prefill(self, case: Case, uuid: str, d: Process) -> None:
        """P computes the prompt, and sends its KV to that D, which keeps it for a request."""
        params = {"seed": 0, "client_max_tokens": len(case.ids)}
        body = self.body(case, max_tokens=1, kv_transfer_params=params)
        headers = self.headers(self.pair_id(d, uuid))
        status, raw = http(f"{self.p.url}/v1/completions", body, headers=headers)
        assert status == 200, raw
        answer = json.loads(raw)
        assert answer["kv_transfer_params"]["transfer"] in (["granted"], ["pending"])
        assert tuple(answer["choices"][0]["token_ids"]) == case.ids[:1]
        wait_for("KV at D", lambda: d.metric("xpyd_kv_leases") > 0)

    def decode(self, case: Case, uuid: str, d: Process, *, suffix: str = "") -> Told:
        """Ask a D for the prompt's answer from the KV of that id."""
        params = {"continue_from": [list(case.ids[:1])], "emit_from": [0]}
        params |= {"seed": 0, "response_id": "cmpl-forged", "created": 1}
        body = self.body(case, max_tokens=len(case.ids), kv_transfer_params=params)
        request = urllib.request.Request(
            f"{d.url}/v1/completions",
            data=json.dumps(body).encode(),
            headers={
                "Content-Type": "application/json",
                **self.headers(self.pair_id(d, uuid) + suffix),
            },
        )
        with urllib.request.urlopen(request, timeout=60) as response:
            answer, said = json.loads(response.read()), response.headers[KV_HEADER]
        return Told(tuple(answer["choices"][0]["token_ids"]), said)

    @staticmethod
    def body(case: Case, **fields: Any) -> dict[str, Any]:
        return {
            "model": "demo",
            "prompt": list(case.prompt),
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            **fields,
        }

    def come_to_rest(self) -> None:
        wait_for("nothing is held anywhere", self.fleet.holds_nothing)


@pytest.fixture(scope="module")
def forger(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forger]:
    flags = ("--kv-wait-seconds", str(WAIT_S), "--kv-lease-seconds", str(LEASE_S))
    with fleet(tmp_path_factory.mktemp("forged"), prefill=1, decode=2, flags=flags) as running:
        yield Forger(running)


@pytest.fixture
def two(cases: list[Case]) -> tuple[Case, Case]:
    """Long prompts without a common beginning, and with different answers."""
    ours, *rest = sorted(cases, key=lambda case: -len(case.prompt))
    theirs = next(c for c in rest if c.prompt[:16] != ours.prompt[:16] and c.ids[0] != ours.ids[0])
    return ours, theirs


@pytest.fixture
def uuid() -> str:
    return secrets.token_hex(16)


def is_recomputed(told: Told, case: Case) -> bool:
    assert told.ids == case.ids, told.kv
    return told.kv.startswith("recomputed")


def test_an_own_reference_moves_the_kv(forger: Forger, two: tuple[Case, Case], uuid: str) -> None:
    """What the others are told apart from."""
    forger.prefill(two[0], uuid, forger.d)
    assert forger.decode(two[0], uuid, forger.d) == Told(two[0].ids, "moved")


@pytest.mark.parametrize("suffix", ["", "-7"], ids=["request", "prompt"])
def test_a_reference_that_never_was_is_recomputed(
    forger: Forger, two: tuple[Case, Case], uuid: str, suffix: str
) -> None:
    if suffix:
        forger.prefill(two[1], uuid, forger.d)
    assert is_recomputed(forger.decode(two[0], uuid, forger.d, suffix=suffix), two[0])
    forger.come_to_rest()


@pytest.mark.parametrize("asked", [0, 1], ids=["the same prompt", "another prompt"])
def test_a_consumed_reference_is_recomputed(
    forger: Forger, two: tuple[Case, Case], uuid: str, asked: int
) -> None:
    forger.prefill(two[0], uuid, forger.d)
    assert forger.decode(two[0], uuid, forger.d).kv == "moved"
    assert is_recomputed(forger.decode(two[asked], uuid, forger.d), two[asked])
    forger.come_to_rest()


def test_a_reference_to_another_prompts_kv_is_recomputed(
    forger: Forger, two: tuple[Case, Case], uuid: str
) -> None:
    forger.prefill(two[1], uuid, forger.d)
    assert is_recomputed(forger.decode(two[0], uuid, forger.d), two[0])
    forger.come_to_rest()


def test_a_reference_to_another_instances_kv_is_recomputed_and_that_instance_has_its_own(
    forger: Forger, two: tuple[Case, Case], uuid: str
) -> None:
    forger.prefill(two[1], uuid, forger.d)
    for case in two:
        assert is_recomputed(forger.decode(case, uuid, forger.other), case)
        if case is two[0]:
            assert forger.decode(two[1], uuid, forger.d) == Told(two[1].ids, "moved")
    forger.come_to_rest()


def test_a_reference_past_its_lease_is_recomputed(
    forger: Forger, two: tuple[Case, Case], uuid: str
) -> None:
    forger.prefill(two[1], uuid, forger.d)
    forger.come_to_rest()
    for case in two:
        assert is_recomputed(forger.decode(case, uuid, forger.d), case)


def test_a_client_that_names_another_requests_kv_gets_its_own_answer(
    forger: Forger, two: tuple[Case, Case], uuid: str
) -> None:
    """It has seen a pair id with its MAC, and sends both as its own."""
    mine, others = two
    stolen = forger.headers(forger.pair_id(forger.d, uuid))
    forger.prefill(others, uuid, forger.d)
    url = f"{forger.fleet.router.url}/v1/completions"
    body = forger.body(mine, max_tokens=len(mine.ids))
    begun_s = time.monotonic()
    status, raw = http(url, body, headers=stolen)
    assert status == 200, raw
    assert tuple(json.loads(raw)["choices"][0]["token_ids"]) == mine.ids
    if time.monotonic() - begun_s < LEASE_S / 2:
        assert forger.decode(others, uuid, forger.d) == Told(others.ids, "moved")
    status, raw = http(url, {**body, "kv_transfer_params": {"transfer": ["granted"]}})
    assert status == 400
    assert json.loads(raw)["error"]["param"] == "kv_transfer_params"
    forger.come_to_rest()
