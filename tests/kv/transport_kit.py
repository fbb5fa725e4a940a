"""What the transport's tests share: a session that records, endpoints of both roles, and a puppet
that speaks the protocol over a plain blocking socket as far as a test wants."""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import ssl
import tempfile
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.kv import nixl_kit
from tests.kv.gpu_kit import REGION_BYTES, FakeGpus, Gpus, RealGpus
from tests.kv.nccl_kit import NcclWorld
from tests.kv.pods import KEY, PATIENCE_S
from tests.kv.tls_kit import TRUSTING, digest_of_peer
from tests.kv.wire_samples import LAYOUT, SAMPLES
from xpyd_core.errors import ProtocolError
from xpyd_core.request_id import Address
from xpyd_kv.memory.device import DeviceView
from xpyd_kv.transport.body import checksum
from xpyd_kv.transport.devices.cuda_ipc import CudaIpcPath
from xpyd_kv.transport.devices.nccl.path import NcclPath
from xpyd_kv.transport.devices.nixl.path import NixlPath
from xpyd_kv.transport.devices.staging import Staging
from xpyd_kv.transport.endpoint import TcpEndpoint
from xpyd_kv.transport.host.data_path import DataPath
from xpyd_kv.transport.host.shared_memory import SharedMemory, SharedMemoryPath
from xpyd_kv.transport.settings import Bounds, Identity, Timeouts
from xpyd_kv.transport.stream.sockets import usable
from xpyd_kv.wire.connection import Connection, Opened
from xpyd_kv.wire.frames import encode
from xpyd_kv.wire.handshake import LENT, OVER_TCP, Terms
from xpyd_kv.wire.messages import CHECKSUM_BYTES, MAX_PROBE_BYTES, Data, Hello, Layout

UUID = "0123456789abcdef" * 2
BLOCK_BYTES = LAYOUT.block_bytes
QUICK = Timeouts(connect_s=0.2, auth_s=0.2, ping_s=30.0, failed_auth_s=30.0)
KINDS = ("tcp", "uds", "shm")
"""Transports of host memory."""
NIXL = nixl_kit.library()
_ON_GPU = ("cuda_ipc", "tcp+gpu", "uds+gpu")
CONFORMING = (
    *KINDS,
    "tls",
    "tls+gpu",
    pytest.param("nixl", marks=nixl_kit.needs_nixl),
    *_ON_GPU,
    *(pytest.param(f"{kind}:real", marks=pytest.mark.gpu) for kind in _ON_GPU),
    "nccl",
    pytest.param("nccl:real", marks=pytest.mark.gpu),
)
"""Those that pass the same tests. `+gpu`: the caches are on GPUs, so that DATA goes through slabs;
`:real`: on a real GPU instead of its fake."""
HOST = b"the tests' machine"
SLAB_BYTES = LAYOUT.max_data_bytes + Bounds().scratch_bytes
_SAMPLES = {sample.name: sample for sample in SAMPLES}
_serial = itertools.count(1)
# One for all tests: its descriptors are nobody's leak.
SHARED = SharedMemory(256 * 2**20)
_ports = itertools.count(20_000)


class Recorder:
    """A Handler that keeps what it was told, in order, and lets tests wait for it."""

    def __init__(self) -> None:
        self.told: list[tuple[Any, ...]] = []
        self.details: list[str] = []
        self.checksums: list[bytes] = []
        """Those of the frames that have ended."""
        self.on: dict[str, Callable[..., Any]] = {}
        """What a test wants to happen at an event, by its name."""
        self._news = threading.Condition()

    def tell(self, *event: Any) -> Any:
        with self._news:
            self.told.append(event)
            self._news.notify_all()
        react = self.on.get(event[0])
        return react(*event[1:]) if react else None

    def wait(self, name: str, count: int = 1) -> Any:
        """The `count`-th event of this name, without its name."""
        with self._news:
            assert self._news.wait_for(lambda: len(self.all(name)) >= count, PATIENCE_S), (
                name,
                self.told,
            )
            return self.all(name)[count - 1]

    def all(self, name: str) -> list[tuple[Any, ...]]:
        return [event[1:] for event in self.told if event[0] == name]

    def names(self) -> list[str]:
        return [event[0] for event in self.told]

    def peer_up(self, peer):
        self.tell("up", peer)

    def dial_failed(self, address, reason, detail=""):
        self.tell("failed", address, reason)
        self.details.append(detail)

    def peer_down(self, peer, reason):
        self.tell("down", peer, reason)

    def message(self, peer, message, body):
        self.tell("message", peer, message, body)

    def data_begin(self, peer, header, length):
        return self.tell("begin", peer, header, length)

    def data_end(self, peer, header, checksum, *, stored, intact):
        self.checksums.append(checksum)
        self.tell("end", peer, header, stored, intact)

    def tick(self, now):
        react = self.on.get("tick")
        return react(now) if react else None


