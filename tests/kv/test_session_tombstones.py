"""What D remembers of transfers that are over."""

from __future__ import annotations

from xpyd_core.request_id import TransferKey
from xpyd_kv.session.deadlines import Tombstones

KEY = TransferKey("a" * 32, 0)


def test_the_late_end_of_an_older_epoch_does_not_admit_a_newer_one_again() -> None:
    over = Tombstones(60.0)
    over.end(KEY, 2, now=0.0)
    # A CANCEL of epoch 1 comes late.
    over.end(KEY, 1, now=1.0)
    assert over.refusal(KEY, 1, now=2.0) == "stale"
    assert over.refusal(KEY, 2, now=2.0) == "stale"
    assert over.refusal(KEY, 3, now=2.0) is None


def test_the_end_of_an_epoch_does_not_reopen_a_key_whose_request_has_gone_on() -> None:
    over = Tombstones(60.0)
    over.end(KEY, 2, now=0.0)
    over.close(KEY, now=1.0)
    over.end(KEY, 3, now=2.0)
    assert over.refusal(KEY, 4, now=3.0) == "finished"
    assert over.refusal(KEY, 4, now=62.0) is None
