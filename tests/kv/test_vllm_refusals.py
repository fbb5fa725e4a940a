"""What our connector in vLLM refuses at start, its options, and the page about them."""

import importlib
import json
import re
from abc import ABC, abstractmethod

import msgspec
import pytest
import torch
from pydantic import ValidationError

from tests.kv.vllm_engine import config_of
from tests.kv.vllm_fakes import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    RSWASpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
    groups_of,
)
from tests.kv.vllm_kit import PAGE, shown
from xpyd_core.errors import UserError
from xpyd_kv.vllm import engine_api, worker
from xpyd_kv.vllm.connector import XpydConnector
from xpyd_kv.vllm.engine_api import check_engine
from xpyd_kv.vllm.options import (
    CONNECTOR,
    Options,
    check_config,
    incarnation_of,
    read_options,
    role_of,
)
from xpyd_kv.vllm.stats import COUNTERS
from xpyd_operator.document.engine import Engine


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda config, groups: groups.append(groups[0]), "2 KV cache groups"),
        (lambda config, _: setattr(config.model_config, "use_mla", True), "MLA"),
        (lambda config, _: setattr(config, "speculative_config", object()), "speculative"),
        (
            lambda config, _: setattr(config.parallel_config, "decode_context_parallel_size", 2),
            "decode_context_parallel_size",
        ),
        (lambda config, _: setattr(config.parallel_config, "nnodes", 2), "one machine"),
        (
            lambda config, _: setattr(config.parallel_config, "data_parallel_size", 2),
            "data_parallel_size",
        ),
        (
            lambda config, _: setattr(config.kv_transfer_config, "kv_load_failure_policy", "fail"),
            "kv_load_failure_policy",
        ),
        (lambda config, _: setattr(config.model_config, "model", "org/name"), "model 'org/name'"),
        (lambda config, _: setattr(config.model_config, "tokenizer", "org/name"), "tokenizer 'org"),
        (lambda config, _: setattr(config.model_config, "hf_config_path", "/x"), "hf_config_path"),
        (lambda config, _: setattr(config.model_config, "enable_sleep_mode", True), "sleep"),
        (lambda config, _: setattr(config.parallel_config, "enable_dbo", True), "enable_dbo"),
    ],
)
def test_what_is_not_served_is_refused_at_start_with_the_reason(change, reason):
    config, groups = config_of("kv_producer", port=24099), groups_of()
    change(config, groups.kv_cache_groups)
    with pytest.raises(UserError, match=reason):
        check_config(config, groups, read_options(config))


@pytest.mark.parametrize(
    "spec",
    [
        SlidingWindowSpec(),
        ChunkedLocalAttentionSpec(),
        RSWASpec(),
        UniformTypeKVCacheSpecs({"0": FullAttentionSpec(), "1": SlidingWindowSpec()}),
    ],
)
def test_a_model_that_does_not_keep_all_of_a_prompt_s_kv_is_refused_at_start(spec):
    config = config_of("kv_consumer", port=24099)
    with pytest.raises(UserError, match=r"KV cache of \w+Spec: .* full attention is supported"):
        check_config(config, groups_of(spec), read_options(config))


