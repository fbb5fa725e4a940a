"""A pod that does not lead, with fake ranks: python -m tests.ranks.kit.fake_pod LEADER HOST KEY
FIELDS, the last as JSON: see pod_config."""

from __future__ import annotations

import json
import sys

from tests.ranks.kit.instances import COMMAND, pod_config
from xpyd_core.errors import UserError
from xpyd_core.logs import set_up_logging
from xpyd_worker.ranks.pods.agent import serve_pod

if __name__ == "__main__":
    set_up_logging("warning", "text")
    leader, host, key_file, more = sys.argv[1:]
    config = pod_config(1, leader=leader, host=host, key_file=key_file, **json.loads(more))
    try:
        sys.exit(serve_pod(config, COMMAND))
    except UserError as error:
        sys.stderr.write(f"{error}\n")
        sys.exit(2)
