"""D's state machine, frame by frame: what it answers, refuses and frees."""

from __future__ import annotations

from typing import Any

import pytest

from tests.kv.kvfakes import with_block_size
from tests.kv.kvsim import SimPeer
from tests.kv.receive_bench import BLOCKS, HELLO, KEY, LAYERS, REF, TOKENS, Bench
from xpyd_core.blocks import token_bytes
from xpyd_core.errors import ProtocolError
from xpyd_kv.session.events import ReceiveEnded, ReceiveLanded, ReceiveOffered, ReceiveQuiet
from xpyd_kv.wire import messages as wire
from xpyd_kv.wire.fit import wire_layout


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_offer_grant_data_commit_done(bench: Bench) -> None:
    bench.granted()
    assert isinstance(bench.events[0], ReceiveOffered)
    assert bench.events[0].prompt.token_ids == tuple(range(TOKENS))
    assert all(bench.data(seq) for seq in range(LAYERS))
    bench.commit()
    assert bench.said() == ["GRANT", "DONE"]
    assert bench.told() == [ReceiveLanded(KEY, 0, "tcp")]


@pytest.mark.parametrize(
    "broken",
    [{"digest": bytes(32)}, {"tokens": 11}, {"prompt_tokens": 11}, {"prompt_tokens": 0},
     {"total_bytes": 1}],
)  # fmt: skip
def test_an_offer_that_lies_closes_the_connection(bench: Bench, broken: dict[str, Any]) -> None:
    with pytest.raises(ProtocolError, match="OFFER"):
        bench.offer(**broken)
    assert not bench.events
    assert not bench.session.open_transfers


@pytest.mark.parametrize(
    "message",
    [wire.Grant(**REF, epoch=0), wire.Done(**REF, epoch=0), wire.Lease(**REF, epoch=0, ttl_ms=1)],
)
def test_what_only_a_d_sends_closes_the_connection(bench: Bench, message: wire.Message) -> None:
    with pytest.raises(ProtocolError):
        bench.session.message(bench.peer, message, b"")


def test_a_repeated_offer_gets_the_same_answer_again(bench: Bench) -> None:
    bench.offer()
    bench.offer()
    assert bench.said() == []
    bench.session.defer(KEY, 0)
    bench.offer()
    assert bench.said() == ["LEASE", "LEASE"]
    landing = bench.store.take(KEY, BLOCKS)
    assert landing is not None
    bench.session.grant(KEY, 0, landing, 0)
    bench.offer()
    for seq in range(LAYERS):
        bench.data(seq)
    bench.commit()
    bench.offer()
    bench.commit()
    assert bench.said() == ["GRANT", "GRANT", "DONE", "DONE", "DONE"]
    assert len(bench.events) == 2


def test_a_higher_epoch_replaces_the_older_one_which_is_freed_when_quiet(bench: Bench) -> None:
    bench.granted()
    began, header = bench.begin(0)
    assert began
    bench.offer(epoch=1)
    assert bench.told() == [ReceiveEnded(KEY, 0, "replaced")]
    assert bench.said() == ["GRANT", "CANCEL replaced"]
    bench.cancelled(epoch=0)
    assert bench.told() == []
    bench.end(header)
    assert bench.told() == [ReceiveQuiet(KEY, 0)]
    bench.offer(epoch=0)
    assert bench.said() == ["CANCEL duplicate"]


def test_another_peer_can_neither_offer_nor_send_nor_cancel_a_running_transfer(
    bench: Bench,
) -> None:
    bench.granted()
    stranger: Any = SimPeer(None, HELLO)
    bench.said()
    bench.offer(peer=stranger)
    bench.offer(epoch=1, peer=stranger)
    assert not bench.data(0, peer=stranger)
    bench.cancel(peer=stranger)
    assert bench.said() == ["CANCEL duplicate", "CANCEL duplicate", "CANCELLED"]
    assert bench.metrics.refused_data == {"foreign": 1}
    assert bench.told() == []
    bench.session.peer_down(stranger, "closed")
    assert all(bench.data(seq) for seq in range(LAYERS))
    bench.commit()
    assert bench.told() == [ReceiveLanded(KEY, 0, "tcp")]


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
    bench: Bench, changes: dict[str, Any], reason: str
) -> None:
    bench.granted(skip_blocks=1)
    assert bench.data(1, first_block=1)
    asked = {"seq": 0, "first_block": 1, **changes}
    assert not bench.data(asked.pop("seq"), 0, **asked)
    assert bench.metrics.refused_data == {reason: 1}


@pytest.mark.parametrize("deferred", [False, True])
def test_data_before_the_grant_goes_nowhere(bench: Bench, deferred: bool) -> None:
    bench.offer()
    if deferred:
        bench.session.defer(KEY, 0)
    assert not bench.data(0)
    assert bench.metrics.refused_data == {"not_granted": 1}


