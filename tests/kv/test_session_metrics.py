"""What the sessions count of a transfer's life: bytes, overlap, times, leases, ends."""

from __future__ import annotations

import pytest

from tests.kv import receive_driver, send_driver
from tests.kv.kvfakes import LAYOUT
from tests.kv.receive_driver import LAYERS as D_LAYERS
from tests.kv.send_driver import KEY, LAYERS, REF
from xpyd_kv.wire import messages as wire


@pytest.fixture
def p() -> send_driver.Driver:
    return send_driver.Driver()


@pytest.fixture
def d() -> receive_driver.Driver:
    return receive_driver.Driver()


def test_p_tells_what_left_before_the_prefills_end_from_what_left_after(
    p: send_driver.Driver,
) -> None:
    p.offer()
    p.clock.now += 0.02
    p.grant()
    p.ready()
    p.send_one()
    p.clock.now += 3.0
    p.session.complete(KEY, 0)
    for _ in range(LAYERS - 1):
        p.send_one()
    p.clock.now += 0.2
    assert p.metrics.open_transfers == 1
    p.answer(wire.Done(**REF))
    layer = 3 * LAYOUT.block_bytes
    assert (p.metrics.sent_frames, p.metrics.sent_bytes) == (LAYERS, LAYERS * layer)
    assert p.metrics.overlapped_bytes == layer
    assert p.metrics.open_transfers == 0
    assert p.metrics.grant_wait.sum == pytest.approx(0.02)
    assert p.metrics.transfer_s["tcp"].sum == pytest.approx(3.2)
    assert p.metrics.after_prefill_s.sum == pytest.approx(0.2)


def test_p_counts_why_transfers_failed_and_leases_that_ran_out(
    p: send_driver.Driver,
) -> None:
    p.offer()
    p.grant()
    p.pass_time(31)
    p.answer(wire.Cancelled(**REF))
    assert p.metrics.failed == {"stalled": 1}
    assert p.metrics.leases_expired == 1
    assert p.metrics.open_transfers == 0


def test_an_offer_without_answer_is_no_lease(p: send_driver.Driver) -> None:
    p.offer()
    p.pass_time(6)
    p.answer(wire.Cancelled(**REF))
    assert p.metrics.failed == {"offer_timeout": 1}
    assert p.metrics.leases_expired == 0


def test_d_counts_frames_seconds_and_its_end(d: receive_driver.Driver) -> None:
    d.granted()
    assert d.metrics.open_transfers == 1
    d.clock.now += 0.5
    assert all(d.data(seq) for seq in range(D_LAYERS))
    d.commit()
    assert d.metrics.received_frames == D_LAYERS
    assert d.metrics.transfer_s["tcp"].sum == pytest.approx(0.5)
    assert d.metrics.open_transfers == 1
    d.session.finish(receive_driver.KEY, "adopted")
    assert d.metrics.open_transfers == 0
    assert d.metrics.failed == {}


def test_d_counts_orphans_whose_lease_ran_out(d: receive_driver.Driver) -> None:
    d.granted()
    d.clock.now += 31
    d.session.tick(d.clock.now)
    assert d.metrics.leases_expired == 1
    assert d.metrics.failed == {"lease_expired": 1}
