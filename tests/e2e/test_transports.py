"""Fleets whose pairs move KV by Unix socket, by shared memory, or as they agree."""

from pathlib import Path

import pytest

from tests.e2e.harness import fleet
from tests.e2e.oracle import Case
from tests.kv.nixl_kit import needs_nixl
from xpyd_kv.wire.handshake import LENT

pytestmark = pytest.mark.slow
CASES = 12


@pytest.mark.parametrize(
    ("asked", "taken"),
    [
        ("uds", "uds"),
        ("shm", "shm"),
        ("auto", "shm"),
        ("tcp", "tcp"),
        ("tcp", "striped"),
        ("tcp", "tls"),
        pytest.param("nixl", "nixl", marks=needs_nixl),
    ],
)
@pytest.mark.long
def test_greedy_tokens_are_those_of_one_process(
    tmp_path: Path, cases: list[Case], asked: str, taken: str
) -> None:
    flags = ("--kv-socket-dir", str(tmp_path / "kv"), "--kv-transport", asked)
    if taken == "striped":
        flags = (*flags, "--kv-connections", "2")
    if taken == "tls":
        flags, taken = (*flags, "--kv-encryption", "tls"), "tcp"
    with fleet(tmp_path) as running:
        p = running.start_engine("Prefill", *flags, "--kv-group-bytes", "1")
        d = running.start_engine("Decode", *flags, "--kv-on-failure", "fail")
        for engine in (p, d):
            running.wait_ready(engine)
        for case in cases[:CASES]:
            assert running.answer(case) == case.ids
        for engine in (p, d):
            samples = engine.metrics()
            assert samples[f"xpyd_kv_peers_total{{transport={taken}}}"] == 1
            # Until all further connections of `striped` are there, DATA takes the first one.
            if taken != "striped":
                assert (samples["xpyd_kv_shared_bytes_total"] > 0) == (taken in LENT)
        assert d.metric("xpyd_kv_received_bytes_total") == p.metric("xpyd_kv_sent_bytes_total") > 0
        assert d.metric("xpyd_kv_recomputed_requests_total") == 0
        if taken in LENT and taken != "striped":
            assert d.metric("xpyd_kv_shared_bytes_total") == d.metric(
                "xpyd_kv_received_bytes_total"
            )
    assert list((tmp_path / "kv").glob("*")) == []
