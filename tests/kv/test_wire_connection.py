"""Two connections talking by hand: handshake, keys, order, roles, PINGs. Virtual time."""

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kv.wire_samples import KEYS, LAYOUT, SAMPLES
from xpyd_core.errors import ProtocolError
from xpyd_kv.wire.connection import Connection, Opened, Pulse, Received
from xpyd_kv.wire.errors import IllegalMoveError, RefusedError, SilentPeerError
from xpyd_kv.wire.frames import DataBegin, Decoder, Frame, Limits, encode
from xpyd_kv.wire.handshake import Handshake, Terms
from xpyd_kv.wire.messages import (
    CHECKSUM_BYTES,
    Auth,
    Cancel,
    Data,
    Done,
    Goaway,
    Grant,
    Hello,
    Layout,
    Offer,
    Ping,
    Pong,
    Refuse,
)

OLD, NEW, STRANGE = b"old key, 16 bytes", b"new key, 16 bytes", b"another fleet's key"


def hello(role="P", nonce=b"n", **changes):
    fields = {"major": 1, "minor": 0, "engine_id": role, "incarnation": f"of-{nonce.decode()}"}
    return Hello(**{**fields, "role": role, "nonce": nonce * 32, **changes})


def dialler(keys=(OLD,), layout=LAYOUT, deadline=4.0, pulse=None, **changes):
    terms = Terms(hello("P", b"p", **changes), layout, keys)
    return Connection(terms, dialler=True, deadline=deadline, pulse=pulse)


def acceptor(keys=(OLD,), layout=LAYOUT, deadline=4.0, pulse=None, nonce=b"d", **changes):
    terms = Terms(hello(**{"role": "D", "nonce": nonce, **changes}), layout, keys)
    return Connection(terms, dialler=False, deadline=deadline, pulse=pulse)


class Talk:
    """Carries bytes between two connections until both are silent; keeps what each saw."""

    def __init__(self, p, d, now=0.0):
        self.events = {"p": [], "d": []}
        self.errors = {"p": None, "d": None}
        self.sent = {"p": b"", "d": b""}
        ends = {"p": p, "d": d}
        for _ in range(20):
            for me, other in (("p", "d"), ("d", "p")):
                out = ends[me].outgoing()
                self.sent[me] += out
                if out and self.errors[other] is None:
                    try:
                        for event in ends[other].feed(out, now):
                            self.events[other].append(event)
                    except ProtocolError as error:
                        self.errors[other] = error

    def types(self, who):
        """Names of the control frames that one side sent."""
        frames = Decoder(Limits()).feed(self.sent[who])
        return [type(frame.message).__name__ for frame in frames]


def opened(**options):
    p, d = dialler(**options), acceptor(**options)
    talk = Talk(p, d)
    assert [type(e) for e in talk.events["p"] + talk.events["d"]] == [Opened, Opened]
    return p, d


def feed(connection, *messages, now=0.0):
    return [*connection.feed(b"".join(encode(m) for m in messages), now)]


def test_both_sides_open_and_know_each_other():
    p, d = dialler(), acceptor()
    talk = Talk(p, d)
    assert p.peer == Opened(hello("D", b"d"), LAYOUT)
    assert d.peer == Opened(hello("P", b"p"), LAYOUT)
    assert talk.types("p") == ["Hello", "Auth", "Layout"]
    assert talk.types("d") == ["Hello", "Auth", "Layout"]


@pytest.mark.parametrize(
    ("p_keys", "d_keys"),
    [
        ((OLD,), (OLD, NEW)),
        ((OLD, NEW), (OLD,)),
        ((OLD,), (NEW, OLD)),
        ((NEW, OLD), (OLD, NEW)),
        ((OLD, NEW), (NEW, OLD)),
        ((NEW,), (OLD, NEW)),
        ((NEW,), (NEW, OLD)),
    ],
)
def test_a_key_can_be_changed_while_the_fleet_runs(p_keys, d_keys):
    talk = Talk(dialler(keys=p_keys), acceptor(keys=d_keys))
    assert talk.errors == {"p": None, "d": None}


