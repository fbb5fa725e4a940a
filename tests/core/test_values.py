"""Sizes, block hashes, heartbeats, the fleet's key, the pod's environment, errors and the log."""

import json
import logging
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from xpyd_core import blocks, compat, keys, logs, messages, pod_env
from xpyd_core.errors import ApiError, ProtocolError, UserError
from xpyd_core.request_id import Address
from xpyd_core.sizes import format_bytes, parse_bytes

BASE_BEAT = {"type": "P", "http_address": "10.0.1.2:20001", "zmq_address": "10.0.1.2:21001"}


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("1e1", 10),  # Article fact 4
        ("8e9", 8_000_000_000),
        (1234, 1234),
        ("0", 0),
        ("4Gi", 4 * 2**30),
        ("1.5Ki", 1536),
        ("500M", 500_000_000),
        ("2k", 2000),
    ],
)
def test_sizes_parse_as_written(text: str | int, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize(
    "text",
    ["", "-1", "4GB", "1e100", "NaN", "10%", "1 Gi", "0x10", "\u0663", "9" * 41, "9" * 5000],
)
def test_other_sizes_are_refused(text: str) -> None:
    with pytest.raises(UserError, match="not a size") as raised:
        parse_bytes(text)
    assert len(str(raised.value)) < 200


def test_percentages_need_something_to_be_taken_of() -> None:
    assert parse_bytes("10%", of=80_000_000_000) == 8_000_000_000
    with pytest.raises(UserError):
        parse_bytes("0%", of=100)


def test_sizes_print_for_people() -> None:
    assert [format_bytes(n) for n in (512, 1536, 4 * 2**30)] == ["512 B", "1.5 KiB", "4.0 GiB"]
    assert [format_bytes(n) for n in (1023, 2**30 - 20_000)] == ["1023 B", "1.0 GiB"]


def test_seventeen_tokens_need_two_blocks() -> None:
    assert [blocks.blocks_for(n) for n in (0, 1, 16, 17)] == [0, 1, 1, 2]


@given(st.lists(st.integers(0, 2**32 - 1), max_size=100), st.integers(0, 100))
def test_extending_a_chain_equals_hashing_at_once(tokens: list[int], cut: int) -> None:
    grown: list[bytes] = []
    blocks.extend_block_hashes(grown, tokens[:cut])
    blocks.extend_block_hashes(grown, tokens)
    assert grown == blocks.block_hashes(tokens)
    assert len(grown) == len(tokens) // 16


def test_a_hash_covers_everything_before_its_block() -> None:
    one, other = list(range(48)), [99, *range(1, 48)]
    assert len({*blocks.block_hashes(one), *blocks.block_hashes(other)}) == 6


def test_the_salt_separates_whole_chains_and_extras_every_block() -> None:
    tokens = list(range(32))
    plain, salted = blocks.block_hashes(tokens), blocks.block_hashes(tokens, salt=b"tenant")
    extra = blocks.block_hashes(tokens, extras=b"lora")
    assert len({*plain, *salted, *extra}) == 6


def test_prompt_digests_are_over_little_endian_u32() -> None:
    assert blocks.token_bytes([1, 256]) == bytes([1, 0, 0, 0, 0, 1, 0, 0])
    assert blocks.prompt_digest([1, 2]) != blocks.prompt_digest([1, 2, 0])


def test_the_base_heartbeat_has_three_fields() -> None:
    beat = messages.decode_heartbeat(msgspec.msgpack.encode(BASE_BEAT))
    assert (beat.http, beat.kv) == (Address("10.0.1.2", 20001), Address("10.0.1.2", 21001))
    assert (beat.version, beat.compatibility, beat.state, beat.continuation) == (0, "", "Ready", 0)


def test_our_beat_without_optional_values_is_the_base_beat() -> None:
    beat = messages.Heartbeat(**BASE_BEAT)  # pyright: ignore[reportArgumentType]  # a plain dict
    assert msgspec.msgpack.decode(messages.encode_heartbeat(beat)) == BASE_BEAT
    assert messages.HEARTBEAT_PERIOD_S == 3


def test_unknown_fields_of_newer_beats_are_ignored() -> None:
    frame = msgspec.msgpack.encode({**BASE_BEAT, "later": [1, {"x": None}]})
    assert messages.decode_heartbeat(frame).type == "P"


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"\xff\x00junk",
        msgspec.msgpack.encode([1]),
        msgspec.msgpack.encode({**BASE_BEAT, "type": "X"}),
        msgspec.msgpack.encode({**BASE_BEAT, "http_address": "nowhere"}),
        msgspec.msgpack.encode({**BASE_BEAT, "zmq_address": 5}),
        msgspec.msgpack.encode({k: v for k, v in BASE_BEAT.items() if k != "type"}),
        msgspec.msgpack.encode({**BASE_BEAT, "models": ["m"] * 65}),
        msgspec.msgpack.encode({**BASE_BEAT, "fleet": "x" * (64 * 1024)}),
    ],
)
def test_bad_beats_are_a_protocol_error(frame: bytes) -> None:
    with pytest.raises(ProtocolError, match="heartbeat"):
        messages.decode_heartbeat(frame)


