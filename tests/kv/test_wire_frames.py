"""The decoder against streams cut anywhere, broken anywhere and made of anything."""

import struct
import zlib
from itertools import accumulate, pairwise

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kv.wire_samples import KEYS, LAYOUT, PAIR, SAMPLES
from xpyd_core.errors import ProtocolError
from xpyd_kv.wire.errors import IllegalMoveError
from xpyd_kv.wire.frames import (
    MAX_NACK_FRAMES,
    MUST,
    PREFIX_BYTES,
    DataBegin,
    DataChunk,
    DataEnd,
    Decoder,
    Frame,
    Limits,
    encode,
)
from xpyd_kv.wire.messages import Cancel, Data, Done, Grant, Nack, Offer, Ping, Probe

LIMITS = Limits.of(LAYOUT, PAIR)
STREAM = b"".join(sample.raw for sample in SAMPLES)
# What a decoder may hold: one control frame; here the longest is 16 + 65,535 + 4 x max_tokens.
MOST_KEPT_BYTES = 16 + 65_535 + 4 * MAX_NACK_FRAMES


def decode(pieces, limits=LIMITS):
    """Events with the chunks of a body joined, and the error that ended it."""
    decoder, events = Decoder(limits), []
    try:
        for piece in pieces:
            for event in decoder.feed(piece):
                if isinstance(event, DataChunk) and events and isinstance(events[-1], bytes):
                    events[-1] += bytes(event.data)
                elif isinstance(event, DataChunk):
                    events.append(bytes(event.data))
                else:
                    events.append(event)
            assert decoder.kept_bytes <= MOST_KEPT_BYTES
    except ProtocolError as error:
        return events, str(error)
    return events, None


def raw_frame(number, header=b"\x80", body=b"", *, flags=0, crc=None, body_bytes=None):
    sizes = (len(header), len(body) if body_bytes is None else body_bytes)
    crc = zlib.crc32(header) if crc is None else crc
    return struct.pack("<4sBBHII", b"XKV1", number, flags, *sizes, crc) + header + body


def cut(data, places):
    edges = [0, *sorted(place % (len(data) + 1) for place in places), len(data)]
    return [data[a:b] for a, b in pairwise(edges)]


WHOLE = decode([STREAM])


def test_the_stream_of_all_samples_gives_all_of_them():
    events, error = WHOLE
    assert error is None
    messages = [e.message for e in events if isinstance(e, Frame)]
    assert messages == [s.message for s in SAMPLES if not isinstance(s.message, Data)]
    (data,) = [s for s in SAMPLES if isinstance(s.message, Data)]
    begin = events.index(DataBegin(data.message, 128))
    ended = DataEnd(data.message, data.body[128:])
    assert events[begin + 1 : begin + 3] == [data.body[:128], ended]


@given(st.lists(st.integers(0, len(STREAM)), max_size=40))
@settings(max_examples=200, deadline=None)
def test_where_the_stream_is_cut_changes_nothing(places):
    assert decode(cut(STREAM, places)) == WHOLE


def test_byte_by_byte_gives_the_same():
    assert decode([STREAM[i : i + 1] for i in range(len(STREAM))]) == WHOLE


@given(st.integers(0, len(STREAM) - 1), st.integers(0, 7), st.lists(st.integers(0, 3000)))
@settings(max_examples=300, deadline=None)
def test_a_flipped_bit_harms_no_frame_before_it(place, bit, places):
    broken = bytearray(STREAM)
    broken[place] ^= 1 << bit
    ends = list(accumulate(len(sample.raw) for sample in SAMPLES))
    start = max((end for end in ends if end <= place), default=0)
    before, _ = decode([STREAM[:start]])
    events, error = decode(cut(bytes(broken), places))
    assert events[: len(before)] == before
    assert (events, error) == decode([bytes(broken)])


@given(st.sampled_from(SAMPLES), st.integers(0), st.integers(0, 7))
@settings(max_examples=200, deadline=None)
def test_a_flipped_bit_in_a_header_is_refused(sample, place, bit):
    header_bytes = len(sample.raw) - len(sample.body) - 16
    broken = bytearray(sample.raw)
    broken[16 + place % header_bytes] ^= 1 << bit
    assert decode([bytes(broken)]) == ([], "a header's CRC is wrong")


@given(st.lists(st.binary(max_size=200), max_size=20))
@settings(max_examples=300, deadline=None)
def test_random_bytes_end_in_a_protocol_error_or_wait_for_more(pieces):
    events, error = decode(pieces)
    assert not events
    assert error is not None or b"XKV1".startswith(b"".join(pieces)[:4])


