"""The update that a step ends with, in plain torch and in Triton, beside one request at a time."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any

import pytest
import torch

from tests.gpu.conftest import Kit
from xpyd_worker.kernels import post_update as plain
from xpyd_worker.kernels.post_update import Sampled

SLOTS = 7
MOST_TOKENS = 24

Update = Callable[[plain.Fields, torch.Tensor, torch.Tensor, Sampled], None]


@dataclass
class Known:
    """A sequence in Python's own numbers."""

    prompt: int
    tokens: list[int]
    computed: int = 0
    last: int = 0
    prefill: int = field(default=0, init=False)

    def end_step(self, query_len: int, drawn: list[int], rejected: int) -> None:
        if drawn:
            self.last = drawn[-1]
        self.tokens += drawn
        self.computed += query_len - rejected
        self.prefill = min(self.prefill + query_len, self.prompt)


def put(known: list[Known], *, pinned: bool) -> plain.Fields:
    made = plain.make_fields(len(known), MOST_TOKENS, pinned=pinned)
    for slot, one in enumerate(known):
        ids = one.tokens[:MOST_TOKENS]
        made.all_token_ids[slot, : len(ids)] = torch.tensor(ids, dtype=torch.int32)
        made.total_len[slot], made.prefill_len[slot] = len(one.tokens), one.prompt
        made.num_computed[slot], made.computed_prefill[slot] = one.computed, one.prefill
        made.last_sampled[slot] = one.last
    return made


def assert_are(found: plain.Fields, known: list[Known]) -> None:
    wanted = put(known, pinned=False)
    for one in fields(plain.Fields):
        assert getattr(found, one.name).tolist() == getattr(wanted, one.name).tolist(), one.name


@pytest.fixture(params=["torch", "triton"])
def update(request: pytest.FixtureRequest, kit: Kit) -> Update:
    if kit.dtype != torch.float32:
        pytest.skip("nothing here has the model's dtype")
    return plain.post_update if request.param == "torch" else kit.gpu.post_update.post_update


def run(
    kit: Kit, update: Update, known: list[Known], *steps: list[tuple[int, int, list[int], int]]
) -> plain.Fields:
    """Steps of (slot, query length, drawn, rejected), on both sides."""
    found = put(known, pinned=kit.device.type == "cuda")
    on = kit.device if update is not plain.post_update else torch.device("cpu")
    for step in steps:
        slots, query_lens, drawn, rejected = zip(*step, strict=True)
        width = max(1, *map(len, drawn))
        # What does not count is no token.
        rows = [[*some, *[-9] * (width - len(some))] for some in drawn]
        sampled = Sampled(
            torch.tensor(rows, dtype=torch.int64, device=on),
            torch.tensor([len(some) for some in drawn], dtype=torch.int32, device=on),
            torch.tensor(rejected, dtype=torch.int32, device=on),
        )
        numbers: list[Any] = [torch.tensor(n, device=on) for n in (slots, query_lens)]
        update(found, numbers[0], numbers[1], sampled)
        for slot, query_len, some, number in step:
            known[slot].end_step(query_len, some, number)
    if kit.device.type == "cuda":
        torch.cuda.synchronize()
    return found


def some_known() -> list[Known]:
    return [Known(prompt=4 + slot, tokens=list(range(100, 104 + slot))) for slot in range(SLOTS)]


def test_a_step_that_draws_one_token_each(kit: Kit, update: Update) -> None:
    """Article fact 43."""
    known = some_known()
    found = run(kit, update, known, [(5, 9, [31], 0), (0, 4, [32], 0)])
    assert_are(found, known)
    assert found.last_sampled.tolist() == [32, 0, 0, 0, 0, 31, 0]
    assert found.all_token_ids[0, 4] == 32
    assert found.total_len.tolist() == [5, 5, 6, 7, 8, 10, 10]


def test_a_part_of_a_prompt_draws_none_and_keeps_what_was_drawn_last(
    kit: Kit, update: Update
) -> None:
    """Article fact 43."""
    known = some_known()
    known[3].last = 77
    found = run(kit, update, known, [(3, 5, [], 0), (1, 5, [8], 0)])
    assert_are(found, known)
    assert found.last_sampled[3] == 77
    assert (found.total_len[3], found.num_computed[3], found.computed_prefill[3]) == (7, 5, 5)


def test_several_tokens_and_those_that_turned_out_wrong(kit: Kit, update: Update) -> None:
    """Of four guesses behind a token one holds: two are drawn, three of the five are taken back.

    Article fact 43.
    """
    known = some_known()
    known[2].computed = 6
    found = run(kit, update, known, [(2, 5, [41, 42], 3), (4, 8, [43], 0), (6, 2, [], 0)])
    assert_are(found, known)
    assert found.num_computed[2] == 6 + 5 - 3
    assert found.last_sampled[2] == 42
    assert found.all_token_ids[2, 6:9].tolist() == [41, 42, 0]


def test_computed_prefill_ends_with_the_prompt(kit: Kit, update: Update) -> None:
    """Article fact 43."""
    known = some_known()
    found = run(kit, update, known, [(0, 3, [], 0)], [(0, 1, [5], 0)], [(0, 1, [6], 0)])
    assert_are(found, known)
    assert (found.computed_prefill[0], found.num_computed[0]) == (4, 5)


def test_what_a_history_has_no_room_for_harms_nobody(kit: Kit, update: Update) -> None:
    known = some_known()
    known[1].tokens = list(range(MOST_TOKENS - 1))
    found = run(kit, update, known, [(1, 1, [51, 52, 53], 0), (2, 6, [54], 0)], [(1, 1, [55], 0)])
    assert_are(found, known)
    assert found.all_token_ids[1, -2:].tolist() == [MOST_TOKENS - 2, 51]
    assert found.all_token_ids[2, 0] == 100


@pytest.mark.parametrize("seed", range(3))
def test_walks_of_steps(kit: Kit, update: Update, seed: int) -> None:
    rng = random.Random(seed)
    known = some_known()
    steps: list[list[tuple[int, int, list[int], int]]] = []
    for _ in range(8):
        step: list[tuple[int, int, list[int], int]] = []
        for slot in rng.sample(range(SLOTS), rng.randint(1, SLOTS)):
            query_len = rng.randint(1, 5)
            drawn = [rng.randrange(1 << 31) for _ in range(rng.randint(0, 4))]
            step.append((slot, query_len, drawn, rng.randrange(query_len)))
        steps.append(step)
    assert_are(run(kit, update, known, *steps), known)
