"""Our connector in a fake of vLLM's engine: both halves of a P and a D, over real sockets."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace

import pytest
import torch

from tests.kv import vllm_engine
from tests.kv.pods import until
from tests.kv.vllm_engine import FakeVllm, pair
from tests.kv.vllm_fakes import FakePool, FakeRequest, Status, answer_of, ids, kv_of
from xpyd_core.compat import HEAD_TOKEN_KV
from xpyd_core.errors import UserError
from xpyd_core.keys import call_mac
from xpyd_core.request_id import TransferKey, parse_pair_id
from xpyd_kv.vllm import channel, engine_api, worker
from xpyd_kv.vllm.decode import GivenBlocks, Loading
from xpyd_kv.vllm.options import role_of

BUFFER = {"buffer_bytes": 1 << 20}
POOL = {"pool_bytes": 1 << 20}


def prompt(tokens: int, seed: int = 0) -> list[int]:
    return [(i * 7 + seed * 131 + 3) % 3000 for i in range(tokens)]


def alone(tokens: list[int]) -> int:
    """What one vLLM answers."""
    return answer_of(kv_of(tokens))


def prefill(p: FakeVllm, d: FakeVllm, tokens: list[int], **how) -> tuple[FakeRequest, FakeRequest]:
    """P's request, which is over; and D's, which is not added."""
    of_p, of_d = ids(p, d, **how)
    first = p.add(FakeRequest(of_p, tokens))
    p.run(d, until=lambda: first.answer is not None)
    assert first.answer == alone(tokens)
    return first, FakeRequest(of_d, tokens, first.said)


def serve(p: FakeVllm, d: FakeVllm, tokens: list[int], **how) -> FakeRequest:
    """P's request first, then D's, as a router does; D's."""
    _, second = prefill(p, d, tokens, **how)
    d.add(second)
    d.run(p, until=lambda: second.answer is not None)
    assert second.answer == alone(tokens)
    return second


def assert_all_is_back(p: FakeVllm, d: FakeVllm) -> None:
    p.run(d, until=lambda: not p.has_requests() and not d.has_requests())
    for engine in (p, d):
        assert engine.pool.get_num_free_blocks() == engine.pool.num_gpu_blocks - 1
        connector = engine.scheduler._half.connector
        if connector.store is not None:
            until(lambda store=connector.store: not store.metrics().leases, "landings given back")


@pytest.mark.parametrize("mode", ["put_async", "put", "get"])
@pytest.mark.parametrize("store", [{}, BUFFER, POOL], ids=["blocks", "buffer", "pool"])
def test_d_answers_as_one_engine_and_loads_the_whole_prompt(mode, store):
    with pair({"chunk": 50, "mode": mode}, store) as (p, d):
        for number, length in enumerate((1, 2, 7, 8, 9, 16, 100, 131)):
            request = serve(p, d, prompt(length, number), is_chat=number % 2 == 1)
            assert request.external == length
        assert d.recomputed == []
        assert_all_is_back(p, d)
        where = {"get": "pulled"}.get(mode) or next((k[:-6] for k in store), "deferred")
        assert d.stats.data["landings"] == {where: 8}


@pytest.mark.parametrize("store", [{}, POOL], ids=["blocks", "pool"])
def test_zeros_in_place_of_the_kv_change_the_answer(store):
    with pair({}, store) as (p, d):
        _, request = prefill(p, d, prompt(100))
        d.add(request)
        d.run(p, until=lambda: request.request_id in d.arrived)
        for cache in d.caches[0].values():
            cache[request.blocks] = 0
        d.run(p, until=lambda: request.answer is not None)
        assert request.answer != alone(request.prompt_token_ids)


@pytest.mark.parametrize(
    ("of_p", "of_d"),
    [
        ({"tp": 2}, {}),
        ({}, {"tp": 4}),
        ({"pp": 2}, {"tp": 2}),
        ({"tp": 2, "pp": 2}, {"pp": 2}),
    ],
)
@pytest.mark.parametrize("store", [{}, POOL], ids=["blocks", "pool"])
def test_any_division_into_ranks_goes_with_any_other(of_p, of_d, store):
    with pair({"chunk": 30, **of_p}, {**of_d, **store}) as (p, d):
        for number in range(3):
            assert serve(p, d, prompt(70 + number, number)).external == 70 + number
        assert_all_is_back(p, d)


