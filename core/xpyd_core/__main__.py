"""`python -m xpyd_core` is the `xpyd` command, for those who start it with their own Python."""

import sys

from xpyd_core.cli import main

sys.exit(main())
