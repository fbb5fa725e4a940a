"""Expert load balancing: what `--eplb-config` says, and what each step's frame tells the ranks. No
torch.

Whole experts lie in slots, a rank's part of them. How many tokens chose each is counted over a
window of steps; at its end experts are placed anew, and weights move behind the steps that follow.
The side that schedules says when, in the step itself, so that all ranks do it at the same step. See
docs/adr/0126.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from enum import IntEnum

from xpyd_core.errors import UserError

MOST_STEPS = 1_000_000
"""Of a window and between two placements; at 1 ms a step a quarter of an hour."""


class ExpertTurn(IntEnum):
    """What ranks do about their experts before they run a step."""

    NONE = 0
    COUNT = 1
    """Begin to count: the window is from here to the next placement."""
    PLACE = 2
    """Place experts by what was counted, and begin to count anew. Nothing, where the weights of the
    placement before are still on their way."""


@dataclass(frozen=True, kw_only=True)
class EplbConfig:
    """`--eplb-config`, with vLLM's names and defaults."""

    num_redundant_experts: int = 0
    """Further slots of a layer, over all ranks: for copies."""
    window_size: int = 1000
    """Steps whose tokens count; at most `step_interval`."""
    step_interval: int = 3000
    """Steps between two placements."""

    def turn(self, step: int) -> ExpertTurn:
        """What ranks do before step number `step`, of those that they have run, from 1 on."""
        if step % self.step_interval == 0:
            return ExpertTurn.PLACE
        begins = step % self.step_interval == self.step_interval - self.window_size
        return ExpertTurn.COUNT if begins else ExpertTurn.NONE


def read_eplb(given: Mapping[str, object] | None, *, is_on: bool) -> EplbConfig | None:
    """The flag's object, and whether --enable-eplb is given. UserError naming the key."""
    if not is_on:
        if given is not None:
            raise UserError("--eplb-config: no effect without --enable-eplb; give both, or none")
        return None
    known = [one.name for one in fields(EplbConfig)]
    found: dict[str, int] = {}
    for key, value in (given or {}).items():
        if key not in known:
            raise UserError(
                f"--eplb-config: unknown key {key!r}; expected some of {', '.join(known)}"
            )
        least = 0 if key == "num_redundant_experts" else 1
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise UserError(f"--eplb-config: {key}: expected a whole number from {least} on")
        if value > MOST_STEPS:
            raise UserError(f"--eplb-config: {key}: {value}; at most {MOST_STEPS}")
        found[key] = value
    config = EplbConfig(**found)
    if config.window_size > config.step_interval:
        raise UserError(
            f"--eplb-config: window_size: {config.window_size} steps; at most step_interval, "
            f"{config.step_interval}"
        )
    return config