@pytest.mark.parametrize(
    "spec",
    [
        FullAttentionSpec(),
        # All tokens' KV is kept; the kernels look at a window of it.
        FullAttentionSpec(sliding_window=32),
        UniformTypeKVCacheSpecs(
            {"0": FullAttentionSpec(), "1": FullAttentionSpec(sliding_window=32)}
        ),
    ],
)
def test_a_model_that_keeps_all_of_a_prompt_s_kv_is_served(spec):
    config = config_of("kv_consumer", port=24099)
    check_config(config, groups_of(spec), read_options(config))


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--speculative-config", object()),
        ("--hf-config-path", "/x"),
        ("--enable-sleep-mode", True),
        ("--enable-dbo", True),
        ("--ubatch-size", 2),
        ("--prefill-context-parallel-size", 2),
        ("--decode-context-parallel-size", 2),
        ("--data-parallel-size", 2),
        ("--nnodes", 2),
    ],
)
def test_a_fleets_document_refuses_flags_with_which_the_connector_does_not_start(flag, value):
    config, name = config_of("kv_producer", port=24099), flag.removeprefix("--").replace("-", "_")
    owners = (config, config.model_config, config.parallel_config)
    [owner] = [owner for owner in owners if hasattr(owner, name)]
    setattr(owner, name, value)
    with pytest.raises(UserError, match="XpydConnector: "):
        check_config(config, groups_of(), read_options(config))
    # How many ranks and replicas an instance has, the document says of engines of any type.
    is_size = flag == "--data-parallel-size"
    reason = "use spec.pools[].parallelism" if is_size else f"leave out .*{flag}"
    with pytest.raises(ValidationError, match=reason.replace("[", "\\[")):
        Engine(type="VLLM", connector="Xpyd", image="v", args=(f"{flag}={value}",))


@pytest.mark.parametrize(
    ("extra", "reason"),
    [
        ({"kv_prot": 1}, "kv_prot"),
        ({"mode": "push"}, "mode"),
        ({"host": "localhost"}, "literal ip"),
        ({"insecure": False}, "secret"),
        ({"transports": ["carrier"]}, "carrier"),
        ({"wait_s": 0}, "wait_s"),
        ({"discovery": "routers"}, "discovery"),
        ({"heartbeat_period_s": 0}, "heartbeat_period_s"),
    ],
)
def test_a_wrong_option_is_refused_by_its_name(extra, reason):
    with pytest.raises(UserError, match=reason):
        read_options(config_of("kv_producer", port=24099, **extra))


def test_routers_without_the_plugin_that_beats_to_them_are_refused(monkeypatch):
    config = config_of("kv_producer", port=24099, discovery="127.0.0.1:30001")
    groups = groups_of()
    check_config(config, groups, read_options(config))
    monkeypatch.setattr(engine_api, "is_plugin_named", lambda: False)
    with pytest.raises(UserError, match="VLLM_PLUGINS=xpyd"):
        check_config(config, groups, read_options(config))


def test_policy_fail_is_allowed_where_it_is_asked_for():
    config = config_of("kv_consumer", port=24099, policy="fail", fail_without_kv=True)
    check_config(config, groups_of(), read_options(config))


def test_the_page_has_every_option_with_its_default_and_every_metric():
    page = PAGE.read_text()
    options = [(field.name, json.dumps(field.default)) for field in msgspec.structs.fields(Options)]
    assert re.findall(r"^\| `((?!xpyd_)\w+)` \| `(.+?)` \|", page, re.M) == options
    rows = re.findall(r"^\| `xpyd_kv_(\w+)_total` \| (?:`(\w+)` )?\| (.+) \|$", page, re.M)
    assert {name: (label, text) for name, label, text in rows} == dict(COUNTERS)


@pytest.mark.parametrize(("role", "letter"), [("kv_producer", "P"), ("kv_consumer", "D")])
def test_the_command_lines_of_the_page_have_all_that_a_pair_needs(role, letter, tmp_path):
    """test_vllm_real runs them."""
    page = shown(role)
    assert page.environment == {"VLLM_PLUGINS": "xpyd"}
    assert page.transfer["kv_connector"] == CONNECTOR
    assert hasattr(importlib.import_module(page.transfer["kv_connector_module_path"]), CONNECTOR)
    given = page.transfer["kv_connector_extra_config"]
    assert given["host"] == page.flags["--host"], "routers reach what heartbeats say"
    key = tmp_path / "kv.key"
    key.write_text("a secret of the whole fleet\n")
    config = config_of(
        role, port=page.transfer["kv_port"], policy=page.transfer["kv_load_failure_policy"]
    )
    config.kv_transfer_config.kv_connector_extra_config = {**given, "key_file": str(key)}
    options = read_options(config)
    check_config(config, groups_of(), options)
    assert role_of(config) == letter
    assert given["key_file"]
    assert options.keys
    assert not options.accept_unsigned_pairs
    assert options.discovery
    assert (options.pool_bytes > 0) == (letter == "D")
    assert int(page.flags["--shutdown-timeout"]) > 0, "0 cuts all requests at SIGTERM"


