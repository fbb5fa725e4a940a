"""The memory plan: sizes given are honoured or refused, the others are chosen to fit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.operator.fleets import cpu_pool, parsed
from xpyd_core.errors import UserError
from xpyd_operator.document.engines import Model
from xpyd_operator.manifests.resources import (
    CACHE_LEAST_BYTES,
    MIB,
    PROCESS_BYTES,
    flag_value,
)
from xpyd_operator.up.checks import draft_bytes, expert_bytes, locate_model, weights_bytes
from xpyd_operator.up.memory import Machine, check_room, plan_memory, read_machine

GIB = 1 << 30


def fleet(args=(), kv=None, parallelism=None):
    decode = cpu_pool("d", "Decode", parallelism=parallelism or {})
    pools = [cpu_pool("p", "Prefill"), decode]
    return parsed(engine={"args": list(args)}, pools=pools, kvTransfer=kv or {})


def plan(
    available,
    *,
    args=(),
    kv=None,
    replicas=(1, 3),
    cores=8,
    weights=0,
    experts=0,
    parallelism=None,
):
    machine = Machine(available, cores)
    document = fleet(args, kv, parallelism)
    return plan_memory(document, replicas, machine, weights_bytes=weights, expert_bytes=experts)


def test_a_large_machine_gives_each_engine_its_most():
    found = plan(400 * GIB)
    assert found.of("p").args == (f"--kv-cache-memory={GIB}",)
    assert found.of("d").args == (f"--kv-host-pool-size={4 * GIB}", f"--kv-cache-memory={GIB}")
    assert found.of("d").buffer_bytes == GIB // 10
    assert (found.of("p").buffer_bytes, found.of("p").host_pool_bytes) == (0, 0)


def test_given_sizes_are_kept_and_get_no_flag_from_the_plan():
    kv = {"bufferSize": "64Mi", "hostPoolSize": "256Mi"}
    found = plan(8 * GIB, args=["--kv-cache-memory=100Mi"], kv=kv)
    assert (found.of("p").args, found.of("d").args) == ((), ())
    d = found.of("d")
    assert (d.cache_bytes, d.buffer_bytes, d.host_pool_bytes) == (100 * MIB, 64 * MIB, 256 * MIB)
    assert d.total_bytes == PROCESS_BYTES + 420 * MIB


@pytest.mark.parametrize("mode", ["PutAsync", "Put", "Get"])
def test_p_has_buffer_and_pool_where_it_keeps_kv_until_it_is_asked_for(mode):
    found = plan(8 * GIB, kv={"mode": mode, "bufferSize": "64Mi", "hostPoolSize": "256Mi"})
    p = found.of("p")
    wanted = (64 * MIB, 256 * MIB) if mode == "Get" else (0, 0)
    assert (p.buffer_bytes, p.host_pool_bytes) == wanted
    chosen = plan(8 * GIB, kv={"mode": mode}).of("p")
    given = [arg for arg in chosen.args if arg.startswith("--kv-host-pool-size=")]
    assert (chosen.host_pool_bytes > 0) == bool(given) == (mode == "Get")


def test_a_fleet_that_does_not_fit_is_refused_with_the_numbers():
    with pytest.raises(UserError) as caught:
        plan(4 * GIB, kv={"hostPoolSize": "8Gi"})
    text = str(caught.value)
    assert text.startswith("the fleet does not fit this machine: it needs 27.0 GiB of memory,")
    assert "3.2 GiB (80 % of 4.0 GiB available) can be used" in text
    assert "8.0 GiB" in text.splitlines()[3]
    assert "spec.kvTransfer.hostPoolSize" in text


@pytest.mark.parametrize(
    ("cores", "replicas", "threads"), [(2, (1, 3), 1), (8, (1, 3), 2), (8, (0, 0), 8)]
)
def test_cores_are_shared_and_nobody_gets_none(cores, replicas, threads):
    assert plan(64 * GIB, cores=cores, replicas=replicas).threads == threads


def test_each_rank_is_a_process_with_its_cache_and_a_share_of_weights_buffer_and_pool():
    kv = {"bufferSize": "64Mi", "hostPoolSize": "256Mi"}
    found = plan(
        64 * GIB,
        args=["--kv-cache-memory=100Mi"],
        kv=kv,
        weights=GIB,
        parallelism={"tensor": 2, "pipeline": 3},
    )
    p, d = found.of("p"), found.of("d")
    assert p.total_bytes == PROCESS_BYTES + GIB + 100 * MIB
    assert d.total_bytes == 7 * PROCESS_BYTES + GIB + (600 + 64 + 256) * MIB
    assert found.total_bytes == p.total_bytes + 3 * d.total_bytes
    head, of_p, of_d, total = found.table().splitlines()
    assert head.split()[2:5] == ["engines", "ranks", "process"]
    assert of_p.split()[:5] == ["p", "1", "1", "700.0", "MiB"]
    assert of_d.split()[:5] == ["d", "3", "6", "4.8", "GiB"]
    assert of_d.split()[7:] == ["600.0", "MiB", "64.0", "MiB", "256.0", "MiB"]
    assert total.endswith("1 CPU threads each rank")


def test_each_replica_has_its_weights_its_ranks_and_their_caches():
    """Buffer and host pool are the instance's, which its replicas share."""
    given = {
        "args": ["--kv-cache-memory=100Mi"],
        "kv": {"bufferSize": "64Mi", "hostPoolSize": "256Mi"},
        "weights": GIB,
    }
    found = plan(64 * GIB, cores=30, parallelism={"tensor": 2, "data": 3}, **given)
    d = found.of("d")
    assert d.total_bytes == 7 * PROCESS_BYTES + 3 * GIB + (600 + 64 + 256) * MIB
    assert (d.ranks, d.weights_bytes, found.threads) == (6, 3 * GIB, 1)
    two = plan(64 * GIB, parallelism={"data": 2}, **given).of("d")
    assert two.total_bytes == 3 * PROCESS_BYTES + 2 * GIB + (200 + 64 + 256) * MIB
    with pytest.raises(UserError, match=r"it needs 22\.5 GiB"):
        plan(16 * GIB, parallelism={"data": 2}, **(given | {"weights": 2 * GIB}))


