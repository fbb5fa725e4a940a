"""The mock engines, one process for all of them, and the beats that tell routers of them."""

from __future__ import annotations

import contextlib
import subprocess
import threading
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import zmq
from msgspec import structs

from bench.process import free_port
from bench.router.shape import DECODES, PREFILLS, TOKENS_PER_S, Row
from xpyd_core.messages import Heartbeat, InstanceType, encode_heartbeat

_END_S = 10.0
_BEAT_S = 1.0
_FIRST_KV_PORT = 21001


@dataclass(frozen=True)
class Mocks:
    """Ports of the engines, on 127.0.0.1."""

    prefills: Sequence[int]
    decodes: Sequence[int]


@contextmanager
def engines(program: Path) -> Generator[Mocks]:
    """They listen while the block runs."""
    mocks = Mocks([free_port() for _ in range(PREFILLS)], [free_port() for _ in range(DECODES)])
    ports = ["prefill", *map(str, mocks.prefills), "decode", *map(str, mocks.decodes)]
    process = subprocess.Popen(
        [str(program), str(TOKENS_PER_S), *ports], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        if process.stdout.readline() != "ready\n":
            raise RuntimeError(f"the mock engines ended with {process.wait(_END_S)}")
        yield mocks
    finally:
        process.kill()
        process.communicate(timeout=_END_S)


def beats(mocks: Mocks, row: Row) -> list[bytes]:
    """What the engines say of themselves: vLLM's three fields, or ours."""
    prefills = [_beat("P", number, port) for number, port in enumerate(mocks.prefills)]
    decodes = [_beat("D", number, port) for number, port in enumerate(mocks.decodes, PREFILLS)]
    made = [*prefills, *decodes]
    return [encode_heartbeat(beat if row.wire == "vllm" else _own(beat)) for beat in made]


def _beat(kind: InstanceType, number: int, port: int) -> Heartbeat:
    zmq_address = f"127.0.0.1:{_FIRST_KV_PORT + number}"
    return Heartbeat(type=kind, http_address=f"127.0.0.1:{port}", zmq_address=zmq_address)


def _own(beat: Heartbeat) -> Heartbeat:
    name = f"{beat.type.lower()}-{beat.http.port}"
    return structs.replace(
        beat,
        version=1,
        instance=name,
        incarnation=f"{name}-mock",
        compatibility="mock",
        models=("m",),
        max_model_len=131072,
        continuation=1,
        running=3,
        free_blocks=9000,
        total_blocks=10000,
    )


@contextmanager
def beating(frames: Sequence[bytes], port: int) -> Generator[None]:
    """The engines beat to this discovery port, from the main thread's start of the block on."""
    over = threading.Event()

    def beat() -> None:
        context = zmq.Context()
        try:
            dealer = context.socket(zmq.DEALER)
            dealer.setsockopt(zmq.SNDHWM, len(frames))
            dealer.connect(f"tcp://127.0.0.1:{port}")
            while not over.wait(_BEAT_S):
                for frame in frames:
                    # A router that stands still has old ones waiting.
                    with contextlib.suppress(zmq.Again):
                        dealer.send(frame, zmq.NOBLOCK)
        finally:
            context.destroy(0)

    thread = threading.Thread(target=beat)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
