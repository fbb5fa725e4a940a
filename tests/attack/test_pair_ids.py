"""Pair ids that no router of the fleet made: P dials nobody for them, and D reserves nothing."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from tests.router.fakes import fleet, pair
from tests.worker.server_fakes import KEY, serving
from xpyd_core.keys import INSECURE_KEYS, PAIR_MAC_HEADER, call_mac, is_call_mac
from xpyd_worker.engine.request import ReceiveFrom, SendTo

UUID = "93923d63113b4b338973f24d19d4bf11"
OTHER_KEY = b"fedcba9876543210fedcba9876543210"


def pair_id(uuid: str = UUID) -> str:
    return f"___prefill_addr_10.0.1.2:21001___decode_addr_10.0.1.3:22001_{uuid}"


RIGHT = call_mac(KEY, "pair", pair_id())
WRONG = {
    "none": {},
    "empty": {PAIR_MAC_HEADER: ""},
    "of another id": {PAIR_MAC_HEADER: call_mac(KEY, "pair", pair_id("0" * 32))},
    "of another purpose": {PAIR_MAC_HEADER: call_mac(KEY, "kv-release", pair_id())},
    "by another key": {PAIR_MAC_HEADER: call_mac(b"x" * 32, "pair", pair_id())},
    "not ASCII": {PAIR_MAC_HEADER: "\xe9" * 64},
    "in another header": {"X-Xpyd-Mac": RIGHT},
}
_HEADER = PAIR_MAC_HEADER.lower()
BODY = {"prompt": "hi", "max_tokens": 2}


async def transfer_of(role: Any, headers: dict[str, str], keys: tuple[bytes, ...] | None) -> object:
    """What the engine is asked to do about KV for a request with these headers."""
    async with serving(role=role, signed_by=keys) as server:
        given = {"X-Request-Id": pair_id(), **headers}
        latin = {name: value.encode("latin-1") for name, value in given.items()}
        answer = await server.client.post("/v1/completions", json=BODY, headers=latin)
        assert answer.status_code == 200
        assert UUID not in answer.text + str(answer.headers.raw)
        return server.engine.requests[0].transfer


@pytest.mark.parametrize("role", ["Prefill", "Decode"])
@pytest.mark.parametrize("how", WRONG)
async def test_without_the_routers_mac_a_request_is_served_alone(
    role: str, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert await transfer_of(role, WRONG[how], (KEY, OTHER_KEY)) is None
    assert "a pair id without the router's MAC" in caplog.text


@pytest.mark.parametrize("key", [KEY, OTHER_KEY])
async def test_a_mac_by_any_of_the_engines_keys_counts(key: bytes) -> None:
    headers = {PAIR_MAC_HEADER: call_mac(key, "pair", pair_id())}
    keys = (KEY, OTHER_KEY)
    assert isinstance(await transfer_of("Prefill", headers, keys), SendTo)
    assert isinstance(await transfer_of("Decode", headers, keys), ReceiveFrom)


async def test_an_engine_that_accepts_unsigned_pairs_takes_every_id() -> None:
    assert isinstance(await transfer_of("Prefill", {}, None), SendTo)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_router_signs_the_id_of_each_pair_in_header_and_body(
    stream: bool, tmp_path: Path
) -> None:
    key_file = tmp_path / "key"
    key_file.write_bytes(KEY + b"\n" + OTHER_KEY)
    async with pair(kv_key_file=key_file) as (made, p, d):
        for _ in range(2):
            await (await made.post(stream=stream, max_tokens=3)).read()
        macs: list[str] = []
        for call in (*p.calls, *d.calls):
            mac = call.headers[_HEADER]
            assert is_call_mac((KEY,), "pair", call.request_id, mac)
            assert call.body["kv_transfer_params"]["pair_mac"] == mac
            macs.append(mac)
        assert len(macs) == 4
        assert len(set(macs)) == 2


async def test_an_engine_that_beats_as_vllms_connector_gets_the_mac_in_the_header_alone() -> None:
    async with fleet() as made:
        p, d = [await made.engine(kind, is_ours=False) for kind in "PD"]
        await made.json(max_tokens=3)
        for call in (*p.calls, *d.calls):
            mac = call.headers[_HEADER]
            assert is_call_mac(INSECURE_KEYS, "pair", call.request_id, mac)
            assert "kv_transfer_params" not in call.body


async def test_a_request_for_one_instance_has_no_mac() -> None:
    async with pair() as (made, p, _):
        await made.json(max_tokens=1)
        assert _HEADER not in p.calls[0].headers


@pytest.fixture(autouse=True)
def _warnings(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
