"""Names that two packages must both have are the same in both (CONTRIBUTING lists the places).

The packages may not import each other; see docs/adr/0037. Defaults of flags and of sampling fields
are compared in tests/worker.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

from scripts.train_demo_model import random_checkpoint
from xpyd_core.cli import build_parser
from xpyd_kv.transport.settings import TRANSPORTS
from xpyd_operator.document.mistakes import UNSUPPORTED_VALUES
from xpyd_operator.document.router import Policy
from xpyd_operator.document.transfer import KvTransfer
from xpyd_operator.plan import template
from xpyd_router.policy.pairs import installed
from xpyd_worker.model.families import FAMILIES

ROOT = Path(__file__).parents[2]


def test_a_policy_has_one_name_in_the_document_the_package_and_the_help() -> None:
    ours = {name for name, entry in installed().items() if entry.module.startswith("xpyd_router.")}
    assert set(get_args(Policy)) == ours
    with_help = re.search(r"--policy NAME .*?(?= --)", " ".join(_help("router").split()))
    assert with_help is not None
    page = (ROOT / "docs/router.md").read_text()
    assert all(name in with_help[0] and f"`{name}`" in page for name in ours)


def _help(program: str) -> str:
    parser = build_parser()
    # argparse has no public way to its sub-parsers.
    choices = next(a.choices for a in parser._actions if isinstance(a.choices, dict))
    return choices[program].format_help()


def test_the_document_takes_or_refuses_each_transport_of_the_engine() -> None:
    taken = set(get_args(KvTransfer.model_fields["transport"].annotation)) - {"Auto"}
    assert taken == set(template._TRANSPORTS)
    refused = {name.lower() for name in UNSUPPORTED_VALUES["spec.kvTransfer.transport"]}
    assert {*template._TRANSPORTS.values(), *refused} == {t.replace("_", "") for t in TRANSPORTS}


def test_each_family_is_on_its_page_and_has_random_checkpoints() -> None:
    page = (ROOT / "docs/engine.md").read_text()
    names = [family.architecture for family in FAMILIES]
    assert re.findall(r"^\| `(\w+ForCausalLM)` \|", page, re.M) == names
    assert list(random_checkpoint._ARCHITECTURES.values()) == names
