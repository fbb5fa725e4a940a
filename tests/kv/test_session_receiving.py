"""D's state machine, frame by frame: what it answers, refuses and frees."""

from __future__ import annotations

from typing import Any

import pytest

from tests.kv.kvfakes import with_block_size
from tests.kv.kvsim import SimPeer
from tests.kv.receive_driver import BLOCKS, HELLO, KEY, LAYERS, REF, TOKENS, Driver
from xpyd_core.blocks import token_bytes
from xpyd_core.errors import ProtocolError
from xpyd_kv.session.events import ReceiveEnded, ReceiveLanded, ReceiveOffered, ReceiveQuiet
from xpyd_kv.wire import messages as wire
from xpyd_kv.wire.fit import wire_layout


@pytest.fixture
def driver() -> Driver:
    return Driver()


def test_offer_grant_data_commit_done(driver: Driver) -> None:
    driver.granted()
    assert isinstance(driver.events[0], ReceiveOffered)
    assert driver.events[0].prompt.token_ids == tuple(range(TOKENS))
    assert all(driver.data(seq) for seq in range(LAYERS))
    driver.commit()
    assert driver.said() == ["GRANT", "DONE"]
    assert driver.take_events() == [ReceiveLanded(KEY, 0, "tcp")]


@pytest.mark.parametrize(
    "broken",
    [{"digest": bytes(32)}, {"tokens": 11}, {"prompt_tokens": 11}, {"prompt_tokens": 0},
     {"total_bytes": 1}],
)  # fmt: skip
def test_an_offer_that_lies_closes_the_connection(driver: Driver, broken: dict[str, Any]) -> None:
    with pytest.raises(ProtocolError, match="OFFER"):
        driver.offer(**broken)
    assert not driver.events
    assert not driver.session.open_transfers


@pytest.mark.parametrize(
    "message",
    [wire.Grant(**REF, epoch=0), wire.Done(**REF, epoch=0), wire.Lease(**REF, epoch=0, ttl_ms=1)],
)
def test_what_only_a_d_sends_closes_the_connection(driver: Driver, message: wire.Message) -> None:
    with pytest.raises(ProtocolError):
        driver.session.message(driver.peer, message, b"")


def test_a_repeated_offer_gets_the_same_answer_again(driver: Driver) -> None:
    driver.offer()
    driver.offer()
    assert driver.said() == []
    driver.session.defer(KEY, 0)
    driver.offer()
    assert driver.said() == ["LEASE", "LEASE"]
    landing = driver.store.take(KEY, BLOCKS)
    assert landing is not None
    driver.session.grant(KEY, 0, landing, 0)
    driver.offer()
    for seq in range(LAYERS):
        driver.data(seq)
    driver.commit()
    driver.offer()
    driver.commit()
    assert driver.said() == ["GRANT", "GRANT", "DONE", "DONE", "DONE"]
    assert len(driver.events) == 2


def test_a_higher_epoch_replaces_the_older_one_which_is_freed_when_quiet(driver: Driver) -> None:
    driver.granted()
    began, header = driver.begin(0)
    assert began
    driver.offer(epoch=1)
    assert driver.take_events() == [ReceiveEnded(KEY, 0, "replaced")]
    assert driver.said() == ["GRANT", "CANCEL replaced"]
    driver.cancelled(epoch=0)
    assert driver.take_events() == []
    driver.end(header)
    assert driver.take_events() == [ReceiveQuiet(KEY, 0)]
    driver.offer(epoch=0)
    assert driver.said() == ["CANCEL duplicate"]


