"""The fleet's secret: read from a file, used for the KV handshake, heartbeats, pair ids,
`POST /kv/release`, `POST /kv/probe`, `POST /drain` and `POST /reset_prefix_cache`.

The file holds one key per line. The first signs; every one is accepted, so that a key can be
rotated by adding, rolling and removing. A key never appears in a log line or an error.

A fleet without a secret (--kv-insecure) signs with the empty key, which no file can hold: it speaks
the same protocol, and never with a fleet that has a secret.

See docs/adr/0025.
"""

from __future__ import annotations

import hmac
from hashlib import sha256
from pathlib import Path
from typing import Literal

from xpyd_core.errors import UserError

MIN_KEY_BYTES = 16
MAX_KEYS = 4
BEAT_MAC_BYTES = 32
INSECURE_KEYS = (b"",)
"""The keys of a fleet without a secret."""
Purpose = Literal["pair", "kv-release", "kv-probe", "drain", "reset_prefix_cache"]
"""What a call with a MAC is for. The text that the MAC is over is the id of a pair, the uuid of a
release, the address in the body of a probe, and the incarnation in the body of the others."""
PAIR_MAC_HEADER = "X-Xpyd-Pair-Mac"
"""The header with the MAC of the pair id in X-Request-Id. See docs/adr/0040."""
_MAX_FILE_BYTES = 16 * 1024


def check_keys_given(path: Path | None, *, insecure: bool, who: str) -> None:
    """UserError unless there is either a key file or the consent to do without. `who` needs it."""
    if path is None and not insecure:
        raise UserError(
            f"--kv-key-file: {who} needs the fleet's secret; make one with `openssl rand -hex 32 > "
            "kv.key` and give --kv-key-file kv.key to every engine and router, or give all of them "
            "--kv-insecure where no other program can reach their ports"
        )
    if path is not None and insecure:
        raise UserError(
            f"--kv-insecure: there is a key file, too ({path}, from --kv-key-file or "
            "XPYD_KV_KEY_FILE); leave one of them out"
        )


def fleet_keys(path: Path | None, *, insecure: bool) -> tuple[bytes, ...]:
    """The keys to sign and to accept with; () where neither was given."""
    if insecure:
        return INSECURE_KEYS
    return () if path is None else read_keys(path)


def read_keys(path: Path, what: str = "KV key file") -> tuple[bytes, ...]:
    """The keys in `path`, signing key first. UserError for none, too many or a short one; it calls
    the file `what`.
    """
    try:
        with path.open("rb") as file:
            content = file.read(_MAX_FILE_BYTES + 1)
    except OSError as error:
        raise UserError(f"{what} {path}: {error.strerror}") from error
    keys = tuple(line.strip() for line in content.splitlines() if line.strip())
    if len(content) > _MAX_FILE_BYTES or not 1 <= len(keys) <= MAX_KEYS:
        raise UserError(f"{what} {path}: expected 1 to {MAX_KEYS} keys, one per line")
    if any(len(key) < MIN_KEY_BYTES for key in keys):
        raise UserError(f"{what} {path}: a key must have at least {MIN_KEY_BYTES} bytes")
    if any(not key.strip(b"\0") for key in keys):
        # HMAC fills keys up with zeros: to it this one is the empty key.
        raise UserError(f"{what} {path}: zero bytes are no key")
    return keys


def call_mac(key: bytes, purpose: Purpose, text: str) -> str:
    """X-Xpyd-Mac of a call: hex HMAC-SHA256(key, purpose + text)."""
    return hmac.new(key, f"{purpose}{text}".encode("utf-8", "replace"), sha256).hexdigest()


def is_call_mac(keys: tuple[bytes, ...], purpose: Purpose, text: str, mac: str) -> bool:
    """Whether `mac` was made with one of the keys; in constant time for each."""
    given = mac.encode("utf-8", "replace")
    return any(hmac.compare_digest(call_mac(key, purpose, text).encode(), given) for key in keys)


def beat_mac(key: bytes, frame: bytes) -> bytes:
    """The frame behind a heartbeat's: HMAC-SHA256(key, "heartbeat" + the heartbeat's frame)."""
    return hmac.digest(key, b"heartbeat" + frame, "sha256")


def is_beat_mac(keys: tuple[bytes, ...], frame: bytes, mac: bytes) -> bool:
    """Whether `mac` was made with one of the keys; in constant time for each."""
    return any(hmac.compare_digest(beat_mac(key, frame), mac) for key in keys)
