"""Hands connections from a port of the machine to an address inside the cluster's network.

A socket belongs to the network namespace it was made in: this process runs inside the cluster,
and the listening socket that it inherits was made outside. So the machine reaches the cluster
although nothing of its own network is changed. Standard library only.

    python forward.py LISTENING_FD HOST PORT
"""

from __future__ import annotations

import asyncio
import socket
import sys

_CHUNK_BYTES = 1 << 16
_CONNECT_S = 10.0


async def serve(listening: socket.socket, host: str, port: int) -> None:
    """Forward until cancelled."""

    async def client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            far_reader, far_writer = await asyncio.wait_for(
                asyncio.open_connection(host, port), _CONNECT_S
            )
        except OSError:
            writer.close()
            return
        try:
            await asyncio.gather(_copy(reader, far_writer), _copy(far_reader, writer))
        finally:
            far_writer.close()
            writer.close()

    server = await asyncio.start_server(client, sock=listening)
    async with server:
        await server.serve_forever()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Copy one direction to its end; a broken other side ends it too."""
    try:
        while data := await reader.read(_CHUNK_BYTES):
            writer.write(data)
            await writer.drain()
        if writer.can_write_eof():
            writer.write_eof()
    except OSError:
        writer.close()


if __name__ == "__main__":
    inherited = socket.socket(fileno=int(sys.argv[1]))
    asyncio.run(serve(inherited, sys.argv[2], int(sys.argv[3])))
