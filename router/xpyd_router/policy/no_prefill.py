"""What a request does that finds neither a pair nor an aggregated instance. Pure.

`picker` asks here after the policy had nobody.
"""

from __future__ import annotations

from typing import Literal

from msgspec.structs import replace

from xpyd_router.policy.base import Want

OnNoPrefill = Literal["Queue", "PrefillOnDecode", "Reject"]
ON_NO_PREFILL: tuple[OnNoPrefill, ...] = ("Queue", "PrefillOnDecode", "Reject")
"""Wait for instances; let D compute the prompt, and wait where there is no D; do not wait."""


def second_wish(want: Want, on_no_prefill: OnNoPrefill) -> Want | None:
    """What to ask the policy for where `want` found nobody; None for nothing."""
    if on_no_prefill != "PrefillOnDecode" or want.alone == "D":
        return None
    return replace(want, alone="D")
