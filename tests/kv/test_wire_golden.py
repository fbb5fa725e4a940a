"""The golden files: what peers of this major version send and understand, byte for byte."""

import re
from pathlib import Path

import pytest

from tests.kv.wire_samples import (
    ACCEPTOR_HELLO,
    DIALLER_HELLO,
    FOLDER,
    KEY,
    LAYOUT,
    PAIR,
    SAMPLES,
    Sample,
    bytes_of,
    hex_text,
)
from xpyd_kv.transport.body import checksum
from xpyd_kv.wire.connection import Connection, Opened
from xpyd_kv.wire.frames import DataBegin, DataChunk, DataEnd, Decoder, Frame, Limits
from xpyd_kv.wire.handshake import Terms, auth_mac
from xpyd_kv.wire.messages import CHECKSUM_BYTES, TYPE_NUMBERS, Data

_DOCS = Path(__file__).parents[2] / "docs"
_NAMES = ("wire.md", "wire-shm.md", "wire-probe.md", "wire-gpu.md", "wire-get.md", "wire-ranks.md")
PAGES = "".join((_DOCS / name).read_text() for name in _NAMES)
names = pytest.mark.parametrize("sample", SAMPLES, ids=[sample.name for sample in SAMPLES])


@names
def test_the_encoder_makes_the_golden_bytes(sample: Sample):
    golden = (FOLDER / f"{sample.name}.hex").read_text()
    assert golden == hex_text(sample)
    assert bytes_of(golden) == sample.raw


@names
def test_the_decoder_reads_the_golden_bytes(sample: Sample):
    raw = bytes_of((FOLDER / f"{sample.name}.hex").read_text())
    events = [
        (event.header, bytes(event.data)) if isinstance(event, DataChunk) else event
        for event in Decoder(Limits.of(LAYOUT, PAIR)).feed(raw)
        if not isinstance(event, DataChunk)
    ]
    if isinstance(sample.message, Data):
        length = len(sample.body) - CHECKSUM_BYTES
        ended = DataEnd(sample.message, sample.body[length:])
        assert events == [DataBegin(sample.message, length), ended]
    else:
        assert events == [Frame(sample.message, sample.body, raw[: len(raw) - len(sample.body)])]


def test_every_type_has_a_golden_file_and_every_file_a_sample():
    assert {type(sample.message) for sample in SAMPLES} == set(TYPE_NUMBERS)
    files = {path.name for path in FOLDER.iterdir()}
    assert files == {f"{sample.name}.hex" for sample in SAMPLES}


def test_the_pages_show_exactly_the_golden_files():
    shown = re.findall(r"^```hex\n(.*?)^```$", PAGES, re.M | re.S)
    assert shown == [(FOLDER / f"{sample.name}.hex").read_text() for sample in SAMPLES]


def test_the_pages_name_every_type_with_its_number():
    for kind, number in TYPE_NUMBERS.items():
        heading = re.search(rf"^##+ .*\b{number} {kind.__name__.upper()}\b", PAGES, re.M)
        assert heading, kind


def test_the_golden_files_are_a_handshake():
    raw = {sample.name: bytes_of((FOLDER / f"{sample.name}.hex").read_text()) for sample in SAMPLES}
    dialler = Connection(Terms(DIALLER_HELLO, LAYOUT, (KEY,)), dialler=True, deadline=4.0)
    acceptor = Connection(Terms(ACCEPTOR_HELLO, LAYOUT, (KEY,)), dialler=False, deadline=4.0)
    assert dialler.outgoing() == raw["hello_dialler"]
    assert not [*acceptor.feed(raw["hello_dialler"], 0.0)]
    assert acceptor.outgoing() == raw["hello_acceptor"]
    assert not [*dialler.feed(raw["hello_acceptor"], 0.0)]
    assert dialler.outgoing() == raw["auth_dialler"]
    assert not [*acceptor.feed(raw["auth_dialler"], 0.0)]
    assert acceptor.outgoing() == raw["auth_acceptor"] + raw["layout"]
    opened = [*dialler.feed(raw["auth_acceptor"] + raw["layout"], 0.0)]
    assert opened == [Opened(ACCEPTOR_HELLO, LAYOUT)]
    assert dialler.outgoing() == raw["layout"]
    assert [*acceptor.feed(raw["layout"], 0.0)] == [Opened(DIALLER_HELLO, LAYOUT)]


def test_the_proof_can_be_made_from_the_page_alone():
    import hmac

    hellos = [sample.raw for sample in SAMPLES[:2]]
    text = b"xpyd-kv-auth/1 dialler"
    for hello in hellos:
        text += len(hello).to_bytes(4, "little") + hello
    mac = auth_mac(KEY, by_dialler=True, dialler_hello=hellos[0], acceptor_hello=hellos[1])
    assert hmac.new(KEY, text, "sha256").digest() == mac


def test_the_sample_checksum_is_that_of_the_sample_body():
    (data,) = [sample for sample in SAMPLES if isinstance(sample.message, Data)]
    body, behind = data.body[:-CHECKSUM_BYTES], data.body[-CHECKSUM_BYTES:]
    assert checksum([memoryview(body)[:50], memoryview(body)[50:]]) == behind
