"""`make bench-router`'s programs in C read JSON and HTTP as others do, in any cut."""

from __future__ import annotations

import ctypes
import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.environments import run

_PROBE = Path(__file__).parents[2] / "bench/router/probe.c"
_COMPILE_S = 60.0
OVER, BROKEN = 6, 7


class Seen(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int) for name in ("state", "status", "is_keeping", "stamps")),
        ("last_stamp", ctypes.c_long),
        ("tail", ctypes.c_char * 8),
    )


@pytest.fixture(scope="module")
def probe(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    made = tmp_path_factory.mktemp("probe") / "probe.so"
    flags = ["-std=gnu11", "-O1", "-shared", "-fPIC", "-fsanitize=undefined"]
    trap = "-fsanitize-undefined-trap-on-error"
    run(["gcc", *flags, trap, "-o", str(made), str(_PROBE)], _COMPILE_S)
    library = ctypes.CDLL(str(made))
    library.find_member.restype = ctypes.c_long
    return library


def member(probe: ctypes.CDLL, text: bytes, name: str) -> bytes | None:
    length = ctypes.c_long()
    at = probe.find_member(
        text, ctypes.c_long(len(text)), name.encode(errors="surrogatepass"), ctypes.byref(length)
    )
    return None if at < 0 else text[at : at + length.value]


def read(probe: ctypes.CDLL, pieces: Sequence[bytes], *, is_closed: bool = False) -> Seen:
    ends = list(itertools.accumulate(map(len, pieces)))
    seen = Seen()
    array = (ctypes.c_long * len(ends))(*ends)
    probe.read_pieces(b"".join(pieces), array, len(ends), is_closed, ctypes.byref(seen))
    return seen


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@settings(deadline=None)
@given(
    document=st.dictionaries(st.text(), _JSON, max_size=5),
    indent=st.sampled_from([None, 1]),
    is_ascii=st.booleans(),
)
def test_members_are_found_where_a_parser_finds_them(
    probe: ctypes.CDLL, document: dict[str, Any], indent: int | None, is_ascii: bool
) -> None:
    text = json.dumps(document, indent=indent, ensure_ascii=is_ascii)
    raw = text.encode(errors="surrogatepass")
    for key, value in document.items():
        name = json.dumps(key, ensure_ascii=is_ascii)[1:-1]
        found = member(probe, raw, name)
        assert found is not None
        assert json.loads(found.decode(errors="surrogatepass")) == value
    assert member(probe, raw, "\\no key is written so") is None


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (b'{"a": 1, "a": 2}', b"2"),
        (b'{"b": {"a": 1}, "c": "\\"a\\": 3"}', None),
        (b'["a", 1]', None),
        (b'["a": 1]', None),
        (b'{"a', None),
        (b'{"a": "b', b'"b'),
        (b"", None),
    ],
)
def test_of_two_members_the_last_counts_and_in_no_object_there_are_none(
    probe: ctypes.CDLL, text: bytes, found: bytes | None
) -> None:
    assert member(probe, text, "a") == found


def stamp(at_ns: int) -> str:
    return f"@{at_ns:019d}"


_NOW = 1_234_567_890_123_456
_TEXT = f"x{stamp(1)}y{stamp(_NOW)}data: [DONE]\n\n".encode()
_HEAD = b"HTTP/1.1 200 OK\r\nServer: x\r\n"
_CHUNKS = b"".join(b"%X;a=b\r\n%s\r\n" % (len(p), p) for p in (_TEXT[:9], _TEXT[9:]))
FRAMES = {
    "length": _HEAD + b"Content-Length: %d\r\n\r\n%s" % (len(_TEXT), _TEXT),
    "chunks": _HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + _CHUNKS + b"0\r\n\r\n",
}


@pytest.mark.parametrize("name", FRAMES)
def test_an_answer_is_read_in_any_cut(probe: ctypes.CDLL, name: str) -> None:
    data = FRAMES[name]
    cuts = [[data[:n], data[n:]] for n in range(1, len(data))]
    for pieces in [[data], *cuts, [bytes([byte]) for byte in data]]:
        seen = read(probe, pieces)
        assert (seen.state, seen.status, seen.is_keeping) == (OVER, 200, 1)
        assert (seen.stamps, seen.last_stamp, seen.tail) == (2, _NOW, b"[DONE]\n\n")
    for n in range(len(data)):
        assert read(probe, [data[:n]]).state < OVER
        assert read(probe, [data[:n]], is_closed=True).state == BROKEN


def test_without_a_frame_an_answer_ends_with_its_connection(probe: ctypes.CDLL) -> None:
    data = b"HTTP/1.1 429 No\r\n\r\n" + _TEXT
    assert read(probe, [data]).state < OVER
    seen = read(probe, [data], is_closed=True)
    assert (seen.state, seen.status, seen.is_keeping, seen.stamps) == (OVER, 429, 0, 2)
    empty = read(probe, [b"HTTP/1.1 204 No\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"])
    assert (empty.state, empty.is_keeping) == (OVER, 0)
    assert read(probe, [b"no head " * 3000]).state == BROKEN
