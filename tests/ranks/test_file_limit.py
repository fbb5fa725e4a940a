"""Ranks start with the file limit raised, whatever that of who started the engine was."""

from __future__ import annotations

import re
import resource
from pathlib import Path

from tests.ranks.kit.instances import started
from xpyd_core.parallel.ranks import Sizes

FEW = 200


def test_ranks_may_open_as_many_files_as_are_allowed() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (FEW, hard))
    try:
        with started(Sizes(tensor=2)) as instance:
            limits = [
                Path(f"/proc/{instance.rank_identity(rank).pid}/limits").read_text()
                for rank in (0, 1)
            ]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    found = [re.findall(r"^Max open files +(\d+)", text, re.M) for text in limits]
    assert found == [[str(min(hard, 1 << 20))]] * 2