class Net:
    """Endpoints of one test, which use one transport only, and the sockets to play with them."""

    def __init__(self, kind: str, folder: Path) -> None:
        name, _, where = kind.partition(":")
        self.transport, _, memory = name.partition("+")
        self.connections = 0
        self.encrypted = self.transport == "tls"
        if self.encrypted:
            self.transport = "tcp"
        if self.transport == "striped":
            self.transport, self.connections = "tcp", 2
        self.folder = folder
        self.gpus: Gpus | None = None
        self.place: dict[str, Any] = {}
        """What HELLO says of where this side is."""
        self._gpu_paths: list[CudaIpcPath | NcclPath] = []
        self._rooms: list[DeviceView] = []
        self.stagings: list[Staging] = []
        self.nccl: NcclWorld | None = None
        if self.transport in ("cuda_ipc", "nccl") or memory:
            # NCCL wants two GPUs for two ranks.
            second = 1 if self.transport == "nccl" else 0
            self.gpus = RealGpus(second) if where else FakeGpus()
            self.place = {"host": HOST, "gpu": self.gpus.p.uuid}
            self._region = self.gpus.p.allocate(REGION_BYTES)
        self._ends: list[Any] = []
        self._own_files: set[str] = set()
        self._shared_bytes = 0

    def endpoint(self, role: str, **options: Any) -> tuple[TcpEndpoint, Recorder]:
        number = next(_serial)
        recorder = options.pop("handler", None) or Recorder()
        name = options.pop("engine_id", f"{role}{number}")
        incarnation = options.pop("incarnation", f"i{number}")
        options.setdefault("keys", (KEY,))
        options.setdefault("layout", LAYOUT)
        options.setdefault("transports", (self.transport,))
        options.setdefault("socket_dir", None if self.is_over_tcp else self.folder)
        if "paths" not in options:
            options["paths"] = [self.path(role)]
        if self.gpus is not None and "staging" not in options and not self.is_lent:
            options["staging"] = self.staging(role)
        options.setdefault("connections", self.connections)
        options.setdefault("encrypted", self.encrypted)
        if role == "P" and self.transport in ("shm", "nixl"):
            options.setdefault("probe_room", memoryview(SHARED.buffer)[-MAX_PROBE_BYTES:])
        if role == "D":
            options.setdefault("listen", Address("127.0.0.1", 0))
        identity = Identity(name, incarnation, role, **options.pop("place", self.place))
        end = TcpEndpoint(recorder, identity=identity, **options)
        end.start()
        self._ends.append(end)
        return end, recorder

    def path(self, role: str) -> DataPath:
        """The data path of a P or D of this net."""
        if self.transport == "nixl":
            return self._nixl_path(role)
        if self.gpus is None or not self.is_lent:
            lends = role == "P" and self.transport == "shm"
            return SharedMemoryPath(SHARED if lends else None)
        if self.transport == "nccl":
            self.nccl = self.nccl or NcclWorld(self.gpus)
            path = self.nccl.path(role, unit_bytes=64 * BLOCK_BYTES)
        elif role == "P":
            path = CudaIpcPath(self.gpus.p, host=HOST, region=self._region)
        else:
            path = CudaIpcPath(self.gpus.d, host=HOST)
        self._gpu_paths.append(path)
        return path

    def _nixl_path(self, role: str) -> DataPath:
        assert NIXL is not None
        lent = [memoryview(SHARED.buffer)] if role == "P" else []
        path = NixlPath(NIXL, unit_bytes=BLOCK_BYTES, lends_from=lent)
        self.keep(path)
        return path

    def keep(self, path: Any) -> None:
        """To be closed when all endpoints are."""
        self._ends.insert(0, path)

    def staging(self, role: str, *, slabs: int = 3) -> Staging:
        """Slabs for a P or D of this net; closed with it."""
        assert self.gpus is not None
        device = self.gpus.p if role == "P" else self.gpus.d
        self.stagings.append(Staging(device, slab_bytes=SLAB_BYTES, slabs=slabs))
        return self.stagings[-1]

    def pair(self, **options: Any):
        """A connected P and D: (p, p's recorder, p's peer), (d, d's recorder, d's peer)."""
        d, d_told = self.endpoint("D", **options)
        p, p_told = self.endpoint("P", **options)
        peer = dial(p, p_told, d.listen_address)
        return (p, p_told, peer), (d, d_told, d_told.wait("up")[0])

    def socket(self, sock: socket.socket) -> socket.socket:
        sock.settimeout(PATIENCE_S)
        self._ends.append(sock)
        return sock

    def listener(self) -> socket.socket:
        """Where a P that dials `address_of` it arrives."""
        sock = self.unconnected()
        if self.is_over_tcp:
            sock.bind(("127.0.0.1", 0))
        else:
            path = self.target(Address("127.0.0.1", next(_ports)))
            sock.bind(path)
            self._own_files.add(Path(path).name)
        sock.listen()
        return sock

    @property
    def is_over_tcp(self) -> bool:
        """Whether its control sockets are TCP's."""
        return self.transport in OVER_TCP

    @property
    def is_lent(self) -> bool:
        """Whether DATA moves beside the socket."""
        return self.transport in LENT

    @property
    def family(self) -> int:
        return socket.AF_INET if self.is_over_tcp else socket.AF_UNIX

    def unconnected(self) -> socket.socket:
        return self.socket(socket.socket(self.family))

    def target(self, address: Address) -> Any:
        """What a socket connects to in order to reach the D of `address`."""
        path = self.folder / f"{address.host}-{address.port}"
        return tuple(address) if self.is_over_tcp else str(path)

    def connect(self, address: Address) -> socket.socket:
        sock = self.unconnected()
        sock.connect(self.target(address))
        return self.socket(TRUSTING.wrap_socket(sock)) if self.encrypted else sock

    def share(self, body: bytes) -> Any:
        """A view of these bytes where a P of this net can send them from: where D can read."""
        if not self.is_lent and self.gpus is None:
            return memoryview(bytearray(body))
        start, self._shared_bytes = self._shared_bytes, self._shared_bytes + len(body)
        if self.gpus is not None:
            assert self._shared_bytes <= REGION_BYTES
            place = self._region[start : self._shared_bytes]
            self.gpus.fill(self.gpus.p, place, body)
            return place
        assert self._shared_bytes <= SHARED.size_bytes - MAX_PROBE_BYTES
        view = memoryview(SHARED.buffer)[start : self._shared_bytes]
        view[:] = body
        return view

    def room(self, size: int, fill: int = 0) -> Any:
        """A view of as many bytes where a D of this net can be told to put them."""
        if self.gpus is None:
            return memoryview(bytearray([fill]) * size)
        view = self.gpus.d.allocate(size)
        self._rooms.append(view)
        self.gpus.fill(self.gpus.d, view, bytes([fill]) * size)
        return view

    def read(self, *views: Any) -> bytes:
        """What stands in views of D's."""
        if self.gpus is None:
            return b"".join(views)
        return b"".join(self.gpus.read(self.gpus.d, view) for view in views)

    def raw(self, name: str) -> bytes:
        """A frame of the wire's samples; HELLOs name this net's transport."""
        sample = _SAMPLES[name]
        if not isinstance(sample.message, Hello):
            return sample.raw
        mine = {"transports": (self.transport,), **self.place}
        return encode(msgspec.structs.replace(sample.message, **mine))

    def files_of_endpoints(self) -> list[str]:
        """Socket files in the folder, but for those that the test made itself."""
        found = {path.name for path in self.folder.iterdir()}
        return sorted(found - self._own_files)

    def close(self) -> None:
        for end in reversed(self._ends):
            if isinstance(end, TcpEndpoint):
                end.close(5.0)
            else:
                end.close()
        if self.gpus is None:
            return
        for path in self._gpu_paths:
            path.close()
        for staging in self.stagings:
            staging.close()
        for room in self._rooms:
            self.gpus.d.free(room)
        self.gpus.p.free(self._region)
        self.gpus.check()


