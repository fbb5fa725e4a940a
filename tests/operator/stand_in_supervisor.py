"""A supervisor whose pods are stand-ins: `daemon` is what --detach starts, `up FILE` a person's."""

import sys
from pathlib import Path

from xpyd_operator.up import run
from xpyd_operator.up.pods import Pod
from xpyd_operator.up.run import UpOptions, run_up

POD = Path(__file__).with_name("stand_in_pod.py")


def program(pod: Pod) -> list[str]:
    return [sys.executable, "-S", "-E", str(POD), pod.template.role]


if __name__ == "__main__":
    mode = sys.argv.pop(1)
    if mode == "daemon":
        sys.exit(run.main(program))
    sys.exit(run_up(UpOptions(sys.argv[1]), detach=False, program=program))
