"""How fast one process reads memory with so many threads: the limit of decoding at batch 1.

python -m bench.engine.bandwidth THREADS: prints bytes per second, the best of some passes.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time

# Far more than the processors' caches hold.
_BYTES = 2**29
_PASSES = 16
_LIMIT_S = 60.0


def read_bandwidth(threads: int) -> float:
    """Bytes per second, measured in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-m", __name__, str(threads)],
        capture_output=True,
        text=True,
        timeout=_LIMIT_S,
        check=True,
        env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
    )
    return float(done.stdout)


def main(threads: int) -> None:
    """The process: each thread on a core of its own, reading a part of its own."""
    import numpy as np

    part = _BYTES // threads // 4
    together = threading.Barrier(threads)
    # Of each thread's passes: begin and end. The threads take them: another one would have to wait
    # for a core before it could look at the clock.
    spans: list[list[tuple[float, float]]] = []

    def read(core: int) -> None:
        os.sched_setaffinity(0, {core})
        values = np.ones(part, dtype=np.float32)
        own: list[tuple[float, float]] = []
        for _ in range(_PASSES):
            together.wait()
            begin_s = time.perf_counter()
            # One pass over memory, without the interpreter's lock, as fast as it comes.
            np.dot(values, values)
            own.append((begin_s, time.perf_counter()))
        spans.append(own)

    workers = [threading.Thread(target=read, args=(core,)) for core in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    passes = zip(*spans, strict=True)
    seconds = [max(end for _, end in one) - min(begin for begin, _ in one) for one in passes]
    sys.stdout.write(f"{_BYTES / min(seconds)}\n")


if __name__ == "__main__":
    main(int(sys.argv[1]))
