"""What is known of one request while it runs: times, instances, tries. Feeds log and metrics.

Made by `serving.inference`, written by `flow`, read once at the end. `now_s` values are one
monotonic clock's.
"""

from __future__ import annotations

import msgspec


class Trace(msgspec.Struct):
    """One request's record; one owner, the task that serves it."""

    endpoint: str
    started_s: float
    client_id: str = ""
    """The client's X-Request-Id."""
    trace_id: str = ""
    """Of the client's traceparent."""
    body_bytes: int = 0
    model: str = ""
    response_id: str = ""
    """The id that the client sees."""
    request: str = ""
    """The uuid of the present try: the same 32 digits in P's and D's lines."""
    prefill: str = ""
    decode: str = ""
    tries: int = 0
    queue_s: float = 0.0
    """Waited for a place and for a pair, in all tries."""
    priority: int | None = None
    """Its place in line, lower is earlier; None where there are no limits: none is read."""
    prefill_s: float | None = None
    """P's call of the last try."""
    first_s: float | None = None
    """From the request to the first byte of a stream."""
    decode_s: float | None = None
    """The call of the last try to D, or to the instance that serves alone."""
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    """Of all choices; None where no engine told."""
    sent_bytes: int = 0
    status: int = 0
    failures: list[str] = []
    """Why tries failed, in order: `prefill:reset`."""

    def extra(self, now_s: float) -> dict[str, object]:
        """The fields of the access log line; what is not known is not there."""
        fields: dict[str, object] = {
            "request": self.request or "-",
            "prefill": self.prefill or "-",
            "decode": self.decode or "-",
            "tries": self.tries,
            "seconds": round(now_s - self.started_s, 4),
            "queue_seconds": round(self.queue_s, 4),
            "bytes": self.sent_bytes,
        }
        if self.priority is not None:
            fields["priority"] = self.priority
        if self.prefill_s is not None:
            fields["prefill_seconds"] = round(self.prefill_s, 4)
        if self.first_s is not None:
            fields["first_byte_seconds"] = round(self.first_s, 4)
        if self.decode_s is not None:
            fields["decode_seconds"] = round(self.decode_s, 4)
        if self.prompt_tokens is not None:
            fields["prompt_tokens"] = self.prompt_tokens
        if self.output_tokens is not None:
            fields["output_tokens"] = self.output_tokens
        texts = {
            "model": self.model,
            "response": self.response_id,
            "trace": self.trace_id,
            "client_id": self.client_id,
        }
        fields |= {name: text for name, text in texts.items() if text}
        if self.failures:
            fields["failures"] = ",".join(self.failures)
        return fields
