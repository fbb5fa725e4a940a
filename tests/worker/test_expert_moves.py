"""Experts that move between ranks while steps run: no row and no token changes, and all ranks do it
together."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.ranks.kit.threads import Meeting, MemoryGroup, Ranks, expert_groups, together
from tests.worker.runner_driver import DrivenSequence, Driver, tiny_checkpoint
from tests.worker.test_experts import COUNT, HIDDEN, RowKernels, make_block, shared_block
from tests.worker.test_runner_ranks import assert_greedy, prompts
from xpyd_core.parallel.ranks import Sizes
from xpyd_worker.engine.eplb import EplbConfig, ExpertTurn
from xpyd_worker.engine.executor import StepInput
from xpyd_worker.model.balancer import ExpertBalancer
from xpyd_worker.model.experts import ExpertMlps, Slots
from xpyd_worker.model.placement import Placement, writes
from xpyd_worker.parallel.api import NO_GROUP, GroupError

Start = Callable[..., Ranks]
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("mixtral", {"num_local_experts": 6, "sliding_window": 21}),
    "qwen3_moe": (
        "qwen3_moe",
        {"num_experts": 8, "mlp_only_layers": [1], "moe_intermediate_size": 36},
    ),
}


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Each rank has one."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Any]]:
    """Folder and oracle of a model, made once."""
    made: dict[str, tuple[Path, Any]] = {}

    def model(name: str) -> tuple[Path, Any]:
        if name not in made:
            family, changes = MODELS[name]
            folder = tmp_path_factory.mktemp("checkpoint")
            made[name] = folder, tiny_checkpoint(folder, family, num_hidden_layers=4, **changes)
        return made[name]

    return model


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts ranks, which end with the test."""
    started: list[Ranks] = []

    def start(folder: Path, sizes: Sizes, **options: Any) -> Ranks:
        started.append(Ranks(folder, sizes, **options))
        return started[-1]

    yield start
    for ranks in started:
        ranks.close()


@dataclass
class Turning:
    """Where a ModelRunner stands: says in each step what ranks do about their experts, as a
    RankedExecutor does."""

    executor: Any
    eplb: EplbConfig
    steps: int = 0
    turns: list[ExpertTurn] = field(default_factory=list[ExpertTurn])

    @property
    def num_blocks(self) -> int:
        return self.executor.num_blocks

    def launch(self, step: StepInput, layer_done: Callable[[int], None]) -> Any:
        self.steps += 1
        self.turns.append(self.eplb.turn(self.steps))
        return self.executor.launch(replace(step, experts=self.turns[-1]), layer_done)


def blocks_of(ranks: Ranks, rank: int) -> list[ExpertMlps]:
    """Of the rank's layers."""
    layers = ranks.runners[rank]._model._layers
    return [layer.experts for layer in layers if layer.experts is not None]


def placements_of(ranks: Ranks, rank: int) -> list[Placement]:
    """Of the rank's layers."""
    return [slots_of(block).placement for block in blocks_of(ranks, rank)]


def balancer_of(ranks: Ranks, rank: int) -> ExpertBalancer:
    found = ranks.runners[rank]._model._balancer
    assert found is not None
    return found


def slots_of(block: ExpertMlps) -> Slots:
    assert block.slots is not None
    return block.slots


LAYOUTS = {
    "EP2, no copies": (Sizes(tensor=2), 0),
    "EP2": (Sizes(tensor=2), 2),
    "EP4": (Sizes(tensor=4), 8),
    "EP2 PP2": (Sizes(tensor=2, pipeline=2), 2),
    "DP2": (Sizes(data=2), 2),
    "DP2 TP2": (Sizes(data=2, tensor=2), 8),
    "DP2 TP2 PP2": (Sizes(data=2, tensor=2, pipeline=2), 8),
}


def redundant_for(name: str, sizes: Sizes, about: int) -> int:
    """Copies that fill the slots of all ranks evenly."""
    count = 6 if name == "mixtral" else 8
    return about + -(count + about) % (sizes.data * sizes.tensor)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", MODELS)
