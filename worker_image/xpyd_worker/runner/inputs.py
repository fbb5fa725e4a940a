"""Whole numbers on their way to the device: rows, positions, ids. Nothing waits for it.

Between the numbers of a batch and the tensors of a forward.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from xpyd_worker.runner.tensors import numbers


def put_ints(lists: Sequence[Sequence[int]], device: torch.device) -> list[Tensor]:
    """Each list as int64 on `device`, all by one copy."""
    together = numbers(list(itertools.chain.from_iterable(lists)), torch.int64, device)
    return list(torch.split(together, [len(one) for one in lists]))


def fill_drawn(token_ids: Tensor, at: Tensor, drawn: Tensor, places: Tensor) -> None:
    """Put `drawn[places]` into rows `at` of `token_ids`. A token that is none (the model's numbers
    were not finite) becomes token 0: whoever knows the tokens drops its sequence."""
    token_ids.index_copy_(0, at, drawn.index_select(0, places).clamp_(min=0))
