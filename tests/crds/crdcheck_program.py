"""Runs crdcheck: the API server's own validation without a server (Go, built once)."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.cluster.harness import build

ROOT = Path(__file__).parents[2]
CRDS = sorted((ROOT / "crds").glob("*.yaml"))
PROGRAM = build.Program("crdcheck", "v1.34.3", "../../crds/crdcheck")
Document = dict[str, Any]


@dataclass(frozen=True)
class Verdict:
    """The server's lines about an object, and the object with its defaults."""

    errors: tuple[str, ...]
    object: Document


@dataclass(frozen=True)
class Report:
    """Lines about each CRD by its name, and a verdict for each object, in their order."""

    crds: dict[str, list[str]]
    verdicts: tuple[Verdict, ...]


def why_no_crdcheck() -> str | None:
    """Why it cannot run here, or None."""
    return None if build.is_built(PROGRAM) else build.missing_for_build()


def crdcheck(objects: Iterable[tuple[Document, Document | None]]) -> Report:
    """What the API server says of objects, each with the one that it would replace."""
    cases = [{"name": "", "object": new, "old": old} for new, old in objects]
    done = subprocess.run(
        [build.binary(PROGRAM), *CRDS],
        input=json.dumps(cases),
        capture_output=True,
        text=True,
        timeout=60,
    )
    if done.returncode != 0:
        raise RuntimeError(done.stderr)
    answer = json.loads(done.stdout)
    verdicts = (Verdict(tuple(case["errors"]), case["object"]) for case in answer["cases"])
    return Report(answer["crds"], tuple(verdicts))