def test_texts_before_during_and_behind_moves_are_those_of_transformers(
    name: str, layout: str, models: Callable[[str], tuple[Path, Any]], start: Start
) -> None:
    folder, oracle = models(name)
    sizes, about = LAYOUTS[layout]
    sizes = replace(
        sizes, has_whole_experts=True, redundant_experts=redundant_for(name, sizes, about)
    )
    ranks = start(folder, sizes)
    before = [placements_of(ranks, rank) for rank in range(len(ranks.runners))]
    balancers = [balancer_of(ranks, rank) for rank in range(len(ranks.runners))]
    for balancer in balancers:
        # One expert a step.
        balancer._moved_bytes = 1
    eplb = EplbConfig(window_size=4, step_interval=5)
    turning: list[Any] = [Turning(ranks.replica(data), eplb) for data in range(sizes.data)]
    drivers = [Driver(one) for one in turning]
    batches = [
        [driver.add(prompt) for prompt in prompts(2 + data, *lengths)]
        for (data, driver), lengths in zip(enumerate(drivers), ((1, 41, 17), (40, 3)), strict=False)
    ]
    waiting: list[int] = []

    def write(driver: Driver, batch: list[DrivenSequence]) -> None:
        for _ in range(24):
            left = 33
            chunks: list[tuple[DrivenSequence, int]] = []
            for one in batch:
                count = min(left, len(one.tokens) - one.computed)
                left -= count
                chunks += [(one, count)] if count else []
            driver.step(chunks)
            waiting.append(len(balancers[0]._left))

    together([lambda d=d, b=b: write(d, b) for d, b in zip(drivers, batches, strict=True)])
    after = [placements_of(ranks, rank) for rank in range(len(ranks.runners))]
    assert after != before, "the load is uneven: experts moved"
    assert any(waiting), "over several steps"
    for rank, found in enumerate(after):
        # All ranks of a stage, of all replicas, agree.
        assert found == after[sizes.coordinates(rank).stage * sizes.tensor]
    moves = [one.moves for one in ranks.runners[0].experts_chosen() if one.moves is not None]
    assert sum(one.moved for one in moves) > 0
    assert all(one.after <= one.before for one in moves)
    # One rank of each group says it.
    assert all(one.moves is None for one in ranks.runners[-1].experts_chosen())
    assert_greedy(oracle, *(one for batch in batches for one in batch))


# Three copies of expert 0, expert 5 on the first rank, none where it was.
LAID: Placement = ((0, 5, 2, 1), (0, 3, 4, 1))
FIRST: Placement = ((0, 1, 2, 3), (4, 5, 0, 1))


