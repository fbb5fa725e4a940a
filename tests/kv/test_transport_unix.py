"""Which transport a pair takes, and the socket files that decide it."""

import logging
import os
import socket
import stat

import pytest

from tests.kv.transport_kit import (
    SHARED,
    Puppet,
    address_of,
    dial,
    networks,
    run,
)
from xpyd_core.errors import UserError
from xpyd_core.request_id import Address
from xpyd_kv.transport.host.shared_memory import SharedMemoryPath
from xpyd_kv.transport.settings import TRANSPORTS, offered
from xpyd_kv.transport.stream.listeners import SocketFolder

ALL = {"transports": TRANSPORTS}
HERE = Address("127.0.0.1", 21001)


net = networks("uds")


@pytest.fixture
def folder(tmp_path):
    folder = SocketFolder(tmp_path / "kv")
    yield folder
    folder.close()


def met(net, p_options, d_options):
    """The transport that such a P and D agree on."""
    d, d_told = net.endpoint("D", **d_options)
    p, p_told = net.endpoint("P", **p_options)
    peer = dial(p, p_told, d.listen_address)
    assert d_told.wait("up")[0].transport == peer.transport
    assert d.counters.opened == p.counters.opened == {peer.transport: 1}
    return peer.transport


def test_a_pair_on_one_machine_takes_the_best_that_both_have(net):
    assert met(net, ALL, ALL) == "uds"
    assert met(net, {**ALL, "paths": [SharedMemoryPath(SHARED)]}, ALL) == "shm"
    assert (
        met(net, {**ALL, "paths": [SharedMemoryPath(SHARED)]}, {"transports": ("uds", "tcp")})
        == "uds"
    )


@pytest.mark.parametrize("other", [{"socket_dir": None, **ALL}, {"transports": ("tcp",)}])
@pytest.mark.parametrize("which", ["p", "d"])
def test_where_one_has_no_unix_sockets_it_is_tcp(net, other, which):
    options = {"p": ALL, "d": ALL, which: other}
    assert met(net, options["p"], options["d"]) == "tcp"


def test_the_choice_is_logged_once_for_each_peer(net, caplog):
    caplog.set_level(logging.INFO, "xpyd_kv.transport.stream.streams")
    met(net, ALL, ALL)
    lines = [r.getMessage() for r in caplog.records if "is up over uds" in r.getMessage()]
    assert len(lines) == 2


def test_a_file_without_a_listener_sends_p_to_the_port(net):
    d, _ = net.endpoint("D", **ALL, socket_dir=None)
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(net.target(d.listen_address))
    p, p_told = net.endpoint("P", **ALL)
    assert dial(p, p_told, d.listen_address).transport == "tcp"
    os.unlink(net.target(d.listen_address))


def test_a_full_queue_sends_p_to_the_port(net):
    """A connect that would have to wait is none: the dial is never later than over TCP."""
    d, _ = net.endpoint("D", **ALL, socket_dir=None)
    with socket.socket(socket.AF_UNIX) as full:
        full.bind(net.target(d.listen_address))
        full.listen(0)
        net.connect(d.listen_address)
        p, p_told = net.endpoint("P", **ALL)
        assert dial(p, p_told, d.listen_address).transport == "tcp"
    os.unlink(net.target(d.listen_address))


def test_told_to_use_unix_sockets_only_p_does_not_fall_back(net):
    d, d_told = net.endpoint("D", **ALL, socket_dir=None)
    p, p_told = net.endpoint("P", transports=("uds",))
    run(p, lambda: p.connect(d.listen_address))
    assert p_told.wait("failed") == (d.listen_address, "no_socket")
    assert d_told.told == []


def test_a_pair_without_a_common_transport_is_refused_on_both_sides(net):
    d, _ = net.endpoint("D", transports=("uds",))
    p, p_told = net.endpoint("P", transports=("tcp",))
    run(p, lambda: p.connect(d.listen_address))
    assert p_told.wait("failed")[1] == "refused:transport"
    assert p.counters.refused == d.counters.refused == {"transport": 1}


