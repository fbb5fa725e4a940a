"""When a choice ends: the engine's stop rules. Pure.

Stop strings are the server's: it sees text, this sees token ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from xpyd_worker.engine.request import FinishReason, SamplingParams


@dataclass(frozen=True)
class End:
    """Why a choice ends; `stop_token_id` is the EOS or stop id that did it."""

    reason: FinishReason
    stop_token_id: int | None = None


@dataclass(frozen=True)
class StopRules:
    """What ends every choice of an engine: the model's EOS ids and its length in tokens."""

    eos_token_ids: tuple[int, ...]
    max_model_len: int

    def end_at(
        self, token_id: int, *, position: int, prompt_tokens: int, sampling: SamplingParams
    ) -> End | None:
        """Whether `token_id`, put out as output token number `position` (from 0), is the last.

        EOS and stop ids count only from position min_tokens on; before it they are masked when
        drawn.
        """
        if position >= sampling.min_tokens:
            if token_id in self.eos_token_ids and not sampling.ignore_eos:
                return End("stop", token_id)
            if token_id in sampling.stop_token_ids:
                return End("stop", token_id)
        if self.is_last(position, prompt_tokens=prompt_tokens, sampling=sampling):
            return End("length")
        return None

    def is_last(self, position: int, *, prompt_tokens: int, sampling: SamplingParams) -> bool:
        """Whether no output token can follow the one at `position`, whatever that is."""
        if position + 1 >= sampling.max_tokens:
            return True
        return prompt_tokens + position + 1 >= self.max_model_len

    def end_within(
        self, token_ids: Sequence[int], *, prompt_tokens: int, sampling: SamplingParams
    ) -> End | None:
        """Whether a choice that has put out `token_ids` ended in them."""
        if sampling.max_tokens == 0:
            return End("length")
        for position, token_id in enumerate(token_ids):
            end = self.end_at(
                token_id, position=position, prompt_tokens=prompt_tokens, sampling=sampling
            )
            if end is not None:
                return end
        return None
