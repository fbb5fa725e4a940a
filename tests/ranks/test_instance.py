"""Ranks as real processes: their start, steps through the ring, and every way in which one goes."""

from __future__ import annotations

import ctypes
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.ranks.kit.instances import (
    WAIT_S,
    executor_of,
    is_alive,
    launch,
    loss_of,
    make,
    started,
    step,
)
from xpyd_core.errors import UserError
from xpyd_core.parallel.ranks import Sizes
from xpyd_worker.engine.executor import LayerExperts
from xpyd_worker.ranks.instance import Instance
from xpyd_worker.ranks.loss import (
    EXIT_RANK_ENDED,
    EXIT_RANK_SILENT,
    EXIT_STEP_STUCK,
    RankLostError,
)

TWO = Sizes(pipeline=2)
FOUR = Sizes(pipeline=2, tensor=2)


@pytest.fixture(scope="module")
def four() -> Iterator[Instance]:
    with started(FOUR, blocks=[9, 5, 8, 7]) as instance:
        yield instance


def test_steps_are_answered_by_the_first_rank_of_the_last_stage(four: Instance) -> None:
    """Article facts 45 and 48."""
    executor = executor_of(four)
    assert [step(executor, {"say": n}) for n in range(50)] == [
        {"rank": 2, "blocks": 5, "say": n} for n in range(50)
    ], "and each rank has as many blocks as fit on the smallest"


def test_what_ranks_say_of_their_experts_is_summed_by_layer() -> None:
    """Rank 1 has the same rows as rank 0 and says nothing."""
    told = {"experts 0": [1, 2], "experts 2": [10, 20]}
    with started(FOUR, **told) as instance:
        executor = executor_of(instance)
        for _ in range(3):
            step(executor, {})
        deadline = time.monotonic() + WAIT_S
        while instance.experts_chosen() != [LayerExperts(3, (11 + 6, 22 + 6))]:
            assert time.monotonic() < deadline, instance.experts_chosen()
            time.sleep(0.05)


def test_each_rank_shows_its_steps_what_fits_on_it_and_whether_it_is_up() -> None:
    with started(TWO, blocks=[9, 5]) as instance:
        assert instance.fits == (9, 5)
        executor = executor_of(instance)
        for _ in range(5):
            step(executor, {})
        # The watch sees them by its next look; ranks that give no answer may come behind.
        wait_until(lambda: steps_of(instance) == [5, 5])
        assert [one.is_up for one in instance.show()] == [True, True]
        os.kill(instance.rank_identity(1).pid, signal.SIGKILL)
        loss_of(instance)
        assert [one.is_up for one in instance.show()] == [True, False]


def steps_of(instance: Instance) -> list[int]:
    return [one.beat.steps for one in instance.show()]


def wait_until(is_so: Callable[[], bool]) -> None:
    end_s = time.monotonic() + WAIT_S
    while not is_so():
        assert time.monotonic() < end_s
        time.sleep(0.02)


def test_steps_under_way_are_waited_for_in_order(four: Instance) -> None:
    executor = executor_of(four)
    under_way = [launch(executor, {"say": n}) for n in range(4)]
    assert [one.wait()["say"] for one in under_way] == [0, 1, 2, 3]  # type: ignore[index]


def test_a_step_longer_than_the_ring_arrives(four: Instance) -> None:
    text = "x" * (3 << 20)
    assert step(executor_of(four), {"say": text})["say"] == text


def test_orphans_of_others_are_adopted_only_while_ranks_start() -> None:
    with started(TWO) as instance:
        assert is_alive(instance.rank_identity(1).pid)
        asked = ctypes.c_int(1)
        ctypes.CDLL(None).prctl(37, ctypes.byref(asked), 0, 0, 0)  # PR_GET_CHILD_SUBREAPER
        assert asked.value == 0