def test_without_the_key_only_hello_and_auth_leave_the_dialler_and_hello_the_acceptor():
    talk = Talk(dialler(keys=(STRANGE,)), acceptor())
    assert talk.types("p") == ["Hello", "Auth"]
    assert talk.types("d") == ["Hello", "Refuse"]
    for error in talk.errors.values():
        assert isinstance(error, RefusedError)
        assert error.reason == "auth"
    assert talk.errors["p"].by_peer
    assert not talk.errors["d"].by_peer
    assert talk.events == {"p": [], "d": []}


def test_the_dialler_shows_nothing_to_an_acceptor_without_the_key():
    p, thief = dialler(), acceptor(keys=(STRANGE,))
    thief_hello = hello("D", b"t")
    sent = p.outgoing()
    sent += b"".join(_answers(p, [encode(thief_hello)]))
    assert [type(f.message) for f in Decoder(Limits()).feed(sent)] == [Hello, Auth]
    with pytest.raises(RefusedError) as refused:
        _answers(p, [encode(Auth(mac=bytes(32)))])
    assert refused.value.reason == "auth"
    assert p.outgoing() == b""
    assert not p.is_open
    assert not thief.is_open


def _answers(connection, frames):
    answers = []
    for frame in frames:
        assert not [*connection.feed(frame, 0.0)]
        answers.append(connection.outgoing())
    return answers


def test_a_recorded_handshake_is_worthless_against_another_nonce():
    recorded = Talk(dialler(), acceptor()).sent["p"]
    d = acceptor(nonce=b"e")
    with pytest.raises(RefusedError) as refused:
        list(d.feed(recorded, 0.0))
    assert refused.value.reason == "auth"


def test_a_reflected_proof_is_worthless():
    p = dialler()
    p.outgoing()
    (auth,) = _answers(p, [encode(hello("D", b"x"))])
    with pytest.raises(RefusedError) as refused:
        list(p.feed(auth, 0.0))
    assert refused.value.reason == "auth"


def test_an_echoing_server_is_ourselves():
    p = dialler()
    with pytest.raises(RefusedError) as refused:
        list(p.feed(p.outgoing(), 0.0))
    assert refused.value.reason == "self"
    assert p.outgoing() == b""


@pytest.mark.parametrize(
    ("p_changes", "d_changes", "reason"),
    [
        ({"major": 2}, {}, "version"),
        ({}, {"major": 2}, "version"),
        ({"incarnation": "same"}, {"incarnation": "same"}, "self"),
        ({"role": "D"}, {}, "role"),
        ({}, {"role": "P"}, "role"),
        ({}, {"role": "A"}, "role"),
        ({"role": "A"}, {}, "role"),
    ],
)
def test_what_both_see_in_the_hellos_is_refused_without_a_word(p_changes, d_changes, reason):
    p = Connection(
        Terms(hello(**{"role": "P", "nonce": b"p", **p_changes}), LAYOUT, (OLD,)),
        dialler=True,
        deadline=4.0,
    )
    talk = Talk(p, acceptor(**d_changes))
    # A side of major 2 is played by our code, which compares with 1: it may see nothing wrong.
    seen = [error.reason for error in talk.errors.values() if error is not None]
    assert reason in seen
    assert "Layout" not in talk.types("p") + talk.types("d")
    assert talk.types("d") == ["Hello"]