def test_another_peer_can_neither_offer_nor_send_nor_cancel_a_running_transfer(
    driver: Driver,
) -> None:
    driver.granted()
    stranger: Any = SimPeer(None, HELLO)
    driver.said()
    driver.offer(peer=stranger)
    driver.offer(epoch=1, peer=stranger)
    assert not driver.data(0, peer=stranger)
    driver.cancel(peer=stranger)
    assert driver.said() == ["CANCEL duplicate", "CANCEL duplicate", "CANCELLED"]
    assert driver.metrics.refused_data == {"foreign": 1}
    assert driver.take_events() == []
    driver.session.peer_down(stranger, "closed")
    assert all(driver.data(seq) for seq in range(LAYERS))
    driver.commit()
    assert driver.take_events() == [ReceiveLanded(KEY, 0, "tcp")]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"end_layer": LAYERS + 1}, "range"),
        ({"end_layer": 0}, "range"),
        ({"end_block": BLOCKS + 1}, "range"),
        ({"first_block": 0}, "range"),
        ({"seq": 10**6}, "range"),
        ({"length": 1}, "length"),
        ({"seq": 1}, "duplicate"),
        ({"first_layer": 1, "end_layer": 2}, "overlap"),
        ({"epoch": 5}, "stale"),
        ({"prompt_index": 3}, "unknown"),
    ],
)
def test_a_frame_out_of_place_goes_nowhere(
    driver: Driver, changes: dict[str, Any], reason: str
) -> None:
    driver.granted(skip_blocks=1)
    assert driver.data(1, first_block=1)
    asked = {"seq": 0, "first_block": 1, **changes}
    assert not driver.data(asked.pop("seq"), 0, **asked)
    assert driver.metrics.refused_data == {reason: 1}


@pytest.mark.parametrize("deferred", [False, True])
def test_data_before_the_grant_goes_nowhere(driver: Driver, deferred: bool) -> None:
    driver.offer()
    if deferred:
        driver.session.defer(KEY, 0)
    assert not driver.data(0)
    assert driver.metrics.refused_data == {"not_granted": 1}


@pytest.mark.parametrize("fault", ["gap", "corrupt"])
def test_a_gap_or_a_broken_frame_is_asked_for_once_and_then_given_up(
    driver: Driver, fault: str
) -> None:
    driver.granted()
    for seq in range(LAYERS):
        if fault == "corrupt" or seq != 1:
            driver.data(seq, intact=seq != 1)
    driver.commit()
    assert driver.said() == ["GRANT", "NACK"]
    assert driver.bodies[-1] == token_bytes([1])
    driver.commit()
    assert driver.said() == ["CANCEL corrupt"]
    assert driver.take_events() == [ReceiveEnded(KEY, 0, "corrupt")]
    driver.cancelled()
    assert driver.take_events() == [ReceiveQuiet(KEY, 0)]
    assert driver.metrics.checksum_mismatches == (fault == "corrupt")


def test_a_frame_that_comes_intact_the_second_time_is_enough(driver: Driver) -> None:
    driver.granted()
    for seq in range(LAYERS):
        driver.data(seq, intact=seq != 1)
    driver.commit()
    assert driver.data(1)
    driver.commit()
    assert driver.said() == ["GRANT", "NACK", "DONE"]


@pytest.mark.parametrize("agrees", [True, False])
def test_what_is_behind_the_intact_frame_counts_for_commit_not_what_was_behind_the_broken_one(
    driver: Driver, agrees: bool
) -> None:
    driver.granted()
    first, second = (b"brokenly", None) if agrees else (None, b"brokenly")
    for seq in range(LAYERS):
        driver.data(seq, intact=seq != 1, checksum=first if seq == 1 else None)
    driver.commit()
    assert driver.data(1, checksum=second)
    driver.commit()
    assert driver.said() == ["GRANT", "NACK", "DONE" if agrees else "CANCEL corrupt"]


@pytest.mark.parametrize("lie", [{"digest": bytes(32)}, {"total_bytes": 1}, {"frames": LAYERS - 1}])
def test_a_commit_that_does_not_agree_with_what_came_is_no_done(
    driver: Driver, lie: dict[str, Any]
) -> None:
    driver.granted()
    for seq in range(LAYERS):
        driver.data(seq)
    driver.commit(**lie)
    assert driver.said() == ["GRANT", "CANCEL corrupt"]
    assert driver.take_events() == [ReceiveEnded(KEY, 0, "corrupt")]


