"""What the modes change in the state machines of P and D, frame by frame."""

from __future__ import annotations

import pytest

from tests.kv import receive_driver
from tests.kv.kvfakes import LAYOUT, FakePool
from tests.kv.send_driver import BLOCKS, KEY, LAYERS, REF, Driver
from xpyd_core.errors import ProtocolError
from xpyd_kv.connector.build import default_store
from xpyd_kv.memory.store import LandingStore, StagedLanding, StoreLimits
from xpyd_kv.plan.frames import Area
from xpyd_kv.session.events import (
    ReceiveEnded,
    ReceiveLanded,
    ReceiveOffered,
    SendDeferred,
    SendEnded,
    SendFlushed,
    SendGranted,
    SendSpilled,
)
from xpyd_kv.session.outgoing import ReadyArea
from xpyd_kv.wire import messages as wire

OFFERED_ONCE = ["OFFER"]


@pytest.fixture
def get() -> Driver:
    return Driver(mode="get")


@pytest.fixture
def put() -> Driver:
    return Driver(mode="put")


@pytest.fixture
def d() -> receive_driver.Driver:
    return receive_driver.Driver()


# --- P


@pytest.mark.parametrize("mode", ["put_async", "put", "get"])
def test_the_offer_names_the_mode(mode: wire.Mode) -> None:
    driver = Driver(mode=mode)
    driver.offer()
    (offer,) = driver.sent
    assert isinstance(offer, wire.Offer)
    assert offer.mode == mode


def test_nothing_leaves_before_d_pulls_and_then_everything_but_what_it_has(get: Driver) -> None:
    get.offer()
    get.ready()
    get.session.complete(KEY, 0)
    get.defer()
    assert not get.queue
    get.pull(skip_tokens=4)
    while get.queue:
        assert get.send_one()
    assert {(h.first_block, h.end_block) for h in get.headers} == {(1, 3)}
    assert get.said() == ["OFFER", "COMMIT"]
    get.answer(wire.Done(**REF))
    assert get.events == [
        SendDeferred(KEY, 0, "d1"), SendGranted(KEY, 0, "d1"), SendEnded(KEY, 0, "")
    ]  # fmt: skip


def test_a_pull_that_comes_while_p_computes_is_a_grant(get: Driver) -> None:
    get.offer()
    get.ready(0, 1)
    get.pull()
    assert len(get.queue) == 1
    get.ready(1, LAYERS)
    assert len(get.queue) == LAYERS


def test_a_d_that_knows_no_modes_may_grant(get: Driver) -> None:
    get.offer()
    get.ready()
    get.grant()
    assert len(get.queue) == LAYERS


@pytest.mark.parametrize("skip", [3, 12])
def test_a_pull_that_skips_what_cannot_be_skipped_closes_the_connection(
    get: Driver, skip: int
) -> None:
    get.offer()
    with pytest.raises(ProtocolError, match="PULL skips"):
        get.pull(skip)


def test_a_second_pull_changes_nothing(get: Driver) -> None:
    get.offer()
    get.ready()
    get.pull()
    get.pull(skip_tokens=4)
    assert len(get.queue) == LAYERS
    assert len(get.events) == 1


def test_an_offer_is_repeated_while_more_of_its_kv_comes_to_stand(get: Driver) -> None:
    get.offer()
    get.defer()
    get.pass_time(14)
    get.ready(0, 1)
    get.defer()
    assert get.said() == OFFERED_ONCE, "more than half of the lease is left"
    get.pass_time(10)
    get.defer()
    assert get.said() == OFFERED_ONCE, "repeated"
    get.pass_time(20)
    get.defer()
    assert get.said() == [], "nothing more stands than at the last OFFER"
    get.ready(1, LAYERS)
    get.session.complete(KEY, 0)
    assert get.said() == OFFERED_ONCE, "the lease begins at the end of the prefill"
    get.ready(0, 1)
    get.pass_time(25)
    get.defer()
    assert get.said() == []


def spill_of(driver: Driver) -> tuple[StagedLanding, LandingStore]:
    """KV of the driver's prompt beside its blocks, whose bytes are then others'."""
    limits = StoreLimits(1.0, 0, 10 * LAYOUT.bytes_per_block)
    store = default_store(limits, driver.memory, FakePool(8))
    spill = store.take_staged(KEY, len(BLOCKS))
    assert spill is not None
    assert spill.fill(BLOCKS) is None
    return spill, store


def test_frames_are_read_from_the_spill_once_it_is_taken(get: Driver) -> None:
    get.offer()
    get.ready()
    get.session.complete(KEY, 0)
    get.defer()
    expected = [
        bytes(get.memory.block_view(layer, block)) for layer in range(LAYERS) for block in BLOCKS
    ]
    spill, _ = spill_of(get)
    get.session.spill(KEY, 0, spill)
    assert get.events[-1] == SendSpilled(KEY, 0, taken=True)
    get.memory.fill(BLOCKS, 99)
    get.pull()
    assert b"".join(bytes(v) for _, views, _ in get.queue for v in views) == b"".join(expected)


