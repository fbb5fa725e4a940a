"""An instance of four ranks that moves KV: whichever of its processes is killed or stopped, and
whatever it does then, all of it ends and says which, and nothing of it is left."""

from __future__ import annotations

import itertools
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import httpx
import pytest

from tests.ranks.kit.instances import WAIT_S, is_alive
from tests.ranks.kit.worker import HOST, LONG, Worker, started, wait_for
from xpyd_core.parallel.ranks import Sizes
from xpyd_worker.ranks.loss import EXIT_RANK_ENDED, EXIT_RANK_SILENT, rank_identity

SIZES = Sizes(pipeline=2, tensor=2)
MAIN = -1
# Chunks of 16 tokens: a second of steps at least.
PROMPT = {"prompt": [7] * 900, "max_tokens": 1, "stream": True}
JUDGED_S = 10.0
QUICK = [(3, signal.SIGKILL, "prefill"), (MAIN, signal.SIGSTOP, "decode")]
ALL = itertools.product(
    (0, 1, 2, 3, MAIN), (signal.SIGKILL, signal.SIGSTOP), ("idle", "prefill", "decode")
)
CASES = [pytest.param(*case, False, marks=pytest.mark.slow) for case in QUICK]
CASES += [pytest.param(*case, True, marks=pytest.mark.soak) for case in ALL]


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[Worker]:
    kv = ("--role", "Decode", "--kv-insecure", "--kv-socket-dir", str(tmp_path / "kv"))
    sizes = ("-tp", "2", "-pp", "2", "--kv-buffer-size", "1Mi", "--kv-host-pool-size", "1Mi")
    with started(
        tmp_path, *kv, *sizes, "--max-num-seqs", "8", "--max-num-batched-tokens", "16"
    ) as found:
        yield found


class Asking:
    """Requests under way; each must come to an end."""

    def __init__(self, body: dict[str, object], count: int) -> None:
        self.has_begun = threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=(body,)) for _ in range(count)]
        for thread in self._threads:
            thread.start()

    def _ask(self, body: dict[str, object]) -> None:
        url = f"http://{HOST}:20001/v1/completions"
        # Cut in the middle where the process was killed.
        with (
            suppress(httpx.TransportError),
            httpx.stream("POST", url, json=body, timeout=None) as a,
        ):
            for _ in a.iter_lines():
                self.has_begun.set()

    def end(self) -> None:
        for thread in self._threads:
            thread.join(WAIT_S)
            assert not thread.is_alive(), "a client hangs"


def computed(worker: Worker) -> int:
    """Prompt tokens so far."""
    for line in worker.client.get("/metrics").text.splitlines():
        if line.startswith("xpyd_engine_prompt_tokens_computed_total"):
            return int(float(line.split()[-1]))
    return 0


def begin(worker: Worker, moment: str) -> Asking:
    """Bring it to that moment."""
    before = computed(worker)
    asking = Asking(
        PROMPT if moment == "prefill" else LONG, {"idle": 0, "prefill": 8}.get(moment, 2)
    )
    if moment == "prefill":
        wait_for(lambda: computed(worker) > before)
    if moment == "decode":
        assert asking.has_begun.wait(WAIT_S)
    return asking


@pytest.mark.parametrize(("victim", "number", "moment", "is_judged"), CASES)
def test_all_of_it_ends_and_says_which_and_nothing_is_left(
    tmp_path: Path,
    worker: Worker,
    victim: int,
    number: signal.Signals,
    moment: str,
    is_judged: bool,
) -> None:
    shared_before = set(os.listdir("/dev/shm"))
    tree, ranks, main = worker.tree(), worker.ranks(), worker.process.pid
    assert len(ranks) == 4
    sockets = tmp_path / "kv"
    assert len(list(sockets.iterdir())) == 1 + 4
    asking = begin(worker, moment)
    begin_s = time.monotonic()
    os.kill(main if victim == MAIN else ranks[victim], number)
    status = worker.process.wait(WAIT_S)
    wait_for(lambda: not any(map(is_alive, tree)))
    took_s = time.monotonic() - begin_s
    asking.end()
    assert set(os.listdir("/dev/shm")) <= shared_before
    log = worker.log.read_text()
    if victim == MAIN:
        assert status == -signal.SIGKILL
        is_told = f"the instance ends: its main process (pid {main}) has given no sign" in log
        assert is_told == (number == signal.SIGSTOP)
    else:
        assert status == (EXIT_RANK_ENDED if number == signal.SIGKILL else EXIT_RANK_SILENT)
        named = f"the instance ended: {rank_identity(victim, SIZES, pid=ranks[victim])}"
        assert named in log.splitlines()[-1]
        assert not list(sockets.iterdir())
    assert not is_judged or took_s < JUDGED_S
