"""Made-up pair ids at the HTTP ports of a real P and a real D: P dials nobody, D reserves nothing
and waits for nothing. What a signed id does there shows that the tests would see it."""

from __future__ import annotations

import json
import secrets
import socket
from collections.abc import Iterator

import pytest

from tests.e2e.harness import Fleet, Process, fleet, http, wait_for
from xpyd_core.keys import PAIR_MAC_HEADER, call_mac, read_keys

pytestmark = pytest.mark.slow
_FLOOD = 220
"""So many filled a real D's landing buffer and host pool."""
_PROMPT = "San Francisco is a city on the coast of California. " * 4


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with fleet(tmp_path_factory.mktemp("1p1d"), prefill=1, decode=1) as running:
        yield running
        for engine in running.engines:  # one that ends by itself waits for its transfers
            engine.kill()


def made_up(prefill: str, decode: str) -> str:
    return f"___prefill_addr_{prefill}___decode_addr_{decode}_{secrets.token_hex(16)}"


def kv_of(process: Process) -> str:
    return f"{process.ip}:21001"


def address_of(listener: socket.socket) -> str:
    host, port = listener.getsockname()
    return f"{host}:{port}"


def ask(to: Process, pair_id: str, **headers: str) -> dict[str, object]:
    body = {"model": "demo", "prompt": _PROMPT, "max_tokens": 1, "temperature": 0}
    status, answer = http(
        f"{to.url}/v1/completions", body, headers={"X-Request-Id": pair_id, **headers}
    )
    assert status == 200, answer
    return json.loads(answer)


def signed(pair: Fleet, pair_id: str) -> dict[str, str]:
    return {PAIR_MAC_HEADER: call_mac(read_keys(pair.key_file)[0], "pair", pair_id)}


def test_p_dials_nobody_for_an_id_that_no_router_made(pair: Fleet) -> None:
    p, host = pair.engine("Prefill"), f"{pair.subnet}.250"
    with socket.create_server((host, 0)) as attacker, socket.create_server((host, 0)) as right:
        attacker.setblocking(False)
        right.settimeout(20)
        for headers in ({}, {PAIR_MAC_HEADER: "0" * 64}, signed(pair, made_up("a:1", "b:1"))):
            answer = ask(p, made_up(kv_of(p), address_of(attacker)), **headers)
            assert "kv_transfer_params" not in answer, "P took part in a pair"
        # One thread of P dials: what it had to dial before, it has dialled when this one comes.
        signed_id = made_up(kv_of(p), address_of(right))
        ask(p, signed_id, **signed(pair, signed_id))
        right.accept()[0].close()
        with pytest.raises(BlockingIOError):
            attacker.accept()


def test_a_flood_of_made_up_ids_at_p_leaves_ds_memory_empty(pair: Fleet) -> None:
    p, d = pair.engine("Prefill"), pair.engine("Decode")
    held = ("xpyd_kv_buffer_used_bytes", "xpyd_kv_pool_used_bytes", "xpyd_kv_leases")
    for _ in range(_FLOOD):
        ask(p, made_up(kv_of(p), kv_of(d)))
    assert [d.metric(name) for name in held] == [0, 0, 0]
    assert d.metric("xpyd_kv_landings_total") == 0
    right = made_up(kv_of(p), kv_of(d))
    ask(p, right, **signed(pair, right))
    wait_for("KV of a signed id on D", lambda: d.metric("xpyd_kv_leases") == 1)


def test_d_waits_for_no_kv_of_an_id_that_no_router_made(pair: Fleet) -> None:
    p, d = pair.engine("Prefill"), pair.engine("Decode")
    missed = d.metric("xpyd_kv_not_received_total")
    for _ in range(5):
        ask(d, made_up(kv_of(p), kv_of(d)))
    assert d.metric("xpyd_kv_not_received_total") == missed
    right = made_up(kv_of(p), kv_of(d))
    ask(d, right, **signed(pair, right))
    assert d.metric("xpyd_kv_not_received_total") == missed + 1
