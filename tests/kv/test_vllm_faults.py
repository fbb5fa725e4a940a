"""A P or a D that is stopped, in a fake of vLLM's engine: nothing waits for it for ever."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.kv.test_vllm_connector import (
    POOL,
    alone,
    assert_all_is_back,
    prefill,
    prompt,
    serve,
)
from tests.kv.vllm_engine import FakeVllm, pair
from tests.kv.vllm_fakes import FakeRequest, ids


@contextmanager
def stopped(engine: FakeVllm) -> Iterator[None]:
    """As by SIGSTOP: no thread of its transfer goes on. The test does not step it."""
    gate = threading.Event()
    halves = [engine.scheduler._half.connector.endpoint]
    halves += [rank._rank._endpoint for _, rank in engine.ranks]
    for endpoint in halves:
        endpoint.call(gate.wait)
    try:
        yield
    finally:
        gate.set()


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["put_async", "get"])
def test_d_computes_what_a_stopped_p_does_not_send(mode):
    with pair({"mode": mode}, {"wait_s": 1.0}) as (p, d):
        _, request = prefill(p, d, prompt(90))
        with stopped(p):
            d.add(request)
            d.run(until=lambda: request.answer is not None)
            assert request.answer == alone(prompt(90))
            assert d.scheduler._half.recomputed_tokens == 90
        assert serve(p, d, prompt(70, 1)).answer == alone(prompt(70, 1))
        assert_all_is_back(p, d)


@pytest.mark.slow
def test_a_p_whose_d_is_stopped_serves_others_and_has_its_blocks_back():
    with pair({"lease_s": 1.0}, POOL) as (p, d):
        serve(p, d, prompt(40))
        with stopped(d):
            first = p.add(FakeRequest(ids(p, d)[0], prompt(90, 1)))
            p.run(until=lambda: first.answer is not None)
            assert first.answer == alone(prompt(90, 1))
            p.run(until=lambda: not p.has_requests())
            assert p.pool.get_num_free_blocks() == p.pool.num_gpu_blocks - 1
        assert serve(p, d, prompt(70, 2)).answer == alone(prompt(70, 2))


def test_kv_goes_over_unix_sockets_where_both_take_them(tmp_path):
    both = {"transports": ["uds"], "socket_dir": str(tmp_path)}
    with pair(both, both) as (p, d):
        serve(p, d, prompt(90))
        assert_all_is_back(p, d)
        assert d.scheduler._half.recomputed_tokens == 0
        [(_, rank)] = d.ranks
        assert set(rank._rank._endpoint.counters.connections_by) == {"uds"}
