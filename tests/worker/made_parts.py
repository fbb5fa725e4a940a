"""What makes parts of grammars in the process that tries them: it imports this module, so that
imports little itself.
"""

from __future__ import annotations

import os
import time

from xpyd_core.bodies import refuse
from xpyd_worker.grammar.spec import Part, Text


def refused_with_its_process(_schema: object, place: str) -> Part:
    """Says where it was called."""
    raise refuse(f"{place}.a", f"process {os.getpid()}")


def made_where_it_competes(_schema: object, _place: str) -> Part:
    """Sleeps where it is called by a trial that runs when a core is free: as if none were."""
    if os.sched_getscheduler(0) == os.SCHED_IDLE:
        time.sleep(60)
    return Text("competes")
