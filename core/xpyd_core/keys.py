"""The fleet's secret: read from a file, used for the KV handshake, heartbeats, pair ids,
`POST /kv/release`, `POST /kv/probe`, `POST /drain` and `POST /reset_prefix_cache`.

The file holds one key per line. The first signs; every one is accepted. Beside a file `key` there
may be a `key.order`: it names files of that folder, one per line, whose keys follow each other so.
Both are read again when they change, so that a key is rotated while all serve: add the new one
behind the old, wait until all have it, put it first, wait, remove the old one. `key_ids` say who
has which. A key never appears in a log line or an error.

A fleet without a secret (--kv-insecure) signs with the empty key, which no file can hold: it speaks
the same protocol, and never with a fleet that has a secret.

See docs/adr/0025 and docs/adr/0088.
"""

from __future__ import annotations

import hmac
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Literal, overload

from xpyd_core.errors import UserError

_log = logging.getLogger(__name__)
_KV_KEY_FILE = "KV key file"
MIN_KEY_BYTES = 16
MAX_KEYS = 4
BEAT_MAC_BYTES = 32
INSECURE_KEYS = (b"",)
"""The keys of a fleet without a secret."""
Purpose = Literal["pair", "kv-release", "kv-probe", "drain", "reset_prefix_cache", "scale"]
"""What a call with a MAC is for. The text that the MAC is over is the id of a pair, the uuid of a
release, the address in the body of a probe, and the incarnation in the body of the others; a scale
has the number of replicas behind it."""
PAIR_MAC_HEADER = "X-Xpyd-Pair-Mac"
"""The header with the MAC of the pair id in X-Request-Id. See docs/adr/0040."""
_MAX_FILE_BYTES = 16 * 1024
Keys = Sequence[bytes]
"""The fleet's keys: the first signs, each is accepted; empty where there is none. Those of a file
change while one looks: who uses several of them together iterates once."""
CHECK_S = 1.0
"""How long after a change of the file the old keys may be used."""


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


class FleetKeys(Sequence[bytes]):
    """The keys that a file holds now. Any thread.

    Who uses a key asks for it here each time. A file is looked at once a second at most, when it is
    asked for; one with a mistake changes nothing. The keys of a router's admins are such ones, too:
    `what` is what errors call the file.
    """

    def __init__(
        self,
        path: Path,
        *,
        known: Keys = (),
        clock: Callable[[], float] = time.monotonic,
        what: str = _KV_KEY_FILE,
    ) -> None:
        """UserError for a file with a mistake, unless there are keys that were `known` before."""
        self._path = path
        self._what = what
        self._clock = clock
        self._due_s = clock() + CHECK_S
        self._stamp = _stamp(path)
        self._keys = tuple(known)
        try:
            self._keys = _read_in_order(path, what)
        except UserError as error:
            if not known:
                raise
            _complain(error)

    @overload
    def __getitem__(self, index: int) -> bytes: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[bytes]: ...
    def __getitem__(self, index: int | slice) -> bytes | Sequence[bytes]:
        return self._current()[index]

    def __len__(self) -> int:
        return len(self._current())

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._current())

    def _current(self) -> tuple[bytes, ...]:
        now_s = self._clock()
        if now_s >= self._due_s:
            self._due_s = now_s + CHECK_S
            # Before the file is read: a change between the two is seen next time.
            stamp = _stamp(self._path)
            if stamp != self._stamp:
                self._stamp = stamp
                self._read()
        return self._keys

    def _read(self) -> None:
        try:
            keys = _read_in_order(self._path, self._what)
        except UserError as error:
            _complain(error)
            return
        if keys != self._keys:
            self._keys = keys
            if self._what == _KV_KEY_FILE:
                _log.info("KV keys: %s, the first signs", ", ".join(key_ids(keys)))
            else:  # an id of a key that a person chose would lead to it
                _log.info("%s %s: %d keys, read anew", self._what, self._path, len(keys))


def _complain(error: UserError) -> None:
    _log.error("%s; the keys stay as they were", error)


def fleet_keys(path: Path | None, *, insecure: bool, known: Keys = ()) -> Keys:
    """The keys to sign and to accept with; () where neither was given. `known`: see FleetKeys."""
    if insecure:
        return INSECURE_KEYS
    return () if path is None else FleetKeys(path, known=known)


def key_ids(keys: Keys) -> tuple[str, ...]:
    """A short name of each key, by which programs say which they have; it does not lead to the key.
    Nothing for a fleet without a secret."""
    return tuple(hmac.digest(key, b"xpyd key id", "sha256")[:8].hex() for key in keys if key)


def _order_of(path: Path) -> Path:
    return path.with_name(f"{path.name}.order")


def _named_files(path: Path) -> list[Path]:
    """The files with the keys, in their order. UserError for an order that cannot be used."""
    order = _order_of(path)
    try:
        text = order.read_bytes()[: _MAX_FILE_BYTES + 1].decode("utf-8", "replace")
    except FileNotFoundError:
        return [path]
    except OSError as error:
        raise UserError(f"{order}: {error.strerror}") from error
    files = [line.strip() for line in text.splitlines() if line.strip()]
    if not 1 <= len(files) <= MAX_KEYS or any(name != Path(name).name for name in files):
        raise UserError(
            f"{order}: expected the names of 1 to {MAX_KEYS} files of this folder, one per line"
        )
    return [path.with_name(name) for name in files]


def _read_in_order(path: Path, what: str) -> tuple[bytes, ...]:
    """All keys, the signing one first. A file that is not there yet is left out, unless it signs.
    UserError."""
    first, *rest = _named_files(path)
    found = read_keys(first, what)
    for file in rest:
        found += read_keys(file, what) if file.exists() else ()
    if len(found) > MAX_KEYS:
        raise UserError(f"{_order_of(path)}: these files hold more than {MAX_KEYS} keys")
    return found


def _stamp(path: Path) -> tuple[tuple[int, int, int] | None, ...]:
    """What changes when one of the files does."""
    try:
        files = _named_files(path)
    except UserError:
        files = [path]
    return tuple(_stamp_of(file) for file in (_order_of(path), *files))


def _stamp_of(file: Path) -> tuple[int, int, int] | None:
    try:
        found = file.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


def read_keys(path: Path, what: str = _KV_KEY_FILE) -> tuple[bytes, ...]:
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


def is_call_mac(keys: Keys, purpose: Purpose, text: str, mac: str) -> bool:
    """Whether `mac` was made with one of the keys; in constant time for each."""
    given = mac.encode("utf-8", "replace")
    return any(hmac.compare_digest(call_mac(key, purpose, text).encode(), given) for key in keys)


def beat_mac(key: bytes, frame: bytes) -> bytes:
    """The frame behind a heartbeat's: HMAC-SHA256(key, "heartbeat" + the heartbeat's frame)."""
    return hmac.digest(key, b"heartbeat" + frame, "sha256")


def is_beat_mac(keys: Keys, frame: bytes, mac: bytes) -> bool:
    """Whether `mac` was made with one of the keys; in constant time for each."""
    return any(hmac.compare_digest(beat_mac(key, frame), mac) for key in keys)


def word_mac(key: bytes, frame: bytes) -> bytes:
    """The frame behind a router's word: HMAC-SHA256(key, "router-word" + the word's frame)."""
    return hmac.digest(key, b"router-word" + frame, "sha256")


def is_word_mac(keys: Keys, frame: bytes, mac: bytes) -> bool:
    """Whether `mac` was made with one of the keys; in constant time for each."""
    return any(hmac.compare_digest(word_mac(key, frame), mac) for key in keys)
