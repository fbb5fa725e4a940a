"""What our connector expects of vLLM, compared with the sources of versions that do not run here.

Nothing is downloaded: `python scripts/vllm_environment.py sources` does that.
"""

from __future__ import annotations

import ast
import inspect
import logging
import re
from abc import ABC, abstractmethod
from pathlib import Path

import pytest
from pydantic import ValidationError

from bench.environments import cache
from scripts.vllm_environment import sources_folder
from tests.kv import vllm_engine
from xpyd_kv.vllm import engine_api
from xpyd_operator.document.engine import Engine

RUN = cache() / "bench-engine/vllm-0.32.0/lib/python3.11/site-packages"
BASE = "distributed/kv_transfer/kv_connector/v1/base.py"
KEPT = {"abstractmethod", "classmethod", "staticmethod", "property"}
# What is read of vLLM's objects, and the file that defines them.
READ = {
    "ModelConfig": "config/model.py",
    "ParallelConfig": "config/parallel.py",
    "CacheConfig": "config/cache.py",
    "KvTransferConfig": "config/kv_transfer.py",
    "VllmConfig": "config/vllm.py",
    "KvCacheConfig": "v1/kv_cache_interface.py",
    "Request": "v1/request.py",
    "NewRequest": "v1/core/sched/output.py",
    "CachedRequests": "v1/core/sched/output.py",
    "SchedulerOutput": "v1/core/sched/output.py",
    "KvCacheBlocks": "v1/core/kv_cache_manager.py",
    "GpuBlockPool": "v1/core/block_pool.py",
    "KvConnectorOutput": "v1/outputs.py",
}


@pytest.fixture(params=[RUN, sources_folder()], ids=["0.32.0", "0.33.0"])
def sources(request: pytest.FixtureRequest) -> Path:
    if not (request.param / "vllm" / BASE).exists():
        pytest.skip("scripts/vllm_environment.py has not made it")
    return request.param / "vllm"


def class_of(text: str, name: str) -> type:
    """The class of this name, with empty methods: it needs nothing that vLLM imports."""
    [found] = [
        node
        for node in ast.parse(text).body
        if isinstance(node, ast.ClassDef) and node.name == name
    ]
    methods = [node for node in found.body if isinstance(node, ast.FunctionDef)]
    for method in methods:
        arguments = method.args
        of_all = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
        for argument in [*of_all, arguments.vararg, arguments.kwarg]:
            if argument is not None:
                argument.annotation = None
        arguments.defaults = [ast.Constant(None) for _ in arguments.defaults]
        arguments.kw_defaults = [one and ast.Constant(None) for one in arguments.kw_defaults]
        method.returns, method.body = None, [ast.Pass()]
        method.decorator_list = [
            one for one in method.decorator_list if isinstance(one, ast.Name) and one.id in KEPT
        ]
    found.bases, found.body, found.decorator_list = [ast.Name("ABC", ast.Load())], [*methods], []
    module = ast.fix_missing_locations(ast.Module([found], []))
    names = {"ABC": ABC, "abstractmethod": abstractmethod}
    exec(compile(module, name, "exec"), names)
    return names[name]


def misfits(monkeypatch: pytest.MonkeyPatch, text: str) -> list[str]:
    bases = [class_of(text, name) for name in ("KVConnectorBase_V1", "SupportsHMA")]
    monkeypatch.setattr(engine_api, "KVConnectorBase_V1", bases[0])
    monkeypatch.setattr(engine_api, "SupportsHMA", bases[1])
    own = {n: v for n, v in vars(vllm_engine.XpydConnector).items() if inspect.isroutine(v)}
    return engine_api.misfits(type("Connector", tuple(bases), own))


def test_the_connector_has_the_methods_that_vllm_calls(sources, monkeypatch):
    assert misfits(monkeypatch, (sources / BASE).read_text()) == []


@pytest.mark.parametrize(
    ("before", "after", "wrong"),
    [
        ("def wait_for_save(self)", "def wait_for_save(self, how)", "wait_for_save"),
        ("def reset_cache(self)", "def reset_all(self)", "reset_cache: missing"),
        (
            "    @abstractmethod\n    def wait_for_save(self)",
            "    @abstractmethod\n    def warm(self): ...\n\n    def wait_for_save(self)",
            "warm: not known",
        ),
        ('vllm_config: "VllmConfig") -> str | None', "config) -> str", "get_required_kvcache"),
    ],
)
def test_another_method_in_vllm_is_a_misfit(before, after, wrong, sources, monkeypatch):
    text = (sources / BASE).read_text()
    assert before in text
    [found] = misfits(monkeypatch, text.replace(before, after))
    assert wrong in found


def test_every_method_that_the_connector_overrides_is_compared(sources):
    """One that is new here must be listed there."""
    bases = [
        class_of((sources / BASE).read_text(), n) for n in ("KVConnectorBase_V1", "SupportsHMA")
    ]
    own = {n for n, v in vars(vllm_engine.XpydConnector).items() if inspect.isroutine(v)} | {
        n for n, v in vars(vllm_engine.XpydConnector).items() if isinstance(v, classmethod)
    }
    overridden = {name for name in own - {"__new__"} if any(hasattr(b, name) for b in bases)}
    known = {*engine_api._EXPECTED, *engine_api._SINCE_0_33}
    assert overridden <= known


