"""A device that cannot be asked: the sampler on tensors without values.

Meta tensors stand for a GPU's: whoever reads one, or asks how many of its elements there are of a
kind, fails. What a GPU would answer after a wait, and torch lets pass here, the mode below refuses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.worker.test_sampling_options import BASE, CASES, OUTPUT, PROMPT, VOCAB, Asked, row_of
from xpyd_worker.engine.executor import SampleSpec, ScheduledSequence
from xpyd_worker.engine.request import SamplingParams
from xpyd_worker.runner.adjustments import Adjustments
from xpyd_worker.runner.batch import BatchRows
from xpyd_worker.runner.prompt_scores import PromptScorer
from xpyd_worker.runner.sampler import SampleRow, kernel_draw, sample, score
from xpyd_worker.runner.tensors import rows_of

META = torch.device("meta")
# To the device and back; on a GPU they wait unless they are told not to.
COPIES = {"aten::copy_", "aten::_to_copy"}
# How large their answer is depends on values.
ASKING = {"aten::nonzero", "aten::masked_select", "aten::_unique2", "aten::repeat_interleave"}


class Waits(AssertionError):
    """A GPU would be waited for here."""


class NoWaits(TorchDispatchMode):
    """Refuses what makes the host wait for a GPU."""

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        name = func.name().partition(".")[0]
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        devices = {x.device for x in tensors} | ({kwargs.get("device")} & {META})
        if META in devices:
            self._check(name, tensors, kwargs, is_mixed=len(devices) > 1)
        return func(*args, **kwargs)

    @staticmethod
    def _check(
        name: str, tensors: Sequence[torch.Tensor], kwargs: dict[str, Any], *, is_mixed: bool
    ) -> None:
        if name in COPIES:
            if is_mixed and not kwargs.get("non_blocking", False):
                raise Waits(f"{name}: a copy that is waited for")
        elif is_mixed:
            # An index, or a number that torch copies by itself, and waits.
            raise Waits(f"{name}: tensors of host and device together")
        if name in ASKING or name == "aten::_local_scalar_dense":
            raise Waits(f"{name}: asks for values")
        if "index" in name and any(x.dtype == torch.bool for x in tensors[1:]):
            raise Waits(f"{name}: an index of flags asks for values")
        if name == "aten::lift_fresh":
            raise Waits("a tensor of a list is made on the device")


@pytest.mark.parametrize(
    "ask",
    [
        lambda x: bool(x.any()),
        lambda x: int(x[0]),
        lambda x: x.tolist(),
        lambda x: x.nonzero(),
        lambda x: x[x > 3],
        lambda x: x[torch.tensor([0])],
        lambda x: x.index_put_((torch.tensor([0]),), x[:1]),
        lambda x: torch.where(x > 0, x, torch.tensor(5.0)),
        lambda x: x.repeat_interleave(x.long()),
        lambda x: torch.tensor([1.0], device=META) + x,
        lambda x: torch.tensor([1.0]).to(META) + x,
        lambda x: x.cpu(),
        lambda x: torch.empty(4).copy_(x, non_blocking=True),
    ],
)
def test_the_mode_knows_a_wait(ask: Callable[[torch.Tensor], object]) -> None:
    with pytest.raises((Waits, RuntimeError, NotImplementedError)), NoWaits():
        ask(torch.empty(4, device=META))


def params_of(changes: dict[str, Any], temperature: float) -> SamplingParams:
    return replace(BASE, **{"temperature": temperature, "logprobs": 3, **changes})


def rows_of_all_options(vocab: int = VOCAB) -> list[SampleRow]:
    """Each option, greedy and drawn; some with more top_k, more logprobs than there are tokens."""
    adjustments = Adjustments(vocab_size=vocab)
    more = {"wide": {"top_k": vocab - 1}, "many": {"logprobs": 99}, "silent": {"logprobs": None}}
    asked = [
        Asked(params_of(changes, temperature), PROMPT, OUTPUT, seq_id)
        for seq_id, changes in enumerate([*CASES.values(), *more.values()])
        for temperature in (0.0, 1.0)
    ]
    rows = [row_of(one, index % 5, adjustments) for index, one in enumerate(asked)]
    return [*rows, *(replace(row, mask=bytes(-(-vocab // 32) * 4)) for row in rows)]


@pytest.mark.parametrize("has_kernel", [False, True])
def test_sampling_waits_for_nothing(*, has_kernel: bool) -> None:
    """With the draw in torch and with one that a kernel does."""
    kernel = kernel_draw(lambda logits, params: torch.empty_like(params.top_k, dtype=torch.int64))
    rows = rows_of_all_options()
    logits = torch.empty(5, VOCAB, device=META)
    with NoWaits():
        drawn = sample(logits, rows, kernel) if has_kernel else sample(logits, rows)
        one_kind = sample(logits, rows[:1])
    assert drawn.tokens.device == META
    assert drawn.tokens.shape == (len(rows),)
    assert drawn.scores is not None
    assert drawn.scores.own.device == META
    assert one_kind.tokens.dtype == torch.int64


def test_scoring_prompts_waits_for_nothing() -> None:
    def logits(hidden: torch.Tensor) -> torch.Tensor:
        return hidden.new_empty(hidden.shape[0], VOCAB)

    scorer = PromptScorer(logits, vocab_size=VOCAB)
    params = replace(BASE, prompt_logprobs=2)
    first = ScheduledSequence(1, (3, 4, 5), 0, (0,), params, 7)
    second = replace(first, token_ids=(6, 7, 8, 9), start=3, samples=(SampleSpec(0, 0),))
    with NoWaits():
        for sequence in (first, second):
            scorer.score(torch.empty(9, 4, device=META), [BatchRows(sequence, 2)])
        score(torch.empty(2, VOCAB, device=META), torch.empty(2, device=META).long(), [0, None])


def test_all_rows_in_order_are_the_matrix_itself() -> None:
    matrix = torch.arange(6).view(3, 2)
    assert rows_of(matrix, [0, 1, 2]) is matrix
    assert rows_of(matrix, [2, 0]).tolist() == [[4, 5], [0, 1]]