@pytest.mark.parametrize(
    ("changes", "factor"),
    [
        ({"factors": {"model": "other", "kv_dtype": "float32"}}, "model"),
        ({"factors": {"model": "demo", "kv_dtype": "bfloat16"}}, "kv_dtype"),
        ({"factors": {"model": "demo"}}, "kv_dtype"),
        ({"factors": {**LAYOUT.factors, "rope\n": "x"}}, "other"),
        ({"layers": (0, 2)}, "layers"),
        ({"kv_heads": 2}, "kv_heads"),
        ({"head_dim": 2}, "head_dim"),
        ({"block_size": 24, "block_bytes": 192}, "block_size"),
        ({"block_size": 0}, "block_size"),
        ({"dtype": "bfloat16"}, "dtype"),
        ({"block_size": 32}, "block_bytes"),
        ({"block_bytes": 256}, "block_bytes"),
        ({"block_bytes": 130}, "block_bytes"),
        ({"layers": (1, 0)}, "layers"),
        ({"stages": ((0, 2),)}, "layers"),
        ({"layers": (1,), "stages": ((0, 1),)}, "layers"),
        ({"kv_heads": 2, "block_bytes": 256, "total_kv_heads": 1}, "kv_heads"),
        ({"total_kv_heads": 4}, "kv_heads"),
        ({"total_kv_heads": 3, "tp": 2}, "tp"),
        ({"is_mla": True}, "is_mla"),
    ],
)
def test_both_sides_name_the_factor_that_differs(changes, factor):
    theirs = msgspec.structs.replace(LAYOUT, **changes)
    talk = Talk(dialler(layout=theirs), acceptor())
    for error in talk.errors.values():
        assert (error.reason, error.factor) == ("incompatible", factor)
    assert talk.events == {"p": [], "d": []}


def test_limits_may_differ():
    theirs = msgspec.structs.replace(LAYOUT, max_tokens=5, max_data_bytes=1)
    p, d = dialler(layout=theirs), acceptor()
    Talk(p, d)
    assert p.is_open
    assert d.is_open
    # One block always fits.
    assert d.max_data_bytes == LAYOUT.block_bytes


SMALL, LARGE = LAYOUT, msgspec.structs.replace(LAYOUT, block_size=64, block_bytes=512)


@pytest.mark.parametrize(("of_p", "of_d"), [(SMALL, LARGE), (LARGE, SMALL)], ids=["to_4", "of_4"])
def test_block_sizes_may_differ_and_data_holds_blocks_of_p(of_p, of_d):
    of_d = msgspec.structs.replace(of_d, max_data_bytes=1)
    p, d = dialler(layout=of_p), acceptor(layout=of_d)
    Talk(p, d)
    assert (p.block_bytes, d.block_bytes) == (of_p.block_bytes, of_p.block_bytes)
    # One of P's blocks always fits, and no more was allowed.
    message = next(s.message for s in SAMPLES if s.name == "data")
    frame = p.encode(message, of_p.block_bytes + CHECKSUM_BYTES)
    assert [*d.feed(frame, 0.0)] == [DataBegin(message, of_p.block_bytes)]
    two = msgspec.structs.replace(message, end_block=2)
    with pytest.raises(IllegalMoveError):
        p.encode(two, 2 * of_p.block_bytes + CHECKSUM_BYTES)
    with pytest.raises(IllegalMoveError):
        p.encode(message, of_d.block_bytes + CHECKSUM_BYTES)


def test_the_side_that_refuses_says_in_its_own_log_what_does_not_fit():
    theirs = msgspec.structs.replace(LAYOUT, block_size=24, block_bytes=192)
    talk = Talk(dialler(layout=theirs), acceptor())
    text = "block_size): P has 24 tokens, D has 16; one must be a multiple of the other"
    for error in talk.errors.values():
        assert text in str(error)


HANDSHAKE = [Hello, Auth, Layout]
BY_TYPE = {type(sample.message): sample.raw for sample in SAMPLES}


@pytest.mark.parametrize("steps", range(3))
@pytest.mark.parametrize("kind", BY_TYPE, ids=lambda kind: kind.__name__)
def test_any_other_frame_in_the_handshake_ends_it(steps, kind):
    if kind is HANDSHAKE[steps]:
        return
    p, d = dialler(), acceptor()
    for _ in range(steps):
        list(d.feed(p.outgoing(), 0.0))
        list(p.feed(d.outgoing(), 0.0))
    if steps == 2:
        p.outgoing()
    with pytest.raises(ProtocolError):
        list(d.feed(BY_TYPE[kind], 0.0))
    assert not d.is_open


