"""One line per request, written without the machinery of `logging`: it costs more than a request.

The lines look like those of xpyd_core.logs, as text or JSON. They are gathered and written to
standard error some times a second, and at the end.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
from collections.abc import Callable
from datetime import UTC, datetime

import orjson

from xpyd_router.requests.trace import Trace

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


def _plain(value: object) -> object:
    """`value` as one word: what a client chose may hold spaces, quotes and ends of lines."""
    if isinstance(value, str) and _WORD.fullmatch(value) is None:
        return orjson.dumps(value).decode()
    return value


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
        fields = trace.extra(now_s)
        message = f"POST /v1/{trace.endpoint} {status}"
        time = self._time()
        if self._is_json:
            entry = {"time": time, "level": "info", "logger": LOGGER, "message": message}
            line = orjson.dumps({**entry, **fields}, option=orjson.OPT_APPEND_NEWLINE)
        else:
            extras = "".join([f" {key}={_plain(value)}" for key, value in fields.items()])
            line = f"{time} INFO    {LOGGER}: {message}{extras}\n".encode()
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
