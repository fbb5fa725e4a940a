"""What every xpyd process shares: values, messages, ids, hashes, errors, logs, the command.

Imports the standard library and msgspec only, so that it costs a container nothing; `heartbeat`
alone needs pyzmq, which every engine has. It knows none of the programs that use it.
docs/architecture.md has the map of all packages.
"""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("xpyd")
except PackageNotFoundError:  # a bare source tree on sys.path, not an installation
    __version__ = "0+unknown"
