"""An instance of two pods, as two processes with an address each: whatever goes on either side, the
other ends, and says why."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.ranks.kit.instances import (
    COMMAND,
    WAIT_S,
    executor_of,
    is_alive,
    launch,
    loss_of,
    pod_config,
    step,
)
from xpyd_core.keys import INSECURE_KEYS
from xpyd_worker.config import WorkerConfig
from xpyd_worker.ranks.instance import Instance
from xpyd_worker.ranks.link.links import Links
from xpyd_worker.ranks.loss import EXIT_POD_LOST, EXIT_RANK_ENDED, RankLostError
from xpyd_worker.ranks.pods.agent import Agent
from xpyd_worker.ranks.pods.handshake import join_leader
from xpyd_worker.ranks.pods.messages import Numbers
from xpyd_worker.ranks.start.messages import Logs

LEADER, POD = (f"127.{44 + os.getpid() % 200}.{os.getpid() // 200 % 250}.{n}" for n in (1, 2))
KEY = "0123456789abcdef"


@dataclass
class Pair:
    instance: Instance
    pod: subprocess.Popen[bytes]
    log: Path

    def ranks_there(self) -> list[int]:
        """Process ids of the other pod's ranks."""
        children = Path(f"/proc/{self.pod.pid}/task/{self.pod.pid}/children").read_text()
        return [int(one) for one in children.split()]


@contextmanager
def other_pod(
    tmp_path: Path, key: str = KEY, **more: Any
) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    key_file, log = tmp_path / "pod.key", tmp_path / "pod.log"
    key_file.write_text(key)
    command = [sys.executable, "-m", "tests.ranks.kit.fake_pod", LEADER, POD, str(key_file)]
    command.append(json.dumps(more))
    with log.open("wb") as file:
        process = subprocess.Popen(command, stderr=file)
    try:
        yield process, log
    finally:
        process.kill()
        process.wait()


def leader_config(tmp_path: Path, **more: Any) -> WorkerConfig:
    key_file = tmp_path / "leader.key"
    key_file.write_text(KEY)
    return pod_config(0, leader=LEADER, host=LEADER, key_file=str(key_file), **more)


def test_a_pod_knows_its_leader_before_it_hears_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the leader says first may have come when the link begins."""
    known: list[bool] = []

    def serve(_: Links, link: Any) -> None:
        known.append(link._take.__self__._leader is link)

    monkeypatch.setattr(Links, "serve", serve)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        agent = Agent(leader_config(tmp_path), ours, COMMAND)
        agent._links.close(5)
        os.close(agent._waker)
    assert known == [True]


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    config = leader_config(tmp_path)
    with other_pod(tmp_path) as (process, log):
        instance = Instance(config, logs=Logs("warning"), command=COMMAND)
        try:
            instance.start()
            yield Pair(instance, process, log)
        finally:
            instance.close(in_order=instance.loss is None)


def test_steps_and_channels_reach_the_other_pod_and_come_back(pair: Pair) -> None:
    executor = executor_of(pair.instance)
    assert [step(executor, {"say": n}) for n in range(20)] == [
        {"rank": 2, "blocks": 7, "say": n} for n in range(20)
    ]
    assert step(executor, {"where": True})["where"] == [LEADER, POD, POD]
    long = "x" * (3 << 20)
    assert step(executor, {"say": long})["say"] == long
    got: list[bytes] = []
    came = threading.Event()
    pair.instance.channels[3].listen(lambda message: (got.append(message), came.set()))
    pair.instance.channels[3].post(b"hello")
    assert came.wait(WAIT_S)
    assert got == [b"3 heard hello"]
    pair.instance.close(in_order=True)
    pair.instance.close = lambda in_order=False: None  # type: ignore[method-assign]
    assert pair.pod.wait(WAIT_S) == 0
    assert pair.log.read_text() == ""


def test_steps_that_wait_for_a_rank_hold_up_nothing_else_of_its_pod(pair: Pair) -> None:
    executor = executor_of(pair.instance)
    launch(executor, {"3": "hang"})
    # More than its ring takes; the last of the ring's bytes are free once the other rank has read.
    launch(executor, {"say": "x" * (3 << 20)})
    came = threading.Event()
    pair.instance.channels[2].listen(lambda _: came.set())
    pair.instance.channels[2].post(b"hello")
    assert came.wait(WAIT_S)
    assert pair.instance.loss is None


def test_a_rank_of_the_other_pod_that_is_killed_ends_both_pods(pair: Pair) -> None:
    ranks = pair.ranks_there()
    running = launch(executor_of(pair.instance), {"*": "hang"})
    os.kill(ranks[1], signal.SIGKILL)
    with pytest.raises(RankLostError, match=r"rank 3 \(pod 1, stage 1, .* SIGKILL"):
        running.wait()
    assert loss_of(pair.instance).status == EXIT_RANK_ENDED
    assert pair.pod.wait(WAIT_S) == EXIT_POD_LOST
    assert "rank 3 (pod 1, stage 1, tensor share 1) was ended by SIGKILL" in pair.log.read_text()
    assert not any(map(is_alive, ranks))


def test_a_pod_that_is_killed_takes_its_ranks_along_and_ends_the_leader(pair: Pair) -> None:
    ranks = pair.ranks_there()
    pair.pod.kill()
    loss = loss_of(pair.instance)
    assert loss.status == EXIT_POD_LOST
    assert "pod 1 of the instance is gone" in loss.text
    pair.pod.wait(WAIT_S)
    for pid in ranks:
        while is_alive(pid):
            threading.Event().wait(0.01)


def test_a_pod_ends_when_its_leader_is_gone(pair: Pair) -> None:
    """As its process' end does: the sockets close without a word."""
    pods = pair.instance._own_pods  # pyright: ignore[reportPrivateUsage]
    assert pods is not None
    pods[1]._link.socket.shutdown(socket.SHUT_RDWR)  # pyright: ignore[reportPrivateUsage]
    assert pair.pod.wait(WAIT_S) == EXIT_POD_LOST
    assert "the leader is gone" in pair.log.read_text()


@pytest.mark.slow
def test_a_pod_that_is_stopped_ends_the_leader(pair: Pair) -> None:
    pair.pod.send_signal(signal.SIGSTOP)
    assert "has given no sign of life" in loss_of(pair.instance).text


def test_who_has_another_key_is_no_pod(tmp_path: Path) -> None:
    config = leader_config(tmp_path)
    instance = Instance(config, logs=Logs("warning"), command=COMMAND)
    starting = threading.Thread(target=lambda: _fails(instance))
    starting.start()
    try:
        sock = _connect(config)
        with sock, pytest.raises(Exception, match="has it the same key"):
            join_leader(sock, 1, Numbers.of(config), INSECURE_KEYS)
    finally:
        instance.close()
        starting.join(WAIT_S)
    assert not starting.is_alive()


def _fails(instance: Instance) -> None:
    with pytest.raises(RankLostError, match="did not come") as raised:
        instance.start()
    assert raised.value.status == EXIT_POD_LOST


def _connect(config: WorkerConfig) -> socket.socket:
    while True:
        try:
            return socket.create_connection((LEADER, config.rendezvous_port), 1, (POD, 0))
        except OSError:
            threading.Event().wait(0.01)