def test_of_replicas_that_come_and_go_those_count_that_a_local_engine_has():
    few, elastic = ({"data": 1}, {"data": 1, "maxData": 8})
    assert plan(6 * GIB, cores=8, parallelism=elastic) == plan(6 * GIB, cores=8, parallelism=few)


def test_replicas_that_share_experts_hold_them_once():
    weights = {"weights": 10 * GIB, "experts": 8 * GIB}
    copies = plan(400 * GIB, parallelism={"data": 4}, **weights).of("d")
    assert copies.weights_bytes == 40 * GIB
    shared = plan(400 * GIB, parallelism={"data": 4, "expert": 4}, **weights).of("d")
    assert shared.weights_bytes == 4 * 2 * GIB + 8 * GIB
    args = ["--enable-expert-parallel"]
    by_args = plan(400 * GIB, args=args, parallelism={"data": 4}, **weights)
    assert by_args.of("d").weights_bytes == shared.weights_bytes
    assert by_args.of("p").weights_bytes == 10 * GIB


def test_a_buffer_in_percent_is_of_the_caches_of_all_ranks():
    layout = {"tensor": 2, "pipeline": 2}
    given = plan(
        64 * GIB, args=["--kv-cache-memory=100Mi"], kv={"bufferSize": "10%"}, parallelism=layout
    )
    assert given.of("d").buffer_bytes == 40 * MIB
    chosen = plan(64 * GIB, kv={"bufferSize": "50%"}, parallelism=layout).of("d")
    assert chosen.buffer_bytes == 2 * chosen.cache_bytes
    assert chosen.args[0] == f"--kv-host-pool-size={chosen.host_pool_bytes}"


