"""A program for tests of warm starts: says what it sees, or ends as its argument says."""

from __future__ import annotations

import atexit
import json
import os
import signal
import sys

how = sys.argv[1]
if how == "say":
    seen = {
        "arguments": sys.argv[1:],
        "name": __name__,
        "own": os.environ["OF_THE_PROGRAM"],
        "session": os.getsid(0),
        "pid": os.getpid(),
        "folder": os.getcwd(),
        "threads": len(os.listdir("/proc/self/task")),
        "descriptors": [fd for fd in range(256) if os.path.exists(f"/proc/self/fd/{fd}")],
        "signals": [signal.getsignal(signal.SIGCHLD), signal.getsignal(signal.SIGTERM)],
    }
    sys.stdout.write(json.dumps(seen))
elif how == "text":
    sys.exit("the end")
elif how == "raise":
    raise ValueError("the end")
elif how == "atexit":
    atexit.register(lambda: sys.stdout.write("at the exit\n"))
elif how == "sleep":
    signal.pause()
else:
    sys.exit(int(how))
