"""A vLLM on this machine's CPU and an engine of our own, one P and one D, behind our router; and
connectors with a defect, by which the other tests would be wrong.

Soak: see test_vllm_real.
"""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.kv.vllm_kit import (
    DISCOVERY_PORT,
    KV_PORT,
    MODEL,
    PORT,
    ROUTER,
    STRICT,
    D,
    P,
    Vllm,
    by_router,
    greedy,
    instances,
    metric,
    pair,
    post,
    prompt,
    router,
    text_of,
    until_verified,
)

pytestmark = pytest.mark.soak
LENGTHS = (1, 5, 60, 127, 128, 129, 300, 513, 900, 1500)
LANDINGS = "xpyd_kv_landings_total"
PORTABLE = {"portable": True, "pool_bytes": 1 << 28}


@contextmanager
def worker(role: str, host: str, folder: Path) -> Iterator[Path]:
    """One `xpyd worker`; its log."""
    argv = [sys.executable, "-m", "xpyd_core", "worker", "--model", str(MODEL)]
    argv += ["--served-model-name", "demo-model", "--role", role, "--host", host]
    argv += ["--port", str(PORT), "--kv-port", str(KV_PORT), "--dtype", "float32"]
    argv += ["--kv-key-file", str(folder / "kv.key"), "--kv-cache-memory", "256Mi"]
    argv += ["--discovery", f"{ROUTER}:{DISCOVERY_PORT}", "--heartbeat-period-ms", "500"]
    argv += ["--device", "cpu", "--threads", "1", "--no-enable-prefix-caching"]
    log = folder / f"{role}.log"
    with log.open("wb") as file:
        process = subprocess.Popen(argv, stdout=file, stderr=file)
    try:
        yield log
    finally:
        process.terminate()
        process.wait(30.0)


def texts(ids: list[int]) -> tuple[str, str]:
    """What the pair answers, and what its D does alone. Engines write broken characters apart."""
    body = {"prompt": ids, "max_tokens": 8}
    return text_of(by_router(**body)), text_of(post(D, PORT, "/v1/completions", greedy(body)))


def until_introduced(folder: Path, log: Path, what: str) -> str:
    """Wait until the router has introduced the two, without a request of a client; the line of D's
    log in which D judges."""
    deadline = time.monotonic() + 120.0
    verdicts = "have met|are never a pair"
    while re.search(verdicts, (folder / "router.log").read_text()) is None:
        assert time.monotonic() < deadline, (folder / "router.log").read_text()[-2000:]
        time.sleep(0.2)
    found = re.search(r".*first contact.*", log.read_text())
    assert found is not None
    assert what in found[0]
    return found[0]


def without_kv() -> dict[str, list[str]]:
    """The names at /instances of partners without KV, by list."""
    found = instances()["instances"]
    return {of: [name for one in found for name in one[of]] for of in ("unmet", "refused")}


def assert_answers_as_one(lost: str) -> None:
    """Also the first of a client gets P's KV. `lost`: what D counts where it does not."""
    name = "xpyd_kv_transfers_total"
    before, lost_before = metric(D, PORT, name), metric(D, PORT, lost)
    for seed, length in enumerate(LENGTHS):
        both, alone = texts(prompt(length, seed))
        assert both == alone, length
    assert metric(D, PORT, name) == before + len(LENGTHS)
    assert metric(D, PORT, lost) == lost_before > 0


def key(folder: Path) -> None:
    (folder / "kv.key").write_text("a secret of the whole fleet\n")


def test_kv_of_a_vllm_goes_to_an_engine_of_ours(tmp_path):
    key(tmp_path)
    with router(tmp_path, *STRICT), worker("Decode", D, tmp_path) as log:
        p = Vllm.of_ours("kv_producer", P, tmp_path / "p.log", portable=True)
        try:
            p.wait()
            until_introduced(tmp_path, log, "is ours, and is used")
            until_verified(1)
            assert_answers_as_one("xpyd_kv_recomputed_requests_total")
        finally:
            p.stop()


def test_kv_of_an_engine_of_ours_goes_to_a_vllm(tmp_path):
    key(tmp_path)
    with router(tmp_path), worker("Prefill", P, tmp_path):
        log = tmp_path / "d.log"
        flags = ["--no-enable-prefix-caching"]
        d = Vllm.of_ours("kv_consumer", D, log, flags=flags, **PORTABLE)
        try:
            d.wait()
            until_introduced(tmp_path, log, "is ours, and is used")
            assert_answers_as_one("xpyd_kv_not_received_total")
            assert d.metric("vllm:kv_cache_usage_perc") == 0
        finally:
            d.stop()


def test_a_vllm_that_lies_about_its_layout_is_caught_and_d_answers_alone(tmp_path):
    key(tmp_path)
    flags = ("--on-no-prefill", "PrefillOnDecode")
    with router(tmp_path, *flags), worker("Decode", D, tmp_path) as log:
        p = Vllm.of_ours("kv_producer", P, tmp_path / "p.log", module="vllm_defects")
        try:
            p.wait()
            said = until_introduced(tmp_path, log, "is not ours, and is never used")
            found = re.search(r"deviates by (\S+), allowed in float32", said)
            assert found is not None
            assert float(found[1]) > 1
            landed = metric(D, PORT, LANDINGS)
            assert landed > 0
            refused = without_kv()
            assert refused["unmet"] == []
            assert len(refused["refused"]) == 2
            sent = p.metric("vllm:request_success_total")
            # The router has no pair: D computes, and no KV is sent to it.
            for seed, length in enumerate((60, 300, 900)):
                both, alone = texts(prompt(length, 400 + seed))
                assert both == alone, length
            assert metric(D, PORT, LANDINGS) == landed
            assert p.metric("vllm:request_success_total") == sent
        finally:
            p.stop()


def test_zeros_in_place_of_the_kv_change_the_answer(tmp_path):
    """So equal answers of a pair prove that D used P's KV."""
    of_d = {
        "module": "vllm_defects",
        "pool_bytes": 1 << 28,
        "flags": ["--no-enable-prefix-caching"],
    }
    with pair(tmp_path, {}, of_d) as (p, d):
        transfers = d.metric("xpyd_kv_transfers_total")
        some = [prompt(length, 500 + length) for length in (60, 300, 900)]
        for ids in some:
            both, alone = texts(ids)
            assert alone == p.text(prompt=ids, max_tokens=8)
            assert both != alone, len(ids)
        # D computes the last token of a prompt: of one that has no other nothing is used.
        both, alone = texts(prompt(1, 500))
        assert both == alone
        assert d.metric("xpyd_kv_transfers_total") == transfers + len(some) + 1
        assert d.metric("xpyd_kv_recomputed_tokens_total") == 0
