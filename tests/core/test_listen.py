"""Listeners: the pod's own address, and the loopback that port-forward dials."""

import socket

import pytest

from xpyd_core.listen import listen, other_loopback


@pytest.mark.parametrize(
    ("host", "beside"),
    [
        ("10.0.0.5", "127.0.0.1"),
        ("fd00::5", "::1"),
        ("127.0.0.1", None),
        ("127.1.2.3", None),
        ("::1", None),
        ("0.0.0.0", None),
        ("::", None),
        ("localhost", None),
    ],
)
def test_loopback_is_added_only_where_the_address_leaves_it_out(host, beside):
    assert other_loopback(host) == beside


def test_a_port_of_zero_becomes_one_free_port():
    (sock,) = listen("127.0.0.1", 0, backlog=1)
    with sock, socket.create_connection(sock.getsockname(), timeout=5):
        assert not sock.getblocking()


def test_an_address_that_is_taken_is_an_error():
    (sock,) = listen("127.0.0.1", 0, backlog=1)
    with sock, pytest.raises(OSError, match="in use"):
        listen("127.0.0.1", sock.getsockname()[1], backlog=1)