@contextlib.contextmanager
def network(transport: str) -> Iterator[Net]:
    """A Net that must leave no descriptor, thread or socket file behind."""
    with tempfile.TemporaryDirectory() as folder:
        descriptors, threads = len(os.listdir("/proc/self/fd")), threading.active_count()
        net = Net(transport, Path(folder))
        yield net
        net.close()
        nixl_kit.end_openers(PATIENCE_S)
        # Fewer: what an earlier test left to the garbage collector is gone.
        assert len(os.listdir("/proc/self/fd")) <= descriptors
        assert threading.active_count() == threads
        assert net.files_of_endpoints() == []


def networks(*transports: Any) -> Any:
    """A fixture: a Net of each of these transports."""

    @pytest.fixture(params=transports)
    def net(request: Any) -> Iterator[Net]:
        with network(request.param) as made:
            yield made

    return net


def run(end: TcpEndpoint, function: Callable[[], Any]) -> Any:
    """`function` on the I/O thread; what it returned or raised."""
    done, result = threading.Event(), []

    def call() -> None:
        try:
            result.append((function(), None))
        except Exception as error:
            result.append((None, error))
        done.set()

    end.call(call)
    assert done.wait(PATIENCE_S)
    value, error = result[0]
    if error is not None:
        raise error
    return value