@pytest.mark.parametrize("fault", ["gap", "corrupt"])
def test_a_gap_or_a_broken_frame_is_asked_for_once_and_then_given_up(
    bench: Bench, fault: str
) -> None:
    bench.granted()
    for seq in range(LAYERS):
        if fault == "corrupt" or seq != 1:
            bench.data(seq, intact=seq != 1)
    bench.commit()
    assert bench.said() == ["GRANT", "NACK"]
    assert bench.bodies[-1] == token_bytes([1])
    bench.commit()
    assert bench.said() == ["CANCEL corrupt"]
    assert bench.told() == [ReceiveEnded(KEY, 0, "corrupt")]
    bench.cancelled()
    assert bench.told() == [ReceiveQuiet(KEY, 0)]
    assert bench.metrics.checksum_mismatches == (fault == "corrupt")


def test_a_frame_that_comes_intact_the_second_time_is_enough(bench: Bench) -> None:
    bench.granted()
    for seq in range(LAYERS):
        bench.data(seq, intact=seq != 1)
    bench.commit()
    assert bench.data(1)
    bench.commit()
    assert bench.said() == ["GRANT", "NACK", "DONE"]


@pytest.mark.parametrize("agrees", [True, False])
def test_what_is_behind_the_intact_frame_counts_for_commit_not_what_was_behind_the_broken_one(
    bench: Bench, agrees: bool
) -> None:
    bench.granted()
    first, second = (b"brokenly", None) if agrees else (None, b"brokenly")
    for seq in range(LAYERS):
        bench.data(seq, intact=seq != 1, checksum=first if seq == 1 else None)
    bench.commit()
    assert bench.data(1, checksum=second)
    bench.commit()
    assert bench.said() == ["GRANT", "NACK", "DONE" if agrees else "CANCEL corrupt"]


@pytest.mark.parametrize("lie", [{"digest": bytes(32)}, {"total_bytes": 1}, {"frames": LAYERS - 1}])
def test_a_commit_that_does_not_agree_with_what_came_is_no_done(
    bench: Bench, lie: dict[str, Any]
) -> None:
    bench.granted()
    for seq in range(LAYERS):
        bench.data(seq)
    bench.commit(**lie)
    assert bench.said() == ["GRANT", "CANCEL corrupt"]
    assert bench.told() == [ReceiveEnded(KEY, 0, "corrupt")]


def test_a_commit_that_says_all_when_a_layer_is_missing_is_no_done(bench: Bench) -> None:
    bench.granted()
    for seq in range(LAYERS - 1):
        bench.data(seq)
    bench.commit(frames=LAYERS - 1)
    assert bench.said() == ["GRANT", "CANCEL corrupt"]


def test_a_commit_while_a_frame_is_written_is_no_done(bench: Bench) -> None:
    """Lent bytes come beside the socket: else D would adopt blocks that are written to."""
    bench.granted()
    for seq in range(LAYERS - 1):
        bench.data(seq)
    _, header = bench.begin(LAYERS - 1)
    bench.commit(frames=LAYERS - 1)
    assert bench.said() == ["GRANT", "CANCEL corrupt"]
    bench.cancelled()
    assert bench.told() == [ReceiveEnded(KEY, 0, "corrupt")]
    bench.end(header)
    assert bench.told() == [ReceiveQuiet(KEY, 0)]


def test_a_number_is_not_used_by_two_frames_at_once(bench: Bench) -> None:
    bench.granted()
    assert bench.begin(0, 0)[0]
    assert not bench.begin(0, 1)[0]
    assert bench.metrics.refused_data == {"duplicate": 1}


def test_a_commit_over_more_frames_than_blocks_closes_the_connection(bench: Bench) -> None:
    bench.granted()
    with pytest.raises(ProtocolError, match="COMMIT"):
        bench.commit(frames=LAYERS * BLOCKS + 1)


def test_cancel_during_a_frame_is_answered_when_its_last_byte_has_come(bench: Bench) -> None:
    bench.granted()
    _, header = bench.begin(0)
    bench.said()
    bench.cancel()
    assert bench.said() == []
    assert bench.told() == [ReceiveEnded(KEY, 0, "cancelled")]
    bench.end(header)
    assert bench.said() == ["CANCELLED"]
    assert bench.told() == [ReceiveQuiet(KEY, 0)]


@pytest.mark.parametrize("frames", [0, 1, LAYERS])
def test_cancel_frees_what_landed_so_far(bench: Bench, frames: int) -> None:
    bench.granted()
    for seq in range(frames):
        bench.data(seq)
    if frames == LAYERS:
        bench.commit()
    bench.told()
    bench.said()
    bench.cancel()
    bench.cancel()
    assert bench.told() == [ReceiveEnded(KEY, 0, "cancelled"), ReceiveQuiet(KEY, 0)]
    assert bench.said() == ["CANCELLED", "CANCELLED"]
    bench.offer(epoch=0)
    assert bench.said() == ["CANCEL stale"]
    bench.offer(epoch=1)
    assert bench.said() == []


