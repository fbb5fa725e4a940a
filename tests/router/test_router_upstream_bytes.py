"""Answers and chunks that are told by their bytes are what the HTTP parser makes of them."""

from __future__ import annotations

from typing import Any

import httptools
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from xpyd_router.upstream.connection import whole_answer, whole_chunks

HEAD = b"HTTP/1.1 200 OK\r\nDate: today\r\nContent-Type: application/json\r\n"
NAMES = (b"content-length: 5", b"Content-Length: 5", b"CONTENT-LENGTH:  5 ")


class Parsed:
    """What httptools finds in an answer."""

    def __init__(self, data: bytes) -> None:
        self.body, self.headers, self.is_whole = b"", list[tuple[bytes, bytes]](), False
        parser: Any = httptools.HttpResponseParser(self)
        try:
            parser.feed_data(data)
        except httptools.HttpParserError:
            self.is_whole = False

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name.lower(), value))

    def on_body(self, body: bytes) -> None:
        self.body += body

    def on_message_complete(self) -> None:
        self.is_whole = True


@pytest.mark.parametrize("length", NAMES)
def test_a_plain_answer_is_told_with_its_type_and_body(length: bytes) -> None:
    found = whole_answer(HEAD + length + b"\r\n\r\nhello")
    assert found == (b"application/json", b"hello", b"")
    bare = whole_answer(b"HTTP/1.1 200 \r\n" + length + b"\r\n\r\nhello")
    assert bare == (b"", b"hello", b"")
    said = whole_answer(
        HEAD + b"x-xpyd-kv: recomputed; reason=auth\r\n" + length + b"\r\n\r\nhello"
    )
    assert said == (b"application/json", b"hello", b"recomputed; reason=auth")


@pytest.mark.parametrize(
    "data",
    [
        HEAD + b"content-length: 6\r\n\r\nhello",  # the rest is still to come
        HEAD + b"content-length: 4\r\n\r\nhello",  # more than the answer
        HEAD + b"content-length: +5\r\n\r\nhello",
        HEAD + b"content-length: 5, 5\r\n\r\nhello",
        HEAD + b"content-length: 5\r\nContent-Length: 5\r\n\r\nhello",
        HEAD + b"content-length: 5\r\nTransfer-Encoding: chunked\r\n\r\nhello",
        HEAD + b"content-length: 5\r\nConnection: close\r\n\r\nhello",
        HEAD + b"content-length: 5\r\nRetry-After: 1\r\n\r\nhello",
        HEAD + b"\r\nhello",
        HEAD + b"content-length: 5\r\n",
        HEAD + b"content-length: " + b"9" * 5000 + b"\r\n\r\nhello",
        b"HTTP/1.1 500 Oh\r\ncontent-length: 5\r\n\r\nhello",
        b"HTTP/1.0 200 OK\r\ncontent-length: 5\r\n\r\nhello",
        b"HTTP/1.1 2000 OK\r\ncontent-length: 5\r\n\r\nhello",
        b"",
    ],
)
def test_everything_else_is_the_parsers(data: bytes) -> None:
    assert whole_answer(data) is None


@given(
    st.binary(max_size=300),
    st.integers(-2, 2),
    st.sampled_from(["X-A: b", "Server: s", "X-Xpyd-Kv: moved"]),
)
def test_what_is_told_is_what_the_parser_finds(body: bytes, wrong: int, header: str) -> None:
    length = max(len(body) + wrong, 0)
    data = HEAD + f"{header}\r\nContent-Length: {length}\r\n\r\n".encode() + body
    found, parsed = whole_answer(data), Parsed(data)
    assert (found is not None) == (length == len(body))
    if found is not None:
        assert parsed.is_whole
        headers = dict(parsed.headers)
        said = headers.get(b"x-xpyd-kv", b"")
        assert found == (headers[b"content-type"], parsed.body, said)


def chunked(payloads: list[bytes], digits: str) -> bytes:
    return b"".join(format(len(p), digits).encode() + b"\r\n" + p + b"\r\n" for p in payloads)


@given(
    st.lists(st.binary(min_size=1, max_size=40), min_size=1, max_size=5),
    st.integers(0, 250),
    st.sampled_from(["x", "X", "04x"]),
)
@example([b"a\r\n", b"\r\n1\r\nb"], 0, "x")
def test_whole_chunks_are_told_and_a_cut_one_is_not(
    payloads: list[bytes], cut: int, digits: str
) -> None:
    data = chunked(payloads, digits)
    assert whole_chunks(data) == b"".join(payloads)
    start = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
    assert Parsed(start + data).body == b"".join(payloads)
    ends = {len(chunked(payloads[:count], digits)) for count in range(len(payloads) + 1)}
    part = data[: cut % len(data)]
    told = whole_chunks(part)
    assert (told is not None) == (len(part) in ends - {0})
    if told is not None:
        assert Parsed(start + part).body == told


@pytest.mark.parametrize(
    "data",
    [
        b"0\r\n\r\n",  # the last one ends the answer: the parser must see it
        b"1\r\na\r\n0\r\n\r\n",
        b"0x1\r\na\r\n",
        b"+1\r\na\r\n",
        b" 1\r\na\r\n",
        b"1_0\r\n" + b"a" * 16 + b"\r\n",
        b"1;name=value\r\na\r\n",
        b"\r\n",
        b"1\r\nab\r\n",
        b"1\r\na\n\r",
        b"ffffffffff\r\na\r\n",
        b"",
    ],
)
def test_chunks_of_any_other_form_are_the_parsers(data: bytes) -> None:
    assert whole_chunks(data) is None
