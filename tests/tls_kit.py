"""TLS for tests: authorities and certificates, and a bridge that lets any test speak it.

`Bridge` is what stunnel is: it takes plain connections and has a TLS connection for each. The end
of one side is the end of that side over TLS (close_notify), and a reset is a reset, so that a test
of half-closed clients or of resets runs over TLS unchanged.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import datetime
import functools
import ssl
import tempfile
from collections.abc import AsyncGenerator
from pathlib import Path

import trustme

from xpyd_core.tls import ServerFiles


@functools.cache
def authority(name: str = "tests") -> trustme.CA:
    """The authority of this name; making one takes milliseconds."""
    return trustme.CA(organization_name=name)


def write_pair(
    directory: Path,
    *names: str,
    ca: trustme.CA | None = None,
    until: datetime.datetime | None = None,
    stem: str = "tls",
) -> ServerFiles:
    """A new certificate for `names` with its key, in `directory`; the files may exist."""
    directory.mkdir(parents=True, exist_ok=True)
    issuer = ca or authority()
    begin = datetime.datetime(2001, 1, 1, tzinfo=datetime.UTC)
    made = issuer.issue_cert(
        *(names or ("127.0.0.1", "localhost")), not_after=until, not_before=begin
    )
    files = ServerFiles(directory / f"{stem}.crt", directory / f"{stem}.key")
    files.certificate.write_bytes(b"".join(one.bytes() for one in made.cert_chain_pems))
    assert files.key is not None
    files.key.write_bytes(made.private_key_pem.bytes())
    files.key.chmod(0o600)
    return files


def write_ca(path: Path, ca: trustme.CA | None = None) -> Path:
    """The authority's own certificate, as clients need it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    (ca or authority()).cert_pem.write_to_path(path)
    return path


def client_context(ca: trustme.CA | None = None) -> ssl.SSLContext:
    """A client that trusts the authority."""
    context = ssl.create_default_context()
    (ca or authority()).configure_trust(context)
    return context


is_tls: contextvars.ContextVar[bool] = contextvars.ContextVar("is_tls", default=False)
"""Whether the routers of a test speak TLS; plain clients then come over a bridge."""

of_engines: contextvars.ContextVar[ssl.SSLContext | None] = contextvars.ContextVar(
    "of_engines", default=None
)
"""With what fake engines serve that start now; None: plain HTTP."""


def tls_if_asked(stack: contextlib.ExitStack | contextlib.AsyncExitStack) -> dict[str, ServerFiles]:
    """The field of a router's configuration, where `is_tls`; `stack` removes the files."""
    if not is_tls.get():
        return {}
    return {"tls": write_pair(Path(stack.enter_context(tempfile.TemporaryDirectory())))}


@contextlib.asynccontextmanager
async def bridged(port: int) -> AsyncGenerator[int]:
    """Where plain clients reach `port`: there, or where `is_tls` at a bridge."""
    if not is_tls.get():
        yield port
        return
    async with Bridge(port, client_context()).open() as bridge:
        yield bridge.port


class Bridge:
    """See the module. `port` is where plain clients connect."""

    def __init__(self, to_port: int, context: ssl.SSLContext) -> None:
        self.port = 0
        self._to_port = to_port
        self._context = context
        self._tasks: set[asyncio.Task[None]] = set()

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncGenerator[Bridge]:
        """It accepts meanwhile."""
        server = await asyncio.start_server(self._begin, "127.0.0.1", 0, limit=65536)
        self.port = server.sockets[0].getsockname()[1]
        try:
            yield self
        finally:
            server.close()
            for task in tuple(self._tasks):
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def _begin(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.get_running_loop().create_task(self._serve(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._to_port)
        try:
            await self._carry(reader, writer, far_reader, far_writer)
        except (OSError, ssl.SSLError):
            writer.transport.abort()
            far_writer.transport.abort()
        finally:
            writer.close()
            far_writer.close()

    async def _carry(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        far_reader: asyncio.StreamReader,
        far_writer: asyncio.StreamWriter,
    ) -> None:
        far = _Far(self._context, far_reader, far_writer)
        await far.shake_hands()

        async def up() -> None:
            while data := await reader.read(65536):
                await far.send(data)
            await far.end()

        upwards = asyncio.create_task(up())
        try:
            while data := await far.receive():
                writer.write(data)
                await writer.drain()
            writer.write_eof()
            await upwards
        finally:
            upwards.cancel()
            await asyncio.gather(upwards, return_exceptions=True)


class _Far:
    """The bridge's connection over TLS."""

    def __init__(
        self, context: ssl.SSLContext, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_hostname="127.0.0.1")
        self._reader, self._writer = reader, writer

    async def shake_hands(self) -> None:
        while True:
            try:
                self._tls.do_handshake()
                break
            except ssl.SSLWantReadError:
                await self._flush()
                if not await self._feed():
                    raise ConnectionError("the server ended in its handshake") from None
        await self._flush()

    async def send(self, data: bytes) -> None:
        rest = memoryview(data)
        while rest:
            rest = rest[self._tls.write(rest) :]
        await self._flush()

    async def end(self) -> None:
        """End our side of TLS, not of TCP."""
        with contextlib.suppress(ssl.SSLError):
            self._tls.unwrap()
        await self._flush()

    async def receive(self) -> bytes:
        """What comes next; empty at the end of the other side, of TLS or of TCP."""
        while True:
            try:
                return self._tls.read(65536)
            except ssl.SSLZeroReturnError:  # where our side has ended, too
                return b""
            except ssl.SSLWantReadError:
                if not await self._feed():
                    return b""

    async def _feed(self) -> bool:
        data = await self._reader.read(65536)
        self._incoming.write(data)
        return bool(data)

    async def _flush(self) -> None:
        self._writer.write(self._outgoing.read())
        await self._writer.drain()