def test_cores_are_shared_among_the_ranks_of_all_engines():
    layout = {"tensor": 2, "pipeline": 2}
    assert plan(64 * GIB, cores=18, replicas=(1, 2), parallelism=layout).threads == 2
    assert plan(64 * GIB, cores=2, replicas=(1, 2), parallelism=layout).threads == 1


def test_a_fleet_whose_ranks_do_not_fit_is_refused_where_one_rank_would():
    assert plan(4 * GIB, replicas=(1, 1))
    with pytest.raises(UserError, match="the fleet does not fit this machine"):
        plan(4 * GIB, replicas=(1, 1), parallelism={"tensor": 4})


@settings(max_examples=60, deadline=None)
@given(
    layout=st.sampled_from([{}, {"tensor": 2}, {"tensor": 2, "pipeline": 4}, {"data": 3}]),
    available=st.integers(0, 200 * GIB),
    replicas=st.tuples(st.integers(0, 8), st.integers(0, 8)),
    cache=st.none() | st.integers(1, 4096),
    buffer=st.none() | st.sampled_from(["1%", "99%", "0", "1Gi"]),
    pool=st.none() | st.integers(0, 8192),
    weights=st.integers(0, 8 * GIB),
)
def test_a_plan_always_fits_and_keeps_what_was_given(
    layout, available, replicas, cache, buffer, pool, weights
):
    args = [] if cache is None else [f"--kv-cache-memory={cache}Mi"]
    kv = {"bufferSize": buffer} if buffer else {}
    kv |= {} if pool is None else {"hostPoolSize": f"{pool}Mi"}
    try:
        found = plan(
            available, args=args, kv=kv, replicas=replicas, weights=weights, parallelism=layout
        )
    except UserError:
        # Right only if even the least of what is open does not fit.
        least = CACHE_LEAST_BYTES if cache is None else cache * MIB
        most_buffer = least + GIB  # 99 % of the cache, or the 1 GiB that was asked for
        ranks = (1, layout.get("tensor", 1) * layout.get("pipeline", 1))
        most = sum(
            count * ((each + 1) * PROCESS_BYTES + weights + each * (least + most_buffer))
            + count * (pool or 0) * MIB
            for count, each in zip(replicas, ranks, strict=True)
        )
        assert most > available * 8 // 10
        return
    assert found.total_bytes <= found.usable_bytes or sum(replicas) == 0
    for engine in found.pools:
        assert (
            engine.cache_bytes == cache * MIB if cache else engine.cache_bytes >= CACHE_LEAST_BYTES
        )
    if pool is not None:
        assert found.of("d").host_pool_bytes == pool * MIB


def test_more_engines_need_room_now():
    found = plan(64 * GIB, args=["--kv-cache-memory=1Gi"], kv={"hostPoolSize": "1Gi"})
    check_room(found, "d", 1, Machine(4 * GIB, 2))
    with pytest.raises(UserError, match=r"4 more of pool d need 11\.1 GiB of memory, 3\.2 GiB"):
        check_room(found, "d", 4, Machine(4 * GIB, 2))


@pytest.mark.parametrize(
    ("args", "value"),
    [
        ([], None),
        (["--x=1", "--x", "2"], "2"),
        (["--x"], None),
        (["--xy=1"], None),
        (["--x=a=b"], "a=b"),
    ],
)
def test_flags_are_found_in_both_spellings_the_last_one_wins(args, value):
    assert flag_value(args, "--x") == value


def test_this_machine_has_memory_and_cores():
    machine = read_machine()
    assert machine.available_bytes > 0
    assert machine.cores >= 1


def test_weights_count_twice_where_half_precision_is_widened(tmp_path):
    (tmp_path / "config.json").write_text('{"dtype": "bfloat16"}')
    (tmp_path / "a.safetensors").write_bytes(bytes(100))
    assert weights_bytes(str(tmp_path), []) == 200
    assert weights_bytes(str(tmp_path), ["--dtype=bfloat16"]) == 100
    (tmp_path / "config.json").write_text('{"torch_dtype": "float32"}')
    assert weights_bytes(str(tmp_path), []) == 100


