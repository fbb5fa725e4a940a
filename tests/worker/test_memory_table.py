"""The table of where memory went."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from xpyd_worker.config import GIB, WorkerConfig
from xpyd_worker.load.ready_model import log_memory, memory_table
from xpyd_worker.runner.gpu_memory import GpuUse, Profile
from xpyd_worker.system import give_back, resident_bytes


def table(config: WorkerConfig, resident: int | None = 3 * GIB) -> dict[str, int]:
    rows = memory_table(
        config, weight_bytes=GIB, cache_bytes=GIB, num_blocks=10, resident_bytes=resident
    )
    return {row.name: row.size_bytes for row in rows}


def test_the_table_has_what_the_role_asks_for() -> None:
    alone = ["weights", "KV cache", "torch, libraries, Python", "resident now"]
    assert list(table(WorkerConfig("m"))) == alone
    assert list(table(WorkerConfig("m", role="Prefill"))) == alone
    wide = {"KV buffer", "KV host pool"}
    assert wide < table(WorkerConfig("m", role="Decode")).keys()
    assert wide < table(WorkerConfig("m", role="Prefill", kv_mode="get")).keys()


def test_what_is_not_weights_is_the_rest_of_the_process() -> None:
    assert table(WorkerConfig("m"))["torch, libraries, Python"] == 2 * GIB
    assert "resident now" not in table(WorkerConfig("m"), resident=None)


def test_the_weights_of_what_drafts_are_not_part_of_a_gpu_s_largest_step() -> None:
    profile = Profile(total=80 * GIB, others=0, tensors=9 * GIB, workspaces=0)
    rows = memory_table(
        WorkerConfig("m"),
        weight_bytes=4 * GIB,
        cache_bytes=GIB,
        num_blocks=1,
        resident_bytes=None,
        gpu=GpuUse(profile, 0),
        draft_bytes=3 * GIB,
        draft_weight_bytes=2 * GIB,
    )
    found = {row.name: row.size_bytes for row in rows}
    assert found["GPU: largest step"] == 3 * GIB
    assert found["GPU: what drafts, with its KV cache"] == 3 * GIB


def test_each_row_is_a_line(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        log_memory(
            memory_table(
                WorkerConfig("m"),
                weight_bytes=GIB,
                cache_bytes=GIB // 2,
                num_blocks=7,
                resident_bytes=None,
            )
        )
    assert [record.getMessage() for record in caplog.records] == [
        "memory: weights     1.0 GiB  packed for this device",
        "memory: KV cache  512.0 MiB  7 blocks of 16, taken as it is used",
    ]


def test_the_system_says_what_is_resident(tmp_path: Path) -> None:
    status = tmp_path / "status"
    status.write_text("Name:\tx\nVmRSS:\t    2048 kB\nThreads:\t1\n")
    assert resident_bytes(status) == 2 * 1024 * 1024
    assert resident_bytes(tmp_path / "none") is None
    assert (resident_bytes() or 0) > 1024 * 1024


def test_what_was_freed_goes_back_to_the_system() -> None:
    # Small ones, which the allocator keeps.
    parts = [bytearray(4096) for _ in range(30_000)]
    full = resident_bytes()
    keep = parts[-1]
    parts.clear()
    give_back()
    left = resident_bytes()
    assert full is not None
    assert left is not None
    assert len(keep) == 4096
    assert full - left > 60 * 1024 * 1024