@given(
    st.sampled_from(SAMPLES),
    st.binary(max_size=120),
    st.integers(0, 200),
    st.integers(0, 3),
)
@settings(max_examples=500, deadline=None)
def test_junk_in_a_header_with_a_right_crc_is_a_protocol_error_or_a_valid_message(
    sample, junk, place, kept
):
    header_bytes = int.from_bytes(sample.raw[6:8], "little")
    header = sample.raw[16 : 16 + header_bytes]
    place %= len(header) + 1
    header = header[:place] + junk + header[place + kept :]
    events, _ = decode([raw_frame(sample.raw[4], header, sample.body)])
    for event in events:
        if isinstance(event, Frame):
            # What the decoder accepts, the encoder can say: nothing out of bounds came through.
            encode(event.message, len(event.body))


json_like = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.binary(max_size=70)
    | st.text(max_size=70),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=10,
)


@given(st.sampled_from(SAMPLES), st.data())
@settings(max_examples=150, deadline=None)
def test_a_header_with_one_field_of_anything_never_raises_anything_else(sample, data):
    fields = msgspec.msgpack.decode(sample.raw[16 : len(sample.raw) - len(sample.body)])
    name = data.draw(st.sampled_from(sorted(fields)))
    fields[name] = data.draw(json_like)
    decode([raw_frame(sample.raw[4], msgspec.msgpack.encode(fields), sample.body)])


NESTED = b"\x81\xa1x" + b"\x91" * 60_000 + b"\x00"
DATA = next(s for s in SAMPLES if isinstance(s.message, Data))


def _data(**changes):
    return msgspec.msgpack.encode(msgspec.structs.replace(DATA.message, **changes))


def _header(message):
    return msgspec.msgpack.encode(message)


REFUSED = {
    "another protocol": (b"GET / HTTP/1.1\r\n", "magic"),
    "another protocol, first byte": (b"G", "magic"),
    "another version's magic": (b"XKV2" + bytes(12), "magic"),
    "unknown type that must be understood": (raw_frame(99, flags=MUST), "must be understood"),
    "type 0": (raw_frame(0, flags=MUST), "must be understood"),
    "a huge unknown body": (raw_frame(99, body_bytes=64 * 1024 + 1), "over its limit"),
    "no header": (raw_frame(15, b""), "schema"),
    "wrong CRC": (raw_frame(15, crc=1), "CRC"),
    "not msgpack": (raw_frame(15, b"\xc1"), "schema"),
    "not a map": (raw_frame(15, b"\x93\x01\x02\x03"), "schema"),
    "missing field": (raw_frame(15), "schema"),
    "text for a number": (raw_frame(15, b"\x81\xa5token\xa17"), "schema"),
    "negative number": (raw_frame(15, b"\x81\xa5token\xff"), "schema"),
    "number too large": (raw_frame(15, b"\x81\xa5token\xcf" + b"\xff" * 8), "schema"),
    "broken utf-8": (raw_frame(12, b"\x84" + _header(KEYS)[1:] + b"\xa6reason\xa1\xff"), "schema"),
    "deep nesting": (raw_frame(15, NESTED), "schema"),
    "trailing bytes": (raw_frame(15, b"\x81\xa5token\x07\x00"), "schema"),
    "uuid with a newline": (
        raw_frame(9, _header({**KEYS, "uuid": "0" * 32 + "\n"})),
        "schema",
    ),
    "uuid in capitals": (raw_frame(9, _header({**KEYS, "uuid": "A" * 32})), "schema"),
    "body where there is none": (raw_frame(9, _header(KEYS), b"x"), "over its limit"),
    "4 GiB of control": (raw_frame(12, body_bytes=2**32 - 1), "over its limit"),
    "offer over the context": (
        raw_frame(5, body_bytes=4 * LAYOUT.max_tokens + 4),
        "over its limit",
    ),
    "nack over its bound": (raw_frame(11, body_bytes=4 * MAX_NACK_FRAMES + 4), "over its limit"),
    "data over the frame": (raw_frame(7, body_bytes=64 * 2**20 + 9), "over its limit"),
    "data longer than its ranges": (raw_frame(7, _data(), bytes(137)), "disagrees"),
    "data shorter than its ranges": (raw_frame(7, _data(), bytes(135)), "disagrees"),
    "data without its checksum": (raw_frame(7, _data(), bytes(128)), "disagrees"),
    "data without body": (raw_frame(7, _data()), "disagrees"),
    "data of no layer": (raw_frame(7, _data(end_layer=0)), "range"),
    "data of layers that are not": (raw_frame(7, _data(end_layer=3), bytes(392)), "range"),
    "data of no block": (raw_frame(7, _data(first_block=1)), "range"),
    "data backwards": (raw_frame(7, _data(first_block=3), bytes(264)), "range"),
}