def test_many_requests_at_once_with_few_blocks():
    with pair({"chunk": 64, "blocks": 60}, {"blocks": 40, "pool_bytes": 1 << 16}) as (p, d):
        pairs = [(ids(p, d), prompt(5 + 13 * (n % 9), n // 2)) for n in range(30)]
        firsts = [p.add(FakeRequest(name, tokens)) for (name, _), tokens in pairs]
        seconds = [d.add(FakeRequest(name, tokens)) for (_, name), tokens in pairs]
        p.run(d, until=lambda: all(r.answer is not None for r in (*firsts, *seconds)))
        for request in (*firsts, *seconds):
            assert request.answer == alone(request.prompt_token_ids)
        assert_all_is_back(p, d)


@pytest.mark.parametrize("state", ["waiting", "loading", "arrived"])
@pytest.mark.parametrize("store", [{}, POOL], ids=["blocks", "pool"])
def test_a_client_that_leaves_d_leaves_nothing_there(state, store):
    with pair({"caches": False}, {"caches": False, **store}) as (p, d):
        of_p, of_d = ids(p, d)
        tokens = prompt(150)
        request = d.add(FakeRequest(of_d, tokens))
        if state == "waiting":
            d.step()
            d.abort(request)
        first = p.add(FakeRequest(of_p, tokens))
        if state == "loading":
            p.run(d, until=lambda: request.status is Status.WAITING_FOR_REMOTE_KVS)
            d.abort(request)
        elif state == "arrived":
            p.run(d, until=lambda: request.request_id in d.arrived)
            d.abort(request)
        p.run(d, until=lambda: first.answer is not None)
        assert_all_is_back(p, d)
        assert serve(p, d, prompt(150, 2)).external == 150
        assert_all_is_back(p, d)


def test_vllm_keeps_the_blocks_of_a_request_that_has_gone_until_no_write_can_land():
    with pair() as (p, d):
        _, request = prefill(p, d, prompt(90))
        gate = threading.Event()
        p.ranks[0][1]._rank._endpoint.call(lambda: gate.wait(20.0))
        d.add(request)
        loading = d.scheduler._half._loadings[request.request_id]
        d.run(p, until=lambda: loading.is_taken)
        d.abort(request)
        for _ in range(20):
            d.step()
        assert d.requests
        gate.set()
        assert_all_is_back(p, d)


def test_in_mode_put_p_answers_when_d_has_the_kv():
    with pair({"mode": "put", "hold_s": 60.0}, POOL) as (p, d):
        first = p.add(FakeRequest(ids(p, d)[0], prompt(100)))
        gate = threading.Event()
        d.ranks[0][1]._rank._endpoint.call(lambda: gate.wait(20.0))
        stepping = threading.Thread(target=p.step)
        stepping.start()
        stepping.join(0.3)
        assert stepping.is_alive()
        gate.set()
        stepping.join(20.0)
        assert first.said["transfer"] == ["granted"]
        assert not p.scheduler.has_pending_push_work()


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_a_client_that_leaves_p_leaves_nothing_there_and_d_computes(steps):
    with pair({"chunk": 20}, {"wait_s": 0.5}) as (p, d):
        of_p, of_d = ids(p, d)
        first = p.add(FakeRequest(of_p, prompt(100)))
        for _ in range(steps):
            p.step()
        p.abort(first)
        p.run(d, until=lambda: not p.has_requests())
        second = d.add(FakeRequest(of_d, prompt(100)))
        d.run(p, until=lambda: second.answer is not None)
        assert second.answer == alone(prompt(100))
        assert d.stats.data["recomputed_tokens"] == 100
        assert_all_is_back(p, d)


def test_d_does_not_wait_for_kv_of_which_p_says_that_it_will_not_come():
    with pair({}, {"wait_s": 600.0}) as (p, d):
        _, request = prefill(p, d, prompt(30))
        request.kv_transfer_params = {"transfer": ["none"], "reason": ["auth"]}
        d.add(request)
        d.step()
        assert request.answer == alone(prompt(30))


def test_p_says_how_the_transfer_is():
    with pair() as (p, d):
        first, second = prefill(p, d, prompt(30))
        assert first.said["transfer"] in (["pending"], ["granted"])
        d.add(second)
        d.run(p, until=lambda: second.answer is not None)
        assert second.said is None
        # Nobody listens there.
        of_p, _ = ids(p, SimpleNamespace(port=9999))
        lost = p.add(FakeRequest(of_p, prompt(200)))
        p.chunk = 5
        p.run(d, until=lambda: lost.answer is not None)
        assert lost.said == {
            "transfer": ["none"],
            "reason": ["unreachable"],
            "decode_incarnation": "",
        }
        assert_all_is_back(p, d)


def test_a_p_that_dies_while_d_loads_costs_d_the_prompt_and_no_wait():
    with pair({"mode": "get"}, {"wait_s": 600.0}) as (p, d):
        uuid = f"{90:032x}"
        _, request = prefill(p, d, prompt(90), uuid=uuid)
        # Of KV that was not even offered D cannot know that it will not come.
        consumer = d.scheduler._half.connector.consumer
        d.run(p, until=lambda: consumer.offered(TransferKey(uuid, 0)) is not None)
        p.close()
        d.add(request)
        d.run(until=lambda: request.answer is not None)
        assert request.answer == alone(prompt(90))
        assert d.pool.get_num_free_blocks() == d.pool.num_gpu_blocks - 1


@pytest.mark.parametrize("caches", [True, False])
def test_a_preempted_prompt_is_offered_again(caches):
    with pair({"chunk": 20, "caches": caches}, {"caches": caches}) as (p, d):
        of_p, of_d = ids(p, d)
        first = p.add(FakeRequest(of_p, prompt(100)))
        p.step()
        p.step()
        p.preempt(first)
        p.run(d, until=lambda: first.answer is not None)
        second = d.add(FakeRequest(of_d, prompt(100), first.said))
        d.run(p, until=lambda: second.answer is not None)
        assert (second.answer, second.external) == (alone(prompt(100)), 100)
        assert_all_is_back(p, d)


def test_reset_cache_drops_kv_that_no_request_has():
    with pair({"caches": False}, {**POOL, "wait_s": 0.3}) as (p, d):
        _, request = prefill(p, d, prompt(60))
        p.run(d, until=lambda: not p.has_requests())
        assert d.scheduler.reset_cache() is True
        d.add(request)
        d.run(p, until=lambda: request.answer is not None)
        assert (request.answer, request.external) == (alone(prompt(60)), 0)
        assert_all_is_back(p, d)


def test_what_vllm_does_not_load_after_all_is_forgotten():
    with pair() as (p, d):
        _, request = prefill(p, d, prompt(60))
        asks = d.scheduler.get_num_new_matched_tokens

        def overridden(*args):
            external, _ = asks(*args)
            return (None, False) if external is None else (0, False)

        # As for prompt logprobs.
        d.scheduler.get_num_new_matched_tokens = overridden
        d.add(request)
        d.run(p, until=lambda: request.answer is not None)
        assert request.answer == alone(prompt(60))
        assert_all_is_back(p, d)


@pytest.mark.parametrize("store", [{}, POOL], ids=["blocks", "pool"])
def test_a_load_whose_blocks_vllm_names_later_runs_then(store):
    with pair({}, {"defers_loads": True, **store}) as (p, d):
        _, request = prefill(p, d, prompt(90))
        d.add(request)
        d.run(p, until=lambda: request.request_id in d.deferred)
        for _ in range(20):
            p.step()
            d.step()
        assert request.status is Status.WAITING_FOR_REMOTE_KVS
        d.start_loads()
        d.run(p, until=lambda: request.answer is not None)
        assert (request.answer, request.external) == (alone(prompt(90)), 90)
        assert d.recomputed == []
        assert_all_is_back(p, d)


@pytest.mark.parametrize("store", [{}, POOL], ids=["blocks", "pool"])
def test_a_load_whose_blocks_vllm_never_names_leaves_nothing(store):
    with pair({}, {"defers_loads": True, **store}) as (p, d):
        _, request = prefill(p, d, prompt(90))
        d.add(request)
        d.run(p, until=lambda: request.request_id in d.deferred)
        d.abort(request)
        assert_all_is_back(p, d)


def test_a_load_that_is_named_when_p_has_gone_is_computed():
    with pair({}, {"defers_loads": True, "wait_s": 600.0}) as (p, d):
        _, request = prefill(p, d, prompt(90))
        d.add(request)
        d.run(p, until=lambda: request.request_id in d.deferred)
        p.close()
        d.start_loads()
        d.run(until=lambda: request.answer is not None)
        assert request.answer == alone(prompt(90))
        assert d.recomputed == [request.request_id]
        assert d.pool.get_num_free_blocks() == d.pool.num_gpu_blocks - 1


def test_blocks_of_different_sizes_go_together_where_one_can_be_cut(monkeypatch):
    # As on CUDA, where a block is K and V of each token.
    monkeypatch.setattr(worker, "transposed_k", lambda _: HEAD_TOKEN_KV)
    with pair({"block_size": 16}, {"block_size": 8, **POOL}) as (p, d):
        assert serve(p, d, prompt(90)).external == 90
        # D has 3 blocks of 8 of it: its landing begins before, and is adopted behind them.
        assert serve(p, d, [*prompt(29), *prompt(40, 7)]).external == 69 - 24
        assert d.recomputed == []
        assert_all_is_back(p, d)


def test_a_landing_that_cannot_begin_where_vllm_s_blocks_do_is_given_up(monkeypatch):
    monkeypatch.setattr(worker, "transposed_k", lambda _: HEAD_TOKEN_KV)
    with pair({"block_size": 16}, {"block_size": 8}) as (p, d):
        serve(p, d, prompt(29))
        request = serve(p, d, [*prompt(29), *prompt(40, 7)])
        assert d.recomputed == [request.request_id]
        assert_all_is_back(p, d)


@pytest.mark.parametrize("sizes", [(8, 8), (16, 8), (8, 16)])
@pytest.mark.parametrize("turned", ["P", "D", "PD"])
@pytest.mark.parametrize("mode", ["put_async", "get"])
def test_portable_kv_goes_between_caches_of_which_some_have_k_transposed(
    sizes, turned, mode, monkeypatch
):
    """As between our engine and a vLLM on a CPU."""
    of_p, of_d = (
        {"block_size": size, "transposed": letter in turned, "portable": True, **POOL}
        for letter, size in zip("PD", sizes, strict=True)
    )
    real = worker._layout_name

    def layout_name(config, tensor, *, on_gpu):
        return real(config, tensor, on_gpu=on_gpu) if role_of(config) in turned else HEAD_TOKEN_KV

    monkeypatch.setattr(worker, "_layout_name", layout_name)
    with pair({**of_p, "mode": mode, "chunk": 30}, of_d) as (p, d):
        for number, length in enumerate((1, 9, 16, 100)):
            assert serve(p, d, prompt(length, number)).external == length
        # A prefix of it is in both caches.
        serve(p, d, [*prompt(100, 3), *prompt(30, 9)])
        assert d.recomputed == []
        assert_all_is_back(p, d)


def test_caches_of_other_kernels_cannot_be_portable(monkeypatch):
    monkeypatch.setattr(engine_api, "cpu_isa", lambda *_: "amx")
    with pytest.raises(UserError, match="portable"), pair(d={"portable": True}):
        pass


@pytest.mark.parametrize("change", ["layout", "block_size", "dtype"])
def test_different_bytes_are_refused_by_the_factor_s_name(change, monkeypatch):
    of_p = {"block_size": 16} if change == "block_size" else {}
    of_p |= {"dtype": torch.bfloat16} if change == "dtype" else {}
    with pair(of_p, {"wait_s": 0.5}) as (p, d):
        if change == "layout":
            monkeypatch.setattr(worker, "transposed_k", lambda _: HEAD_TOKEN_KV)
            p.close()
            p = FakeVllm("producer")
        factor = "kv_dtype" if change == "dtype" else "kv_layout"
        of_p, of_d = ids(p, d)
        p.chunk = 1
        first = p.add(FakeRequest(of_p, prompt(60)))
        p.run(d, until=lambda: first.answer is not None)
        assert first.said["reason"] == [f"incompatible:{factor}"]
        second = d.add(FakeRequest(of_d, prompt(60), first.said))
        d.run(p, until=lambda: second.answer is not None)
        assert second.answer == alone(prompt(60))
        p.close()


def test_a_pair_id_counts_only_with_the_router_s_mac(tmp_path):
    key = tmp_path / "kv.key"
    key.write_text("a secret of the whole fleet\n")
    secret = {"insecure": False, "accept_unsigned_pairs": False, "key_file": str(key)}
    with pair(secret, {**secret, "wait_s": 600.0}) as (p, d):
        of_p, of_d = ids(p, d)
        mac = call_mac(key.read_bytes().strip(), "pair", str(parse_pair_id(of_p)))
        for given, external in (({}, 0), ({"pair_mac": "00"}, 0), ({"pair_mac": mac}, 30)):
            first = p.add(FakeRequest(of_p, prompt(30), given))
            p.run(d, until=lambda first=first: first.answer is not None)
            second = d.add(FakeRequest(of_d, prompt(30), given))
            d.pool.caches = False
            d.run(p, until=lambda second=second: second.answer is not None)
            assert (second.answer, second.external) == (alone(prompt(30)), external)
            assert (first.said is not None) == bool(external)


def test_each_step_gives_the_i_o_thread_a_turn_while_kv_moves(monkeypatch):
    monkeypatch.setattr(channel, "_TURN_S", 20.0)
    with pair() as (p, _):
        [(_, rank)] = p.ranks
        for half in (rank._rank, p.scheduler._half):
            seen = []
            half._turns._endpoint.call(lambda seen=seen: seen.append(time.sleep(0.05)))
            half._turns.give(is_moving=True)
            assert seen
            # Not again at once, where nothing moves.
            half._turns._endpoint = None
            half._turns.give(is_moving=False)


def test_other_requests_are_served_alone():
    with pair() as (p, d):
        for engine in (p, d):
            request = engine.add(FakeRequest("cmpl-a-client-s-own-0-1a2b3c4d", prompt(20)))
            engine.run(until=lambda request=request: request.answer is not None)
            assert request.said is None
        assert_all_is_back(p, d)


def test_an_adapter_s_request_is_served_alone():
    """KV under an adapter is not the model's own."""
    with pair({}, {"wait_s": 600.0}) as (p, d):
        serve(p, d, prompt(30))
        d.pool.caches = False
        adapter = SimpleNamespace(lora_name="french")
        of_p, of_d = ids(p, d)
        first = p.add(FakeRequest(of_p, prompt(30), lora_request=adapter))
        p.run(d, until=lambda: first.answer is not None)
        second = d.add(FakeRequest(of_d, prompt(30), lora_request=adapter))
        d.run(p, until=lambda: second.answer is not None)
        assert (first.said, second.external) == (None, 0)
        assert_all_is_back(p, d)


@pytest.mark.parametrize("given", [["pair_mac"], "pair_mac", 7, True])
def test_a_request_whose_parameters_are_no_object_is_served_alone(given):
    with pair({"accept_unsigned_pairs": False}, {"accept_unsigned_pairs": False}) as (p, d):
        for engine, name in zip((p, d), ids(p, d), strict=True):
            request = engine.add(FakeRequest(name, prompt(20), given))
            engine.run(until=lambda request=request: request.answer is not None)
            assert (request.answer, request.external) == (alone(prompt(20)), 0)


def test_what_is_counted_comes_to_vllm_s_metrics():
    made = {}

    class Counter:
        def __init__(self, name, documentation, labelnames):
            self.counts = made[name] = {}
            self.labelnames = labelnames

        def labels(self, *values):
            assert len(values) == len(self.labelnames)
            add = lambda more: self.counts.update({values: self.counts.get(values, 0) + more})  # noqa: E731
            return SimpleNamespace(inc=add)

    with pair() as (p, d):
        serve(p, d, prompt(40))
        assert_all_is_back(p, d)
        until(
            lambda: (p.step(), p.add(FakeRequest("x", [1])), p.stats)[2].data.get("sent_bytes"), ""
        )
        metrics = vllm_engine.XpydConnector.build_prom_metrics(
            d.config, {object: Counter}, ["model_name"], {0: ["demo-model"]}
        )
        metrics.observe(d.stats.data)
        metrics.observe(p.stats.data)
    assert made["xpyd_kv_transfers_total"] == {("demo-model", "done"): 2}
    assert made["xpyd_kv_landings_total"] == {("demo-model", "deferred"): 1}
    assert made["xpyd_kv_sent_bytes_total"][("demo-model",)] > 0


def test_of_two_loads_that_share_a_block_each_ends_with_its_own_transfer():
    blocks = GivenBlocks(FakePool(64, 8, caches=False), 8)
    loads = [
        Loading(letter, TransferKey(letter * 32, 0), (1,) * 32, "p", 32, (0, 0, last, last + 1))
        for letter, last in (("a", 5), ("b", 7))
    ]
    for load in loads:
        blocks.serve(load)
        assert blocks.take(4) == list(load.blocks)
    for load in loads:
        assert not load.is_quiet
        blocks.release(load.blocks)
        assert load.is_quiet