def test_a_cancel_that_overtakes_its_offer_refuses_it(bench: Bench) -> None:
    bench.cancel()
    bench.offer()
    assert bench.said() == ["CANCELLED", "CANCEL stale"]
    assert not bench.events


def test_giving_up_waits_for_p_and_closes_the_connection_of_a_p_that_does_not_answer(
    bench: Bench,
) -> None:
    bench.granted()
    bench.data(0)
    bench.session.finish(KEY, "timeout")
    assert bench.said() == ["GRANT", "CANCEL timeout"]
    assert bench.told() == [ReceiveEnded(KEY, 0, "timeout")]
    assert not bench.data(1)
    assert bench.metrics.refused_data == {"cancelled": 1}
    bench.pass_time(4.9)
    assert not bench.disconnected
    bench.pass_time(0.2)
    assert bench.disconnected == [bench.peer]
    assert bench.told() == []
    bench.session.peer_down(bench.peer, "CANCEL was not answered")
    assert bench.told() == [ReceiveQuiet(KEY, 0)]
    assert not bench.session.open_transfers


def test_both_sides_cancelling_at_once_get_their_answers(bench: Bench) -> None:
    bench.granted()
    bench.session.finish(KEY, "timeout")
    bench.said()
    bench.cancel()
    assert bench.said() == ["CANCELLED"]
    assert ReceiveQuiet(KEY, 0) not in bench.told()
    bench.cancelled()
    assert bench.told() == [ReceiveQuiet(KEY, 0)]


def test_a_finished_key_takes_no_offer_of_any_epoch_for_a_minute(bench: Bench) -> None:
    bench.session.finish(KEY, "no_offer")
    bench.offer(epoch=7)
    assert bench.said() == ["CANCEL finished"]
    bench.pass_time(61)
    bench.offer(epoch=7)
    assert bench.said() == []
    assert len(bench.events) == 1


def test_a_grant_for_a_transfer_that_ended_meanwhile_comes_back(bench: Bench) -> None:
    bench.offer()
    bench.cancel()
    landing = bench.store.take(KEY, BLOCKS)
    assert landing is not None
    bench.said()
    bench.session.grant(KEY, 0, landing, 0)
    assert bench.told() == [ReceiveEnded(KEY, 0, "cancelled"), ReceiveQuiet(KEY, 0)]
    assert bench.said() == []


def test_an_engine_that_is_busy_gets_the_lease_time_and_no_more(bench: Bench) -> None:
    bench.session.expect(KEY)
    bench.offer()
    bench.pass_time(2.5)
    assert bench.said() == ["LEASE"]
    for _ in range(28):
        bench.pass_time(1)
    assert bench.said() == ["LEASE", "LEASE", "CANCEL lease_expired"]
    assert bench.told() == [ReceiveEnded(KEY, 0, "lease_expired")]


def test_a_lease_runs_from_the_last_frame_not_while_it_moves(bench: Bench) -> None:
    bench.granted()
    for seq in range(LAYERS):
        bench.pass_time(29)
        assert bench.data(seq)
    bench.commit()
    assert bench.told() == [ReceiveLanded(KEY, 0, "tcp")]
    bench.pass_time(29)
    assert bench.told() == []
    bench.pass_time(2)
    assert bench.told() == [ReceiveEnded(KEY, 0, "lease_expired"), ReceiveQuiet(KEY, 0)]


def test_a_p_that_goes_quiet_after_the_grant_loses_it(bench: Bench) -> None:
    bench.session.expect(KEY)
    bench.granted()
    bench.pass_time(31)
    assert bench.said() == ["GRANT", "CANCEL lease_expired"]


def test_the_death_of_p_is_the_end_of_what_is_not_complete(bench: Bench) -> None:
    bench.granted()
    bench.begin(0)
    bench.session.peer_down(bench.peer, "closed")
    assert bench.told() == [ReceiveEnded(KEY, 0, "peer_lost"), ReceiveQuiet(KEY, 0)]
    assert bench.session.tick(bench.clock.now) is None


def test_late_data_of_a_finished_transfer_is_refused_and_p_is_told(bench: Bench) -> None:
    bench.granted()
    bench.cancel()
    bench.said()
    assert not bench.data(0)
    bench.pass_time(61)
    assert not bench.data(0)
    assert bench.said() == ["CANCEL stale", "CANCEL unknown"]
    assert bench.metrics.refused_data == {"stale": 1, "unknown": 1}


@pytest.mark.parametrize(("block_size", "is_taken"), [(8, False), (2, True)])
def test_larger_blocks_of_p_are_refused_where_d_has_no_place_for_their_surplus(
    block_size: int, is_taken: bool
) -> None:
    bench = Bench(on_device=True)
    of_p = with_block_size(block_size)
    layout = wire_layout(of_p, factors={}, max_tokens=4096)
    blocks = -(-TOKENS // block_size)
    bench.offer(peer=SimPeer(None, HELLO, layout), total_bytes=blocks * of_p.bytes_per_block)
    assert bench.said() == ([] if is_taken else ["CANCEL layout"])
    assert len(bench.events) == is_taken
