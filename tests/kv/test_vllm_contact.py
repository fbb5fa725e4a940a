"""The first contact of D with a P of another engine, in fakes of vLLM, over real sockets."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.kv.pods import pod, until
from tests.kv.test_vllm_connector import POOL, alone, assert_all_is_back, prefill, prompt, serve
from tests.kv.vllm_engine import FakeVllm, pair
from tests.kv.vllm_fakes import (
    HEAD_DIM,
    HEADS,
    HOST,
    LAYERS,
    MODEL,
    FakeRequest,
    ids,
    kv_of,
)
from xpyd_core.compat import HEAD_TOKEN_KV, compat_factors
from xpyd_core.keys import fleet_keys
from xpyd_core.request_id import Address, TransferKey, pair_id_text
from xpyd_kv.connector.contact import REFUSED, UNVERIFIED, Contacts
from xpyd_kv.memory.api import Deviation
from xpyd_kv.values import KvLayout
from xpyd_kv.vllm import engine_api, worker
from xpyd_kv.vllm.options import role_of


@pytest.fixture
def mixed(monkeypatch) -> Callable[..., Any]:
    """Makes a D, and a P of another version of vLLM: another engine to each other."""

    @contextmanager
    def make(p: dict | None = None, d: dict | None = None) -> Iterator[tuple[FakeVllm, FakeVllm]]:
        at_d = FakeVllm("consumer", **(POOL if d is None else d))
        monkeypatch.setattr(engine_api, "vllm_version", "0.99.0")
        try:
            at_p = FakeVllm("producer", **(p or {}))
            try:
                yield at_p, at_d
            finally:
                at_p.close()
        finally:
            at_d.close()

    return make


def reasons(d: FakeVllm) -> dict[str, int]:
    """Why requests of D got no KV."""
    return dict(d.scheduler._half.connector.metrics.not_received)


def contact(p: FakeVllm, d: FakeVllm, tokens: list[int]) -> None:
    """A pair's first prompt, which D computes; until both have nothing of it any more."""
    assert serve(p, d, tokens).external == 0
    assert_all_is_back(p, d)


@pytest.mark.parametrize("mode", ["put_async", "put", "get"])
@pytest.mark.parametrize(("of_p", "of_d"), [({}, {}), ({"tp": 2}, {}), ({"pp": 2}, {"tp": 2})])
def test_kv_of_another_engine_is_used_once_a_prompt_has_been_compared(mixed, mode, of_p, of_d):
    with mixed({"mode": mode, "chunk": 30, **of_p}, {**POOL, **of_d}) as (p, d):
        contact(p, d, prompt(70))
        assert reasons(d) == {"unverified": 1}
        for number in range(1, 4):
            assert serve(p, d, prompt(60 + number, number)).external == 60 + number
        assert reasons(d) == {"unverified": 1}
        assert_all_is_back(p, d)


def test_d_without_a_prefix_cache_compares_too(mixed):
    with mixed({"caches": False}, {"caches": False, **POOL}) as (p, d):
        contact(p, d, prompt(70))
        assert serve(p, d, prompt(70)).external == 70


@pytest.mark.parametrize("sizes", [(8, 8), (16, 8), (8, 16)])
@pytest.mark.parametrize("turned", ["P", "D", "PD"])
def test_portable_kv_is_compared_token_by_token(mixed, sizes, turned, monkeypatch):
    real = worker._layout_name

    def layout_name(config, tensor, *, on_gpu):
        return real(config, tensor, on_gpu=on_gpu) if role_of(config) in turned else HEAD_TOKEN_KV

    monkeypatch.setattr(worker, "_layout_name", layout_name)
    of_p, of_d = (
        {"block_size": size, "transposed": letter in turned, "portable": True, **POOL}
        for letter, size in zip("PD", sizes, strict=True)
    )
    with mixed(of_p, of_d) as (p, d):
        contact(p, d, prompt(100))
        assert serve(p, d, prompt(90, 1)).external == 90


