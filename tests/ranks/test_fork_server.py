"""Ranks are forked from one process, and are then as if each had been started alone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests.ranks.kit.instances import WAIT_S, executor_of, is_alive, started, step
from tests.ranks.kit.odd_fork_server import MODULE, TWO, fork_server_of, odd, text_of
from xpyd_worker.ranks.loss import RankLostError


def test_ranks_are_children_of_this_process_with_a_name_and_nothing_of_each_others() -> None:
    with started(TWO) as instance:
        pids = [instance.rank_identity(rank).pid for rank in range(2)]
        parents = [text_of(pid, "stat").rpartition(")")[2].split()[1] for pid in pids]
        assert parents == [str(os.getpid())] * 2
        assert [text_of(pid, "comm").strip() for pid in pids] == ["xpyd-rank-0", "xpyd-rank-1"]
        titles = [text_of(pid, "cmdline").rstrip("\0") for pid in pids]
        assert titles == [f"xpyd rank {n}: stage 0 of 1, share {n} of 2" for n in range(2)]
        own = [sockets(pid) for pid in pids]
        # Each its link; and the first what all meet at.
        assert [len(one) for one in own] == [2, 1]
        assert not own[0] & own[1]
        assert not is_alive(fork_server_of(instance))


def sockets(pid: int) -> set[str]:
    folder = Path(f"/proc/{pid}/fd")
    links = {os.readlink(one) for one in folder.iterdir()}
    return {one for one in links if one.startswith("socket:")}


def test_what_all_need_is_imported_once_and_is_there_in_each() -> None:
    instance = odd("count")
    try:
        instance.start()
        said = step(executor_of(instance), {"say": 1})
    finally:
        instance.close(in_order=instance.loss is None)
    assert said["imported_by"] == "the fork server"


def test_a_thread_that_an_import_starts_has_each_rank_import_by_itself(
    capfd: pytest.CaptureFixture[str],
) -> None:
    instance = odd("thread")
    try:
        instance.start()
        said = step(executor_of(instance), {"say": 1})
    finally:
        instance.close(in_order=instance.loss is None)
    assert said["imported_by"] == "the rank"
    log = capfd.readouterr().err
    assert "each rank imports torch by itself, for the import starts threads" in log
    assert log.count("\n") == 1, "said once"


def test_an_import_that_fails_is_said_by_a_rank(capfd: pytest.CaptureFixture[str]) -> None:
    instance = odd("fail")
    try:
        with pytest.raises(RankLostError, match=r"rank 0 .*: No module named 'torch'"):
            instance.start()
    finally:
        instance.close()
    assert "ModuleNotFoundError" in capfd.readouterr().err


def test_a_fork_server_that_is_killed_is_the_end_of_all_its_ranks() -> None:
    instance = odd("hang")
    killer = threading.Thread(target=lambda: os.kill(fork_server_of(instance), signal.SIGKILL))
    killer.start()
    try:
        with pytest.raises(RankLostError, match=r"rank 0 .* was ended by SIGKILL"):
            instance.start()
    finally:
        killer.join()
        instance.close()


def test_a_fork_server_that_is_killed_between_two_forks_leaves_no_rank(tmp_path: Path) -> None:
    instance = odd("die after a fork")
    try:
        with pytest.raises(RankLostError, match=r"rank 1 .* was ended by SIGKILL"):
            instance.start()
        first = instance.rank_identity(0).pid
        assert first
        assert not is_alive(first)
    finally:
        instance.close()


def test_a_close_while_the_fork_server_imports_leaves_nothing() -> None:
    instance = odd("hang")

    def start() -> None:
        with pytest.raises(RankLostError, match="was closed"):
            instance.start()

    starting = threading.Thread(target=start)
    starting.start()
    fork_server = fork_server_of(instance)
    instance.close()
    starting.join(WAIT_S)
    assert not starting.is_alive()
    assert not is_alive(fork_server)


@pytest.mark.parametrize("how", ["hang", "count"])
def test_nothing_outlives_a_process_that_is_killed(how: str) -> None:
    """While the fork server imports, and when it has forked; also what is stopped."""
    command = [sys.executable, "-m", MODULE, "--instance", how]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        pids = [int(one) for one in process.stdout.readline().split()]
        assert pids
        assert all(map(is_alive, pids))
        os.kill(pids[0], signal.SIGSTOP)
        process.kill()
    ticks = threading.Event()
    for _ in range(round(WAIT_S / 0.01)):
        if not any(map(is_alive, pids)):
            return
        ticks.wait(0.01)
    raise AssertionError(f"of {pids} something is left")