def test_who_waits_for_room_in_the_ring_hears_that_a_rank_is_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("xpyd_worker.ranks.instance._PUBLISH_S", 10 * WAIT_S)
    with started(TWO) as instance:
        executor = executor_of(instance)
        launch(executor, {"0": "hang"})
        pid = instance.rank_identity(1).pid
        killer = threading.Timer(0.5, os.kill, (pid, signal.SIGKILL))
        killer.start()
        # More than the ring takes: rank 0 never reads it.
        with pytest.raises(RankLostError, match=r"rank 1 .* SIGKILL"):
            launch(executor, {"say": "x" * (3 << 20)})
        killer.join()
        assert loss_of(instance).status == EXIT_RANK_ENDED


def test_channels_carry_messages_to_a_rank_and_back(four: Instance) -> None:
    got: list[bytes] = []
    all_here = threading.Event()

    def hear(message: bytes) -> None:
        got.append(message)
        if len(got) == 100:
            all_here.set()

    four.channels[3].listen(hear)
    for n in range(100):
        four.channels[3].post(b"%d" % n)
    assert all_here.wait(WAIT_S)
    assert got == [b"3 heard %d" % n for n in range(100)]


def test_a_rank_that_gives_up_between_steps_ends_the_instance_with_its_reason() -> None:
    with started(FOUR) as instance:
        pids = [instance.rank_identity(rank).pid for rank in range(4)]
        step(executor_of(instance), {"say": 1})
        instance.channels[3].post(b"give up: the GPU has failed: unspecified launch failure")
        loss = loss_of(instance)
        assert loss.status == EXIT_RANK_ENDED
        assert re.match(r"rank 3 \(stage 1, tensor share 1, .* the GPU has failed: un", loss.text)
        assert not any(map(is_alive, pids))


def test_ranks_leave_in_order_and_nothing_is_left(capfd: pytest.CaptureFixture[str]) -> None:
    before, threads = set(os.listdir("/proc/self/fd")), threading.active_count()
    with started(TWO) as instance:
        pids = [instance.rank_identity(rank).pid for rank in range(2)]
        step(executor_of(instance), {"say": 1})
    assert not any(map(is_alive, pids))
    assert instance.loss is None
    assert set(os.listdir("/proc/self/fd")) == before
    assert threading.active_count() == threads
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("host", ["127.3.2.1", "::1"])
def test_ranks_of_one_pod_meet_where_only_its_own_host_comes(host: str) -> None:
    """Who reaches their store or their groups is one of them: neither asks for a key."""
    with started(TWO, host=host) as instance:
        where = step(executor_of(instance), {"where": True})["where"]
    assert where == ["127.0.0.1", "127.0.0.1", host], "KV still comes to the pod's address"


@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_rank_ends_the_step_under_way_and_the_other_rank(rank: int) -> None:
    with started(TWO) as instance:
        pids = [instance.rank_identity(r).pid for r in range(2)]
        running = launch(executor_of(instance), {"*": "hang"})
        os.kill(pids[rank], signal.SIGKILL)
        with pytest.raises(
            RankLostError, match=rf"rank {rank} \(stage {rank}, .* ended by SIGKILL"
        ):
            running.wait()
        assert not any(map(is_alive, pids))
        assert loss_of(instance).status == EXIT_RANK_ENDED
        with pytest.raises(RankLostError):
            launch(executor_of(instance), {})


@pytest.mark.slow
def test_a_stopped_rank_is_noticed_while_nothing_runs() -> None:
    with started(TWO) as instance:
        pids = [instance.rank_identity(r).pid for r in range(2)]
        os.kill(pids[1], signal.SIGSTOP)
        loss = loss_of(instance)
        assert loss.status == EXIT_RANK_SILENT
        assert f"rank 1 (stage 1, tensor share 0, pid {pids[1]})" in loss.text
        assert not any(map(is_alive, pids))


