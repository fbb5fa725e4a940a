"""The lines of a file of client keys: read, written, and the keys that they are made for. Pure but
for the random bytes of a new key.

A line is a name, the hash of a key, and options:

    team-a sha256:HEX requests=8 tokens=100000 weight=2 models=qwen,llama
    alice scrypt:16384:8:1:SALT:HEX

A key that `xpyd key new` makes has 256 random bits: nobody finds it by its SHA-256. A key that a
person chose needs scrypt. Several lines of one name are several keys of one client, whose options
are in the first of these lines. The file holds no key, but a salt and limits: keep it from clients.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from xpyd_core.errors import UserError

MAX_FILE_BYTES = 1024 * 1024
"""The size of a Secret."""
MAX_NAMES = 1024
MAX_SCRYPT_LINES = 16
"""A key that is not known yet is hashed once for each."""
MAX_KEY_BYTES = 512
_PREFIX = "xpyd-"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
_SHA256 = re.compile(r"sha256:([0-9a-f]{64})")
_SCRYPT = re.compile(r"scrypt:(\d{1,8}):(\d{1,3}):(\d{1,3}):([0-9a-f]{16,128}):([0-9a-f]{64})")
_SALT = re.compile(r"[!-~]{1,128}")
_MODEL = re.compile(r"[!-+\--~]{1,256}")
_MOST = 2**40
_MAX_WEIGHT = 1000
_MAX_PRIORITY = 2**31
_SCRYPT_BYTES = 64 * 1024 * 1024
"""The memory of one hash at most."""


class Scrypt(NamedTuple):
    """A hash of a key that a person chose."""

    cost: int
    block: int
    parallel: int
    salt: bytes
    digest: bytes

    def matches(self, key: bytes) -> bool:
        """Whether it is of `key`. Takes some 50 ms of a core."""
        return hmac.compare_digest(_scrypt(key, self), self.digest)


@dataclass(frozen=True)
class KeyOptions:
    """What a key may use: of the whole fleet, whose routers share it equally."""

    requests: int | None = None
    """Requests in flight; None: no limit."""
    tokens: int | None = None
    """Tokens in flight, of prompts and allowed outputs; None: no limit."""
    tokens_per_minute: int | None = None
    """Tokens of prompts and outputs; a minute's may be used at once. None: no limit."""
    priority: int = 0
    """The earliest place in line that its requests may ask for; lower is earlier."""
    weight: int = 1
    """Its share of a full fleet, by that of the other keys that wait."""
    models: tuple[str, ...] = ()
    """Names of the models that it may use; none named: all."""
    salt: str = ""
    """Keys of one salt share cached prefixes; empty: the key's own name."""

    @property
    def is_limited(self) -> bool:
        """Whether it has a limit of its own."""
        return bool(self.requests or self.tokens or self.tokens_per_minute)


@dataclass
class KeyFile:
    """What a file says."""

    options: dict[str, KeyOptions] = field(default_factory=dict[str, KeyOptions])
    """By name, in the order of the file."""
    by_digest: dict[bytes, str] = field(default_factory=dict[bytes, str])
    """SHA-256 of a key -> its name."""
    chosen: list[tuple[Scrypt, str]] = field(default_factory=list[tuple[Scrypt, str]])
    """Keys that people chose, with their names."""


def digest_of(key: bytes) -> bytes:
    """What a key is known by."""
    return hashlib.sha256(key).digest()


def salted(name: str) -> str:
    """The cache salt that engines get for the keys of a salt or name: 128 bits in hex."""
    return hashlib.sha256(f"xpyd-cache-salt\0{name}".encode()).hexdigest()[:32]


def _scrypt(key: bytes, kind: Scrypt) -> bytes:
    return hashlib.scrypt(
        key,
        salt=kind.salt,
        n=kind.cost,
        r=kind.block,
        p=kind.parallel,
        maxmem=2 * _SCRYPT_BYTES,
        dklen=32,
    )


def new_key() -> str:
    """A key of 256 random bits."""
    return _PREFIX + secrets.token_urlsafe(32)


def line_of(name: str, key: str, options: Mapping[str, str], *, is_chosen: bool = False) -> str:
    """The line of the file for `key`. UserError for what a file may not hold."""
    if is_chosen:
        kind = Scrypt(16384, 8, 1, secrets.token_bytes(16), b"")
        made = _scrypt(key.encode(), kind).hex()
        shown = f"scrypt:{kind.cost}:{kind.block}:{kind.parallel}:{kind.salt.hex()}:{made}"
    else:
        shown = f"sha256:{digest_of(key.encode()).hex()}"
    words = [name, shown, *(f"{option}={value}" for option, value in options.items())]
    line = " ".join(words)
    parse_keys(line, "key")
    return line


