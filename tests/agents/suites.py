"""The suites of scripts/agent_suites.py as processes, and what they say of each case."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from scripts.agent_suites import node, suites_folder

MODEL = "gpt-5-claude-4"
"""llm-comply skips cases of reasoning unless the model has such a name."""
COMPLY = ("openai-chat", "open-responses", "anthropic")
CANARY = ("chat", "modern")
_RUN_S = 100.0


@dataclass(frozen=True)
class Verdict:
    """What a suite says of a case."""

    is_passed: bool
    complaints: str
    """Why it failed, and what it warns of."""


def python(environment: str) -> str:
    """The Python of one of the environments."""
    return str(suites_folder() / environment / "bin/python")


def _argv(suite: str, url: str) -> list[str]:
    folder = suites_folder()
    if suite in CANARY:
        cli = folder / "canary/node_modules/compatcanary/src/cli.js"
        how = ("--profile", suite, "--format", "json", "--fail-on", "never")
        return [str(node()), str(cli), "scan", "--base-url", url, "--model", MODEL, *how]
    how = ("--format", suite, "--json", "--timeout", "60")
    return [str(folder / "comply/bin/llm-comply"), "-u", url, "-k", "unused", "-m", MODEL, *how]


async def run_suite(suite: str, url: str) -> dict[str, Verdict]:
    """Every case of `suite` against the API below `url`, which ends in /v1."""
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*_argv(suite, url), stdout=pipe, stderr=pipe)
    try:
        said, complaint = await asyncio.wait_for(process.communicate(), _RUN_S)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert said, complaint.decode()
    return {case["id"]: _verdict(case) for case in json.loads(said)["results"]}


def _verdict(case: Mapping[str, Any]) -> Verdict:
    said = [*case.get("errors", ()), *case.get("warnings", ())]
    if "summary" in case:
        said.append(f"{case['summary']} {case.get('error', '')}")
    # A case that was skipped is none that passed.
    return Verdict(case["status"] in ("passed", "pass"), "; ".join(map(str, said)))


def is_installed() -> bool:
    """Whether scripts/agent_suites.py has run."""
    return (suites_folder() / "ready").exists() or (suites_folder() / "no-canary").exists()


def is_left_out(suite: str) -> bool:
    """Whether the suite is npm's, whose registry could not be reached."""
    return suite in CANARY and not (suites_folder() / "ready").exists()