def test_an_instance_is_p_or_d():
    with pytest.raises(UserError, match="kv_both"):
        role_of(config_of("kv_both", port=24099))


@pytest.mark.parametrize(
    ("dtype", "changes", "reason"),
    [
        (torch.float32, {"kv_cache_layout": "LBNHC"}, "LBNHC"),
        # One dtype of torch has the bytes of both.
        (torch.uint8, {"cache_dtype": "fp8_e4m3"}, "fp8_e4m3"),
        (torch.uint8, {"cache_dtype": "fp8_e5m2"}, "fp8_e5m2"),
        (torch.uint8, {}, "uint8"),
    ],
)
def test_caches_whose_bytes_have_no_name_are_refused(dtype, changes, reason):
    config = config_of("kv_producer", port=24099)
    vars(config.cache_config).update(changes)
    with pytest.raises(UserError, match=reason):
        worker._layout_name(config, torch.zeros((2, 1, 8, 16), dtype=dtype), on_gpu=False)


def test_vllm_is_asked_for_its_kernels_as_it_chooses_them(monkeypatch):
    asked = []
    kernels = importlib.import_module("vllm.v1.attention.backends.cpu_attn")
    monkeypatch.setattr(kernels, "_get_attn_isa", lambda *given: asked.append(given) or "vec")
    config = config_of("kv_producer", port=24099)
    config.model_config.dtype, config.cache_config.cache_dtype = torch.float32, "bfloat16"
    cache = torch.zeros((2, 1, 8, 16), dtype=torch.bfloat16)
    worker._layout_name(config, cache, on_gpu=False)
    assert asked == [(torch.float32, 8, 8, "bfloat16")]


def test_other_kernels_mean_another_layout(monkeypatch):
    config = config_of("kv_producer", port=24099)
    names = set()
    for isa in ("vec", "amx", "neon"):
        monkeypatch.setattr(engine_api, "cpu_isa", lambda *_, isa=isa: isa)
        names.add(worker._layout_name(config, torch.zeros((2, 1, 8, 16)), on_gpu=False))
    assert len(names) == 3


def test_an_untested_version_is_warned_of_and_a_checked_one_is_not(monkeypatch, caplog):
    check_engine(XpydConnector)
    monkeypatch.setattr(engine_api, "vllm_version", "0.33.0")
    check_engine(XpydConnector)
    assert not caplog.records
    monkeypatch.setattr(engine_api, "vllm_version", "0.99.0+cpu")
    check_engine(XpydConnector)
    assert "0.99.0" in caplog.text


def test_a_vllm_with_other_methods_is_refused_when_it_makes_the_connector(monkeypatch):
    class Other(engine_api.KVConnectorBase_V1):
        def build_connector_meta(self, scheduler_output, more): ...

    monkeypatch.setattr(engine_api, "KVConnectorBase_V1", Other)
    with pytest.raises(UserError, match=r"build_connector_meta: \(scheduler_output, more\)"):
        XpydConnector(config_of("kv_producer", port=24099), None, None)


def test_a_vllm_that_requires_a_method_more_is_refused_when_it_makes_the_connector():
    class Newer(ABC):
        @abstractmethod
        def warm_connector(self): ...

    class OverNewer(XpydConnector, Newer): ...

    with pytest.raises(UserError, match="warm_connector: not known to xpyd, and required"):
        OverNewer(config_of("kv_producer", port=24099), None, None)


def test_a_restart_is_another_incarnation():
    config = config_of("kv_producer", port=24099)
    before = incarnation_of(config)
    assert before == incarnation_of(config)
    config.instance_id = "54321"
    assert before != incarnation_of(config)
