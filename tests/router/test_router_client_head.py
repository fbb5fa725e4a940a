"""What goes on of a client's head: trace context, named headers, and never the end of a line."""

from __future__ import annotations

import pytest

from xpyd_core.errors import UserError
from xpyd_router.request.client_request import ClientHead, HeadReader, check_forwarded_names

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT = f"00-{TRACE}-00f067aa0ba902b7-01".encode()


def read(*headers: tuple[bytes, bytes], names: tuple[str, ...] = ()) -> ClientHead:
    return HeadReader(names).read(headers)


@pytest.mark.parametrize(
    "parent",
    [
        PARENT,
        b" " + PARENT + b" ",
        b"cc-" + PARENT[3:],
        b"cc-" + PARENT[3:] + b"-what-comes-later",
    ],
)
def test_a_valid_parent_goes_on_as_it_is(parent: bytes) -> None:
    head = read((b"traceparent", parent), (b"tracestate", b"congo=t61rcWkgMzE,rojo@x=00 f"))
    assert head.trace_id == TRACE
    assert head.forwarded == (
        f"traceparent: {parent.decode().strip()}\r\ntracestate: congo=t61rcWkgMzE,rojo@x=00 f\r\n"
    )


@pytest.mark.parametrize(
    "parent",
    [
        b"",
        b"00",
        PARENT.upper(),
        PARENT + b"-more",
        PARENT + b"x",
        b"ff-" + PARENT[3:],
        PARENT.replace(TRACE.encode(), b"0" * 32),
        PARENT.replace(b"00f067aa0ba902b7", b"0" * 16),
        PARENT + b"\r\nX-Evil: 1",
        b"cc-" + PARENT[3:] + b"-\r\nX-Evil: 1",
        b"cc-" + PARENT[3:] + b"-" + b"x" * 300,
    ],
)
def test_of_an_invalid_parent_nothing_goes_on(parent: bytes) -> None:
    assert read((b"traceparent", parent), (b"tracestate", b"a=1")) == HeadReader().read(())


def test_two_parents_are_none() -> None:
    assert read((b"traceparent", PARENT), (b"traceparent", PARENT)).forwarded == ""


@pytest.mark.parametrize(
    "state", [b"", b"novalue", b"A=1", b"a=1\r\nX: y", b"a=b=c", b"a=" + b"1" * 511, b"a=\x80"]
)
def test_an_invalid_state_is_dropped_alone(state: bytes) -> None:
    head = read((b"traceparent", PARENT), (b"tracestate", state))
    assert head.forwarded == f"traceparent: {PARENT.decode()}\r\n"


def test_states_of_several_lines_are_joined() -> None:
    head = read((b"tracestate", b"a=1"), (b"traceparent", PARENT), (b"tracestate", b"b=2, c=3"))
    assert head.forwarded.endswith("tracestate: a=1,b=2, c=3\r\n")


def test_only_named_headers_go_on() -> None:
    sent = (
        (b"host", b"evil"),
        (b"authorization", b"Bearer secret"),
        (b"x-tenant", b"a"),
        (b"x-tenant", b"b\xe9"),
        (b"x-other", b"c"),
    )
    assert read(*sent).forwarded == ""
    assert read(*sent, names=("X-Tenant",)).forwarded == "X-Tenant: a\r\nX-Tenant: bé\r\n"
    named = read(*sent, names=("Authorization",))
    assert named.forwarded == "Authorization: Bearer secret\r\n"


@pytest.mark.parametrize(
    ("value", "status"),
    [
        (b"a\r\nX-Evil: 1", 400),
        (b"a\nb", 400),
        (b"a\x00b", 400),
        (b"a" * 8001, 431),
    ],
)
def test_values_that_could_harm_are_refused_by_the_headers_name(value: bytes, status: int) -> None:
    head = read((b"x-a", value), (b"x-request-id", b"mine"), names=("X-A",))
    assert head.complaint is not None
    assert (head.complaint.status, head.forwarded) == (status, "")
    assert "X-A" in head.complaint.message
    assert head.request_id == b"mine"


def test_all_values_together_are_bounded() -> None:
    three = [(b"x-a", b"a" * 6000)] * 3
    assert read(*three[:2], names=("x-a",)).complaint is None
    complaint = read(*three, names=("x-a",)).complaint
    assert complaint is not None
    assert complaint.status == 431


@pytest.mark.parametrize("value", [b"x" * 257, b"\xe9", b"a\r\nX-Evil: 1", b"a\tb"])
def test_an_id_that_cannot_be_echoed_is_as_none(value: bytes) -> None:
    assert read((b"x-request-id", value)).request_id == b""


@pytest.mark.parametrize(
    "name",
    [
        *("Connection", "keep-alive", "TE", "Transfer-Encoding", "Upgrade", "Trailer"),
        *("Host", "Content-Length", "content-type", "X-Request-Id", "X-Xpyd-Mac", "Expect"),
        *("Proxy-Authorization", "traceparent", "a b", "a:b", "", "a\r\nb", "x" * 65, "é"),
    ],
)
def test_names_that_must_not_go_on_are_refused(name: str) -> None:
    with pytest.raises(UserError, match="--forward-header"):
        check_forwarded_names([name])


def test_names_are_taken_once() -> None:
    assert check_forwarded_names(["X-A", "x-a", "Authorization"]) == ("x-a", "Authorization")
    with pytest.raises(UserError, match="at most 32"):
        check_forwarded_names([f"x-{number}" for number in range(33)])


def test_a_session_is_read_and_goes_on_only_where_a_flag_names_it() -> None:
    named = (b"x-session-id", b"talk \xe9")
    assert read(named) == ClientHead(session="talk \xe9")
    head = read(named, names=("X-Session-Id",))
    assert (head.session, head.forwarded) == ("talk \xe9", "X-Session-Id: talk \xe9\r\n")
    assert read((b"x-session-id", b"x" * 257)).session == ""
