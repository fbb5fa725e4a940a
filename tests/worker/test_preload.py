"""An engine that is forked behind `preload` finds all of its modules imported."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.e2e.harness import DEMO_MODEL

# Serves until it is healthy, by the worker's own way in; what was imported meanwhile.
PROGRAM = """
import argparse, http.client, json, os, signal, sys, threading, time
from xpyd_core.process import thread_names
from xpyd_worker.preload import preload

preload()
threads = thread_names()
known = set(sys.modules)

from xpyd_worker import command, main

parser = argparse.ArgumentParser()
command.configure(parser)
config = command.read_config(parser.parse_args(sys.argv[1:]))

def is_healthy():
    connection = http.client.HTTPConnection(config.host, config.port, timeout=5)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()

def end_it():
    while not is_healthy():
        time.sleep(0.05)
    os.kill(os.getpid(), signal.SIGTERM)

threading.Thread(target=end_it, daemon=True).start()
status = main.run(config)
print(json.dumps([status, threads, sorted(set(sys.modules) - known)]))
os._exit(0)
"""


@pytest.mark.slow
@pytest.mark.parametrize("role", ["Prefill", "Decode"])
def test_an_engine_imports_nothing_behind_the_fork_and_no_thread_runs_before(role: str) -> None:
    flags = ["--model", str(DEMO_MODEL), "--role", role, "--kv-insecure", "--threads", "1"]
    host = f"127.59.{os.getpid() % 250}.{2 + (role == 'Decode')}"
    flags += ["--host", host, "--port", "20001", "--kv-port", "21001", "--kv-cache-memory", "64Mi"]
    flags += ["--kv-buffer-size", "16Mi", "--kv-host-pool-size", "16Mi", "--device", "cpu"]
    command = [sys.executable, "-P", "-c", PROGRAM, *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    status, threads, late = json.loads(done.stdout.splitlines()[-1])
    assert status == 0, done.stderr
    assert threads == ["python"]
    assert not late, "\n".join(late)
