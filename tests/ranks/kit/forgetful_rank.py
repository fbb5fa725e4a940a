"""A rank that leaves out the update that a step ends with, on every stage but the first and the
last: `python -m tests.ranks.kit.forgetful_rank`, started as the real one is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from xpyd_kv.ranks.engine import Channel
from xpyd_worker.ranks.start.fork_server import main
from xpyd_worker.ranks.start.messages import Start
from xpyd_worker.ranks.start.rank_main import GiveUp, MakeProgram
from xpyd_worker.system import prepare_for_torch

if TYPE_CHECKING:
    from xpyd_worker.ranks.start.program import RankProgram


def prepare() -> MakeProgram:
    """As the real one's."""
    prepare_for_torch()
    return make_program


def make_program(start: Start, channel: Channel, give_up: GiveUp) -> RankProgram:
    """The real one, but for that."""
    from xpyd_worker.kernels.post_update import Sampled
    from xpyd_worker.ranks.compute.request_states import RequestStates
    from xpyd_worker.ranks.start import program

    class Forgetful(RequestStates):
        def post_update(
            self, slots: Sequence[int], query_lens: Sequence[int], sampled: Sampled | None
        ) -> None:
            pass

    if 0 < start.sizes.coordinates(start.rank).stage < start.sizes.pipeline - 1:
        program.RequestStates = Forgetful  # pyright: ignore[reportPrivateImportUsage]
    return program.RankProgram(start, channel, give_up)


if __name__ == "__main__":
    main(prepare)