def dial(end: TcpEndpoint, told: Recorder, address: Address | None) -> Any:
    assert address is not None
    before = len(told.all("up"))
    run(end, lambda: end.connect(address))
    return told.wait("up", before + 1)[0]


def address_of(sock: socket.socket) -> Address:
    name = sock.getsockname()
    if isinstance(name, str):
        host, _, port = Path(name).name.rpartition("-")
        return Address(host, int(port))
    return Address(*name[:2])


class Puppet:
    """One side of a connection over a blocking socket, after whose handshake the test does what it
    likes, good or bad."""

    def __init__(
        self,
        sock: socket.socket,
        role: str,
        *,
        key: bytes = KEY,
        layout: Layout = LAYOUT,
        **hello: Any,
    ) -> None:
        self.sock = sock
        number = next(_serial)
        identity = Identity(f"puppet{number}", f"i{number}", role)  # type: ignore[arg-type]
        over = hello.setdefault("transports", usable(sock))
        mine: Hello = msgspec.structs.replace(identity.hello(number.to_bytes(32)), **hello)
        binding = partial(digest_of_peer, sock) if isinstance(sock, ssl.SSLSocket) else bytes
        terms = Terms(mine, layout, (key,), over, binding=binding)
        self.wire = Connection(terms, dialler=role == "P", deadline=1e9)
        self._early: list[Any] = []

    def open(self) -> Puppet:
        events: list[Any] = []
        while not any(isinstance(event, Opened) for event in events):
            self.sock.sendall(self.wire.outgoing())
            if (data := self.sock.recv(65536)) == b"":
                raise ConnectionError("closed in the handshake")
            events += self.wire.feed(data, 0.0)
        self.sock.sendall(self.wire.outgoing())
        self._early = [event for event in events if not isinstance(event, Opened)]
        return self

    def read(self) -> list[Any]:
        """Events of what comes next, or came with the handshake's last bytes; [] at the end."""
        if self._early:
            early, self._early = self._early, []
            return early
        while data := self.sock.recv(65536):
            events = [*self.wire.feed(data, 0.0)]
            if events:
                return events
        return []


def is_closed(sock: socket.socket) -> bool:
    """Wait until the other side has closed; whether it did in time. What it says is dropped."""
    with contextlib.suppress(ConnectionError):
        while sock.recv(65536):
            pass
    return True


def data_header(views_or_bytes: Any, *, seq: int = 0) -> Data:
    views = [memoryview(views_or_bytes)] if isinstance(views_or_bytes, bytes) else views_or_bytes
    length = sum(len(view) for view in views)
    assert length % BLOCK_BYTES == 0
    return Data(
        uuid=UUID,
        prompt_index=0,
        epoch=0,
        seq=seq,
        first_layer=0,
        end_layer=1,
        first_block=0,
        end_block=length // BLOCK_BYTES,
    )


def send_data(
    end: TcpEndpoint, told: Recorder, peer: Any, views: list[memoryview], *, seq: int = 0
) -> None:
    """Queue one DATA frame; `told` gets ("done", seq, sent), and its checksum if it was."""

    def done(checksum: bytes | None) -> None:
        if checksum is not None:
            told.checksums.append(checksum)
        told.tell("done", seq, checksum is not None)

    run(end, lambda: end.send_data(peer, lambda: data_header(views, seq=seq), views, done))


def raw_data(body: bytes, *, seq: int = 0, digest: bytes | None = None) -> bytes:
    """A whole DATA frame; with a `digest` that is not its body's, a broken one."""
    header = encode(data_header(body, seq=seq), len(body) + CHECKSUM_BYTES)
    return header + body + (checksum([memoryview(body)]) if digest is None else digest)


def cuts(buffer: memoryview, sizes: Iterator[int]) -> list[memoryview]:
    """The buffer as views of these sizes, the last one shorter."""
    views, start = [], 0
    while start < len(buffer):
        size = next(sizes)
        views.append(buffer[start : start + size])
        start += size
    return views


def protocol_error(*_: Any) -> None:
    raise ProtocolError("the session does not like it")


def broken(*_: Any) -> None:
    raise RuntimeError("a defect of the session")
