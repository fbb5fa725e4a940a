"""What two places must describe says the same in both: names, defaults (CONTRIBUTING lists them).

Each pair is written twice for a reason: packages that may not import each other, a signature that
an editor shows, values that a reader sees where they are used (docs/adr/0036, 0037).
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, get_args

from scripts.train_demo_model import random_checkpoint
from xpyd_core.cli import build_parser
from xpyd_core.pod_env import PodEnv
from xpyd_kv.transport.settings import TRANSPORTS
from xpyd_operator.document.fleet import KvTransfer, Policy
from xpyd_operator.document.mistakes import UNSUPPORTED_VALUES
from xpyd_operator.plan import template
from xpyd_router.policy.pairs import installed
from xpyd_worker import SamplingParams
from xpyd_worker.command import configure, read_config
from xpyd_worker.config import WorkerConfig
from xpyd_worker.engine import request
from xpyd_worker.model.families import FAMILIES
from xpyd_worker.server.openai.params import parse_chat, parse_completion

ROOT = Path(__file__).parents[2]


def defaults(kind: type[Any]) -> dict[str, Any]:
    """Of a dataclass' fields that have one."""
    return {f.name: f.default for f in fields(kind) if f.default is not MISSING}


def common(one: Mapping[str, Any], other: Mapping[str, Any]) -> set[str]:
    return one.keys() & other.keys()


def test_a_policy_has_one_name_in_the_document_the_package_and_the_help() -> None:
    ours = {name for name, entry in installed().items() if entry.module.startswith("xpyd_router.")}
    assert set(get_args(Policy)) == ours
    with_help = re.search(r"--policy NAME .*?(?= --)", " ".join(_help("router").split()))
    assert with_help is not None
    page = (ROOT / "docs/router.md").read_text()
    assert all(name in with_help[0] and f"`{name}`" in page for name in ours)


def _help(program: str) -> str:
    parser = build_parser()
    choices = next(
        a.choices for a in parser._actions if isinstance(a.choices, dict)
    )  # no other way
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


def test_a_worker_without_flags_has_the_defaults_of_its_configuration() -> None:
    parser = argparse.ArgumentParser()
    configure(parser)
    args = parser.parse_args(["--model", "m", "--role", "Aggregated"])
    config = read_config(args, PodEnv())
    named = {"host", "instance", "served_model_names"}  # of the pod, or of the checkpoint
    wanted = {name: value for name, value in defaults(WorkerConfig).items() if name not in named}
    assert {name: getattr(config, name) for name in wanted} == wanted


def test_a_sampling_parameter_has_one_default_in_bodies_in_the_engine_and_in_python() -> None:
    chat = {"messages": [{"role": "user", "content": "hi"}]}
    bodies = [parse_completion({"prompt": "hi"}).options, parse_chat(chat).options]
    in_engine, in_python = defaults(request.SamplingParams), defaults(SamplingParams)
    for options in bodies:
        names = common(in_engine, vars(options))
        assert len(names) > 12
        assert {n: getattr(options, n) for n in names} == {n: in_engine[n] for n in names}
    names = common(in_python, in_engine)
    assert len(names) > 12
    # An absent value is None in Python, an empty tuple in the engine.
    assert {n: in_python[n] or None for n in names} == {n: in_engine[n] or None for n in names}
