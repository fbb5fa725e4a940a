"""State of this instance as the fleet sees it: Starting, Ready, Draining, Gone; and failed.

One object, owned by main; the API asks it whether a request may come in, the heartbeat tells it.
"""

from __future__ import annotations

from collections.abc import Callable

from xpyd_core.errors import ApiError
from xpyd_core.messages import InstanceState

_RETRY_AFTER_S = 1


class Lifecycle:
    """The state and who is told when it changes."""

    def __init__(self) -> None:
        self.state: InstanceState = "Starting"
        self.failed = False
        self._listeners: list[Callable[[], None]] = []

    def listen(self, listener: Callable[[], None]) -> None:
        """Call `listener` at every change."""
        self._listeners.append(listener)

    def become(self, state: InstanceState) -> None:
        """Change the state; states never go back."""
        self.state = state
        self._tell()

    def fail(self) -> None:
        """The engine has ended by itself: nothing can be served any more."""
        self.failed = True
        self.become("Gone")

    def _tell(self) -> None:
        for listener in self._listeners:
            listener()

    @property
    def is_serving(self) -> bool:
        """Whether requests are worked on (no new ones while Draining)."""
        return self.state in ("Ready", "Draining") and not self.failed

    def admit(self, is_expected: Callable[[], bool]) -> None:
        """503 unless a request may come in. While Draining only one whose KV is here already."""
        if self.state == "Ready" and not self.failed:
            return
        if self.state == "Draining" and is_expected():
            return
        reason = "failed" if self.failed else self.state.lower()
        raise ApiError(503, f"this instance is {reason}", retry_after_s=_RETRY_AFTER_S)
