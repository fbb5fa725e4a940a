"""The xPyD article's numbers 1 to 6 (fleet, router, ids), each as a test.

1 ports, heartbeat, registry; 2 id parsing; 3 who gets which max_tokens and finds whom, round robin;
4 the example addresses and sizes; 5 the first request (its answer: tests/e2e/test_serving.py);
6 scaling restarts no instance (with real engines: tests/e2e/test_local_fleet.py).
"""

import argparse

import msgspec
import orjson
import pytest

from tests.router.choosing import make_policy
from xpyd_core.messages import HEARTBEAT_PERIOD_S, Heartbeat, decode_heartbeat
from xpyd_core.pod_env import DISCOVERY_PORT, ROUTER_HTTP_PORT, PodEnv
from xpyd_core.request_id import Address, parse_pair_id
from xpyd_core.sizes import parse_bytes
from xpyd_router.config import RouterConfig
from xpyd_router.fleet.registry import Registry
from xpyd_router.policy.base import Want
from xpyd_router.policy.pairs import Pair
from xpyd_router.request.client_request import parse_request
from xpyd_router.request.state import prefill_body
from xpyd_worker.command import configure, read_config

PREFILL = Address("10.0.1.2", 21001)
DECODES = [Address(f"10.0.1.{3 + i}", 22001 + 1000 * i) for i in range(3)]
ARTICLE_ID = (
    "cmpl-___prefill_addr_10.0.1.2:21001___decode_addr_10.0.1.3:22001"
    "_93923d63113b4b338973f24d19d4bf11-0"
)


def _beat(kind: str, number: int, kv: Address) -> Heartbeat:
    http = f"10.0.1.{number + 1}:{20000 + number}"
    frame = msgspec.msgpack.encode({"type": kind, "http_address": http, "zmq_address": str(kv)})
    return decode_heartbeat(frame)


def _one_p_three_d() -> Registry:
    registry = Registry(period_s=HEARTBEAT_PERIOD_S, missed_beats=3)
    registry.apply(_beat("P", 1, PREFILL), now=0.0)
    for number, kv in enumerate(DECODES, 2):
        registry.apply(_beat("D", number, kv), now=0.0)
    return registry


def test_the_router_listens_on_10001_and_30001_and_beats_come_every_3_s() -> None:
    """Article fact 1."""
    config = RouterConfig()
    assert (ROUTER_HTTP_PORT, DISCOVERY_PORT, HEARTBEAT_PERIOD_S) == (10001, 30001, 3.0)
    assert (config.port, config.discovery_port) == (10001, 30001)
    assert config.heartbeat_interval_s == 3.0


def test_the_registry_maps_http_addresses_to_kv_addresses() -> None:
    """Article fact 1."""
    instances = _one_p_three_d().instances
    assert {str(i.beat.http): i.beat.kv for i in instances} == {
        "10.0.1.2:20001": PREFILL,
        "10.0.1.3:20002": DECODES[0],
        "10.0.1.4:20003": DECODES[1],
        "10.0.1.5:20004": DECODES[2],
    }


def test_an_id_as_engines_write_it_parses() -> None:
    """Article fact 2."""
    pair = parse_pair_id(ARTICLE_ID)
    assert pair is not None
    assert (pair.prefill, pair.decode) == (PREFILL, DECODES[0])
    assert pair.uuid == "93923d63113b4b338973f24d19d4bf11"
    assert pair.suffix_index == 0
    # Prefix and index are the engine's: the router's own id has neither.
    assert str(pair) == ARTICLE_ID.removeprefix("cmpl-").removesuffix("-0")


def test_ps_copy_has_max_tokens_1_and_the_clients_bytes_stay() -> None:
    """Article fact 3."""
    raw = b'{"model": "base_model", "prompt": "San Francisco is a", "max_tokens": 10}'
    ask = parse_request("completions", raw)
    assert orjson.loads(prefill_body(ask, pair_mac="mac"))["max_tokens"] == 1
    assert ask.raw == raw


def test_instances_are_selected_in_turn() -> None:
    """Article fact 3."""
    policy, snapshot = make_policy("RoundRobin"), _one_p_three_d().snapshot
    turns: list[Address] = []
    for _ in range(6):
        pair = policy.pick(snapshot, Want("base_model"))
        assert isinstance(pair, Pair)
        assert pair.prefill.beat.kv == PREFILL
        turns.append(pair.decode.beat.kv)
    assert turns == turns[:3] * 2
    assert set(turns) == set(DECODES)


@pytest.mark.parametrize(("text", "size"), [("1e1", 10), ("8e9", 8_000_000_000)])
def test_buffer_sizes_in_scientific_form_parse(text: str, size: int) -> None:
    """Article fact 4."""
    assert parse_bytes(text) == size


def test_an_engine_takes_settings_of_a_decode_instance() -> None:
    """Article fact 4."""
    parser = argparse.ArgumentParser(exit_on_error=False)
    configure(parser)
    flags = (
        "--model m --served-model-name base_model --dtype float16 --role Decode --port 20002"
        " --kv-port 22001 --max-model-len 10000 --max-num-batched-tokens 10000 --max-num-seqs 256"
        " --kv-buffer-size 8e9 --kv-key-file k --host 10.0.1.3 --discovery 10.0.1.1:30001"
    )
    config = read_config(parser.parse_args(flags.split()), PodEnv())
    assert config.kv_address == DECODES[0]
    assert config.kv_buffer_bytes == 8_000_000_000
    assert (config.max_model_len, config.max_num_batched_tokens) == (10_000, 10_000)
    assert (config.max_num_seqs, config.dtype) == (256, "float16")


def test_one_instance_more_or_less_leaves_the_others_as_they_are() -> None:
    """Article fact 6."""
    registry = _one_p_three_d()
    before = registry.instances
    more = Address("10.0.1.6", 25001)
    registry.apply(_beat("D", 5, more), now=1.0)
    assert [i for i in registry.instances if i.beat.kv != more] == list(before)
    for number, kv in [(1, PREFILL), *enumerate(DECODES, 2)]:
        registry.apply(_beat("P" if number == 1 else "D", number, kv), now=9.0)
    registry.expire(now=11.0)  # the new one missed three beats
    assert [i.beat.kv for i in registry.instances] == [i.beat.kv for i in before]
