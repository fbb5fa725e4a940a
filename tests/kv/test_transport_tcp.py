"""What only TCP does: names, source addresses, relays."""

import socket
import threading

import pytest

from tests.kv.pods import KEY, until
from tests.kv.transport_kit import (
    BLOCK_BYTES,
    Puppet,
    address_of,
    networks,
    raw_data,
    run,
)
from tests.kv.wire_samples import LAYOUT, SAMPLES
from xpyd_core.errors import UserError
from xpyd_core.request_id import Address
from xpyd_kv.transport.endpoint import TcpEndpoint
from xpyd_kv.transport.settings import Identity
from xpyd_kv.wire.messages import Offer

OFFER = next(sample for sample in SAMPLES if isinstance(sample.message, Offer))


net = networks("tcp")


@pytest.mark.parametrize("host", ["localhost", "example.invalid", ""])
def test_a_name_is_never_looked_up(net, host):
    p, p_told = net.endpoint("P")
    run(p, lambda: p.connect(Address(host, 21001)))
    assert p_told.wait("failed")[1] == "refused:address"


def test_dials_come_from_the_source_address(net):
    p, _ = net.endpoint("P", source_host="127.0.0.9")
    listener = net.listener()
    run(p, lambda: p.connect(address_of(listener)))
    sock, name = listener.accept()
    net.socket(sock)
    assert name[0] == "127.0.0.9"


def test_an_endpoint_that_cannot_listen_says_why(net):
    taken = address_of(net.listener())
    for address, why in ((taken, "bound"), (Address("localhost", 0), "literal ip")):
        end = TcpEndpoint(
            None, identity=Identity("d", "i", "D"), layout=LAYOUT, keys=(KEY,), listen=address
        )
        with pytest.raises(UserError, match=why):
            end.start()
        end.close(1.0)


def test_without_a_key_there_is_no_endpoint():
    with pytest.raises(UserError, match="key"):
        TcpEndpoint(None, identity=Identity("d", "i", "D"), layout=LAYOUT, keys=())


def test_a_handshake_over_a_relay_works(net):
    """AUTH binds no address: P dials a relay, D sees the relay."""
    d, d_told = net.endpoint("D")
    p, p_told = net.endpoint("P")
    listener = net.listener()
    run(p, lambda: p.connect(address_of(listener)))
    near, _ = listener.accept()
    far = socket.create_connection(d.listen_address)
    ends = [(near, far), (far, near)]
    threads = [threading.Thread(target=_pump, args=pair) for pair in ends]
    for thread in threads:
        thread.start()
    peer = p_told.wait("up")[0]
    run(p, lambda: p.send(peer, OFFER.message, OFFER.body))
    assert d_told.wait("message")[1:] == (OFFER.message, OFFER.body)
    p.close(2.0)
    d_told.wait("down")
    d.close(2.0)
    for thread in threads:
        thread.join(5.0)
    near.close()
    far.close()


def trickling_p(net, body):
    """A D into which a P has begun to send `body`, and its clock."""
    now = [0.0]
    d, d_told = net.endpoint("D", clock=lambda: now[0])
    d_told.on["begin"] = lambda *_: [memoryview(bytearray(len(body)))]
    puppet = Puppet(net.connect(d.listen_address), "P").open()
    d_told.wait("up")
    frame = raw_data(body)
    before = d.counters.received_bytes
    puppet.sock.sendall(frame[:1000])
    until(lambda: d.counters.received_bytes == before + 1000)
    return d, d_told, now, puppet, frame[1000:]


def test_a_few_bytes_of_a_long_body_wake_nobody(net):
    d, d_told, _, puppet, rest = trickling_p(net, bytes(40_000 * BLOCK_BYTES))
    before = d.counters.received_bytes
    for start in range(0, 10_000, 1000):
        puppet.sock.sendall(rest[start : start + 1000])
        run(d, lambda: None)
    assert d.counters.received_bytes == before
    puppet.sock.sendall(rest[10_000:])
    assert d_told.wait("end")[2:] == (True, True)
    # What follows is a short frame, which comes at once.
    puppet.sock.sendall(raw_data(bytes(BLOCK_BYTES), seq=1)[:10])
    before = before + len(rest) + 10
    until(lambda: d.counters.received_bytes == before)


def test_a_body_that_trickles_shows_that_its_peer_lives(net):
    d, d_told, now, puppet, rest = trickling_p(net, bytes(40_000 * BLOCK_BYTES))
    for start in range(0, 20_000, 1000):
        before = d.counters.received_bytes
        puppet.sock.sendall(rest[start : start + 1000])
        now[0] += 2.0
        run(d, lambda: None)
        until(lambda: d.counters.received_bytes > before)  # noqa: B023 - called in this turn
    assert d_told.all("down") == []
    puppet.sock.sendall(rest[20_000:])
    assert d_told.wait("end")[2:] == (True, True)


def _pump(source, sink):
    while data := source.recv(65536):
        sink.sendall(data)
    sink.shutdown(socket.SHUT_WR)
