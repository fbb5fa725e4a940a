"""A pod for tests of the local shell: answers what the supervisor asks, and dies as it is told.

    stand_in_pod.py ROLE FLAGS...     ROLE is `router` or an engine's

An engine beats to the router's discovery address by HTTP; the router's /instances shows who beat in
the last second, and GET /lose/N makes it count N requests whose KV did not come. Flags that matter:
--crash-while=FILE exits 3 (or --crash-status=N) at the start while FILE exists, --drain=SECONDS is
how long SIGTERM takes, --deaf ignores SIGTERM, --never-beats is for an engine that the router never
finds. The environment is printed.
"""

import contextlib
import json
import os
import signal
import socket
import ssl
import sys
import threading
import time
from datetime import UTC, datetime

sys.argv += [a for a in os.environ.get("STAND_IN_ARGS", "").split() if a not in sys.argv]
role = sys.argv[1]


def flag(name: str) -> str | None:
    values = [arg.partition("=")[2] for arg in sys.argv if arg.split("=")[0] == f"--{name}"]
    return values[-1] if values else None


def log(text: str) -> None:
    now = datetime.now(UTC).isoformat(timespec="milliseconds")
    with contextlib.suppress(OSError):  # as `logging` does where the disk is full
        sys.stdout.write(f"{now} INFO    stand-in: {text}\n")
        sys.stdout.flush()


def serve(listener: socket.socket, answer) -> None:
    while True:
        try:
            connection, _ = listener.accept()
        except ssl.SSLError:
            continue
        with connection:
            connection.settimeout(2)
            try:
                path = connection.recv(65536).split(b" ")[1].decode()
                body = answer(path)
                head = f"HTTP/1.1 200 OK\r\nContent-Length: {len(body)}\r\n\r\n"
                connection.sendall(head.encode() + body)
            except (OSError, IndexError):
                pass


def as_router() -> None:
    beats: dict[str, float] = {}
    lost = 0

    def on_beat(path: str) -> bytes:
        beats[path.removeprefix("/beat/")] = time.monotonic()
        return b"ok"

    def on_http(path: str) -> bytes:
        nonlocal lost
        if path.startswith("/lose/"):
            lost += int(path.removeprefix("/lose/"))
        if path.startswith("/metrics"):
            pair = 'prefill="t-prefill-0",decode="t-decode-0"'
            labels = f'{pair},outcome="recomputed",cause="unreachable"'
            outcomes = f"xpyd_router_kv_outcomes_total{{{labels}}} {lost}\n"
            return f"{outcomes}xpyd_router_in_flight 4\n".encode()
        fresh = [a for a, at in beats.items() if time.monotonic() - at < 1]
        if path == "/instances":
            rows = [{"http_address": a, "state": "Ready"} for a in fresh]
            return json.dumps({"instances": rows}).encode()
        return b"{}"

    discovery = (flag("discovery-host"), int(flag("discovery-port")))
    beating = socket.create_server(discovery)
    threading.Thread(target=serve, args=(beating, on_beat), daemon=True).start()
    admin = socket.socket(fileno=int(flag("admin-listen-fd")))
    threading.Thread(target=serve, args=(admin, on_http), daemon=True).start()
    clients = socket.socket(fileno=int(flag("listen-fd")))
    if certificate := flag("ssl-certfile"):
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(certificate, flag("ssl-keyfile"))
        clients = context.wrap_socket(clients, server_side=True)
    serve(clients, lambda path: b"{}")


def beat_for_ever(me: str) -> None:
    host, port = os.environ["XPYD_DISCOVERY"].split(":")
    while True:
        try:
            with socket.create_connection((host, int(port)), timeout=1) as router:
                router.sendall(f"GET /beat/{me} HTTP/1.1\r\n\r\n".encode())
                router.recv(100)
        except OSError:
            pass
        time.sleep(0.1)


def as_engine() -> None:
    host, port = os.environ["XPYD_POD_IP"], int(os.environ["XPYD_HTTP_PORT"])
    if "--never-beats" not in sys.argv:
        me = f"{host}:{port}"
        threading.Thread(target=beat_for_ever, args=(me,), daemon=True).start()
    serve(socket.create_server((host, port)), lambda path: b"{}")


def on_term(*_) -> None:
    log("drains")
    threading.Timer(float(flag("drain") or 0), lambda: os._exit(0)).start()


signal.signal(signal.SIGTERM, signal.SIG_IGN if "--deaf" in sys.argv else on_term)
crash = flag("crash-while")
environ = {name: value for name, value in os.environ.items() if name.startswith(("XPYD", "OMP"))}
log(json.dumps({"argv": sys.argv[1:], "environ": environ}))
if crash and os.path.exists(crash) and role != "router":
    log("told to crash")
    sys.exit(int(flag("crash-status") or 3))
threading.Thread(target=as_router if role == "router" else as_engine, daemon=True).start()
while True:
    signal.pause()
