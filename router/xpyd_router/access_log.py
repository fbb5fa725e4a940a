"""One request's record (`Trace`) and its line in the access log.

`http.inference` makes a Trace, the modules of `request` write it, and it is read once at the end:
by the access log here and by `request_metrics`. Lines look like those of xpyd_core.logs, as text or
JSON, but are written without `logging`, which costs more than a request. They are collected and
written to standard error some times a second, and at the end.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
from collections.abc import Callable
from datetime import UTC, datetime
from functools import lru_cache
from typing import Literal

import msgspec
import orjson

from xpyd_core.kv_outcome import AloneCause


class Trace(msgspec.Struct):
    """One request's record; one owner, the task that serves it."""

    endpoint: str
    started_s: float
    client_id: str = ""
    """The client's X-Request-Id."""
    trace_id: str = ""
    """The trace id of the client's traceparent."""
    key: str = ""
    """The name of the client's key."""
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
    """The request's priority, lower is earlier; None where no limits are set, so none is read."""
    prefill_s: float | None = None
    """P's call of the last try."""
    first_s: float | None = None
    """Time from the request to the first byte of a stream."""
    decode_s: float | None = None
    """The call of the last try to D, or to the instance that serves alone."""
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    """Tokens of all choices; None where no engine gave a number."""
    sent_bytes: int = 0
    status: int = 0
    kv: str = ""
    """What became of the KV (xpyd_core.kv_outcome.Outcome); '' before an engine answered."""
    kv_cause: str = ""
    """Why it was not moved."""
    stands_in: AloneCause | Literal[""] = ""
    """Why one instance serves the try, where no pair was there."""
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
            "key": self.key,
            "kv": self.kv,
            "kv_cause": self.kv and self.kv_cause,
        }
        fields |= {name: text for name, text in texts.items() if text}
        if self.failures:
            fields["failures"] = ",".join(self.failures)
        return fields


LOGGER = "xpyd_router.access"
_FLUSH_S = 0.1
_FLUSH_BYTES = 64 * 1024
_STDERR = 2
_WORD = re.compile(r'[^\s"\x00-\x1f\x7f-\x9f]+')


def write_stderr(data: bytes) -> None:
    """All of `data` to standard error; what cannot be written is lost, as with `logging`."""
    view = memoryview(data)
    try:
        while view:
            view = view[os.write(_STDERR, view) :]
    except OSError:
        return


@lru_cache(maxsize=1024)
def _word(text: str) -> str:
    """`text` as one word: what a client or an engine chose may hold spaces, quotes and ends of
    lines. Names of engines and models come again and again.
    """
    return text if _WORD.fullmatch(text) else orjson.dumps(text).decode()


@lru_cache(maxsize=64)
def _kv_words(kv: str, cause: str) -> str:
    if not kv:
        return ""
    return f" kv={kv} kv_cause={cause}" if cause else f" kv={kv}"


def as_words(trace: Trace, now_s: float) -> str:
    """The fields of `Trace.extra` as a line of text has them. Made for every request, so nothing is
    looked at twice.
    """
    line = (
        f" request={trace.request or '-'} prefill={_word(trace.prefill or '-')}"
        f" decode={_word(trace.decode or '-')} tries={trace.tries}"
        f" seconds={now_s - trace.started_s:.4f} queue_seconds={trace.queue_s:.4f}"
        f" bytes={trace.sent_bytes}"
    )
    if trace.priority is not None:
        line += f" priority={trace.priority}"
    if trace.prefill_s is not None:
        line += f" prefill_seconds={trace.prefill_s:.4f}"
    if trace.first_s is not None:
        line += f" first_byte_seconds={trace.first_s:.4f}"
    if trace.decode_s is not None:
        line += f" decode_seconds={trace.decode_s:.4f}"
    if trace.prompt_tokens is not None:
        line += f" prompt_tokens={trace.prompt_tokens}"
    if trace.output_tokens is not None:
        line += f" output_tokens={trace.output_tokens}"
    if trace.model:
        line += f" model={_word(trace.model)}"
    if trace.response_id:
        line += f" response={trace.response_id}"
    if trace.trace_id:
        line += f" trace={trace.trace_id}"
    if trace.client_id:
        line += f" client_id={_word(trace.client_id)}"
    line += f" key={trace.key}" if trace.key else ""
    line += _kv_words(trace.kv, trace.kv_cause)
    if trace.failures:
        line += f" failures={','.join(trace.failures)}"
    return line


class AccessLog:
    """See the module. `wall_clock` gives Unix seconds; its owner flushes it at the end."""

    def __init__(
        self,
        *,
        is_json: bool,
        wall_clock: Callable[[], float],
        is_on: bool = True,
        write: Callable[[bytes], None] = write_stderr,
    ) -> None:
        self._is_enabled = is_on and logging.getLogger(LOGGER).isEnabledFor(logging.INFO)
        self._is_json = is_json
        self._wall_clock = wall_clock
        self._write = write
        self._lines: list[bytes] = []
        self._size = 0
        self._timer: asyncio.TimerHandle | None = None
        self._second = 0
        self._second_text = ""

    def add(self, trace: Trace, status: int, now_s: float) -> None:
        """The line of a request that ended; `now_s` on the trace's clock."""
        if not self._is_enabled:
            return
        path = f"/v1/{trace.endpoint}"
        message = f"POST {path} {status}"
        time = self._time()
        if self._is_json:
            entry = {"time": time, "level": "info", "logger": LOGGER, "message": message}
            entry |= {"path": path, "status": status}
            fields = trace.extra(now_s)
            line = orjson.dumps({**entry, **fields}, option=orjson.OPT_APPEND_NEWLINE)
        else:
            line = f"{time} INFO    {LOGGER}: {message}{as_words(trace, now_s)}\n".encode()
        self._lines.append(line)
        self._size += len(line)
        if self._size >= _FLUSH_BYTES:
            self.flush()
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_FLUSH_S, self.flush)

    def flush(self) -> None:
        """Write what has gathered."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._lines:
            lines, self._lines, self._size = b"".join(self._lines), [], 0
            self._write(lines)

    def _time(self) -> str:
        """Now, as xpyd_core.logs writes it; the second's part is made once."""
        now = self._wall_clock()
        second = int(now)
        if second != self._second:
            self._second = second
            self._second_text = datetime.fromtimestamp(second, UTC).isoformat()[:19]
        return f"{self._second_text}.{int((now - second) * 1000):03d}+00:00"