@pytest.mark.parametrize(("stream", "why"), REFUSED.values(), ids=REFUSED.keys())
def test_what_the_protocol_forbids_is_refused_at_once(stream, why):
    events, error = decode([stream])
    assert not events
    assert error is not None
    assert why in error


OFFER = next(s for s in SAMPLES if isinstance(s.message, Offer))


@pytest.mark.parametrize(
    ("changes", "body_bytes"),
    [({}, 8), ({}, 16), ({"tokens": 0}, 0), ({"prompt_tokens": 4}, 12), ({"prompt_tokens": 0}, 12)],
)
def test_an_offer_must_agree_with_its_body(changes, body_bytes):
    header = _header({**msgspec.structs.asdict(OFFER.message), **changes})
    events, error = decode([raw_frame(5, header, bytes(body_bytes))])
    assert not events
    assert error is not None


def test_an_error_says_nothing_of_what_the_stranger_sent():
    secret = "do-not-log-this"
    for field in ("uuid", secret):
        _, error = decode([raw_frame(9, _header({**KEYS, field: secret, "epoch": secret}))])
        assert error is not None
        assert secret not in error


@given(st.integers(0, 64 * 1024), st.lists(st.integers(0, 70_000), max_size=8))
@settings(max_examples=50, deadline=None)
def test_an_unknown_type_without_must_is_skipped_without_being_kept(body_bytes, places):
    ping = encode(Ping(token=1))
    stream = ping + raw_frame(99, b"anything", bytes(body_bytes)) + ping
    decoder = Decoder(LIMITS)
    events = []
    for piece in cut(stream, places):
        events += decoder.feed(piece)
        assert decoder.kept_bytes <= 64
    assert [e.message for e in events] == [Ping(token=1)] * 2


def test_an_unknown_field_is_ignored():
    header = _header({**KEYS, "later": {"deep": [1, 2]}})
    ((event,), error) = decode([raw_frame(9, header)])
    assert error is None
    assert event.message == Done(**KEYS)


def test_a_body_can_be_read_beside_the_decoder():
    decoder = Decoder(LIMITS)
    split = len(DATA.raw) - 108
    begin, chunk = decoder.feed(DATA.raw[:split])
    assert begin == DataBegin(DATA.message, 128)
    assert isinstance(chunk, DataChunk)
    assert decoder.data_left == 100
    decoder.data_read(60)
    with pytest.raises(IllegalMoveError):
        decoder.data_read(41)
    decoder.data_read(40)
    assert (decoder.data_left, decoder.wanted_bytes) == (0, 8)
    assert [*decoder.feed(DATA.raw[-8:-3])] == []
    assert (decoder.data_left, decoder.wanted_bytes) == (0, 3)
    with pytest.raises(IllegalMoveError):
        decoder.data_read(1)
    end, after = decoder.feed(DATA.raw[-3:] + encode(Ping(token=2)))
    assert end == DataEnd(DATA.message, DATA.body[128:])
    assert isinstance(after, Frame)
    assert decoder.wanted_bytes == PREFIX_BYTES


def test_data_cut_at_any_two_bytes_gives_the_same():
    """What stands before and behind it is there, so that its own end is found, too."""
    stream = encode(Ping(token=1)) + DATA.raw + encode(Ping(token=2))
    whole = decode([stream])
    assert [type(event) for event in whole[0]] == [Frame, DataBegin, bytes, DataEnd, Frame]
    ends = range(len(stream) - 60, len(stream) + 1)
    for first in range(len(stream)):
        for second in {end for end in ends if end >= first}:
            assert decode([stream[:first], stream[first:second], stream[second:]]) == whole


def test_a_body_longer_than_a_prefix_can_say_is_not_encoded():
    assert encode(DATA.message, 2**32 - 1)
    with pytest.raises(IllegalMoveError, match="too long"):
        encode(DATA.message, 2**32)


@pytest.mark.parametrize(
    "message",
    [
        Ping(token=-1),
        Cancel(**KEYS, reason="x" * 257),
        Grant(uuid="0" * 31, prompt_index=0, epoch=0),
        Nack(**KEYS, frames=2**32),
        Data(**{**msgspec.structs.asdict(DATA.message), "end_layer": 2**16}),
        Probe(token=1, size_bytes=1, checksum=b"1234567"),
    ],
)
def test_the_encoder_refuses_what_the_decoder_would(message):
    with pytest.raises(IllegalMoveError):
        encode(message)