def test_a_relayed_address_has_no_socket_and_is_dialled(net):
    """The file carries the address that D listens on, not the one that others are told."""
    net.endpoint("D", **ALL)
    relay = net.socket(socket.create_server(("127.0.0.1", 0)))
    p, p_told = net.endpoint("P", **ALL)
    run(p, lambda: p.connect(address_of(relay)))
    puppet = Puppet(net.socket(relay.accept()[0]), "D").open()
    assert p_told.wait("up")[0].transport == puppet.wire.transport == "tcp"


def test_a_new_d_takes_the_place_of_a_dead_one(folder):
    first = folder.listen(HERE)
    first.sock.close()
    second = folder.listen(HERE)
    sock = folder.dial(HERE)
    assert sock is not None
    sock.close()
    first.close()
    again = folder.dial(HERE)
    assert again is not None
    again.close()
    second.close()
    assert folder.dial(HERE) is None


def test_a_living_one_is_not_replaced(folder):
    first = folder.listen(HERE)
    with pytest.raises(UserError, match="another one listens"):
        folder.listen(HERE)
    first.close()


def test_only_the_owner_can_open_the_socket(folder, tmp_path):
    listener = folder.listen(HERE)
    (path,) = (tmp_path / "kv").iterdir()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE((tmp_path / "kv").stat().st_mode) == 0o700
    listener.close()
    assert not path.exists()


def test_a_folder_that_others_may_write_to_is_refused(tmp_path):
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o770)
    with pytest.raises(UserError, match="chmod go-w"):
        SocketFolder(shared)


def test_a_folder_that_is_none_is_refused(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="memory"):
        offered(("nixl",), has_folder=False, lent=[])
    with pytest.raises(UserError, match="--kv-socket-dir"):
        SocketFolder(tmp_path / "file")


def test_a_long_path_is_no_hindrance(tmp_path):
    folder = SocketFolder(tmp_path / ("x" * 100) / ("y" * 100))
    listener = folder.listen(HERE)
    sock = folder.dial(HERE)
    assert sock is not None
    sock.close()
    listener.close()
    folder.close()


@pytest.mark.parametrize("host", ["../escape", "fe80::1%../../x", "fe80::1%eth0", "localhost", ""])
def test_a_request_cannot_name_a_file_of_its_choice(folder, host):
    assert folder.dial(Address(host, 21001)) is None
    with pytest.raises(UserError):
        folder.listen(Address(host, 21001))


def test_all_spellings_of_an_address_mean_one_socket(folder):
    listener = folder.listen(Address("0:0::1", 21001))
    sock = folder.dial(Address("::1", 21001))
    assert sock is not None
    sock.close()
    listener.close()


def test_what_cannot_be_used_is_not_offered():
    both = {"has_folder": True, "lent": ["shm"]}
    assert offered(("tcp", "shm", "uds"), **both) == ("shm", "uds", "tcp")
    assert offered(TRANSPORTS, has_folder=True, lent=TRANSPORTS) == TRANSPORTS
    assert offered(TRANSPORTS, has_folder=False, lent=["nixl"]) == ("nixl", "tcp")
    assert offered(TRANSPORTS, has_folder=True, lent=[]) == ("uds", "tcp")
    assert offered(TRANSPORTS, has_folder=False, lent=["shm"]) == ("tcp",)
    with pytest.raises(UserError, match="memory"):
        offered(("shm",), has_folder=True, lent=[])
    with pytest.raises(UserError, match="--kv-socket-dir"):
        offered(("uds",), has_folder=False, lent=["shm"])
    with pytest.raises(UserError, match="on a GPU"):
        offered(("cuda_ipc",), **both)
    with pytest.raises(UserError, match="pigeon"):
        offered(("pigeon",), **both)


def test_the_file_of_a_killed_one_is_taken_away_and_a_living_one_s_stays(folder, tmp_path):
    gone, other = HERE, Address("127.0.0.1", 21002)
    listener, living = folder.listen(gone), folder.listen(other)
    # As the kernel does it.
    listener.sock.close()
    for address in (gone, other, Address("127.0.0.1", 21003), Address("a.name", 1)):
        folder.remove_dead(address)
    assert os.listdir(tmp_path / "kv") == ["127.0.0.1-21002"]
    # Nor that of one whose queue is full.
    socks = [folder.dial(other) for _ in range(300)]
    assert socks[-1] is None
    folder.remove_dead(other)
    assert os.listdir(tmp_path / "kv") == ["127.0.0.1-21002"]
    for sock in filter(None, socks):
        sock.close()
    living.close()