def test_what_drafts_takes_memory_too(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(bytes(100))
    given = json.dumps({"model": f"file://{tmp_path}", "num_speculative_tokens": 3})
    assert draft_bytes(["--speculative-config", given]) == 100
    assert draft_bytes([f"--speculative-config={given}"]) == 100
    for none in (
        [],
        ["--speculative-config", '{"method": "ngram"}'],
        ["--speculative-config", "["],
    ):
        assert draft_bytes(none) == 0
    assert weights_bytes("hf://org/name", []) == 0


def write_shards(folder: Path) -> None:
    names = (
        "model.embed_tokens",
        "model.layers.0.mlp.experts.0.up_proj",
        "model.layers.0.mlp.gate",
    )
    for index, sizes in enumerate(((10, 30, 2), (20, 0, 0))):
        header, at = {"__metadata__": {"format": "pt"}}, 0
        for name, size in zip(names, sizes, strict=True):
            header[f"{name}.weight"] = {"dtype": "BF16", "data_offsets": [at, at + size]}
            at += size
        text = json.dumps(header).encode()
        content = len(text).to_bytes(8, "little") + text + bytes(at)
        (folder / f"{index}.safetensors").write_bytes(content)


def test_an_embedding_that_is_the_head_too_counts_twice(tmp_path: Path) -> None:
    write_shards(tmp_path)
    (tmp_path / "config.json").write_text('{"dtype": "bfloat16"}')
    untied = weights_bytes(str(tmp_path), ["--dtype=bfloat16"])
    experts = expert_bytes(str(tmp_path), ["--dtype=bfloat16"])
    (tmp_path / "config.json").write_text('{"dtype": "bfloat16", "tie_word_embeddings": true}')
    tied = weights_bytes(str(tmp_path), ["--dtype=bfloat16"])
    assert tied == untied + 30
    assert weights_bytes(str(tmp_path), []) == 2 * tied
    assert expert_bytes(str(tmp_path), ["--dtype=bfloat16"]) == tied * 30 // 92 < experts


def test_tensors_of_experts_are_told_by_their_names(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"dtype": "bfloat16"}')
    write_shards(tmp_path)
    whole = weights_bytes(str(tmp_path), ["--dtype=bfloat16"])
    assert expert_bytes(str(tmp_path), ["--dtype=bfloat16"]) == whole * 30 // 62
    assert expert_bytes(str(tmp_path), []) == 2 * whole * 30 // 62
    assert expert_bytes("hf://org/name", []) == 0


@pytest.mark.parametrize("content", [b"", bytes(100), b"\x02" + bytes(7) + b"[]", b"\xff" * 20])
def test_a_file_that_is_no_checkpoint_holds_no_experts(tmp_path, content):
    (tmp_path / "a.safetensors").write_bytes(content)
    assert expert_bytes(str(tmp_path), []) == 0


def test_a_model_path_starts_at_the_document(tmp_path):
    (tmp_path / "m").mkdir()
    (tmp_path / "docs").mkdir()
    with pytest.raises(UserError, match=r"spec\.model\.uri: .* no config\.json in it"):
        locate_model(Model(uri="file://../m"), tmp_path / "docs")
    (tmp_path / "m" / "config.json").write_text("{}")
    assert locate_model(Model(uri="file://../m"), tmp_path / "docs") == str(tmp_path / "m")
    assert locate_model(Model(uri=f"file://{tmp_path}/m"), tmp_path) == str(tmp_path / "m")
    assert locate_model(Model(uri="hf://org/name"), tmp_path) == "hf://org/name"
    with pytest.raises(UserError, match="no such folder"):
        locate_model(Model(uri="file://nowhere"), tmp_path)


def test_what_the_ranks_may_use_is_used():
    found = plan(8 * GIB, replicas=(1, 1), parallelism={"tensor": 4})
    assert 0.9 * found.usable_bytes < found.total_bytes <= found.usable_bytes
