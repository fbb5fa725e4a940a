"""Why an instance cannot go on, said so that its last log line and its exit status tell. Pure."""

from __future__ import annotations

import signal
from dataclasses import dataclass

from xpyd_core.parallel.ranks import Sizes

# Exit statuses of an instance that lost a rank (docs/parallel.md).
EXIT_RANK_ENDED = 11
EXIT_RANK_SILENT = 12
EXIT_STEP_STUCK = 13
EXIT_POD_LOST = 14
# Exit statuses of a rank's process.
RANK_FAILED = 1
RANK_MISSES_OTHERS = 75


class RankLostError(Exception):
    """The instance has lost a rank. No XpydError: nothing can be computed any more, so the engine
    ends, and the supervisor of the process starts another. `status`: the process' exit status, 1
    where no rank and no pod has gone."""

    def __init__(self, text: str, *, status: int = 1) -> None:
        super().__init__(text)
        self.status = status


@dataclass(frozen=True)
class RankIdentity:
    """A rank, as messages name it. `pod`: its number in the instance where there are several;
    `pid`: 0 where the process is not there yet."""

    rank: int
    stage: int
    tensor_rank: int
    pid: int = 0
    pod: int | None = None

    def __str__(self) -> str:
        pod = "" if self.pod is None else f"pod {self.pod}, "
        pid = f", pid {self.pid}" if self.pid else ""
        share = f"stage {self.stage}, tensor share {self.tensor_rank}"
        return f"rank {self.rank} ({pod}{share}{pid})"


def rank_identity(
    rank: int, sizes: Sizes, *, pid: int = 0, pod: int | None = None, first: int = 0
) -> RankIdentity:
    """The identity of rank `rank` in an instance of these sizes, or in a replica whose first rank
    is number `first` of the instance."""
    place = sizes.coordinates(rank)
    return RankIdentity(first + rank, place.stage, place.tensor, pid, pod)


@dataclass(frozen=True)
class Loss:
    """The first that went wrong: a sentence that names the rank, and the instance's exit status.
    `is_user_error`: what the user can mend, said while the ranks started."""

    text: str
    status: int
    is_user_error: bool = False


@dataclass(frozen=True)
class Failure:
    """Why a rank ends, in its own words. `misses_others`: another did not answer it, so it is not
    the first that went."""

    text: str
    is_user_error: bool = False
    misses_others: bool = False


def how_ended(returncode: int) -> str:
    """A process' end, from what Popen says of it."""
    if returncode >= 0:
        return f"ended with status {returncode}"
    try:
        name = signal.Signals(-returncode).name
    except ValueError:
        name = f"signal {-returncode}"
    hint = "; was it short of memory?" if -returncode == signal.SIGKILL else ""
    return f"was ended by {name}{hint}"
