"""Collectives as torch's operators (article fact 51): what is registered holds to its schema, and a
graph can be made of them without any rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.ranks.kit.groups import Seat, run_ranks
from xpyd_core.parallel.ranks import Sizes

CHECKS = ("test_schema", "test_faketensor")
OPS: Any = torch.ops


def checks(seat: Seat) -> None:
    with seat.open(Sizes(tensor=2)) as state:
        name = state.tensor_group.unique_name
        for op in (OPS.xpyd.all_reduce_, OPS.xpyd.all_gather):
            torch.library.opcheck(op, (torch.ones(3, 4), name), test_utils=CHECKS)
        rows = (torch.ones(3, 4), [1, 2], [1 + seat.rank] * 2, name)
        torch.library.opcheck(OPS.xpyd.all_to_all, rows, test_utils=CHECKS)


@pytest.mark.slow  # most of it goes into imports of torch's
def test_operators_hold_to_their_schemas_and_fakes():
    """Article fact 51."""
    run_ranks(checks, 2)


def fakes(seat: Seat) -> list[Any]:
    with seat.open(Sizes(tensor=2, has_whole_experts=True)) as state:
        if seat.rank:  # has no part in it
            return []
        with FakeTensorMode():
            x = torch.empty(5, 8, dtype=torch.bfloat16)
            all_of_them = (
                state.tensor.all_reduce(x),
                state.tensor.all_gather(x),
                state.experts.all_to_all(x, [2, 3], [2, 7]),
            )
        return [(tuple(one.shape), one.dtype) for one in all_of_them]


def test_fakes_have_the_shapes_of_what_they_stand_for_and_ask_nobody():
    """Article fact 51."""
    found = run_ranks(fakes, 2)[0]
    assert found == [((5, 8), torch.bfloat16), ((5, 16), torch.bfloat16), ((9, 8), torch.bfloat16)]


def closed(seat: Seat) -> str:
    with seat.open(Sizes()) as state:
        name = state.tensor_group.unique_name
    with pytest.raises(KeyError) as error:
        OPS.xpyd.all_reduce_(torch.ones(1), name)
    return str(error.value)


def test_a_closed_group_has_no_name():
    assert "no group 'tensor:0' is open here" in run_ranks(closed, 1)[0]