@pytest.mark.parametrize("steps", range(4))
@pytest.mark.parametrize("sample", SAMPLES, ids=[s.name for s in SAMPLES])
def test_the_handshake_itself_knows_the_order_too(steps, sample):
    """Connection refuses these frames by their type before it has read them; this is behind it."""
    p = Handshake(Terms(hello("P", b"p"), LAYOUT, (OLD,)), dialler=True)
    d = Handshake(Terms(hello("D", b"d"), LAYOUT, (OLD,)), dialler=False)
    to_d = p.begin()
    for _ in range(steps):
        to_p = b"".join(d.receive(frame) for frame in Decoder(Limits()).feed(to_d))
        to_d = b"".join(p.receive(frame) for frame in Decoder(Limits()).feed(to_p))
    if steps < 3 and type(sample.message) is HANDSHAKE[steps]:
        return
    with pytest.raises(ProtocolError):
        d.receive(Frame(sample.message, sample.body, sample.raw))


def test_before_auth_an_unknown_type_is_not_skipped():
    unknown = bytearray(encode(Ping(token=1)))
    unknown[4:6] = 99, 0
    with pytest.raises(ProtocolError):
        list(acceptor().feed(bytes(unknown), 0.0))
    _, d = opened()
    assert not [*d.feed(bytes(unknown), 0.0)]


def test_a_dialler_may_not_speak_before_its_auth_is_accepted_for_more():
    p, d = dialler(), acceptor()
    list(d.feed(p.outgoing(), 0.0))
    list(p.feed(d.outgoing(), 0.0))
    with pytest.raises(ProtocolError):
        list(d.feed(BY_TYPE[Offer], 0.0))


OF_P = {"Offer", "Data", "Commit", "Probe"}
OF_D = {"Grant", "Pull", "Done", "Nack", "Lease", "Probed"}
EITHER = {"Cancel", "Cancelled", "Goaway"}


@pytest.mark.parametrize("kind", BY_TYPE, ids=lambda kind: kind.__name__)
def test_an_open_connection_takes_only_what_the_peers_role_sends(kind):
    p, d = opened()
    for receiver, legal in ((d, OF_P | EITHER), (p, OF_D | EITHER)):
        if kind.__name__ in legal:
            assert [*receiver.feed(BY_TYPE[kind], 0.0)]
        elif kind is Ping:
            assert not [*receiver.feed(BY_TYPE[kind], 0.0)]
            assert receiver.outgoing() == encode(Pong(token=7))
        elif kind is not Pong:
            with pytest.raises(ProtocolError):
                list(receiver.feed(BY_TYPE[kind], 0.0))


@pytest.mark.parametrize("sample", SAMPLES, ids=[s.name for s in SAMPLES])
def test_we_may_send_only_what_our_role_sends(sample):
    p, d = opened()
    name = type(sample.message).__name__
    for sender, legal in ((p, OF_P | EITHER), (d, OF_D | EITHER)):
        if name in legal:
            raw = sender.encode(sample.message, len(sample.body))
            assert raw + sample.body == sample.raw
        else:
            with pytest.raises(IllegalMoveError):
                sender.encode(sample.message, len(sample.body))


def test_nothing_can_be_sent_before_it_is_open():
    p = dialler()
    with pytest.raises(IllegalMoveError):
        p.encode(Cancel(**KEYS))
    with pytest.raises(IllegalMoveError):
        _ = p.peer


def test_the_peers_limits_bind_us_and_ours_bind_the_peer():
    small = msgspec.structs.replace(LAYOUT, max_tokens=2, max_data_bytes=256)
    p, d = dialler(), acceptor(layout=small)
    Talk(p, d)
    offer, data = BY_TYPE[Offer], BY_TYPE[Data]
    with pytest.raises(IllegalMoveError):
        p.encode(next(s.message for s in SAMPLES if s.name == "offer"), 12)
    message = next(s.message for s in SAMPLES if s.name == "data")
    wide = msgspec.structs.replace(message, end_block=3)
    with pytest.raises(IllegalMoveError):
        p.encode(wide, 384 + CHECKSUM_BYTES)
    with pytest.raises(IllegalMoveError):
        p.encode(message, 128)
    assert p.encode(message, 128 + CHECKSUM_BYTES)
    with pytest.raises(ProtocolError):
        list(d.feed(offer, 0.0))
    assert data


