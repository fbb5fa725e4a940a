"""Waits with a deadline: every one says what was waited for and what was seen last."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


class NotInTime(AssertionError):
    """What was waited for did not happen before the deadline."""


def wait_for(
    predicate: Callable[[], T],
    deadline_s: float,
    what: str,
    *,
    interval_s: float = 0.2,
    explain: Callable[[], str] | None = None,
) -> T:
    """Ask until the answer is true, and return it.

    An AssertionError of the predicate counts as "not yet", so that a predicate may be a test's
    own assertions; its text, or the last answer, is in the failure's text. `explain` is asked
    once, for more words about the failure. Raises NotInTime.
    """
    end = time.monotonic() + deadline_s
    while True:
        last: object
        try:
            answer = predicate()
            if answer:
                return answer
            last = answer
        except AssertionError as error:
            last = error
        if time.monotonic() >= end:
            more = f"\n{explain()}" if explain is not None else ""
            raise NotInTime(f"not within {deadline_s:g} s: {what} (last: {last}){more}")
        time.sleep(interval_s)
