#!/usr/bin/env python3
"""`vllm serve` without vLLM: its flags, its HTTP paths and its end on SIGTERM. D answers what P was
asked before, as both note it beside the model."""

import json
import os
import re
import signal
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

assert sys.argv[1] == "serve"
FLAGS = dict(re.findall(r"^--([a-z-]+)=(.*)$", "\n".join(sys.argv), re.MULTILINE))
NAME = sys.argv[sys.argv.index("--served-model-name") + 1]
TRANSFER = json.loads(FLAGS["kv-transfer-config"])
NOTES = Path(sys.argv[2]) / "notes"


class Answers(BaseHTTPRequestHandler):
    def do_GET(self):
        models = {"object": "list", "data": [{"id": NAME, "max_model_len": 64}]}
        known = {"/health": b"", "/v1/models": json.dumps(models).encode(), "/metrics": b""}
        self.answer(200 if self.path in known else 404, known.get(self.path, b""))

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path != "/v1/completions":
            return self.answer(404, b"{}")
        note = {
            "role": TRANSFER["kv_role"],
            "id": self.headers["X-Request-Id"],
            "signed": bool((body.get("kv_transfer_params") or {}).get("pair_mac")),
            "max_tokens": body["max_tokens"],
            "transfer": TRANSFER,
            "pid": os.getpid(),
        }
        with NOTES.open("a") as file:
            file.write(json.dumps(note) + "\n")
        choice = {"index": 0, "text": TRANSFER["kv_role"], "finish_reason": "length"}
        usage = {"prompt_tokens": 2, "completion_tokens": 1, "total_tokens": 3}
        rest = {"id": "cmpl-1", "object": "text_completion", "created": 1, "model": NAME}
        self.answer(200, json.dumps({**rest, "choices": [choice], "usage": usage}).encode())

    def answer(self, status, body):
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_args):
        """Nothing."""


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    ThreadingHTTPServer((FLAGS["host"], int(FLAGS["port"])), Answers).serve_forever()
