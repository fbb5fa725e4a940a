"""What one step computes, as tensors on their way to the host, and the StepOutput they become.

Between the runner, which enqueues a step, and whoever waits for it. A sequence that nothing could
be drawn or scored for fails alone.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from xpyd_worker.engine.executor import ScheduledSequence, StepOutput
from xpyd_worker.engine.request import SampledToken
from xpyd_worker.runner.prompt_scores import PromptScores
from xpyd_worker.runner.sampler import Drawn


@dataclass(frozen=True)
class StepResults:
    """Of a step's sequences: `failed` says why some took no part, `asking` are those that draw, and
    `drawn` has the rows of their SampleSpecs, one behind the other; None where nobody draws."""

    failed: dict[int, str]
    prompts: PromptScores
    asking: tuple[ScheduledSequence, ...]
    drawn: Drawn | None

    def to_host(self) -> StepResults:
        """Enqueue the copies to the host: right when what was enqueued so far is done."""
        drawn = None if self.drawn is None else self.drawn.to_host()
        return replace(self, prompts=self.prompts.to_host(), drawn=drawn)

    def output(self) -> StepOutput:
        """What is on the host, when the caller has waited for the copies: nothing here does."""
        scored = self.prompts.result()
        failed = self.failed | scored.failed
        samples: dict[int, tuple[SampledToken, ...]] = {}
        tokens = iter(() if self.drawn is None else self.drawn.result())
        for sequence in self.asking:
            drawn = [next(tokens) for _ in sequence.samples]
            found = tuple(token for token in drawn if token is not None)
            if len(found) < len(drawn):
                failed.setdefault(
                    sequence.seq_id,
                    f"request {sequence.log_id or sequence.seq_id}: the model gave logits that are "
                    "not finite",
                )
            elif sequence.seq_id not in failed:
                samples[sequence.seq_id] = found
        return StepOutput(samples, scored.scores, failed)
