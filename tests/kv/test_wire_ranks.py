"""Connections of engines with several ranks: which frames belong on which, and who refuses whom."""

import msgspec
import pytest

from tests.kv.test_wire_connection import OLD, Talk, hello
from tests.kv.wire_samples import KEYS, LAYOUT
from xpyd_core.errors import ProtocolError
from xpyd_kv.wire.connection import Connection, Opened, Received
from xpyd_kv.wire.errors import IllegalMoveError
from xpyd_kv.wire.frames import DataBegin, encode
from xpyd_kv.wire.handshake import Terms
from xpyd_kv.wire.messages import CHECKSUM_BYTES, Commit, Data, Done, Grant, Layout, Offer

# Two heads, two layers: P cuts the heads, D the layers.
OF_P = msgspec.structs.replace(LAYOUT, total_kv_heads=2, tp=2)
OF_D = msgspec.structs.replace(
    LAYOUT,
    kv_heads=2,
    block_bytes=256,
    layers=(0,),
    stages=((0,), (1,)),
    ranks=("127.0.0.1:21002", "127.0.0.1:21003"),
)
SECOND_OF_D = msgspec.structs.replace(OF_D, layers=(1,))
OFFER = Offer(**KEYS, tokens=1, prompt_tokens=1, digest=bytes(32), total_bytes=512)
COMMIT = Commit(**KEYS, frames=1, total_bytes=64, digest=bytes(32))


def talk(of_p: Layout = OF_P, of_d: Layout = OF_D, takes="both", rank=0, data=False, d_rank=0):
    p = Connection(
        Terms(hello("P", b"p", rank=rank, data=data), of_p, (OLD,)), dialler=True, deadline=4.0
    )
    d = Connection(
        Terms(hello("D", b"d", rank=d_rank), of_d, (OLD,), takes=takes),
        dialler=False,
        deadline=4.0,
    )
    return p, d, Talk(p, d)


def data(first_layer, end_layer, blocks=1):
    return Data(
        **KEYS, seq=0, first_layer=first_layer, end_layer=end_layer, first_block=0, end_block=blocks
    )


def test_engines_speak_of_transfers_on_their_connection_and_move_no_byte_there():
    p, d, said = talk(takes="engines")
    assert said.errors == {"p": None, "d": None}
    assert (p.pair, d.pair) == (None, None)
    [event] = d.feed(p.encode(OFFER, 4) + bytes(4), 0.0)
    assert isinstance(event, Received)
    [event] = p.feed(d.encode(Grant(**KEYS)), 0.0)
    assert isinstance(event, Received)
    for end, frame in ((p, data(0, 1)), (p, COMMIT), (d, Done(**KEYS))):
        with pytest.raises(IllegalMoveError):
            end.encode(frame)
    with pytest.raises(ProtocolError):
        list(d.feed(encode(data(0, 1), 128 + CHECKSUM_BYTES), 0.0))


def test_ranks_move_what_both_have_and_speak_of_nothing_else():
    # P's second rank has one head of both layers, D's second both heads of the second layer.
    p, d, said = talk(of_d=SECOND_OF_D, takes="ranks", rank=1, data=True, d_rank=1)
    assert said.errors == {"p": None, "d": None}
    assert p.is_data
    assert d.is_data
    assert p.pair is not None
    assert p.pair == d.pair
    # One head of 16 tokens of 8 bytes.
    assert (p.pair.layers, p.block_bytes) == (1, 128)
    [event] = d.feed(p.encode(data(0, 1, blocks=2), 256 + CHECKSUM_BYTES), 0.0)
    assert event == DataBegin(data(0, 1, blocks=2), 256)
    for end, frame in ((p, OFFER), (d, Grant(**KEYS)), (p, data(0, 2))):
        with pytest.raises(IllegalMoveError):
            end.encode(frame, 4)
    with pytest.raises(ProtocolError):
        list(p.feed(encode(Grant(**KEYS)), 0.0))


@pytest.mark.parametrize("apart", ["P", "D", "PD"])
def test_no_byte_moves_between_engines_whose_only_rank_is_another_process(apart):
    there = ("127.0.0.1:21002",)
    of_p = msgspec.structs.replace(LAYOUT, is_ranked="P" in apart)
    of_d = msgspec.structs.replace(LAYOUT, is_ranked="D" in apart, ranks=there * ("D" in apart))
    p, d, said = talk(of_p=of_p, of_d=of_d)
    assert said.errors == {"p": None, "d": None}
    assert (p.pair, d.pair) == (None, None)
    p, d, said = talk(of_p=LAYOUT, of_d=LAYOUT, data=True)
    assert said.errors == {"p": None, "d": None}
    assert p.pair == d.pair
    assert p.pair is not None


def test_a_single_process_is_its_only_rank_on_either_side():
    whole = msgspec.structs.replace(LAYOUT, kv_heads=2, block_bytes=256)
    p, _, said = talk(of_p=whole, takes="ranks", data=True)
    assert said.errors == {"p": None, "d": None}
    assert p.block_bytes == 256
    _, d, said = talk(of_d=whole, rank=1, data=True)
    assert said.errors == {"p": None, "d": None}
    assert d.block_bytes == 128


@pytest.mark.parametrize(
    ("changes", "factor"),
    [
        # Another rank's layers; a rank that is none; one that nothing is for.
        ({"d_rank": 1}, "rank"),
        ({"rank": 2}, "rank"),
        ({"of_p": msgspec.structs.replace(OF_P, total_kv_heads=2, tp=2, stages=((0,), (1,)),
                                          layers=(1,)), "rank": 2}, "rank"),
        ({"data": False, "of_d": msgspec.structs.replace(OF_D, ranks=())}, "ranks"),
        ({"data": False, "of_d": msgspec.structs.replace(OF_D, ranks=OF_D.ranks[:1])}, "ranks"),
        ({"data": False, "of_p": LAYOUT,
          "of_d": msgspec.structs.replace(LAYOUT, is_ranked=True)}, "ranks"),
        ({"data": False, "of_d": msgspec.structs.replace(OF_D, total_kv_heads=4)}, "kv_heads"),
    ],
)  # fmt: skip
def test_both_sides_name_what_keeps_two_ranks_or_their_engines_apart(changes, factor):
    _, _, said = talk(**{"data": True, **changes})
    for error in said.errors.values():
        assert (error.reason, error.factor) == ("incompatible", factor)


@pytest.mark.parametrize(("takes", "is_data"), [("engines", True), ("ranks", False)])
def test_who_takes_engines_refuses_ranks_and_the_other_way_round(takes, is_data):
    _, _, said = talk(takes=takes, data=is_data)
    assert {error.reason for error in said.errors.values()} == {"role"}
    assert said.errors["p"].by_peer
    assert Opened not in map(type, said.events["d"])
