"""A real S3 store on loopback (moto), checkpoints in it, and a way there that fails as told.

The store runs in a process of its own: its libraries are not the product's. The Road is a TCP proxy
in front of it: it cuts connections after so many bytes, or changes a byte on its way.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import botocore.session
from botocore.config import Config

KEYS = {"AWS_ACCESS_KEY_ID": "reader", "AWS_SECRET_ACCESS_KEY": "secret"}
_PROGRAM = """
import sys
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer(ip_address=sys.argv[1], port=0, verbose=False)
server.start()
print(server.get_host_and_port()[1], flush=True)
sys.stdin.read()
"""


class Store:
    """The store, and a client of its administrator. `url` is its endpoint."""

    def __init__(self, host: str, port: int) -> None:
        self.host, self.port = host, port
        self.url = f"http://{host}:{port}"
        self.client: Any = botocore.session.get_session().create_client(
            "s3",
            endpoint_url=self.url,
            region_name="us-east-1",
            aws_access_key_id="admin",
            aws_secret_access_key="admin",
            config=Config(
                s3={"addressing_style": "path"}, request_checksum_calculation="when_required"
            ),
        )

    def put(self, bucket: str, files: dict[str, bytes], **more: Any) -> None:
        """Objects of a bucket, which is made."""
        with contextlib.suppress(self.client.exceptions.BucketAlreadyOwnedByYou):
            self.client.create_bucket(Bucket=bucket)
        for key, content in files.items():
            self.client.put_object(Bucket=bucket, Key=key, Body=content, **more)

    def put_in_parts(self, bucket: str, key: str, parts: list[bytes]) -> None:
        """One object, uploaded in parts of at least 5 MiB: its ETag is no plain MD5."""
        place = {"Bucket": bucket, "Key": key}
        upload = self.client.create_multipart_upload(**place)["UploadId"]
        done: list[dict[str, Any]] = []
        for number, content in enumerate(parts, 1):
            sent = self.client.upload_part(
                **place, PartNumber=number, UploadId=upload, Body=content
            )
            done.append({"PartNumber": number, "ETag": sent["ETag"]})
        self.client.complete_multipart_upload(
            **place, UploadId=upload, MultipartUpload={"Parts": done}
        )


@contextlib.contextmanager
def running_store(host: str = "127.0.0.1") -> Generator[Store]:
    """A store of its own, empty."""
    command = [sys.executable, "-W", "ignore", "-c", _PROGRAM, host]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as process:
        try:
            assert process.stdout is not None
            yield Store(host, int(process.stdout.readline()))
        finally:
            process.kill()


class Road:
    """A TCP proxy before the store. Connections share `cuts`: each takes one, and is cut after so
    many bytes from the store; without any it is whole. `slow_s` passes before each 64 KiB."""

    def __init__(self, store: Store) -> None:
        self._to = (store.host, store.port)
        self._listener = socket.create_server((store.host, 0))
        self.url = f"http://{store.host}:{self._listener.getsockname()[1]}"
        self.cuts: list[int] = []
        self.forgery: tuple[bytes, bytes] | None = None
        self.slow_s = 0.0
        self.bytes = 0
        self.connections = 0
        self._lock = threading.Lock()
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """No more connections."""
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                self.connections += 1
                threading.Thread(target=self._serve, args=(near,), daemon=True).start()

    def _serve(self, near: socket.socket) -> None:
        with near, socket.create_connection(self._to) as far, contextlib.suppress(OSError):
            threading.Thread(target=self._forward, args=(near, far), daemon=True).start()
            left: int | None = None
            while data := far.recv(1 << 16):
                with self._lock:
                    # A small answer (a list, a head) takes no cut.
                    if left is None and self.cuts and len(data) > 4096:
                        left = self.cuts.pop(0)
                if self.slow_s:
                    time.sleep(self.slow_s)
                if self.forgery:
                    data = data.replace(*self.forgery)
                if left is not None:
                    data, left = data[:left], left - len(data)
                self.bytes += len(data)
                near.sendall(data)
                if left is not None and left <= 0:
                    near.shutdown(socket.SHUT_RDWR)
                    return

    def _forward(self, near: socket.socket, far: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := near.recv(1 << 16):
                far.sendall(data)


@contextlib.contextmanager
def answering(answer: Callable[[str, str], tuple[int, bytes]]) -> Generator[str]:
    """An HTTP server whose GETs are answered by `answer(path, Range header)`; yields its URL."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            status, body = answer(self.path, self.headers.get("Range", ""))
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002
            """No log."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()


class Hub:
    """Answers as the Hugging Face hub does, for one repository `org/model` with one commit. `lfs`:
    files whose SHA-256 the hub knows; of others it knows git's name."""

    commit = "c" * 40

    def __init__(self, files: dict[str, bytes], *, lfs: tuple[str, ...] = ()) -> None:
        self.files = files
        self._lfs = lfs

    def __call__(self, path: str, ranged: str) -> tuple[int, bytes]:
        path = path.partition("?")[0]
        if path in ("/api/models/org/model", "/api/models/org/model/revision/v1"):
            siblings = [self._sibling(name, data) for name, data in self.files.items()]
            return 200, json.dumps(
                {"id": "org/model", "sha": self.commit, "siblings": siblings}
            ).encode()
        start = f"/org/model/resolve/{self.commit}/"
        if not path.startswith(start):
            return 404, b"{}"
        begin, end = ranged.removeprefix("bytes=").split("-")
        return 206, self.sent(path.removeprefix(start))[int(begin) : int(end) + 1]

    def sent(self, name: str) -> bytes:
        """The bytes of a file."""
        return self.files[name]

    def _sibling(self, name: str, data: bytes) -> dict[str, Any]:
        blob = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
        found: dict[str, Any] = {"rfilename": name, "size": len(data), "blobId": blob}
        if name in self._lfs:
            digest = hashlib.sha256(data).hexdigest()
            found["lfs"] = {"sha256": digest, "size": len(data), "pointerSize": 134}
        return found


def checkpoint(*, weights: bytes = b"w" * 100_000) -> dict[str, bytes]:
    """Files that look like a checkpoint, one that serving does not read, and one in a folder."""
    return {
        "config.json": b'{"architectures": ["Demo"]}',
        "tokenizer.json": b"{}",
        "model.safetensors": weights,
        "pytorch_model.bin": b"a pickle",
        "original/params.json": b"{}",
    }


def under(prefix: str, files: dict[str, bytes]) -> dict[str, bytes]:
    """Their keys."""
    return {f"{prefix}/{name}": content for name, content in files.items()}


def files_in(folder: Path) -> dict[str, bytes]:
    """What a folder holds, without the manifest."""
    return {p.name: p.read_bytes() for p in folder.iterdir() if not p.name.startswith(".")}


def left_beside(folder: Path) -> Iterator[str]:
    """What a download left beside its folder, but the lock."""
    for path in folder.parent.iterdir():
        if path.name.startswith(f".{folder.name}.") and path.suffix != ".lock":
            yield path.name


def environ(**more: str) -> dict[str, str]:
    """A process's environment with the reader's key and no other of AWS."""
    kept = {n: v for n, v in os.environ.items() if not n.startswith(("AWS_", "XPYD_"))}
    return {**kept, **KEYS, **more}
