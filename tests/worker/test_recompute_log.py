"""Recomputing is said loudly, and not for each request."""

from __future__ import annotations

import logging

import pytest

from xpyd_worker.engine.core import EVERY_S, RecomputeLog


def test_the_first_is_said_at_once_and_the_rest_together(caplog: pytest.LogCaptureFixture) -> None:
    log = RecomputeLog()
    with caplog.at_level(logging.WARNING):
        log.look({}, {}, 0.0)
        assert not caplog.messages
        log.look({"timeout": 1}, {"timeout": 9}, 1.0)
        for n in range(2, 500):
            log.look({"timeout": n, "peer_lost": 3}, {"timeout": 9 * n}, 1.0 + n / 100)
        assert len(caplog.messages) == 1
        assert caplog.messages[0].startswith("1 prompts are computed here")
        log.look({"timeout": 500, "peer_lost": 3}, {"timeout": 4500}, 1.0 + EVERY_S)
    assert len(caplog.messages) == 2
    assert "502 prompts" in caplog.messages[1]
    assert "(peer_lost 3, timeout 499)" in caplog.messages[1]
    assert "4500 tokens" in caplog.messages[1]


def test_what_is_no_fault_of_the_transfer_is_not_warned_of(
    caplog: pytest.LogCaptureFixture,
) -> None:
    log = RecomputeLog()
    with caplog.at_level(logging.WARNING):
        log.look({"preempted": 5, "prompt_logprobs": 2}, {"preempted": 50}, 0.0)
        assert not caplog.messages
        log.look({"preempted": 6, "corrupt": 1}, {"preempted": 60, "corrupt": 7}, 1.0)
    assert "1 prompts" in caplog.messages[0]
    assert " 7 tokens" in caplog.messages[0]
