"""The supervisor that `xpyd up --detach` leaves behind: `python -m` this, options as JSON."""

from __future__ import annotations

import sys

import msgspec

from xpyd_core.errors import UserError
from xpyd_operator.up.pods import Program, xpyd_program
from xpyd_operator.up.up import UpOptions, supervise


def main(program: Program = xpyd_program) -> int:
    """Supervise what argv[1] says; the exit status. Everything it says goes to supervisor.log."""
    options = msgspec.json.decode(sys.argv[1], type=UpOptions)
    try:
        return supervise(options, program=program, stream=False)
    except UserError as error:
        sys.stderr.write(f"{error}\n")
        return 2


if __name__ == "__main__":
    sys.exit(main())
