"""The random number behind one sampled token. Pure.

It depends on the request's seed, the choice and the token's position alone, so that any instance,
in any batch, after any preemption, draws the same. The stream is part of what a seed promises: the
test's known values must not change.
"""

from __future__ import annotations

_MASK = (1 << 64) - 1
# The increment and the two multipliers of SplitMix64 (Steele, Lea, Flood 2014).
_GAMMA = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB
# A double holds 53 bits of fraction.
_BITS = 53


def uniform(seed: int, choice_index: int, position: int) -> float:
    """A number in [0, 1) for the token that a choice puts out at `position` (0 for its first).

    Any whole number is a seed; those that agree in their lowest 64 bits are the same seed.
    """
    state = _mix((seed + _GAMMA) & _MASK)
    state = _mix(((state ^ choice_index) + _GAMMA) & _MASK)
    state = _mix(((state ^ position) + _GAMMA) & _MASK)
    return (state >> (64 - _BITS)) * 2.0**-_BITS


def _mix(value: int) -> int:
    """SplitMix64's finaliser: a bijection of 64 bits in which each input bit moves each output."""
    value = ((value ^ (value >> 30)) * _MIX_1) & _MASK
    value = ((value ^ (value >> 27)) * _MIX_2) & _MASK
    return value ^ (value >> 31)