def test_the_default_ports() -> None:  # Article facts 1, 4
    assert (pod_env.ROUTER_HTTP_PORT, pod_env.DISCOVERY_PORT) == (10001, 30001)
    assert (pod_env.HTTP_PORT, pod_env.KV_PORT) == (20001, 21001)


def test_the_pods_environment_is_read_into_one_value() -> None:
    env = pod_env.read_pod_env(
        {
            "XPYD_ROLE": "Decode",
            "XPYD_POD_IP": "127.1.0.3",
            "XPYD_DISCOVERY": "127.1.0.1:30001, [::1]:30001",
            "XPYD_KV_KEY_FILE": "/run/key",
        }
    )
    assert (env.role, env.pod_ip, env.kv_key_file) == ("Decode", "127.1.0.3", Path("/run/key"))
    assert env.discovery == (Address("127.1.0.1", 30001), Address("::1", 30001))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("XPYD_ROLE", "Both"),
        ("XPYD_HTTP_PORT", "x"),
        ("XPYD_HTTP_PORT", "\u00b2"),
        ("XPYD_KV_PORT", "70000"),
        ("XPYD_KV_PORT", "0"),
        ("XPYD_KV_PORT", "9" * 5000),
        ("LWS_GROUP_SIZE", "two"),
        ("LWS_GROUP_SIZE", "\u00b2"),
        ("LWS_WORKER_INDEX", "1" * 10),
        ("LWS_WORKER_INDEX", "1" * 5000),
    ],
)
def test_a_wrong_variable_is_named_and_not_repeated_at_length(name: str, value: str) -> None:
    with pytest.raises(UserError, match=name) as raised:
        pod_env.read_pod_env({name: value})
    assert len(str(raised.value)) < 200


def test_keys_are_read_first_signs_all_accept(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text("first-key-of-the-fleet\n\nsecond-key-rotating-in\n")
    found = keys.read_keys(file)
    assert found == (b"first-key-of-the-fleet", b"second-key-rotating-in")
    for key in found:
        assert keys.is_call_mac(found, "kv-release", "ab", keys.call_mac(key, "kv-release", "ab"))
    assert not keys.is_call_mac(
        found, "kv-release", "ab", keys.call_mac(b"another-key-altogether", "kv-release", "ab")
    )
    assert not keys.is_call_mac(
        found, "kv-release", "cd", keys.call_mac(found[0], "kv-release", "ab")
    )
    assert not keys.is_call_mac(found, "kv-release", "ab", "\u00e9")


@pytest.mark.parametrize("content", ["", "short", "k" * 20_000, "x" * 16 + "\n" + "short"])
def test_unusable_key_files_are_refused_without_showing_them(tmp_path: Path, content: str) -> None:
    file = tmp_path / "key"
    file.write_text(content)
    with pytest.raises(UserError) as error:
        keys.read_keys(file)
    assert "key" in str(error.value)
    assert "short" not in str(error.value).replace(str(file), "")


def test_a_missing_key_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="No such file"):
        keys.read_keys(tmp_path / "absent")


def test_zero_bytes_are_no_key_since_to_hmac_they_are_the_empty_one(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_bytes(bytes(32))
    assert keys.call_mac(bytes(32), "kv-release", "ab") == keys.call_mac(b"", "kv-release", "ab")
    with pytest.raises(UserError, match="zero bytes"):
        keys.read_keys(file)


def test_a_fleet_without_secret_and_one_with_it_do_not_take_each_others_macs() -> None:
    (empty,) = none = keys.fleet_keys(None, insecure=True)
    secret = (b"first-key-of-the-fleet",)
    assert keys.is_call_mac(none, "kv-release", "ab", keys.call_mac(empty, "kv-release", "ab"))
    assert not keys.is_call_mac(
        none, "kv-release", "ab", keys.call_mac(secret[0], "kv-release", "ab")
    )
    assert not keys.is_call_mac(
        secret, "kv-release", "ab", keys.call_mac(empty, "kv-release", "ab")
    )
    assert keys.fleet_keys(None, insecure=False) == ()


def _checkpoint(folder: Path, **config: object) -> Path:
    folder.mkdir()
    base: dict[str, object] = {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 2}
    (folder / "config.json").write_text(json.dumps({**base, **config}))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"\x02" + bytes(7) + b"{}" + bytes(1000))
    return folder


