"""The fleet's keys follow their file while programs use them; a mistake in it changes nothing."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from xpyd_core import keys
from xpyd_core.errors import UserError
from xpyd_core.keys import CHECK_S, FleetKeys, fleet_keys, key_ids

OLD, NEW, THIRD = (letter * 32 for letter in (b"o", b"n", b"t"))


class Keyring:
    """A folder with a key file, and a clock that the test moves."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / "key"
        self.now_s = 100.0
        self.write("key", OLD)
        self.keys = FleetKeys(self.file, clock=lambda: self.now_s)

    def write(self, name: str, *lines: bytes) -> None:
        """As kubelet does: another file in the place of the old one."""
        draft = self.file.with_name("draft")
        draft.write_bytes(b"\n".join(lines) + b"\n")
        draft.replace(self.file.with_name(name))

    def after(self, wait_s: float = CHECK_S) -> tuple[bytes, ...]:
        """The keys that much later."""
        self.now_s += wait_s
        return tuple(self.keys)


@pytest.fixture
def ring(tmp_path: Path) -> Keyring:
    return Keyring(tmp_path)


def test_a_key_that_is_added_is_accepted_within_a_second(ring: Keyring) -> None:
    ring.write("key", OLD, NEW)
    assert ring.after(CHECK_S / 2) == (OLD,)
    assert ring.after(CHECK_S / 2) == (OLD, NEW)
    ring.write("key", NEW, OLD)
    ring.after()
    assert (ring.keys[0], len(ring.keys), OLD in ring.keys) == (NEW, 2, True)
    ring.write("key", NEW)
    assert ring.after() == (NEW,)
    assert OLD not in ring.keys


@pytest.mark.parametrize("bad", [b"", b"short", bytes(32), b"\n".join([b"x" * 32] * 5)])
def test_a_file_with_a_mistake_changes_nothing_and_the_next_good_one_counts(
    ring: Keyring, bad: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    ring.write("key", bad)
    assert ring.after() == (OLD,)
    assert ring.after() == (OLD,)
    assert len(caplog.records) == 1  # once for each change, and never a key
    assert OLD.decode() not in caplog.text
    ring.file.unlink()
    assert ring.after() == (OLD,)
    ring.write("key", NEW)
    assert ring.after() == (NEW,)


def test_an_order_beside_the_file_names_the_files_with_keys(ring: Keyring) -> None:
    ring.write("key.order", b"key", b"key-b")
    assert ring.after() == (OLD,)  # the new file is not there yet
    ring.write("key-b", NEW)
    assert ring.after() == (OLD, NEW)
    ring.write("key.order", b"key-b", b"key")
    assert ring.after() == (NEW, OLD)
    ring.write("key.order", b"key-b")
    assert ring.after() == (NEW,)
    ring.file.unlink()
    assert ring.after() == (NEW,)
    assert tuple(FleetKeys(ring.file)) == (NEW,)


@pytest.mark.parametrize("order", [b"", b"../key", b"sub/key", b"key-b", b"\n".join([b"key"] * 5)])
def test_an_order_that_cannot_be_used_changes_nothing(ring: Keyring, order: bytes) -> None:
    ring.write("key.order", order)  # key-b, which would sign, is not there
    assert ring.after() == (OLD,)
    with pytest.raises(UserError, match="key"):
        FleetKeys(ring.file)
    ring.write("key.order", b"key")
    ring.write("key", NEW)
    assert ring.after() == (NEW,)


def test_files_together_hold_no_more_keys_than_one_may(ring: Keyring) -> None:
    ring.write("key-b", NEW, THIRD)
    ring.write("key", OLD, b"4" * 32, b"5" * 32)
    ring.write("key.order", b"key", b"key-b")
    assert ring.after() == (OLD,)


def test_a_process_that_starts_later_keeps_the_keys_that_its_parent_knew(tmp_path: Path) -> None:
    file = tmp_path / "key"
    with pytest.raises(UserError):
        fleet_keys(file, insecure=False)
    known = fleet_keys(file, insecure=False, known=(OLD,))
    assert tuple(known) == (OLD,)


def test_an_id_names_a_key_and_does_not_show_it() -> None:
    old, new = key_ids((OLD, NEW))
    assert (old, new) == (key_ids([OLD])[0], key_ids([NEW])[0])
    assert len(old) == 16
    assert old != new
    assert OLD.hex()[:8] not in old
    assert key_ids(keys.INSECURE_KEYS) == ()


def test_a_key_is_in_no_text_of_the_keys(ring: Keyring) -> None:
    assert OLD.decode() not in f"{ring.keys} {ring.keys!r}"


def test_a_file_that_is_swapped_within_one_tick_of_the_clock_is_seen(ring: Keyring) -> None:
    before = ring.file.stat()
    ring.write("key", NEW)
    os.utime(ring.file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert ring.after() == (NEW,)
