"""What the engine's steps were like: how long, how many tokens and sequences in each. Pure.

Written by the engine's thread once per step, read by `/metrics`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from xpyd_core.distribution import Distribution

# From a small model's decode step to a full chunk of a large one on a CPU.
STEP_SECONDS = (
    *(0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05),
    *(0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0),
)
STEP_TOKENS = tuple(float(2**power) for power in range(16))
STEP_SEQUENCES = tuple(float(2**power) for power in range(12))


@dataclass
class StepFigures:
    """Distributions over the steps that succeeded. `seconds`: the forward and the sampling, without
    scheduling and, in mode put, without waiting for D; of a step behind another, from when that was
    over."""

    seconds: Distribution = field(default_factory=lambda: Distribution(STEP_SECONDS))
    tokens: Distribution = field(default_factory=lambda: Distribution(STEP_TOKENS))
    sequences: Distribution = field(default_factory=lambda: Distribution(STEP_SEQUENCES))

    def observe(self, *, seconds: float, tokens: int, sequences: int) -> None:
        """One more step."""
        self.seconds.observe(seconds)
        self.tokens.observe(tokens)
        self.sequences.observe(sequences)
