"""What is looked at before ranks start: open files, networks between nodes, devices."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path

import pytest

from xpyd_core.errors import UserError
from xpyd_worker.ranks.start.preflight import (
    check_devices,
    file_warning,
    look_at_network,
    look_at_waits,
    socket_warning,
)


@pytest.mark.parametrize("soft", [256, 4096])
def test_the_file_limit_is_raised_as_far_as_it_may_be(soft: int) -> None:
    code = (
        "import resource; from xpyd_worker.ranks.start.preflight import raise_file_limit;"
        "print(raise_file_limit(), *resource.getrlimit(resource.RLIMIT_NOFILE))"
    )
    done = subprocess.run(
        ["bash", "-c", f'ulimit -Sn {soft}; ulimit -Hn 4096; "$0" -c "$1"', sys.executable, code],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout.split() == ["4096"] * 3


@pytest.mark.parametrize(
    ("limit", "ranks", "is_warned"),
    [(1024, 8, True), (65_535, 8, True), (65_536, 8, False), (1024, 7, False), (1024, 1, False)],
)
def test_few_files_for_many_ranks_are_warned_of(limit: int, ranks: int, is_warned: bool) -> None:
    warning = file_warning(limit, ranks)
    assert (warning is not None) == is_warned
    if warning is not None:
        assert "65536 are advised" in warning
        assert f"{ranks} ranks with at most {limit} open files" in warning


@pytest.mark.parametrize(
    ("nodes", "environ", "has_rdma", "reason"),
    [
        (2, {}, False, "there is no RDMA device here"),
        (2, {}, True, None),
        (1, {}, False, None),
        (1, {"NCCL_NET": "Socket"}, False, None),
        (2, {"NCCL_NET": "socket"}, True, "NCCL_NET=Socket"),
        (2, {"NCCL_IB_DISABLE": "1"}, True, "NCCL_IB_DISABLE=1"),
        (2, {"NCCL_IB_DISABLE": "0"}, True, None),
        (2, {"NCCL_NET": "IB"}, False, None),
        (2, {"NCCL_NET_PLUGIN": "aws-ofi"}, False, None),
    ],
)
def test_sockets_between_nodes_are_warned_of(
    nodes: int, environ: dict[str, str], has_rdma: bool, reason: str | None
) -> None:
    warning = socket_warning(nodes, environ, has_rdma=has_rdma)
    assert (warning is None) == (reason is None)
    if warning is not None and reason is not None:
        assert f"sockets between them: {reason}." in warning


def test_a_network_that_will_hurt_is_in_the_log(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    with caplog.at_level(logging.WARNING):
        look_at_network(2, {}, infiniband=tmp_path / "none")
    assert ["no RDMA device" in line for line in caplog.messages] == [True]
    caplog.clear()
    (tmp_path / "mlx5_0").mkdir()
    with caplog.at_level(logging.WARNING):
        look_at_network(2, {}, infiniband=tmp_path)
    assert caplog.messages == []


@pytest.mark.parametrize(
    ("value", "warns"), [("1", True), ("True", True), ("0", False), ("", False)]
)
def test_waits_that_hold_the_host_up_are_warned_of(
    caplog: pytest.LogCaptureFixture, value: str, warns: bool
) -> None:
    with caplog.at_level(logging.WARNING):
        look_at_waits({})
        look_at_waits({"TORCH_NCCL_BLOCKING_WAIT": value})
    assert ["TORCH_NCCL_BLOCKING_WAIT is set" in line for line in caplog.messages] == [True] * warns


def test_each_rank_needs_a_gpu_of_its_own() -> None:
    check_devices(8, 8)
    check_devices(8, 4)
    with pytest.raises(UserError, match="4 ranks here, 2 GPUs visible"):
        check_devices(2, 4)