def test_frames_behind_the_skipped_tokens_are_read_from_the_spill_too(get: Driver) -> None:
    get.offer()
    get.ready()
    get.session.complete(KEY, 0)
    get.defer()
    last = bytes(get.memory.block_view(1, BLOCKS[2]))
    spill, _ = spill_of(get)
    get.session.spill(KEY, 0, spill)
    get.memory.fill(BLOCKS, 99)
    get.pull(skip_tokens=8)
    assert [b"".join(map(bytes, views)) for _, views, _ in get.queue][1] == last


def test_a_spill_that_comes_after_the_pull_is_not_taken(get: Driver) -> None:
    get.offer()
    get.ready()
    get.session.complete(KEY, 0)
    get.pull()
    spill, _ = spill_of(get)
    get.session.spill(KEY, 0, spill)
    assert get.events[-1] == SendSpilled(KEY, 0, taken=False)
    get.memory.fill(BLOCKS, 99)
    assert bytes(get.queue[0][1][0]) == bytes(get.memory.block_view(0, BLOCKS[0]))


@pytest.mark.parametrize("epoch", [0, 1])
def test_a_spill_for_a_transfer_that_is_over_or_another_is_ignored(get: Driver, epoch: int) -> None:
    get.offer()
    if epoch == 0:
        get.session.peer_down(get.peer, "closed")
    before = len(get.events)
    spill, _ = spill_of(get)
    get.session.spill(KEY, epoch, spill)
    assert len(get.events) == before


def test_put_is_told_when_what_was_handed_over_is_sent(put: Driver) -> None:
    put.offer()
    put.ready(0, 1)
    assert put.events == []
    put.grant()
    put.send_one()
    assert put.events[1:] == [SendFlushed(KEY, 0, 1)]
    put.ready(1, LAYERS)
    put.send_one()
    assert len(put.events) == 2
    put.send_one()
    assert put.events[2:] == [SendFlushed(KEY, 0, LAYERS)]


def test_put_is_told_at_once_where_d_has_all_of_it(put: Driver) -> None:
    put.offer()
    put.grant(skip_tokens=8)
    put.session.ready(KEY, 0, [ReadyArea(Area(0, LAYERS, 0, 2), BLOCKS[:2])])
    assert not put.queue
    assert put.events[1:] == [SendFlushed(KEY, 0, 1)]


@pytest.mark.parametrize("mode", ["put_async", "get"])
def test_nobody_else_is_told(mode: wire.Mode) -> None:
    driver = Driver(mode=mode)
    driver.offer()
    driver.ready()
    driver.grant()
    while driver.queue:
        driver.send_one()
    assert driver.events == [SendGranted(KEY, 0, "d1")]


# --- D


def test_d_answers_an_offer_to_be_pulled_by_lease_and_pulls_later(d: receive_driver.Driver) -> None:
    d.offer(mode="get")
    assert isinstance(d.events[0], ReceiveOffered)
    assert d.events[0].mode == "get"
    d.session.defer(receive_driver.KEY, 0)
    d.session.expect(receive_driver.KEY)
    d.pass_time(100)
    landing = d.store.take(receive_driver.KEY, receive_driver.BLOCKS - 1)
    assert landing is not None
    d.session.grant(receive_driver.KEY, 0, landing, LAYOUT.block_size)
    assert set(d.said()) == {"LEASE", "PULL"}
    assert d.session.open_transfers == 1
    for seq in range(receive_driver.LAYERS):
        assert d.data(seq, first_block=1)
    checksums = (receive_driver.BLOCKS - 1) * LAYOUT.bytes_per_block
    d.commit(total_bytes=checksums)
    assert d.take_events() == [ReceiveLanded(receive_driver.KEY, 0, "tcp")]


def test_a_repeated_offer_is_answered_by_pull_again(d: receive_driver.Driver) -> None:
    d.offer(mode="get")
    d.session.defer(receive_driver.KEY, 0)
    landing = d.store.take(receive_driver.KEY, receive_driver.BLOCKS)
    assert landing is not None
    d.session.grant(receive_driver.KEY, 0, landing, 0)
    d.offer(mode="get")
    assert d.said() == ["LEASE", "PULL", "PULL"]


def test_a_repeated_offer_begins_the_lease_anew_and_its_absence_ends_it(
    d: receive_driver.Driver,
) -> None:
    d.offer(mode="get")
    d.session.defer(receive_driver.KEY, 0)
    for _ in range(4):
        d.pass_time(20)
        d.offer(mode="get")
    d.pass_time(29)
    assert set(d.said()) == {"LEASE"}
    d.pass_time(2)
    assert d.said() == ["CANCEL lease_expired"]
    assert d.take_events() == [ReceiveEnded(receive_driver.KEY, 0, "lease_expired")]
