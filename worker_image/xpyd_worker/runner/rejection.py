"""How many tokens of a draft stand, and what is drawn in the place of one that does not.

A draft token t that was drawn from q is accepted with probability min(1, p(t) / q(t)), where p is
what the model draws from there; if not, the token comes from max(0, p - q), normalised. So the
result is distributed as p (Leviathan et al. 2023; Chen et al. 2023). That is one draw from one
distribution, `against_draft`: t is accepted exactly when it is what is drawn. What is drafted
without chance has q(t) = 1, and then that distribution is p itself. All methods of the engine draft
so, n-grams and models' best tokens: it draws from p and calls `count_standing` alone. So the same
random number gives the same token as without a draft: a seed's text does not depend on what was
drafted, or on the engine that drafts. `against_draft` is the whole rule, for tests of it.

Pure functions over a batch. They must not know sequences or the model.
"""

from __future__ import annotations

import torch
from torch import Tensor


def against_draft(model: Tensor, drafted: Tensor, draft: Tensor | None = None) -> Tensor:
    """What to draw each row's token from: [rows, vocab], a sum of 1 in each row. `model` [rows,
    vocab]: the model's probabilities after all its filters, `drafted` int64 [rows]: the token that
    was drafted, `draft` [rows, vocab]: the probabilities that it was drawn from; None: it
    was drafted without chance."""
    model = model / model.sum(dim=-1, keepdim=True)
    if draft is None:
        return model
    at = drafted[:, None]
    accepted = (model.gather(1, at) / draft.gather(1, at)).clamp_(max=1)
    rest = (model - draft).clamp_(min=0)
    # Where nothing is left the two are the same, and every draft token is accepted.
    total = rest.sum(dim=-1, keepdim=True)
    rest = torch.where(total > 0, rest / total, model)
    return (rest * (1 - accepted)).scatter_add_(1, at, accepted)


def count_standing(drawn: Tensor, drafted: Tensor) -> Tensor:
    """How many tokens of each row of `drawn` int64 [rows, k + 1] stand, int64 [rows], 1 to k + 1:
    those up to the first that is not the draft token at its place in `drafted` [rows, k], that one
    included. A draft token below 0 is none: it is not accepted."""
    is_accepted = (drawn[:, :-1] == drafted) & (drafted >= 0)
    return is_accepted.long().cumprod(dim=-1).sum(dim=-1) + 1
