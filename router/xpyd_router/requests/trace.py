"""What is known of one request while it runs: times, instances, tries. Feeds the access log.

Made by `app`, written by `flow`, read once at the end. `now_s` values are one monotonic clock's.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Trace:
    """One request's record; one owner, the task that serves it."""

    endpoint: str
    started_s: float
    response_id: str = ""
    """The id that the client sees."""
    request: str = ""
    """The uuid of the present try: the same 32 digits in P's and D's lines."""
    prefill: str = ""
    decode: str = ""
    tries: int = 0
    prefill_s: float | None = None
    """From the first try's start to P's answer."""
    first_s: float | None = None
    """From the request to the first byte of the answer."""
    sent_bytes: int = 0
    status: int = 0
    failures: list[str] = field(default_factory=list[str])
    """Why tries failed, in order: `prefill:reset`."""

    def extra(self, now_s: float) -> dict[str, object]:
        """The fields of the access log line."""
        fields: dict[str, object] = {
            "request": self.request or "-",
            "prefill": self.prefill or "-",
            "decode": self.decode or "-",
            "tries": self.tries,
            "seconds": round(now_s - self.started_s, 4),
            "bytes": self.sent_bytes,
        }
        if self.prefill_s is not None:
            fields["prefill_seconds"] = round(self.prefill_s, 4)
        if self.first_s is not None:
            fields["first_byte_seconds"] = round(self.first_s, 4)
        if self.failures:
            fields["failures"] = ",".join(self.failures)
        return fields