def test_a_commit_that_says_all_when_a_layer_is_missing_is_no_done(driver: Driver) -> None:
    driver.granted()
    for seq in range(LAYERS - 1):
        driver.data(seq)
    driver.commit(frames=LAYERS - 1)
    assert driver.said() == ["GRANT", "CANCEL corrupt"]


def test_a_commit_while_a_frame_is_written_is_no_done(driver: Driver) -> None:
    """Lent bytes come beside the socket: else D would adopt blocks that are written to."""
    driver.granted()
    for seq in range(LAYERS - 1):
        driver.data(seq)
    _, header = driver.begin(LAYERS - 1)
    driver.commit(frames=LAYERS - 1)
    assert driver.said() == ["GRANT", "CANCEL corrupt"]
    driver.cancelled()
    assert driver.take_events() == [ReceiveEnded(KEY, 0, "corrupt")]
    driver.end(header)
    assert driver.take_events() == [ReceiveQuiet(KEY, 0)]


def test_a_number_is_not_used_by_two_frames_at_once(driver: Driver) -> None:
    driver.granted()
    assert driver.begin(0, 0)[0]
    assert not driver.begin(0, 1)[0]
    assert driver.metrics.refused_data == {"duplicate": 1}


def test_a_commit_over_more_frames_than_blocks_closes_the_connection(driver: Driver) -> None:
    driver.granted()
    with pytest.raises(ProtocolError, match="COMMIT"):
        driver.commit(frames=LAYERS * BLOCKS + 1)


def test_cancel_during_a_frame_is_answered_when_its_last_byte_has_come(driver: Driver) -> None:
    driver.granted()
    _, header = driver.begin(0)
    driver.said()
    driver.cancel()
    assert driver.said() == []
    assert driver.take_events() == [ReceiveEnded(KEY, 0, "cancelled")]
    driver.end(header)
    assert driver.said() == ["CANCELLED"]
    assert driver.take_events() == [ReceiveQuiet(KEY, 0)]


@pytest.mark.parametrize("frames", [0, 1, LAYERS])
def test_cancel_frees_what_landed_so_far(driver: Driver, frames: int) -> None:
    driver.granted()
    for seq in range(frames):
        driver.data(seq)
    if frames == LAYERS:
        driver.commit()
    driver.take_events()
    driver.said()
    driver.cancel()
    driver.cancel()
    assert driver.take_events() == [ReceiveEnded(KEY, 0, "cancelled"), ReceiveQuiet(KEY, 0)]
    assert driver.said() == ["CANCELLED", "CANCELLED"]
    driver.offer(epoch=0)
    assert driver.said() == ["CANCEL stale"]
    driver.offer(epoch=1)
    assert driver.said() == []


def test_a_cancel_that_overtakes_its_offer_refuses_it(driver: Driver) -> None:
    driver.cancel()
    driver.offer()
    assert driver.said() == ["CANCELLED", "CANCEL stale"]
    assert not driver.events


def test_giving_up_waits_for_p_and_closes_the_connection_of_a_p_that_does_not_answer(
    driver: Driver,
) -> None:
    driver.granted()
    driver.data(0)
    driver.session.finish(KEY, "timeout")
    assert driver.said() == ["GRANT", "CANCEL timeout"]
    assert driver.take_events() == [ReceiveEnded(KEY, 0, "timeout")]
    assert not driver.data(1)
    assert driver.metrics.refused_data == {"cancelled": 1}
    driver.pass_time(4.9)
    assert not driver.disconnected
    driver.pass_time(0.2)
    assert driver.disconnected == [driver.peer]
    assert driver.take_events() == []
    driver.session.peer_down(driver.peer, "CANCEL was not answered")
    assert driver.take_events() == [ReceiveQuiet(KEY, 0)]
    assert not driver.session.open_transfers


