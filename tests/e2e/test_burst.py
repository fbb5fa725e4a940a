"""A burst of prompts for a D that is busy: KV that has to wait goes to the device buffer, what does
not fit there to the host pool, and what fits nowhere waits at P or is computed again. No answer
changes, and nothing stays held. The articles' number 10."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

from tests.e2e.harness import Fleet, Process, fleet, wait_for
from tests.e2e.oracle import Case

pytestmark = [pytest.mark.slow, pytest.mark.long]

# The demo model in fp32: 6 layers x 2 heads x 32 wide x K and V.
BYTES_PER_TOKEN = 6 * 2 * 32 * 2 * 4
BLOCK = 16
BURST = 12
# D never lands directly and runs one request at a time, so a burst waits.
BUSY_D = ("--kv-direct-free", "1", "--max-num-seqs", "1", "--no-enable-prefix-caching")
HELD = ("xpyd_kv_buffer_used_bytes", "xpyd_kv_pool_used_bytes", "xpyd_kv_leases")


def _kv_bytes(case: Case) -> int:
    return -(-len(case.prompt) // BLOCK) * BLOCK * BYTES_PER_TOKEN


@pytest.fixture(scope="module")
def burst(cases: list[Case]) -> list[Case]:
    return sorted(cases, key=lambda case: len(case.prompt))[-BURST:]


@pytest.fixture(scope="module")
def one_p(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with fleet(tmp_path_factory.mktemp("burst"), prefill=1) as running:
        yield running


@contextmanager
def _d(running: Fleet, *flags: str) -> Iterator[Process]:
    decode = running.start_engine("Decode", *BUSY_D, *flags)
    try:
        running.wait_ready(decode)
        yield decode
    finally:
        decode.stop()
        wait_for("the router forgot it", lambda: decode.name not in running.states())


def _all_at_once(running: Fleet, burst: Sequence[Case]) -> None:
    """While D writes a long answer, all of the burst is asked; each answer must be right."""
    answers: dict[int, Any] = {}

    def ask(number: int, case: Case) -> None:
        answers[number] = running.answer(case)

    long = threading.Thread(
        target=lambda: running.complete(prompt=[7] * 20, max_tokens=700, ignore_eos=True)
    )
    asking = [threading.Thread(target=ask, args=pair) for pair in enumerate(burst)]
    long.start()
    for thread in asking:
        thread.start()
    for thread in (long, *asking):
        thread.join(90)
        assert not thread.is_alive(), "a request hangs"
    assert answers == {number: case.ids for number, case in enumerate(burst)}


def _nothing_is_held(running: Fleet) -> None:
    for engine in running.engines:

        def at_rest(engine: Process = engine) -> bool:
            samples = engine.metrics()
            free = samples["xpyd_engine_kv_blocks_free"] == samples["xpyd_engine_kv_blocks_total"]
            return free and not any(samples[name] for name in HELD)

        wait_for(f"{engine.name} holds nothing", at_rest)


def _landings(decode: Process) -> dict[str, float]:
    prefix = "xpyd_kv_landings_total{where="
    return {k[len(prefix) : -1]: v for k, v in decode.metrics().items() if k.startswith(prefix)}


def test_a_burst_over_the_buffer_goes_on_into_the_pool(one_p: Fleet, burst: list[Case]) -> None:
    """Article fact 10."""
    buffer = max(map(_kv_bytes, burst)) * 3
    assert sum(map(_kv_bytes, burst)) > 2 * buffer
    flags = ("--kv-buffer-size", str(buffer), "--kv-host-pool-size", "64Mi")
    with _d(one_p, *flags) as decode:
        _all_at_once(one_p, burst)
        landed = _landings(decode)
        assert landed["buffer"] >= 3
        assert landed["pool"] >= 3
        assert landed.get("direct", 0) == landed.get("deferred", 0) == 0
        assert sum(landed.values()) == BURST + 1
        assert decode.metric("xpyd_kv_pool_high_water_bytes") > 0
        assert decode.metric("xpyd_kv_recomputed_requests_total") == 0
        _nothing_is_held(one_p)


def test_a_burst_over_buffer_and_pool_waits_at_p(one_p: Fleet, burst: list[Case]) -> None:
    """Article fact 10."""
    most = max(map(_kv_bytes, burst))
    flags = ("--kv-buffer-size", str(2 * most), "--kv-host-pool-size", str(2 * most))
    with _d(one_p, *flags) as decode:
        _all_at_once(one_p, burst)
        landed = _landings(decode)
        assert min(landed[where] for where in ("buffer", "pool", "deferred")) >= 1
        assert decode.metric("xpyd_kv_recomputed_requests_total") == 0
        assert decode.metric("xpyd_kv_pool_high_water_bytes") <= 2 * most
        _nothing_is_held(one_p)


def test_what_waits_longer_than_p_can_hold_it_is_computed_again(
    one_p: Fleet, burst: list[Case]
) -> None:
    """P may keep half of its blocks for KV that waits: here they are too few for the burst.

    Article fact 10.
    """
    (prefill,) = one_p.engines
    blocks = 2 * max(len(case.prompt) // BLOCK + 1 for case in burst) + 8
    small = one_p.start_engine(
        "Prefill", "--kv-cache-memory", str(blocks * BLOCK * BYTES_PER_TOKEN)
    )
    one_p.wait_ready(small)
    prefill.stop()
    flags = ("--kv-buffer-size", "0", "--kv-host-pool-size", "0")
    with _d(one_p, *flags) as decode:
        _all_at_once(one_p, burst)
        assert small.metric("xpyd_kv_pressure_cancels_total") >= 1
        assert decode.metric("xpyd_kv_recomputed_requests_total") >= 1
        _nothing_is_held(one_p)
