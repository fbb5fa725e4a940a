"""Two processes over NIXL: P is stopped in the middle of D's read, D gives up, P goes on. What it
sends then must not arrive. Run with UCX_TLS=tcp, or the kernel copies without P's help."""

import multiprocessing
import os
import signal
import sys
import time

import numpy as np

from xpyd_kv.spans import Span
from xpyd_kv.transport.devices.nixl import library
from xpyd_kv.transport.devices.nixl.path import NixlPath
from xpyd_kv.transport.host.data_path import pack

SIZE = 2**29
UNIT = 2**16
STEP = 2**16
PATIENCE_S = 30.0


def lend(pipe):
    memory = np.full(SIZE, 7, np.uint8)
    path = NixlPath(library.load(), unit_bytes=UNIT, lends_from=[memoryview(memory)])
    pipe.send(path.lender().lent().body)
    pipe.recv()


def main():
    ours, its = multiprocessing.Pipe()
    p = multiprocessing.get_context("spawn").Process(target=lend, args=(its,), daemon=True)
    p.start()
    landing = np.zeros(SIZE, np.uint8)
    view = memoryview(landing)
    nixl = library.load()
    nixl.agent(has_progress_thread=False).close()
    descriptors = len(os.listdir("/proc/self/fd"))
    path = NixlPath(nixl, unit_bytes=UNIT, lands_in=lambda: [view])
    borrower = path.borrower()
    borrower.open(SIZE, ours.recv(), [])
    fetch = borrower.prepare(pack([Span(0, SIZE)]), SIZE)([view])
    end = time.monotonic() + PATIENCE_S
    while not arrived(landing):
        assert not fetch.poll(), "the machine copied without P"
        assert time.monotonic() < end
    try:
        os.kill(p.pid, signal.SIGSTOP)
        for _ in range(100):
            # What stands in the sockets still comes.
            fetch.poll()
            time.sleep(0.002)
        assert not fetch.poll()
        borrower.close()
        assert len(os.listdir("/proc/self/fd")) == descriptors, "the agent's sockets are open"
        before = arrived(landing)
        assert 0 < before < SIZE // STEP
        os.kill(p.pid, signal.SIGCONT)
        for _ in range(12):
            time.sleep(0.05)
            assert arrived(landing) == before, "bytes came after the close"
    finally:
        p.kill()


def arrived(landing):
    return int((landing[::STEP] == 7).sum())


if __name__ == "__main__":
    sys.exit(main())