def test_equal_checkpoints_share_a_key_and_each_factor_counts(tmp_path: Path) -> None:
    def factors(folder: Path, **more: Any) -> dict[str, str]:
        values = {"model": "demo", "revision": "", "kv_dtype": "float32", **more}
        return compat.compat_factors(folder, **values)

    one = _checkpoint(tmp_path / "one")
    base = factors(one)
    assert compat.compat_key(base) == compat.compat_key(factors(_checkpoint(tmp_path / "two")))
    weights = _checkpoint(tmp_path / "weights")
    (weights / "model.safetensors").write_bytes(b"\x02" + bytes(7) + b"{}" + bytes(999) + b"\x01")
    for other, differing in [
        (factors(one, kv_dtype="bfloat16"), ["kv_dtype"]),
        (factors(one, kv_layout=compat.transposed_k(128)), ["kv_layout"]),
        (factors(_checkpoint(tmp_path / "rope", rope_theta=1e6)), ["rope_theta"]),
        (factors(one, overrides={"rope_theta": 1e6, "max_position_embeddings": 9}), ["rope_theta"]),
        *(
            (factors(folder, overrides=overrides), ["hf_overrides"])
            for folder, overrides in [
                (one, {"partial_rotary_factor": 0.5}),
                (one, {"rms_norm_eps": 0.01}),
                (one, {"text_config": {"rope_theta": 1}}),
                (one, {"original_max_position_embeddings": 4}),
            ]
        ),
        (factors(one, tokenizer=tmp_path), ["tokenizer"]),
        (factors(_checkpoint(tmp_path / "window", max_window_layers=1)), ["max_window_layers"]),
        (
            factors(_checkpoint(tmp_path / "experts", num_experts_per_tok=1)),
            ["num_experts_per_tok"],
        ),
        (factors(weights), ["revision"]),
        (factors(one, model="other", revision="r"), ["model", "revision"]),
    ]:
        assert compat.differing_factors(base, other) == differing
        assert compat.compat_key(base) != compat.compat_key(other)


def test_of_overrides_those_that_leave_kv_as_it_is_do_not_count(tmp_path: Path) -> None:
    def factors(folder: Path, overrides: dict[str, Any] | None = None) -> dict[str, str]:
        return compat.compat_factors(
            folder, model="demo", revision="", kv_dtype="float32", overrides=overrides
        )

    plain = _checkpoint(tmp_path / "plain", rms_norm_eps=0.01, max_position_embeddings=64)
    for same in ({"rms_norm_eps": 0.01}, {"eos_token_id": 5}, {"max_position_embeddings": 9}):
        assert factors(plain, same) == factors(plain)
    either = factors(plain, {"hidden_act": "gelu", "attention_bias": True})
    assert either == factors(plain, {"attention_bias": True, "hidden_act": "gelu"})
    scalings = {
        "rope_scaling": {"type": "longrope"},
        "rope_parameters": {"full_attention": {"rope_type": "dynamic", "factor": 2.0}},
    }
    for name, scaling in scalings.items():
        stretched = _checkpoint(tmp_path / name, **{name: scaling})
        longer = factors(stretched, {"max_position_embeddings": 9})
        assert compat.differing_factors(factors(stretched), longer) == ["hf_overrides"]


def test_api_errors_have_openais_shape() -> None:
    error = ApiError(404, "no such model", param="model", code="model_not_found")
    assert json.loads(error.body()) == {
        "error": {
            "message": "no such model",
            "type": "not_found_error",
            "param": "model",
            "code": "model_not_found",
        }
    }
    types = [ApiError(status, "").type for status in (400, 401, 429, 503)]
    assert types == [
        "invalid_request_error",
        "authentication_error",
        "rate_limit_error",
        "server_error",
    ]


@pytest.mark.parametrize("formatter", [logs.TextFormatter(), logs.JsonFormatter()])
def test_log_lines_carry_the_request(formatter: logging.Formatter) -> None:
    record = logging.makeLogRecord({"msg": "took %d", "args": (3,), "name": "x", "request": "abc"})
    line = formatter.format(record)
    if isinstance(formatter, logs.JsonFormatter):
        assert json.loads(line)["request"] == "abc"
        assert json.loads(line)["message"] == "took 3"
    else:
        assert line.endswith("x: took 3 request=abc")
