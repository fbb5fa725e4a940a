"""Flags of `xpyd worker`: defaults from the pod's environment, mistakes named with the fix."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

import pytest

from xpyd_core.errors import UserError
from xpyd_core.pod_env import PodEnv
from xpyd_core.request_id import Address
from xpyd_worker.command import configure, read_config
from xpyd_worker.config import WorkerConfig
from xpyd_worker.engine.eplb import EplbConfig

POD = PodEnv(
    role="Decode",
    pod_ip="127.1.0.3",
    http_port=20005,
    kv_port=21005,
    discovery=(Address("127.1.0.1", 30001),),
    kv_key_file=Path("key"),
    instance="demo-decode-0",
)
CONTINUE = ("--on-rank-loss", "continue", "-dp", "2", "--enable-expert-parallel")


def config(*flags: str, env: PodEnv = POD) -> WorkerConfig:
    parser = argparse.ArgumentParser(exit_on_error=False)
    configure(parser)
    return read_config(parser.parse_args(["--model", "m", *flags]), env)


def test_flags_that_are_not_given_leave_the_defaults_of_the_configuration() -> None:
    assert config(env=PodEnv()) == WorkerConfig(model="m")


def test_the_pods_environment_gives_the_defaults() -> None:
    found = config()
    assert (found.role, found.host, found.port) == ("Decode", "127.1.0.3", 20005)
    assert found.kv_address == Address("127.1.0.3", 21005)
    assert (found.discovery, found.kv_key_file) == (POD.discovery, Path("key"))
    assert found.instance == "demo-decode-0"


def test_flags_go_before_the_environment() -> None:
    found = config(
        *("--role", "Prefill", "--host", "127.0.0.9", "--port", "1", "--kv-port", "2000"),
        *("--kv-key-file", "other", "--discovery", "a:1,b:2", "--kv-advertise", "10.0.0.1:3000"),
    )
    assert (found.role, found.host, found.port, found.kv_port) == ("Prefill", "127.0.0.9", 1, 2000)
    assert found.discovery == (Address("a", 1), Address("b", 2))
    assert found.kv_address == Address("10.0.0.1", 3000)


def test_sizes_are_written_as_people_do() -> None:
    found = config("--kv-cache-memory", "200M", "--kv-group-bytes", "1", "--kv-host-pool-size", "0")
    assert found.kv_cache_bytes == 200_000_000
    assert found.buffer_bytes(200_000_000) == 20_000_000
    assert (found.kv_group_bytes, found.kv_host_pool_bytes) == (1, 0)
    assert config("--kv-buffer-size", "8e9").buffer_bytes(10**9) == 8_000_000_000
    assert config("--kv-buffer-size", "25%").buffer_bytes(10**9) == 250_000_000
    assert config().kv_cache_bytes is None
    assert (config().block_size, config("--block-size", "64").block_size) == (16, 64)


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (("--kv-cache-memory", "many"), "--kv-cache-memory"),
        (("--kv-host-pool-size", "10%"), "--kv-host-pool-size"),
        (("--host", "name"), "--host"),
        (("--host", "0.0.0.0"), "--host"),
        (("--port", "70000"), "--port"),
        (("--kv-port", "80"), "--kv-port"),
        (("--kv-advertise", "name:3000"), "--kv-advertise"),
        (("--kv-advertise", "10.0.0.1"), "--kv-advertise"),
        (("--discovery", "nowhere"), "--discovery"),
        (("--max-num-seqs", "0"), "--max-num-seqs"),
        (("--max-num-batched-tokens", "100"), "--max-num-batched-tokens"),
        (("--max-num-seqs", "600", "--max-num-batched-tokens", "512"), "--max-num-batched-tokens"),
        (("--long-prefill-token-threshold", "-1"), "--long-prefill-token-threshold"),
        (("--seed", "-1"), "--seed"),
        (("--max-model-len", "1"), "--max-model-len"),
        (("--threads", "0"), "--threads"),
        (("--device", "gpu"), "--device"),
        (("--device", "cuda:x"), "--device"),
        (("--device", "cuda:01"), "--device"),
        (("--gpu-memory-utilization", "0"), "--gpu-memory-utilization"),
        (("--gpu-memory-utilization", "1.1"), "--gpu-memory-utilization"),
        (("--kv-buffer-size", "much"), "--kv-buffer-size"),
        (("--kv-direct-free", "1.5"), "--kv-direct-free"),
        (("--kv-wait-seconds", "-1"), "--kv-wait-seconds"),
        (("--kv-lease-seconds", "0"), "--kv-lease-seconds"),
        (("--heartbeat-period-ms", "10"), "--heartbeat-period-ms"),
        (("--drain-timeout", "-1"), "--drain-timeout"),
        (("--served-model-name", ""), "--served-model-name"),
    ],
)
def test_a_wrong_flag_is_named(flags: tuple[str, ...], named: str) -> None:
    with pytest.raises(UserError, match=named):
        config(*flags)


@pytest.mark.parametrize("port", [21001, 21002, 21003])
def test_http_does_not_take_a_port_of_the_ranks(port: int) -> None:
    flags = ("--kv-port", "21001", "-tp", "2", "--port", str(port))
    with pytest.raises(UserError, match=f"--port {port}: .* are 21001 to 21003"):
        config("--role", "Decode", *flags)
    assert config("--role", "Prefill", *flags).port == port


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (("-dp", "0"), "--data-parallel-size: 0; expected 1 to 64"),
        (("-dp", "65"), "--data-parallel-size: 65; expected 1 to 64"),
        (("-dp", "2", "--device", "cuda:1"), "--device cuda:1: .* give cuda"),
        (("--enable-elastic-ep", "-pp", "2"), "only without stages, not with --pipeline-.* 2"),
        (
            ("--enable-elastic-ep", "--enable-expert-parallel", "--enable-eplb"),
            "leave out --enable",
        ),
        (CONTINUE[:4], "continue: replicas that share experts .* and --enable-expert-parallel"),
        ((*CONTINUE[:2], CONTINUE[-1]), "continue: .* give --data-parallel-size from 2 on"),
        ((*CONTINUE, "-pp", "2"), "continue: only without stages"),
        ((*CONTINUE, "--role", "Prefill"), "continue: give --role Aggregated or Decode, not"),
        ((*CONTINUE, "--enable-eplb"), "continue: experts do not move then"),
        (("-dp", "2", "--kv-port", "65533"), "--kv-port 65533: the KV of 2 ranks takes 4 ports"),
        (("-dp", "2", "--kv-advertise", "10.0.0.1:65533"), "--kv-advertise: .* from 65533 on"),
    ],
)
def test_replicas_that_cannot_be_are_refused(flags: tuple[str, ...], named: str) -> None:
    with pytest.raises(UserError, match=named):
        config("--role", "Aggregated", *flags)


def test_each_replica_has_its_kv_ports_and_its_part_of_the_memory_for_kv() -> None:
    flags = ("-dp", "2", "-tp", "2", "--kv-port", "21001", "--kv-advertise", "10.0.0.1:22001")
    sizes = ("--kv-buffer-size", "64Mi", "--kv-host-pool-size", "1Gi")
    whole = config("--role", "Decode", *flags, *sizes)
    parts = [whole.of_replica(number) for number in range(2)]
    assert [one.kv_port for one in parts] == [21001, 21004]
    assert [str(one.kv_address) for one in parts] == ["10.0.0.1:22001", "10.0.0.1:22004"]
    assert [one.first_rank for one in parts] == [0, 2]
    assert {(one.kv_buffer_bytes, one.kv_host_pool_bytes) for one in parts} == {(2**25, 2**29)}
    assert len({one.engine_id for one in parts}) == 2
    percent = config("--role", "Decode", *flags, "--kv-buffer-size", "20%").of_replica(1)
    assert percent.buffer_bytes(1000) == 200
    with pytest.raises(UserError, match=r"--port 21006: .* are 21001 to 21006"):
        config("--role", "Decode", *flags, "--port", "21006")


GROUP = replace(POD, group_size=2, worker_index=1, leader_address="10.0.0.1")
BY_HAND = ("-dp", "4", "--headless", "-dpl", "2", "-dpr", "2", "-dpa", "10.0.0.1")


@pytest.mark.parametrize(
    ("env", "flags", "port"),
    [
        (GROUP, ("-dp", "4"), 21000),
        (POD, (*BY_HAND, "--data-parallel-rpc-port", "13345"), 13345),
        (GROUP, BY_HAND, 21000),
    ],
)
def test_a_pod_has_whole_replicas_as_the_group_or_the_flags_say(
    env: PodEnv, flags: tuple[str, ...], port: int
) -> None:
    found = config("--role", "Aggregated", *flags, "-tp", "4", "--kv-port", "21001", env=env)
    assert (found.pods, found.pod, found.leader_address) == (2, 1, "10.0.0.1")
    assert (found.pod_replicas, found.rendezvous_port) == (2, port)
    assert [
        [len(found.of_replica(replica).pod_ranks(pod)) for replica in range(4)] for pod in range(2)
    ] == [[4, 4, 0, 0], [0, 0, 4, 4]]


@pytest.mark.parametrize(
    ("env", "flags", "says"),
    [
        (
            POD,
            ("-dp", "4", "-dpl", "3"),
            "--data-parallel-size-local 3: expected a divisor of --da",
        ),
        (
            POD,
            ("-dp", "4", "-dpl", "0"),
            "--data-parallel-size-local 0: expected a divisor of --da",
        ),
        (POD, ("-dp", "4", "-dpl", "2", "-dpr", "3"), "rank 3: expected a multiple of 2, the rep"),
        (POD, ("-dp", "4", "-dpl", "2", "-dpr", "4"), "below --data-parallel-size 4"),
        (POD, ("-dp", "4", "-dpr", "2"), "rank 2: expected a multiple of 4, the replicas of a pod"),
        (POD, ("-dp", "4", "-dpl", "2", "-dpr", "2", "-dpa", "h"), "give --headless"),
        (POD, ("-dp", "4", "-dpl", "2", "--headless"), "give --data-parallel-start-rank, too"),
        (POD, ("-dp", "4", "-dpl", "2"), "--data-parallel-address: expected the address of"),
        (GROUP, ("-dp", "4", "-dpl", "1"), "local 1: of --data-parallel-size 4, but LWS_GROUP_SIZ"),
        (GROUP, ("-dp", "4", "-dpr", "0"), "start-rank 0: LWS_WORKER_INDEX 1 begins at 2"),
        (GROUP, ("-dp", "3"), "LWS_GROUP_SIZE: 2 pods for 3 replicas"),
        (GROUP, ("-dp", "2", "--enable-elastic-ep"), "in one pod, not in 2"),
        (GROUP, CONTINUE, "continue: replicas of one pod go on, not of 2"),
    ],
)
def test_pods_whose_numbers_cannot_be_are_refused(
    env: PodEnv, flags: tuple[str, ...], says: str
) -> None:
    with pytest.raises(UserError, match=says):
        config("--role", "Aggregated", *flags, env=env)


def test_ranks_count_through_the_replicas() -> None:
    found = config("--role", "Aggregated", "-dp", "3", "-tp", "2")
    assert [replace(found, replica=replica).first_rank for replica in range(3)] == [0, 2, 4]
    assert found.has_ranks
    assert config("--role", "Aggregated", "-dp", "2").has_ranks
    assert not config().has_ranks


def tokens(*flags: str) -> tuple[int, int]:
    """Of a step: on a CPU, on a GPU."""
    found = config(*flags)
    return found.batched_tokens(on_gpu=False), found.batched_tokens(on_gpu=True)


def test_the_budget_of_a_step_is_small_on_a_cpu_and_never_below_the_sequences() -> None:
    assert tokens() == (512, 2048)
    assert tokens("--max-num-batched-tokens", "auto") == (512, 2048)
    assert tokens("--max-num-seqs", "700") == (700, 2048)
    assert tokens("--max-num-seqs", "3000") == (3000, 3000)
    assert tokens("--max-num-batched-tokens", "1000") == (1000, 1000)
    assert tokens("--max-num-batched-tokens=256") == (256, 256)


def test_a_budget_that_is_no_number_is_named_with_what_is_expected() -> None:
    with pytest.raises(argparse.ArgumentError, match=r"--max-num-batched-tokens.* or auto.*'all'"):
        config("--max-num-batched-tokens", "all")


def test_a_chat_template_is_a_file_or_the_text_itself(tmp_path: Path) -> None:
    file = tmp_path / "chat.jinja"
    file.write_text("{{ messages }} é")
    assert config("--chat-template", str(file)).chat_template == "{{ messages }} é"
    assert config("--chat-template", "{{ x }}").chat_template == "{{ x }}"
    assert config().chat_template is None
    with pytest.raises(UserError, match=r"--chat-template: cannot read .*nothing"):
        config("--chat-template", str(tmp_path / "nothing"))


def test_the_parsers_of_chats_reach_the_configuration() -> None:
    given = config("--tool-call-parser", "mistral", "--reasoning-parser", "none")
    assert (given.tool_call_parser, given.reasoning_parser) == ("mistral", "none")
    assert not given.enable_auto_tool_choice
    assert config("--enable-auto-tool-choice").enable_auto_tool_choice


def test_experts_are_balanced_where_both_flags_say_how() -> None:
    assert config().eplb is None
    assert config().sizes.redundant_experts is None
    on = ("--enable-expert-parallel", "--enable-eplb", "--tensor-parallel-size=2")
    assert config(*on).eplb == EplbConfig()
    assert config(*on).sizes.redundant_experts == 0
    found = config(*on, '--eplb-config={"num_redundant_experts": 4, "step_interval": 2000}')
    assert found.eplb == EplbConfig(num_redundant_experts=4, step_interval=2000)
    assert found.sizes.redundant_experts == 4


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (
            '{"use_async": true}',
            "unknown key 'use_async'; expected some of num_redundant_experts, ",
        ),
        ('{"num_redundant_experts": -1}', "num_redundant_experts: expected a whole number from 0"),
        ('{"step_interval": 0}', "step_interval: expected a whole number from 1 on"),
        ('{"step_interval": true}', "step_interval: expected a whole number from 1 on"),
        ('{"window_size": 2000000}', "window_size: 2000000; at most 1000000"),
        ('{"step_interval": 10}', "window_size: 1000 steps; at most step_interval, 10"),
    ],
)
def test_a_wrong_key_of_the_balance_is_named(given: str, words: str) -> None:
    with pytest.raises(UserError, match=f"--eplb-config: {words}"):
        config("--enable-expert-parallel", "--enable-eplb", f"--eplb-config={given}")


def test_a_balance_that_is_not_on_is_refused() -> None:
    with pytest.raises(UserError, match="--eplb-config: no effect without --enable-eplb"):
        config("--eplb-config={}")


def test_the_prefix_cache_is_on_unless_somebody_says_no() -> None:
    assert config().prefix_caching
    assert config("--enable-prefix-caching").prefix_caching
    assert not config("--no-enable-prefix-caching").prefix_caching
    assert config("--no-enable-prefix-caching", "--enable-prefix-caching").prefix_caching


def test_the_options_that_people_know_by_name_reach_the_configuration() -> None:
    found = config(
        *("--max-num-seqs", "8", "--max-num-batched-tokens", "64", "--max-model-len", "1000"),
        *("--long-prefill-token-threshold", "16", "--block-size", "32", "--dtype", "float32"),
        *("--seed", "5", "--served-model-name", "a", "b", "--scheduling-policy", "priority"),
    )
    assert (found.max_num_seqs, found.max_num_batched_tokens, found.max_model_len) == (8, 64, 1000)
    assert (found.long_prefill_token_threshold, found.block_size) == (16, 32)
    assert (found.dtype, found.seed, found.served_model_names) == ("float32", 5, ("a", "b"))
    assert (found.scheduling_policy, config().scheduling_policy) == ("priority", "fcfs")
    assert [config(*words).latency_goal for words in ((), ("--latency-goal", "ttft"))] == [
        "itl",
        "ttft",
    ]


KNOWN_NAMES = (
    "--max-num-seqs --max-num-batched-tokens --max-model-len --long-prefill-token-threshold "
    "--block-size --enable-prefix-caching --dtype --seed --served-model-name --scheduling-policy"
)
_UNITS = (
    "tokens",
    "sequences",
    "names",
    "0 to 2**64 - 1",
    "fcfs:",
    "keep the KV",
    "weights and KV",
)


@pytest.mark.parametrize("flag", KNOWN_NAMES.split())
def test_the_options_that_people_know_say_their_unit_and_their_default(flag: str) -> None:
    parser = argparse.ArgumentParser()
    configure(parser)
    (action,) = (a for a in parser._actions if flag in a.option_strings)
    text = f"{action.metavar or ''} {action.help}".lower()
    assert "default: " in text
    assert any(unit.lower() in text for unit in _UNITS)


def test_p_and_d_need_the_fleets_key_and_an_aggregated_one_does_not() -> None:
    keyless = replace(POD, kv_key_file=None)
    with pytest.raises(UserError, match=r"openssl rand .* --kv-key-file .* --kv-insecure"):
        config(env=keyless)
    assert not config("--role", "Aggregated", env=keyless).moves_kv
    assert config("--kv-insecure", env=keyless).kv_insecure


@pytest.mark.parametrize("role", ["Prefill", "Decode", "Aggregated"])
def test_a_key_and_the_word_that_there_is_none_are_a_contradiction(role: str) -> None:
    with pytest.raises(UserError, match=r"--kv-insecure.*XPYD_KV_KEY_FILE.*leave one of them out"):
        config("--role", role, "--kv-insecure")


def test_every_flag_says_what_it_is() -> None:
    parser = argparse.ArgumentParser()
    configure(parser)
    silent = [action.option_strings for action in parser._actions if not action.help]
    assert silent == []
