"""In which order a rank begins steps and answers, whatever has come meanwhile."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any, cast

import pytest

from xpyd_worker.ranks.link.responses import Answers
from xpyd_worker.ranks.link.ring import RingReader
from xpyd_worker.ranks.start.rank_main import run_steps
from xpyd_worker.ranks.watch.beats import Slot


@dataclass
class Step:
    rank: Rank
    message: bytes
    is_over: bool
    broke: str = ""

    def finish(self) -> bytes | None:
        self.rank.did.append(f"finish {self.message.decode()}")
        return self.message if self.rank.is_output else None


class Rank:
    """It is program, ring, answers and slot at once. Messages have all come before it reads the
    first; None stands for a time at which there is none."""

    def __init__(self, *messages: bytes | None, is_output: bool, is_over: bool) -> None:
        self.messages = deque(messages)
        self.is_output, self.is_over = is_output, is_over
        self.did: list[str] = []

    def launch(self, message: bytes) -> Step:
        self.did.append(f"launch {message.decode()}")
        return Step(self, message, self.is_over, "lost" * message.endswith(b"x"))

    def read(self, timeout_ms: int | None) -> bytes | None:
        if self.messages[0] is None and timeout_ms is None:
            self.messages.popleft()
        return self.messages.popleft()

    def done(self, output: bytes) -> None:
        self.did.append(f"answer {output.decode()}")

    @property
    def meeting(self) -> int:
        return len(self.did)

    def broke(self, meeting: int) -> None:
        self.did.append(f"broke {meeting}")

    def begin(self) -> None: ...

    def launched(self) -> None: ...

    def end(self) -> None: ...

    def run(self, depth: int) -> list[str]:
        run_steps(
            cast(Any, self),
            cast(RingReader, self),
            cast(Answers, self),
            cast(Slot, self),
            is_output=self.is_output,
            depth=depth,
        )
        return self.did


def test_what_is_over_is_answered_before_the_next_step_that_has_come():
    """On a CPU a last stage has drawn when a step is launched. Did its answer wait for the step
    behind it, the other stages would have nothing to do for as long."""
    rank = Rank(b"1", b"2", b"3", b"", is_output=True, is_over=True)
    assert rank.run(depth=2) == [
        *("launch 1", "finish 1", "answer 1"),
        *("launch 2", "finish 2", "answer 2"),
        *("launch 3", "finish 3", "answer 3"),
    ]


def test_what_a_device_still_computes_is_waited_for_when_no_other_has_come():
    rank = Rank(b"1", b"2", None, b"3", None, b"", is_output=True, is_over=False)
    assert rank.run(depth=3) == [
        *("launch 1", "launch 2", "finish 1", "answer 1"),
        *("launch 3", "finish 2", "answer 2"),
    ]


@pytest.mark.parametrize("is_over", [False, True])
def test_other_ranks_finish_a_step_when_the_engine_must_have_had_its_answer(is_over: bool):
    rank = Rank(b"1", b"2", b"3", b"", is_output=False, is_over=is_over)
    assert rank.run(depth=2) == ["launch 1", "launch 2", "finish 1", "launch 3"]


@pytest.mark.parametrize("is_output", [False, True])
def test_a_step_that_broke_is_said_and_has_no_answer(is_output: bool):
    """Each rank says it: the engine knows by the number of the last change which of them are of
    one loss."""
    rank = Rank(b"1x", b"1", b"", is_output=is_output, is_over=True)
    answer = ["finish 1", "answer 1"] if is_output else []
    assert rank.run(depth=1) == ["launch 1x", "broke 1", "launch 1", *answer]
