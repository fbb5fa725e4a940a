"""Bounds and policy of one engine's scheduler. Pure values, checked when made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Policy = Literal["fcfs", "priority"]
POLICIES: tuple[Policy, ...] = ("fcfs", "priority")


@dataclass(frozen=True)
class Limits:
    """Bounds of one engine.

    `max_num_seqs` is how many sequences run at once, `max_num_batched_tokens` a step's budget,
    `max_waiting` how many may queue. With `recompute_without_kv` False a request whose KV did not
    come fails instead. A sequence gets at most `long_prefill_token_threshold` new tokens in a step
    (0: the budget alone bounds it). Under `fcfs` requests rank by arrival, under `priority` by
    their own number first, lower before higher.
    """

    max_num_seqs: int = 256
    max_num_batched_tokens: int = 512
    max_waiting: int = 4096
    recompute_without_kv: bool = True
    long_prefill_token_threshold: int = 0
    policy: Policy = "fcfs"

    def __post_init__(self) -> None:
        if not 1 <= self.max_num_seqs <= self.max_num_batched_tokens:
            raise ValueError("expected 1 <= max_num_seqs <= max_num_batched_tokens")
        if self.long_prefill_token_threshold < 0:
            raise ValueError("expected 0 <= long_prefill_token_threshold")

    def chunk(self, remaining: int, budget: int) -> int:
        """How many of a sequence's `remaining` tokens go into a step that has room for `budget`."""
        return min(remaining, budget, self.long_prefill_token_threshold or remaining)