def options_of(text: str, name: str) -> dict[str, str]:
    """The options in the first line of `name`, as they are written there; empty without one."""
    lines = [words for line in text.splitlines() if (words := line.split()) and words[0] == name]
    parts = [word.partition("=") for word in lines[0][2:]] if lines else []
    return {option: value for option, _, value in parts}


def parse_keys(text: str, what: str) -> KeyFile:
    """The file's `text`. UserError names `what`, the line and the fix; it shows no hash."""
    found = KeyFile()
    for number, line in enumerate(text.splitlines(), 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        try:
            _add(found, words)
        except UserError as error:
            raise UserError(f"{what}, line {number}: {error}") from error
    return found


def _add(found: KeyFile, words: list[str]) -> None:
    name = words[0]
    if _NAME.fullmatch(name) is None:
        raise UserError(
            "expected a name of letters, digits, '.', '_' and '-', at most 63, then the key's hash"
        )
    kind = _hash(words[1] if len(words) > 1 else "")
    options = _options(words[2:])
    if name not in found.options:
        if len(found.options) >= MAX_NAMES:
            raise UserError(f"more than {MAX_NAMES} names")
        found.options[name] = options
    elif len(words) > 2 and options != found.options[name]:
        raise UserError(f"{name}: other options than in the first line of the name")
    if isinstance(kind, Scrypt):
        if len(found.chosen) >= MAX_SCRYPT_LINES:
            raise UserError(f"more than {MAX_SCRYPT_LINES} lines with scrypt: use sha256 keys")
        found.chosen.append((kind, name))
    elif found.by_digest.setdefault(kind, name) != name:
        raise UserError(f"{name}: another name has the same key")


def _hash(text: str) -> bytes | Scrypt:
    if (match := _SHA256.fullmatch(text)) is not None:
        return bytes.fromhex(match[1])
    if (match := _SCRYPT.fullmatch(text)) is None or len(match[4]) % 2:
        raise UserError("expected sha256:HEX or scrypt:N:R:P:SALT:HEX behind the name")
    cost, block, parallel = int(match[1]), int(match[2]), int(match[3])
    is_cost = cost >= 2 and cost & (cost - 1) == 0 and cost.bit_length() <= 16 * block
    if not is_cost or not block or not parallel or 128 * cost * block * parallel > _SCRYPT_BYTES:
        raise UserError(
            "scrypt: expected N a power of 2 below 2 ** (16 * R), and 128 * N * R * P at most "
            "64 MiB"
        )
    return Scrypt(cost, block, parallel, bytes.fromhex(match[4]), bytes.fromhex(match[5]))


_COUNTS: Final = {"requests": "requests", "tokens": "tokens"} | {
    "tokens-per-minute": "tokens_per_minute"
}
OPTIONS: Final = (*_COUNTS, "priority", "weight", "models", "salt")


def _options(words: list[str]) -> KeyOptions:
    values: dict[str, int | str | tuple[str, ...]] = {}
    for word in words:
        name, _, text = word.partition("=")
        field_name = _COUNTS.get(name, name)
        if name not in OPTIONS:
            raise UserError(f"{word[:40]!r}: expected one of {', '.join(OPTIONS)}, as NAME=VALUE")
        if field_name in values:
            raise UserError(f"{name}: given twice")
        values[field_name] = _value(name, text)
    return KeyOptions(**values)  # type: ignore[arg-type]


def _value(name: str, text: str) -> int | str | tuple[str, ...]:
    if name == "models":
        models = tuple(text.split(","))
        if not all(_MODEL.fullmatch(model) for model in models):
            raise UserError("models: expected names with commas between them")
        return models
    if name == "salt":
        if _SALT.fullmatch(text) is None:
            raise UserError("salt: expected 1 to 128 printable characters")
        return text
    low, high = (1, _MAX_WEIGHT) if name == "weight" else (1, _MOST)
    if name == "priority":
        low, high = -_MAX_PRIORITY, _MAX_PRIORITY
    if re.fullmatch(r"-?\d{1,13}", text) is None or not low <= int(text) <= high:
        raise UserError(f"{name}: expected a whole number, {low} to {high}")
    return int(text)
