"""The draw without a sort beside one that sorts to filter, and by its statistics."""

from __future__ import annotations

import bisect
import itertools
import math
from typing import Any

import pytest
import torch

from tests.gpu import twins
from tests.gpu.conftest import Kit

# The device's exp may differ from torch's in its last bits: a draw this near to a border is either.
NEAR = 1e-5


def draw(kit: Kit, logits: torch.Tensor, **params: Any) -> list[int]:
    """Tokens of the kernel; each parameter one number for all rows, or a list."""
    dtypes = {"top_k": torch.int32, "top_p": torch.float64, "uniform": torch.float64}
    columns = {}
    given = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "uniform": 0.5, **params}
    for name, value in given.items():
        values = value if isinstance(value, list) else [value] * logits.shape[0]
        columns[name] = torch.tensor(
            values, dtype=dtypes.get(name, torch.float32), device=kit.device
        )
    made = kit.gpu.sampling.DrawParams(**columns)
    return kit.gpu.sampling.sample(logits.to(kit.device), made).tolist()


def noise(rows: int, vocab: int, *, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 3


def wanted(row: torch.Tensor, uniform: float, **params: Any) -> set[int]:
    """The tokens that are right: one, or those of a border that the number is near to."""
    # Drawn in the order of ids.
    kept = sorted(zip(*twins.kept(row, **params), strict=True))
    tokens = [token for token, _ in kept]
    ends = list(itertools.accumulate(probability for _, probability in kept))
    ends[-1] = math.inf
    first, last = (bisect.bisect_right(ends, uniform + by) for by in (-NEAR, NEAR))
    return set(tokens[first : last + 1])


@pytest.fixture(autouse=True)
def _once(kit: Kit) -> None:
    # Logits are float32 whatever the model's dtype: nothing here depends on it.
    if kit.dtype != torch.float32:
        pytest.skip("logits are float32")


@pytest.mark.parametrize("vocab", [1, 2, 1000, 5000])
def test_a_greedy_row_takes_the_best_token_and_the_lowest_id_among_equals(
    kit: Kit, vocab: int
) -> None:
    logits = noise(4, vocab).round()
    logits[1] = -7.5
    logits[2] = 0.0
    logits[2, : vocab // 2] = -0.0
    found = draw(kit, logits, temperature=[0.0, 0.0, 0.0, 9e-6], top_k=5, top_p=0.5)
    assert found == logits.argmax(-1).tolist()
    assert found[1:3] == [0, 0]


CASES = [
    {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0},
    {"temperature": 0.3, "top_k": 0, "top_p": 1.0, "min_p": 0.0},
    {"temperature": 5.0, "top_k": 7, "top_p": 1.0, "min_p": 0.0},
    {"temperature": 1.0, "top_k": 0, "top_p": 0.6, "min_p": 0.0},
    {"temperature": 1.0, "top_k": 0, "top_p": 1e-6, "min_p": 0.0},
    {"temperature": 2.0, "top_k": 0, "top_p": 1.0, "min_p": 0.1},
    {"temperature": 1.5, "top_k": 40, "top_p": 0.8, "min_p": 0.02},
    {"temperature": 1.0, "top_k": 1, "top_p": 0.9, "min_p": 0.0},
    {"temperature": 1.0, "top_k": 4000, "top_p": 0.99, "min_p": 1.0},
    {"temperature": 1e-4, "top_k": 0, "top_p": 0.5, "min_p": 0.0},
]


@pytest.mark.parametrize("params", CASES)
@pytest.mark.parametrize("has_equals", [False, True])
def test_a_draw_falls_where_it_falls_in_a_row_filtered_by_sorting(
    kit: Kit, params: dict[str, Any], *, has_equals: bool
) -> None:
    logits = noise(4, 300, seed=len(str(params)))
    if has_equals:
        logits = logits.round()
    uniforms = [0.0, 0.37, 0.91, 1 - 2**-53]
    found = draw(kit, logits, uniform=uniforms, **params)
    for token, row, uniform in zip(found, logits, uniforms, strict=True):
        assert token in wanted(row, uniform, **params)


def test_rows_of_a_batch_have_each_their_own_parameters_and_do_not_touch_each_other(
    kit: Kit,
) -> None:
    logits = noise(len(CASES), 4200, seed=9)
    columns = {name: [case[name] for case in CASES] for name in CASES[0]}
    uniforms = [0.05 + 0.09 * index for index in range(len(CASES))]
    together = draw(kit, logits, uniform=uniforms, **columns)
    for index, case in list(enumerate(CASES))[2::4]:
        alone = draw(kit, logits[index : index + 1], uniform=[uniforms[index]], **case)
        assert alone == [together[index]]


def test_masked_tokens_are_never_drawn_and_a_single_one_left_always_is(kit: Kit) -> None:
    logits = torch.full((8, 64), -math.inf)
    logits[:, 17] = -40.0
    uniforms = [index / 8 for index in range(8)]
    assert draw(kit, logits, uniform=uniforms) == [17] * 8
    assert draw(kit, logits, uniform=uniforms, top_p=0.3, top_k=4) == [17] * 8


def test_rows_without_a_finite_best_give_no_token_and_leave_the_others_alone(kit: Kit) -> None:
    logits = noise(5, 64)
    logits[0, 3] = math.nan
    logits[1, 60] = math.inf
    logits[2] = -math.inf
    logits[3, 5] = -math.inf
    temperatures = [1.0, 1.0, 0.0, 0.0, 1.0]
    found = draw(kit, logits, temperature=temperatures)
    assert found[:3] == [kit.gpu.sampling.NOT_FINITE] * 3
    assert found[3] == int(logits[3].argmax())
    assert found[4] in wanted(logits[4], 0.5, **CASES[0])


@pytest.mark.parametrize("params", [CASES[0], CASES[6]])
def test_many_draws_are_distributed_as_they_should_be(kit: Kit, params: dict[str, Any]) -> None:
    row = noise(1, 6, seed=5) / 6
    # The interpreter takes its time.
    count = 40 if kit.device.type == "cpu" else 20_000
    # A lattice whose step is no fraction of anything: evenly spread, and the same every time.
    uniforms = [(0.5 + index * 0.6180339887498949) % 1 for index in range(count)]
    drawn = draw(kit, row.expand(count, -1), uniform=uniforms, **params)
    tokens, probabilities = twins.kept(row[0], **params)
    assert set(drawn) <= set(tokens)
    squares = sum(
        (drawn.count(token) - count * probability) ** 2 / (count * probability)
        for token, probability in zip(tokens, probabilities, strict=True)
    )
    # Chi-square: of 5 degrees of freedom 20.5 is passed once in a thousand; a lattice is closer.
    assert squares < 20.5


def test_logits_of_another_dtype_are_refused(kit: Kit) -> None:
    with pytest.raises(ValueError, match="float32"):
        draw(kit, noise(1, 8).half())