@pytest.mark.parametrize("liar", ["P", "D"])
@pytest.mark.parametrize("of_d", [{}, {"tp": 2}])
def test_a_connector_that_lies_about_its_layout_is_caught(mixed, liar, of_d, monkeypatch, caplog):
    """K is transposed in its blocks, and it says that it is not."""
    monkeypatch.setattr(worker, "_layout_name", lambda *_, **__: HEAD_TOKEN_KV)
    of_p, of_d = (
        {"transposed": letter == liar, "portable": True, **more}
        for letter, more in (("P", {}), ("D", {**POOL, **of_d}))
    )
    with mixed(of_p, of_d) as (p, d):
        contact(p, d, prompt(70))
        for number in range(1, 4):
            first, second = prefill(p, d, prompt(70, number))
            d.add(second)
            d.run(p, until=lambda second=second: second.answer is not None)
            assert second.external == 0
            # P may have answered before D's refusal came; then D knows it itself.
            if first.said["transfer"] == ["none"]:
                assert first.said["reason"] == ["incompatible:kv_values"]
        assert_all_is_back(p, d)
    (line,) = [r.getMessage() for r in caplog.records if "first contact" in r.getMessage()]
    assert "is not ours, and is never used; worst: K of layer" in line


@pytest.mark.parametrize(("by", "is_used"), [(1.0001, True), (1.01, False), (math.nan, False)])
def test_values_within_the_tolerance_pass_and_others_do_not(mixed, by, is_used):
    with mixed({"caches": False}, {"caches": False, **POOL}) as (p, d):
        spoiled = list(p.caches[0])[-1]
        real = p._write

        def write(rank: int, name: str, place: int, request: Any, number: int) -> None:
            real(rank, name, place, request, number)
            if name == spoiled:
                p.caches[rank][name][:, -1, :, -1] *= by

        p._write = write
        p.read = lambda request: kv_of(request.prompt_token_ids)  # its own answer is not looked at
        tokens = prompt(70)
        second = prefill_anyhow(p, d, tokens)
        d.add(second)
        d.run(p, until=lambda: second.answer is not None)
        assert_all_is_back(p, d)
        assert d.scheduler._half._consumer._contacts._verdicts.popitem()[1] == (
            "" if is_used else "incompatible:kv_values"
        )


def prefill_anyhow(p: FakeVllm, d: FakeVllm, tokens: list[int]) -> Any:
    of_p, of_d = ids(p, d)
    first = p.add(FakeRequest(of_p, tokens))
    p.run(d, until=lambda: first.answer is not None)
    return FakeRequest(of_d, tokens, first.said)


def test_another_start_of_p_is_compared_again(mixed):
    with mixed() as (p, d):
        contact(p, d, prompt(70))
        assert serve(p, d, prompt(70, 1)).external == 70
        again = FakeVllm("producer")
        try:
            again.config.instance_id = "another"
            contact(again, d, prompt(70, 2))
            assert serve(again, d, prompt(70, 3)).external == 70
        finally:
            again.close()
        assert reasons(d) == {"unverified": 2}


def test_a_d_without_room_beside_the_cache_computes_and_says_so(mixed, caplog):
    with mixed(d={}) as (p, d):
        for number in range(3):
            contact(p, d, prompt(70, number))
    assert "need a device buffer or a host pool" in caplog.text


def test_a_pool_that_is_full_for_a_time_leaves_the_comparison_to_a_later_prompt(
    mixed, monkeypatch, caplog
):
    version = engine_api.vllm_version
    # 16 blocks of 8 tokens of all layers and heads.
    with mixed(d={"pool_bytes": 16 * 8192}) as (p, d):
        monkeypatch.setattr(engine_api, "vllm_version", version)
        other = FakeVllm("producer")
        try:
            _, waiting = prefill(other, d, prompt(100, 1))
            assert serve(p, d, prompt(70, 2)).external == 0
            assert "no room beside the cache" in caplog.text
            d.add(waiting)
            d.run(other, until=lambda: waiting.answer is not None)
            assert waiting.external == 100
            contact(p, d, prompt(70, 3))
            assert serve(p, d, prompt(70, 4)).external == 70
        finally:
            other.close()


def test_a_client_that_leaves_before_the_comparison_leaves_nothing(mixed):
    with mixed(d={**POOL, "lease_s": 0.5, "chunk": 8}) as (p, d):
        _, second = prefill(p, d, prompt(70))
        d.add(second)
        until(lambda: d.step() or second.blocks, "D's blocks")
        d.abort(second)
        until(lambda: d.step() or not d.scheduler._half.connector.store.metrics().leases, "lease")
        assert_all_is_back(p, d)
        contact(p, d, prompt(70, 1))
        assert serve(p, d, prompt(70, 2)).external == 70