def test_what_is_imported_of_vllm_is_there(sources):
    text = inspect.getsource(engine_api)
    wanted = re.findall(r'_in_engine\(\s*"([\w.]+)", "(\w+)"\s*\)', text)
    assert len(wanted) > 6
    for module, name in wanted:
        path = sources / module.replace(".", "/")
        path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        assert re.search(rf"\b{name}\b", path.read_text()), f"{module}.{name}"


def test_the_kv_of_a_model_with_full_attention_has_the_name_that_is_served(sources):
    text = (sources / "v1/kv_cache_interface.py").read_text()
    for name in ("class FullAttentionSpec(", "kv_cache_spec: KVCacheSpec", "kv_cache_specs: dict"):
        assert name in text


def test_what_is_read_of_vllm_s_objects_is_there(sources):
    for node in ast.parse(inspect.getsource(engine_api)).body:
        if not isinstance(node, ast.ClassDef) or node.name not in READ:
            continue
        text = (sources / READ[node.name]).read_text()
        for member in node.body:
            name = getattr(member, "name", None) or getattr(
                getattr(member, "target", None), "id", None
            )
            if name is not None:
                assert re.search(rf"\b{name}\b\s*[:=(]", text), f"{node.name}.{name}"


def flags_of(sources: Path) -> list[list[str]]:
    """The names of each flag of `vllm serve`."""
    found: list[list[str]] = []
    paths = [sources / "engine/arg_utils.py", *(sources / "entrypoints").glob("*/cli_args.py")]
    nodes = [node for path in paths for node in ast.walk(ast.parse(path.read_text()))]
    for node in nodes:
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "add_argument":
            texts = [one.value for one in node.args if isinstance(one, ast.Constant)]
            found.append([text for text in texts if text.startswith("-")])
        if isinstance(node, ast.ClassDef) and node.name in ("BaseFrontendArgs", "FrontendArgs"):
            fields = [one.target.id for one in node.body if isinstance(one, ast.AnnAssign)]
            found += [[f"--{name.replace('_', '-')}"] for name in fields]
    return [names for names in found if names]


class FlagReader:
    """vLLM's own parser with the flags of `vllm serve`."""

    def __init__(self, sources: Path) -> None:
        text = (sources / "utils/argparse_utils.py").read_text()
        text = text.replace("import regex as re", "import re")
        text = text.replace("from vllm.logger import init_logger", "from logging import getLogger")
        names = {"init_logger": logging.getLogger, "__name__": "argparse_utils"}
        exec(compile(text, "argparse_utils.py", "exec"), names)
        self.flags = flags_of(sources)
        self._parser = names["FlexibleArgumentParser"](prog="vllm")
        serve = self._parser.add_subparsers().add_parser("serve")
        serve.error = self._parser.error = self._fail
        serve.add_argument("model", nargs="?")
        for number, own in enumerate(self.flags):
            serve.add_argument(*own, dest=f"flag{number}", nargs="?", const="")

    def _fail(self, message: str) -> None:
        raise ValueError(message)

    def read(self, args: list[str]) -> list[str] | None:
        """The names of the flag that is given; None: vLLM does not take that."""
        try:
            found = vars(self._parser.parse_args(["serve", "/m", *args]))
        except (ValueError, IndexError):  # --model and --config are read apart, and need a value
            return None
        given = [name for name in found if name.startswith("flag") and found[name] is not None]
        return self.flags[int(given[0].removeprefix("flag"))] if given else None


def is_refused(arg: str) -> bool:
    try:
        Engine(type="VLLM", connector="Xpyd", image="v", args=(arg,))
    except ValidationError:
        return True
    return False


def test_a_document_treats_a_flag_as_vllm_reads_it(sources):
    """Whole, cut short, with `_`, with its value or a member of its JSON behind it."""
    vllm = FlagReader(sources)
    refused = [names for names in vllm.flags if is_refused(names[0])]
    names = {name for own in vllm.flags for name in own}
    names |= {name[:end] for own in refused for name in own for end in range(2, len(name))}
    names |= {f"{name}2" for own in refused for name in own}
    taken = 0
    for name in sorted(names - {"--"}):
        for arg in (name, f"{name}=1", f"{name}.a=1", f"--{name[2:].replace('-', '_')}=1"):
            if (flag := vllm.read([arg])) is not None:
                assert is_refused(arg) == (flag in refused), (arg, flag)
                taken += 1
    assert taken > 1000


def test_every_flag_that_a_document_is_refused_by_name_is_one_of_vllms(sources):
    known = {name for own in flags_of(sources) for name in own}
    known |= {f"--no-{name[2:]}" for name in known}
    lists = [re.match(r"leave out (-[^:]+): ", rule.message) for rule in Engine.rules]
    refused = {name for found in lists if found for name in found[1].split(", ")}
    assert len(refused) > 30
    for name in refused:
        start = name.removesuffix("*")
        assert name in known or (start != name and any(one.startswith(start) for one in known))