@pytest.mark.slow
@pytest.mark.parametrize("when", ["load", "measure", "make"])
def test_a_rank_that_is_stopped_while_it_starts_is_noticed_as_soon(when: str) -> None:
    instance = make(TWO, **{f"{when} 1": "stop"})
    try:
        with pytest.raises(RankLostError, match=r"rank 1 .* no sign of life for 5 s") as raised:
            instance.start()
        assert raised.value.status == EXIT_RANK_SILENT
        assert not any(is_alive(instance.rank_identity(rank).pid) for rank in range(2))
    finally:
        instance.close()


@pytest.mark.slow
def test_a_step_in_which_all_wait_is_stuck() -> None:
    with started(TWO) as instance:
        with pytest.raises(RankLostError, match="a step is stuck: no rank has computed anything"):
            step(executor_of(instance), {"*": "hang"})
        assert loss_of(instance).status == EXIT_STEP_STUCK


def test_a_step_that_does_not_end_is_given_up() -> None:
    with started(TWO) as instance:
        with pytest.raises(RankLostError, match=r"a step is stuck: no answer within 0\.5 s"):
            step(executor_of(instance, deadline_s=0.5), {"*": "spin"})
        assert loss_of(instance).status == EXIT_STEP_STUCK


def test_a_rank_that_fails_in_a_step_says_why(capfd: pytest.CaptureFixture[str]) -> None:
    with started(TWO) as instance:
        with pytest.raises(RankLostError, match=r"rank 0 .*: no such kernel"):
            step(executor_of(instance), {"0": "fail:no such kernel", "1": "misses"})
        assert loss_of(instance).status == EXIT_RANK_ENDED
    assert "ValueError: no such kernel" in capfd.readouterr().err


def test_no_rank_measures_while_another_one_loads(tmp_path: Path) -> None:
    """It would wait for the other's part of a step, and no longer than steps do."""
    measured = tmp_path / "measured"
    with started(TWO, **{"load 1": f"unseen:{measured}", "measure 0": f"touch:{measured}"}):
        assert measured.exists()


@pytest.mark.parametrize("when", ["open", "load", "measure", "make"])
@pytest.mark.parametrize(
    ("does", "error", "match"),
    [
        ("user:--dtype: none", UserError, r"--dtype: none \(rank 1 \(stage 1"),
        ("exit:7", RankLostError, r"rank 1 .* ended with status 7"),
        ("kill", RankLostError, r"rank 1 .* ended by SIGKILL; was it short of memory"),
    ],
)
def test_a_start_that_fails_is_one_error_and_leaves_nothing(
    when: str, does: str, error: type[Exception], match: str
) -> None:
    instance = make(TWO, **{f"{when} 1": does})
    try:
        with pytest.raises(error, match=match) as raised:
            instance.start()
        if isinstance(raised.value, RankLostError):
            assert raised.value.status == EXIT_RANK_ENDED
        assert not any(is_alive(instance.rank_identity(rank).pid) for rank in range(2))
    finally:
        instance.close()


def test_a_rank_that_waits_for_one_that_does_not_come_is_ended_by_close() -> None:
    instance = make(TWO, **{"load 1": "hang"})

    def start() -> None:
        with pytest.raises(RankLostError, match="was closed"):
            instance.start()

    starting = threading.Thread(target=start)
    starting.start()
    while not all(is_alive(instance.rank_identity(rank).pid) for rank in range(2)):
        starting.join(0.01)
    pids = [instance.rank_identity(rank).pid for rank in range(2)]
    instance.close()
    starting.join(WAIT_S)
    assert not starting.is_alive()
    assert not any(map(is_alive, pids))


def test_a_command_that_cannot_be_started_is_a_loss() -> None:
    instance = make(TWO)
    instance._pod._processes._command = ("/does/not/exist",)  # pyright: ignore[reportPrivateUsage]
    try:
        with pytest.raises(RankLostError, match="No such file"):
            instance.start()
    finally:
        instance.close()