def test_messages_arrive_with_their_bodies():
    p, d = opened()
    events = [*d.feed(BY_TYPE[Offer] + BY_TYPE[Data], 0.0)]
    assert isinstance(events[0], Received)
    assert events[0].body == bytes.fromhex("050000000600000070110100")
    assert isinstance(events[1], DataBegin)
    grant = Grant(**KEYS)
    assert [*p.feed(d.encode(grant), 0.0)] == [Received(grant, b"")]


def test_a_refusal_on_an_open_connection_ends_it():
    p, d = opened()
    error = d.refuse("limit")
    assert error.reason == "limit"
    with pytest.raises(RefusedError) as refused:
        list(p.feed(d.outgoing(), 0.0))
    assert refused.value.reason == "limit"
    assert refused.value.by_peer


def test_a_refusals_reason_is_one_of_ours_or_other():
    p, _ = opened()
    with pytest.raises(RefusedError) as refused:
        feed(p, Refuse(reason="line\nbreak", factor="line\nbreak"))
    assert (refused.value.reason, refused.value.factor) == ("other", "other")
    assert "\n" not in str(refused.value)


def test_strangers_get_no_reason():
    d = acceptor()
    d.refuse("limit")
    assert d.outgoing() == b""


@pytest.mark.parametrize("make", [dialler, acceptor])
def test_a_handshake_has_a_deadline(make):
    connection = make(deadline=4.0)
    connection.tick(3.9)
    assert connection.due == 4.0
    with pytest.raises(SilentPeerError):
        connection.tick(4.0)


def test_drops_of_a_handshake_do_not_move_its_deadline():
    d = acceptor(deadline=4.0)
    for now, byte in enumerate(dialler().outgoing()[:4]):
        list(d.feed(bytes([byte]), float(now)))
    assert d.due == 4.0


def test_silence_is_asked_and_three_unanswered_pings_end_it():
    p, _ = opened(pulse=Pulse(ping_s=2.0, missed=3))
    assert p.due == 2.0
    pings = []
    for now in (2.0, 4.0, 6.0):
        p.tick(now - 0.1)
        assert p.outgoing() == b""
        p.tick(now)
        pings.append(p.outgoing())
    assert pings == [encode(Ping(token=n)) for n in (1, 2, 3)]
    p.tick(7.9)
    with pytest.raises(SilentPeerError):
        p.tick(8.0)


def test_any_byte_is_a_sign_of_life():
    p, d = opened()
    for now in (2.0, 4.0, 6.0):
        p.tick(now)
    list(p.feed(d.encode(Done(**KEYS))[:1], 7.0))
    assert p.due == 9.0
    p.tick(9.0)
    assert p.outgoing()


def test_body_bytes_read_beside_the_decoder_are_a_sign_of_life():
    _, d = opened()
    list(d.feed(BY_TYPE[Data][:-64], 0.0))
    d.tick(2.0)
    d.data_read(10, 3.0)
    assert d.due == 5.0


def test_after_our_own_pause_the_peer_gets_its_time():
    p, d = opened()
    p.tick(1000.0)
    list(d.feed(p.outgoing(), 1000.0))
    p.tick(1001.9)
    list(p.feed(d.outgoing(), 1001.9))
    assert p.due == 1003.9


@given(st.lists(st.tuples(st.integers(0, 17), st.binary(max_size=64)), max_size=12), st.data())
@settings(max_examples=200, deadline=None)
def test_no_walk_through_the_handshake_opens_it_without_the_key(steps, data):
    """Any mixture of valid frames and bytes from someone without a key: never open, never more
    than HELLO and a refusal in return, and no error but ProtocolError."""
    d = acceptor()
    said = b""
    frames = [sample.raw for sample in SAMPLES]
    try:
        for number, junk in steps:
            piece = frames[number] if data.draw(st.booleans()) else junk
            list(d.feed(piece, 0.0))
            said += d.outgoing()
    except ProtocolError:
        said += d.outgoing()
    assert not d.is_open
    assert {type(f.message) for f in Decoder(Limits()).feed(said)} <= {Hello, Refuse}


def test_goaway_is_the_sessions_business():
    p, d = opened()
    assert [*d.feed(p.encode(Goaway(reason="closing")), 0.0)] == [
        Received(Goaway(reason="closing"), b"")
    ]