def moving_blocks(
    ranks: int, replicas: int, redundant: int, dtype: torch.dtype
) -> tuple[ExpertMlps, list[ExpertMlps], Any, list[Any]]:
    """One rank's block with all experts, and those of ranks whose experts may move; the context and
    the groups."""
    alone, weights, step, _ = make_block(dtype=dtype, kernels=RowKernels())
    groups, tensor = expert_groups(ranks, replicas), ranks // replicas
    meetings = [Meeting(tensor) for _ in range(replicas)]
    blocks = [
        shared_block(
            weights,
            dtype,
            MemoryGroup(meetings[rank // tensor], rank % tensor) if tensor > 1 else NO_GROUP,
            groups[rank],
            redundant,
        )
        for rank in range(ranks)
    ]
    return alone, blocks, step, groups


def move(blocks: Sequence[ExpertMlps], groups: Sequence[Any], goal: Placement) -> None:
    """All experts at once."""
    balancers = [
        ExpertBalancer([block], torch.zeros(1, COUNT, dtype=torch.int64), group)
        for block, group in zip(blocks, groups, strict=True)
    ]
    before = slots_of(blocks[0]).placement
    together([lambda n=n: balancers[n]._move(blocks[n], before, goal) for n in range(len(blocks))])
    for block in blocks:
        slots_of(block).lay(goal)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("replicas", [1, 2])
def test_a_row_has_the_same_bits_wherever_its_experts_are(
    replicas: int, dtype: torch.dtype
) -> None:
    """As on one rank: with one replica, where ranks add up, and with several, which send rows."""
    alone, blocks, step, groups = moving_blocks(2, replicas, 2, dtype)
    made = torch.Generator().manual_seed(3)
    x = torch.randn(17, HIDDEN, generator=made).to(dtype)
    for goal in (FIRST, LAID, ((5, 4, 2, 1), (0, 3, 4, 1))):
        move(blocks, groups, goal)
        for out in together([lambda block=block: block(x, step) for block in blocks]):
            assert torch.equal(out, alone(x, step))


def test_rows_take_turns_among_copies_of_their_expert() -> None:
    slots = Slots(LAID, COUNT)
    chosen = torch.tensor([[0, 5]] * 4)
    assert slots.of(chosen, 0).tolist() == [[0, 1], [4, 1], [0, 1], [4, 1]]
    # Another rank begins with another copy.
    assert slots.of(chosen[:1], 1).tolist() == [[4, 1]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_moved_weights_are_those_of_the_expert(dtype: torch.dtype) -> None:
    """In the form that this machine packs them in."""
    from xpyd_worker.kernels.cpu.kernels import choose_kernels

    kernels = choose_kernels(vector_sizes=(64,), head_dim=64)
    made = torch.Generator().manual_seed(3)
    gate_up = torch.randn(3, 128, 64, generator=made).to(dtype)
    down = torch.randn(3, 64, 64, generator=made).to(dtype)
    kept = gate_up.clone(), down.clone()
    experts = kernels.experts(gate_up, down)
    for expert in range(3):
        for found, wanted in zip(experts.weights(expert), kept, strict=True):
            assert torch.equal(found, wanted[expert])
    experts.replace(0, *(one.clone() for one in experts.weights(2)))
    for expert, of in ((0, 2), (1, 1), (2, 2)):
        for found, wanted in zip(experts.weights(expert), kept, strict=True):
            assert torch.equal(found, wanted[of])


def test_the_load_is_that_of_all_replicas() -> None:
    """Each replica alone would have nothing moved: its own load is even over ranks."""
    _, blocks, _, groups = moving_blocks(2, 2, 0, torch.float32)
    # The first replica's rows choose 0 and 3, the second one's 1 and 4: together 0 to 2 have 80
    # and 3 to 5 have 20.
    counts = [
        torch.tensor([[40, 0, 0, 10, 0, 0]]),
        torch.tensor([[0, 40, 0, 0, 10, 0]]),
    ]
    zeros = [torch.zeros(1, COUNT, dtype=torch.int64) for _ in counts]
    balancers = [
        ExpertBalancer([block], zero, group)
        for block, zero, group in zip(blocks, zeros, groups, strict=True)
    ]
    for zero, one in zip(zeros, counts, strict=True):
        zero += one
    together([lambda b=b: b.begin_step(ExpertTurn.PLACE) for b in balancers])
    assert balancers[0]._tokens == balancers[1]._tokens == [[40, 40, 0, 10, 10, 0]]
    assert slots_of(blocks[0]).placement == slots_of(blocks[1]).placement
    (moves,) = balancers[0].moves
    assert (moves.before, moves.after) == (1.6, 1.0)


def test_a_window_begins_where_the_step_says() -> None:
    _, (block, _), _, (group, other) = moving_blocks(2, 2, 0, torch.float32)
    counts = torch.zeros(1, COUNT, dtype=torch.int64)
    balancer = ExpertBalancer([block], counts, group)
    counts[0, 0] = 1000
    balancer.begin_step(ExpertTurn.COUNT)
    counts[0, 5] += 7
    partner = ExpertBalancer([block], torch.zeros(1, COUNT, dtype=torch.int64), other)
    together(
        [
            lambda: balancer._of_all_ranks(counts - balancer._window_begins),
            lambda: partner._of_all_ranks(torch.zeros_like(counts)),
        ]
    )
    found = together(
        [
            lambda: balancer._of_all_ranks(counts - balancer._window_begins),
            lambda: partner._of_all_ranks(torch.zeros_like(counts)),
        ]
    )
    assert found == [[[0, 0, 0, 0, 0, 7]]] * 2


def test_ranks_that_do_not_move_at_the_same_step_end_with_the_blame() -> None:
    """One has placed experts before, one has not."""
    _, blocks, _, groups = moving_blocks(2, 2, 0, torch.float32)
    balancers = [
        ExpertBalancer([block], torch.zeros(1, COUNT, dtype=torch.int64), group)
        for block, group in zip(blocks, groups, strict=True)
    ]
    together([lambda b=b: b.begin_step(ExpertTurn.PLACE) for b in balancers])
    balancers[1]._round += 1

    def begin(balancer: ExpertBalancer) -> str:
        with pytest.raises(GroupError) as caught:
            balancer.begin_step(ExpertTurn.PLACE)
        return str(caught.value)

    words = together([lambda b=b: begin(b) for b in balancers])
    assert words[0].startswith("rank 1 of the expert group places experts for the 3. time, rank 0")
    assert words[1].startswith("rank 0 of the expert group places experts for the 2. time, rank 1")


def test_ranks_whose_experts_lie_elsewhere_end_with_the_blame() -> None:
    _, blocks, _, groups = moving_blocks(2, 2, 2, torch.float32)
    slots_of(blocks[1]).lay(LAID)
    balancers = [
        ExpertBalancer([block], torch.zeros(1, COUNT, dtype=torch.int64), group)
        for block, group in zip(blocks, groups, strict=True)
    ]

    def begin(balancer: ExpertBalancer) -> None:
        with pytest.raises(GroupError, match="lie elsewhere"):
            balancer.begin_step(ExpertTurn.PLACE)

    together([lambda b=b: begin(b) for b in balancers])


def test_a_step_moves_no_more_than_its_bound() -> None:
    _, blocks, _, groups = moving_blocks(2, 2, 0, torch.float32)
    # Three exchanges of two.
    goal = ((3, 4, 5), (0, 1, 2))
    width = blocks[0].expert_bytes
    now, steps = slots_of(blocks[0]).placement, 0
    balancers = [
        ExpertBalancer([b], torch.zeros(1, COUNT, dtype=torch.int64), g, moved_bytes=width)
        for b, g in zip(blocks, groups, strict=True)
    ]
    for balancer in balancers:
        balancer._left.append(0)
        balancer._goal = goal
    before = [len(group.calls) for group in groups]
    while balancers[0]._left:
        together([lambda b=b: b.begin_step(ExpertTurn.NONE) for b in balancers])
        steps += 1
    assert slots_of(blocks[0]).placement == goal
    assert steps == len(writes(now, goal)) // 2
    for group, first in zip(groups, before, strict=True):
        assert max(group.calls[first:]) <= width
