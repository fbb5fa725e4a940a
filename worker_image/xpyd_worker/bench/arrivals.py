"""When requests of a measured load come: gamma-distributed gaps. Pure.

A Poisson process, the usual model of independent users, has exponential gaps: shape 1. A smaller
shape makes bursts, a larger one evens the load out.
"""

from __future__ import annotations

import math
from itertools import accumulate
from random import Random


def arrival_times(
    requests: int, *, rate_per_s: float, burstiness: float, seed: int
) -> tuple[float, ...]:
    """Seconds from the start at which each request comes; the first comes at 0.

    `burstiness` is the gamma distribution's shape: the gaps have the mean 1 / `rate_per_s` and the
    variance that divided by `burstiness`, times the mean. An infinite rate: all at once.
    """
    if requests < 1 or rate_per_s <= 0 or burstiness <= 0:
        raise ValueError("expected at least one request, a rate and a burstiness above 0")
    if math.isinf(rate_per_s):
        return (0.0,) * requests
    rng = Random(seed)
    scale_s = 1 / (rate_per_s * burstiness)
    gaps = (rng.gammavariate(burstiness, scale_s) for _ in range(requests - 1))
    return tuple(accumulate(gaps, initial=0.0))
