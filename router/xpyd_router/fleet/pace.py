"""How fast an instance works, learned from what its calls took. Pure.

`requests.objectives` feeds it, the policy SloAware and the forecasts of `/metrics` read it. Of two
things a straight line is kept:

- seconds to the first token, over the prompt tokens that wait on the instance with this prompt's:
  the slope is the inverse of its prefill rate, what is left is paid by every prompt;
- seconds between two tokens, over the requests placed on it.

Each `fleet.loads.Load` has one Pace; it ends with its instance, so a restarted engine is unknown.
"""

from __future__ import annotations

_MEMORY = 0.98
"""What an observation still counts when the next one comes: about the last fifty make the line."""
_LEAST_SPREAD = 0.01
"""Below a tenth of their mean, the spread of the loads that were seen says little about a slope."""
GAP_OFFSET = 16.0
"""Until more is known, so many requests more in a batch double the gap between tokens: a step reads
the weights once for all of them."""


class Line:
    """y over x by least squares, in which old observations fade.

    Where the x that were seen hardly differ, the slope is that of a y that grows with x + `offset`:
    without it a line learned at one load would promise the same time at any other.
    """

    __slots__ = (
        "_covariance",
        "_mean_x",
        "_mean_y",
        "_offset",
        "_variance",
        "_weight",
        "base",
        "slope",
    )

    def __init__(self, offset: float = 0.0) -> None:
        self._offset = offset
        self._weight = 0.0
        self._mean_x = self._mean_y = 0.0
        self._variance = self._covariance = 0.0
        self.base = 0.0
        """y at x = 0, never below 0."""
        self.slope = 0.0
        """What each unit of x adds to y, never below 0."""

    @property
    def is_known(self) -> bool:
        """Whether anything was observed."""
        return self._weight > 0.0

    def observe(self, x: float, y: float) -> None:
        """Take one observation: x above 0, y not below."""
        self._weight = self._weight * _MEMORY + 1.0
        part = 1.0 / self._weight
        dx, dy = x - self._mean_x, y - self._mean_y
        self._mean_x += part * dx
        self._mean_y += part * dy
        rest = 1.0 - part
        self._variance = rest * (self._variance + part * dx * dx)
        self._covariance = rest * (self._covariance + part * dx * dy)
        usual = self._mean_y / (self._mean_x + self._offset)
        doubt = _LEAST_SPREAD * self._mean_x * self._mean_x
        slope = (self._covariance + doubt * usual) / (self._variance + doubt)
        # A base below 0 would make the slope too steep for light loads: then through the origin.
        self.slope = min(max(slope, 0.0), self._mean_y / self._mean_x)
        self.base = max(self._mean_y - self.slope * self._mean_x, 0.0)

    def at(self, x: float) -> float:
        """y as it is expected at x."""
        return self.base + self.slope * x


class Pace:
    """What is known of one instance's speed. One writer, the event loop of its process."""

    __slots__ = ("first", "gap")

    def __init__(self) -> None:
        self.first = Line()
        """Seconds to the first token over prompt tokens."""
        self.gap = Line(GAP_OFFSET)
        """Seconds between two tokens over requests."""