def test_prompts_that_say_too_little_are_computed_and_not_compared(mixed):
    with mixed() as (p, d):
        for number in range(3):
            contact(p, d, prompt(15, number))
        contact(p, d, prompt(16))
        assert serve(p, d, prompt(70, 9)).external == 70


ROPE = {"rope_theta": 500_000.0}
DIFFERENT = {
    "kv_layout": {"portable": False},
    "kv_dtype": {"dtype": torch.bfloat16},
    "rope_theta": {"overrides": ROPE},
    "rope_parameters": {"config": {"rope_parameters": {"rope_type": "default", **ROPE}}},
    "tokenizer": {"tokenizer": '{"model": {}}'},
}
"""Of a vLLM, beside an engine of ours. By the factor."""
SMALL = KvLayout(tuple(range(LAYERS)), HEADS, HEAD_DIM, 8, "float32", HEADS * 8 * 2 * HEAD_DIM * 4)


def changed(folder: Any, config: Any = None, tokenizer: str = "", **of_vllm: Any) -> dict[str, Any]:
    """What makes a fake vLLM whose checkpoint is ours, in the folder, but for this."""
    for file in MODEL.iterdir():
        (folder / file.name).symlink_to(file)
    own = {**json.loads((MODEL / "config.json").read_text()), **(config or {})}
    texts = {"config.json": json.dumps(own), "tokenizer.json": tokenizer}
    for name, text in texts.items():
        if text:
            (folder / name).unlink()
            (folder / name).write_text(text)
    return {"portable": True, "transposed": True, "model": folder, **of_vllm}


@pytest.fixture
def ours() -> Callable[[str], Any]:
    """Makes an engine of ours, as a P or a D, with the factors of `xpyd worker`."""
    factors = compat_factors(MODEL, model="demo-model", revision="", kv_dtype="float32")
    keys = fleet_keys(None, insecure=True)
    return lambda role: pod(role, layout=SMALL, factors=factors, keys=keys)


@pytest.mark.parametrize("factor", DIFFERENT)
def test_a_p_of_vllm_and_our_d_refuse_each_other_by_the_factor_s_name(factor, ours, tmp_path):
    p = FakeVllm("producer", chunk=1, **changed(tmp_path, **DIFFERENT[factor]))
    try:
        with ours("D") as d:
            name = pair_id_text(f"{HOST}:{p.port}", str(d.address), f"{7:032x}")
            first = p.add(FakeRequest(f"cmpl-{name}-0-1a2b3c4d", prompt(60)))
            p.run(until=lambda: first.answer is not None)
            assert first.said["reason"] == [f"incompatible:{factor}"]
    finally:
        p.close()


@pytest.mark.parametrize("factor", DIFFERENT)
def test_our_p_and_a_d_of_vllm_refuse_each_other_by_the_factor_s_name(factor, ours, tmp_path):
    d = FakeVllm("consumer", **POOL, **changed(tmp_path, **DIFFERENT[factor]))
    try:
        with ours("P") as p:
            producer, key, ids = p.kv.producer, TransferKey(f"{7:032x}", 0), tuple(prompt(60))
            to = Address(HOST, d.port)
            producer.offer(key, to, ids, prompt_tokens=60, salt=b"", now=time.monotonic())
            until(lambda: producer.poll(time.monotonic()) or producer.status(key).reason)
            assert producer.status(key).reason == f"incompatible:{factor}"
    finally:
        d.close()


def test_a_plain_vllm_says_the_same_as_an_engine_of_ours(tmp_path):
    longer = {"max_position_embeddings": 4096, "eos_token_id": 5}
    p = FakeVllm("producer", **changed(tmp_path, overrides=longer))
    try:
        [(_, rank)] = p.ranks
        assert rank.get_handshake_metadata().factors == compat_factors(
            MODEL, model="demo-model", revision="", kv_dtype="float32"
        )
    finally:
        p.close()


def test_equal_engines_are_not_compared():
    with pair({}, POOL) as (p, d):
        began = time.monotonic()
        assert serve(p, d, prompt(70)).external == 70
        assert reasons(d) == {}
        assert time.monotonic() >= began


LONG = {"rope_type": "longrope", "original_max_position_embeddings": 64}
SHORT = {"rope": LONG, "max_model_len": 64}


