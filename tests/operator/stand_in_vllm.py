#!/usr/bin/env python3
"""`vllm serve` without vLLM: its flags, its HTTP paths, its drain on SIGTERM, and the heartbeats of
xpyd's plugin where the environment names it. Both roles note beside the model what they are asked;
a P whose prompt is `hold` answers when a file `go` is there. From SIGTERM on it refuses what is new
and finishes what it has.
"""

import asyncio
import json
import os
import re
import signal
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from xpyd_core.heartbeat import HeartbeatSender
from xpyd_core.keys import fleet_keys
from xpyd_core.messages import Heartbeat
from xpyd_core.pod_env import read_pod_env

assert sys.argv[1] == "serve"
FLAGS = dict(re.findall(r"^--([a-z-]+)=(.*)$", "\n".join(sys.argv), re.MULTILINE))
NAME = sys.argv[sys.argv.index("--served-model-name") + 1]
TRANSFER = json.loads(FLAGS["kv-transfer-config"])
NOTES = Path(sys.argv[2]) / "notes"


DRAINS = threading.Event()
OPEN = threading.Semaphore(0)
"""A permit for each answer under way."""


class Answers(BaseHTTPRequestHandler):
    def do_GET(self):
        models = {"object": "list", "data": [{"id": NAME, "max_model_len": 64}]}
        known = {"/health": b"", "/v1/models": json.dumps(models).encode(), "/metrics": b""}
        known["/version"] = b'{"version": "0.32.0"}'
        self.answer(200 if self.path in known else 404, known.get(self.path, b""))

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path != "/v1/completions":
            return self.answer(404, b"{}")
        OPEN.release()
        try:
            if DRAINS.is_set():
                return self.answer(503, b'{"error": {"message": "shutting down"}}')
            self.complete(body)
        finally:
            OPEN.acquire()

    def complete(self, body):
        note = {
            "role": TRANSFER["kv_role"],
            "id": self.headers["X-Request-Id"],
            "params": body.get("kv_transfer_params") or {},
            "environment": {name: os.environ[name] for name in os.environ if name[:4] == "VLLM"},
            "max_tokens": body["max_tokens"],
            "transfer": TRANSFER,
            "pid": os.getpid(),
        }
        with NOTES.open("a") as file:
            file.write(json.dumps(note) + "\n")
        end = time.monotonic() + 30
        while body["prompt"] == "hold" and body["max_tokens"] == 1 and time.monotonic() < end:
            if NOTES.with_name("go").exists():
                break
            time.sleep(0.05)
        choice = {"index": 0, "text": TRANSFER["kv_role"], "finish_reason": "length"}
        usage = {"prompt_tokens": 2, "completion_tokens": 1, "total_tokens": 3}
        if note["params"].get("do_remote_decode"):
            params = {"do_remote_prefill": True, "do_remote_decode": False}
            params |= {"remote_engine_id": "e", "remote_request_id": "r", "remote_host": "h"}
            params |= {"remote_port": 1, "remote_block_ids": [[1]]}
        else:
            params = None
        rest = {
            "kv_transfer_params": params,
            "id": "cmpl-1",
            "object": "text_completion",
            "created": 1,
            "model": NAME,
        }
        self.answer(200, json.dumps({**rest, "choices": [choice], "usage": usage}).encode())

    def answer(self, status, body):
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_args):
        """Nothing."""


async def beat():
    """As the plugin does: not before the server listens."""
    pod, extra = read_pod_env(), TRANSFER["kv_connector_extra_config"]
    sender = HeartbeatSender(
        pod.discovery,
        identity=f"{pod.pod_ip}/{os.getpid()}",
        source_host=pod.pod_ip,
        period_s=extra["heartbeat_period_s"],
        make=lambda: Heartbeat(
            type="P" if TRANSFER["kv_role"] == "kv_producer" else "D",
            http_address=f"{pod.pod_ip}:{pod.http_port}",
            zmq_address=f"{pod.pod_ip}:{TRANSFER['kv_port']}",
            instance=pod.instance,
            incarnation=str(os.getpid()),
            fleet=pod.fleet,
            pool=pod.pool,
            revision=pod.revision,
            models=(NAME,),
            state="Draining" if DRAINS.is_set() else "Ready",
            compatibility="plugin",
            dialect="pair-id",
            prompt_ids=1,
        ),
        keys=fleet_keys(Path(extra["key_file"]), insecure=False),
    )
    sender.start()
    await asyncio.to_thread(DRAINS.wait)
    sender.beat_now()
    await asyncio.Event().wait()


def drain(*_):
    DRAINS.set()
    threading.Thread(target=end).start()


def end():
    """Also what came before this process knew of the signal is answered."""
    time.sleep(0.2)
    while OPEN.acquire(blocking=False):
        OPEN.release()
        time.sleep(0.02)
    os._exit(0)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, drain)
    server = ThreadingHTTPServer((FLAGS["host"], int(FLAGS["port"])), Answers)
    if "xpyd" in os.environ.get("VLLM_PLUGINS", "").split(","):
        threading.Thread(target=lambda: asyncio.run(beat()), daemon=True).start()
    server.serve_forever()
