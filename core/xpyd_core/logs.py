"""Logging set-up of every program: one line per record, as text for people or JSON for machines.

A record about a request carries `extra={"request": id}`: 32 hex digits of the router's id, the same
in the router's, P's and D's lines, or the id that an engine's own caller chose. Other extras become
`key=value` or JSON members.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
from datetime import UTC, datetime

LEVELS = ("debug", "info", "warning", "error")
FORMATS = ("text", "json")
_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "color_message"}


def _extras(record: logging.LogRecord) -> dict[str, object]:
    return {key: value for key, value in vars(record).items() if key not in _STANDARD}


def _time(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")


class TextFormatter(logging.Formatter):
    """`time LEVEL logger: message key=value ...`"""

    def format(self, record: logging.LogRecord) -> str:
        extras = "".join(f" {key}={value}" for key, value in _extras(record).items())
        time, level = _time(record), record.levelname
        line = f"{time} {level:<7} {record.name}: {record.getMessage()}{extras}"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


class JsonFormatter(logging.Formatter):
    """One JSON object per line: time, level, logger, message and the extras."""

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, object] = {
            "time": _time(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **_extras(record),
        }
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, default=str)


def add_logging_arguments(parser: argparse.ArgumentParser) -> None:
    """Give `parser` --log-level and --log-format."""
    parser.add_argument("--log-level", choices=LEVELS, default="info", help="least level to print")
    parser.add_argument("--log-format", choices=FORMATS, default="text", help="text or JSON lines")


def level_in_use() -> str:
    """What --log-level is to be in processes that this one starts: the least of LEVELS whose
    records are printed here, or the highest."""
    root = logging.getLogger()
    return next((one for one in LEVELS if root.isEnabledFor(_number(one))), LEVELS[-1])


def format_in_use() -> str:
    """What --log-format is to be in processes that this one starts."""
    is_json = any(isinstance(one.formatter, JsonFormatter) for one in logging.getLogger().handlers)
    return "json" if is_json else "text"


def _number(level: str) -> int:
    return logging.getLevelNamesMapping()[level.upper()]


def set_up_logging(level: str, log_format: str) -> None:
    """Send all records of `level` and above to standard error in `log_format`."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if log_format == "json" else TextFormatter())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