def test_both_sides_cancelling_at_once_get_their_answers(driver: Driver) -> None:
    driver.granted()
    driver.session.finish(KEY, "timeout")
    driver.said()
    driver.cancel()
    assert driver.said() == ["CANCELLED"]
    assert ReceiveQuiet(KEY, 0) not in driver.take_events()
    driver.cancelled()
    assert driver.take_events() == [ReceiveQuiet(KEY, 0)]


def test_a_finished_key_takes_no_offer_of_any_epoch_for_a_minute(driver: Driver) -> None:
    driver.session.finish(KEY, "no_offer")
    driver.offer(epoch=7)
    assert driver.said() == ["CANCEL finished"]
    driver.pass_time(61)
    driver.offer(epoch=7)
    assert driver.said() == []
    assert len(driver.events) == 1


def test_a_grant_for_a_transfer_that_ended_meanwhile_comes_back(driver: Driver) -> None:
    driver.offer()
    driver.cancel()
    landing = driver.store.take(KEY, BLOCKS)
    assert landing is not None
    driver.said()
    driver.session.grant(KEY, 0, landing, 0)
    assert driver.take_events() == [ReceiveEnded(KEY, 0, "cancelled"), ReceiveQuiet(KEY, 0)]
    assert driver.said() == []


def test_an_engine_that_is_busy_gets_the_lease_time_and_no_more(driver: Driver) -> None:
    driver.session.expect(KEY)
    driver.offer()
    driver.pass_time(2.5)
    assert driver.said() == ["LEASE"]
    for _ in range(28):
        driver.pass_time(1)
    assert driver.said() == ["LEASE", "LEASE", "CANCEL lease_expired"]
    assert driver.take_events() == [ReceiveEnded(KEY, 0, "lease_expired")]


def test_a_lease_runs_from_the_last_frame_not_while_it_moves(driver: Driver) -> None:
    driver.granted()
    for seq in range(LAYERS):
        driver.pass_time(29)
        assert driver.data(seq)
    driver.commit()
    assert driver.take_events() == [ReceiveLanded(KEY, 0, "tcp")]
    driver.pass_time(29)
    assert driver.take_events() == []
    driver.pass_time(2)
    assert driver.take_events() == [ReceiveEnded(KEY, 0, "lease_expired"), ReceiveQuiet(KEY, 0)]


def test_a_p_that_goes_quiet_after_the_grant_loses_it(driver: Driver) -> None:
    driver.session.expect(KEY)
    driver.granted()
    driver.pass_time(31)
    assert driver.said() == ["GRANT", "CANCEL lease_expired"]


def test_the_death_of_p_is_the_end_of_what_is_not_complete(driver: Driver) -> None:
    driver.granted()
    driver.begin(0)
    driver.session.peer_down(driver.peer, "closed")
    assert driver.take_events() == [ReceiveEnded(KEY, 0, "peer_lost"), ReceiveQuiet(KEY, 0)]
    assert driver.session.tick(driver.clock.now) is None


def test_late_data_of_a_finished_transfer_is_refused_and_p_is_told(driver: Driver) -> None:
    driver.granted()
    driver.cancel()
    driver.said()
    assert not driver.data(0)
    driver.pass_time(61)
    assert not driver.data(0)
    assert driver.said() == ["CANCEL stale", "CANCEL unknown"]
    assert driver.metrics.refused_data == {"stale": 1, "unknown": 1}


@pytest.mark.parametrize(("block_size", "is_taken"), [(8, False), (2, True)])
def test_larger_blocks_of_p_are_refused_where_d_has_no_place_for_their_surplus(
    block_size: int, is_taken: bool
) -> None:
    driver = Driver(on_device=True)
    of_p = with_block_size(block_size)
    layout = wire_layout(of_p, factors={}, max_tokens=4096)
    blocks = -(-TOKENS // block_size)
    driver.offer(peer=SimPeer(None, HELLO, layout), total_bytes=blocks * of_p.bytes_per_block)
    assert driver.said() == ([] if is_taken else ["CANCEL layout"])
    assert len(driver.events) == is_taken
