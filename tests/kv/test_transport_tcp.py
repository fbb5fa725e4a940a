"""What only TCP does: names, source addresses, relays."""

import socket
import threading

import pytest

from tests.kv.transport_kit import KEY, address_of, network, run
from tests.kv.wire_samples import LAYOUT, SAMPLES
from xpyd_core.errors import UserError
from xpyd_core.request_id import Address
from xpyd_kv.transport.settings import Identity
from xpyd_kv.transport.tcp import TcpEndpoint
from xpyd_kv.wire.messages import Offer

OFFER = next(sample for sample in SAMPLES if isinstance(sample.message, Offer))


@pytest.fixture
def net():
    with network("tcp") as net:
        yield net


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


def _pump(source, sink):
    while data := source.recv(65536):
        sink.sendall(data)
    sink.shutdown(socket.SHUT_WR)