@pytest.mark.parametrize(
    ("of_p", "of_d", "factor"),
    [
        ({"overrides": {"partial_rotary_factor": 0.5}}, {}, "hf_overrides"),
        ({"overrides": {"text_config": {"rope_theta": 1}}}, {}, "hf_overrides"),
        ({}, {"quantization": "fp8"}, "quantization"),
        ({"rope": LONG, "max_model_len": 65}, SHORT, "long_rope"),
        ({"rope": {"sliding_attention": {}, "full_attention": LONG}}, SHORT, "long_rope"),
    ],
)
def test_what_two_vllms_are_told_of_one_checkpoint_is_refused_by_its_name(of_p, of_d, factor):
    with pair({**of_p, "chunk": 1}, {**of_d, "wait_s": 0.5}) as (p, d):
        first, second = prefill(p, d, prompt(60))
        assert first.said is not None
        assert first.said["reason"] == [f"incompatible:{factor}"]
        d.add(second)
        d.run(p, until=lambda: second.answer is not None)
        assert (second.answer, second.external) == (alone(prompt(60)), 0)


@pytest.mark.parametrize(
    "how", [{"overrides": {"partial_rotary_factor": 0.5}}, {"quantization": "fp8"}, {"rope": LONG}]
)
def test_two_vllms_that_are_told_the_same_of_a_checkpoint_pair(how):
    with pair(how, how) as (p, d):
        assert serve(p, d, prompt(60)).external == 60


@dataclass(eq=False)
class FakeLanding:
    """KV beside the cache: `found` is what a comparison raises, or the deviation that it finds as
    soon as it `is_over`."""

    found: Exception | float
    is_over: bool = False
    is_free: bool = False
    compared: list[tuple[Any, int]] = field(default_factory=list)

    def compare(self, block_ids: Any, tokens: int) -> Any:
        self.compared.append((block_ids, tokens))
        if isinstance(self.found, Exception):
            raise self.found
        worst = Deviation(deviation=self.found)
        return SimpleNamespace(is_done=lambda: self.is_over, worst=worst)

    def free(self) -> None:
        self.is_free = True


def meet(contacts: Contacts, seed: int, landing: FakeLanding) -> Any:
    """What the contacts say of a prompt of one P, where there is room for it."""
    key, prompt = TransferKey(f"{seed:032x}", 0), SimpleNamespace(token_ids=range(70))
    offered: Any = SimpleNamespace(key=key, engine="other", incarnation="one", prompt=prompt)
    store: Any = SimpleNamespace(take_staged=lambda *_: landing)
    return contacts.meet(offered, 9, store)


def begin(contacts: Contacts, seed: int, landing: FakeLanding, now: float) -> list[str]:
    """Compare this prompt; what has been given back of D's blocks."""
    released: list[str] = []
    assert meet(contacts, seed, landing) is landing
    found = contacts.find(TransferKey(f"{seed:032x}", 0))
    assert found is not None
    found.own, found.release = (4, 5), lambda: released.append("own")
    compared: Any = landing
    contacts.compare(found, compared, now)
    assert landing.compared == [((4, 5), 70)]
    return released


def test_a_comparison_that_fails_leaves_nothing_and_decides_nothing(caplog):
    contacts, landing = Contacts("", "float32"), FakeLanding(RuntimeError("no"))
    assert begin(contacts, 1, landing, 0.0) == ["own"]
    assert landing.is_free
    assert not contacts.is_comparing
    assert "could not be compared" in caplog.text
    begin(contacts, 2, FakeLanding(1e-5, is_over=True), 1.0)
    contacts.poll(1.0)
    assert meet(contacts, 3, FakeLanding(0.0)) is None


def test_a_comparison_that_does_not_end_is_given_up_at_its_deadline(caplog):
    contacts, landing = Contacts("", "float32"), FakeLanding(1e-5)
    released = begin(contacts, 1, landing, 100.0)
    until_s = contacts.next_deadline()
    assert until_s is not None
    contacts.poll(until_s - 0.1)
    assert (contacts.is_comparing, landing.is_free, released) == (True, False, [])
    assert meet(contacts, 2, FakeLanding(0.0)) == UNVERIFIED
    contacts.poll(until_s)
    assert (contacts.is_comparing, landing.is_free, released) == (False, True, ["own"])
    assert contacts.next_deadline() is None
    assert "was not compared in time" in caplog.text
    begin(contacts, 3, FakeLanding(2.0, is_over=True), until_s)
    contacts.poll(until_s)
    assert meet(contacts, 4, FakeLanding(0.0)) == REFUSED
