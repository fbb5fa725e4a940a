"""A pod that does not lead, with fake ranks: python -m tests.ranks.kit.fake_pod LEADER HOST KEY."""

from __future__ import annotations

import sys

from tests.ranks.kit.instances import COMMAND, pod_config
from xpyd_core.errors import UserError
from xpyd_core.logs import set_up_logging
from xpyd_worker.ranks.pods.agent import serve_pod

if __name__ == "__main__":
    set_up_logging("warning", "text")
    leader, host, key_file = sys.argv[1:]
    try:
        sys.exit(serve_pod(pod_config(1, leader=leader, host=host, key_file=key_file), COMMAND))
    except UserError as error:
        sys.stderr.write(f"{error}\n")
        sys.exit(2)
