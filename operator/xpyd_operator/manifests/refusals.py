"""Finds what the API server cannot: templates that set what xpyd sets, wrong args of programs.

The operator shows the result as a condition, and `xpyd up` refuses the document with it. Each line
names the field and the remedy. The flags are those of this version: of an image that is
another, only the engine knows them. See docs/adr/0037 and 0049.
"""

from __future__ import annotations

import json
import posixpath
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from math import inf
from typing import cast

from xpyd_core import __version__
from xpyd_core.errors import UserError
from xpyd_core.parallel.checks import (
    ADDRESS,
    DATA_FILE,
    ELASTIC,
    EPLB,
    EXPERT,
    HEADLESS,
    LOCAL,
    ON_LOSS,
    RPC_PORT,
    START_RANK,
)
from xpyd_core.pod_env import ROUTER_ADMIN_PORT, ROUTER_HTTP_PORT
from xpyd_core.sizes import parse_bytes
from xpyd_operator.document.engine import NIXL_HOST, NIXL_PORT, PLUGINS
from xpyd_operator.document.fleet import InferenceFleet
from xpyd_operator.document.pod_template import pod_mistakes
from xpyd_operator.manifests import engine_flags, names, router_flags
from xpyd_operator.manifests.names import JsonObject, list_in, map_in
from xpyd_operator.manifests.pods import engine_ports
from xpyd_operator.manifests.volumes import shares_sockets, user_of
from xpyd_operator.plan.template import REPLICAS_FOLDER

_OURS_IN_POD = ("restartPolicy", "terminationGracePeriodSeconds", "activeDeadlineSeconds")
_HANDLERS = ("httpGet", "exec", "tcpSocket", "grpc")
_PROBES = ("startupProbe", "livenessProbe", "readinessProbe")
_OUR_PREFIX = "xpyd.dev/"
_OUR_LABELS = (names.LABEL_MANAGED_BY, names.LABEL_INSTANCE, names.LABEL_NAME)
_RESERVED = "xpyd-"
"""The prefix of the operator's own volumes and resource claims."""
_OUR_FOLDERS = {
    names.KV_FOLDER: "the fleet's key",
    names.CLIENT_KEYS_FOLDER: "the clients' keys",
    names.ADMIN_FOLDER: "the admin API's keys",
    names.SOCKET_FOLDER: "the engines' sockets",
    names.TLS_FOLDER: "the certificate of the HTTP port",
    names.CLIENT_CA_FOLDER: "the authorities of clients' certificates",
    names.ENGINE_CA_FOLDER: "the authority of engines' certificates",
    names.ROUTER_TLS_FOLDER: "the certificate that routers show to engines",
    names.ROUTER_CA_FOLDER: "the authority of routers' certificates",
    REPLICAS_FOLDER: "the number of an engine's replicas",
}
_LEAVE_OUT = "set by xpyd; leave it out"


@dataclass(frozen=True)
class _Ours:
    """What is xpyd's in a template of this kind: the container's name, ports, devices and variables
    (besides XPYD_*)."""

    container: str
    ports: Mapping[str, int]
    args: str = _LEAVE_OUT
    devices: tuple[str, ...] = ()
    variables: tuple[str, ...] = ()


def template_problems(fleet: InferenceFleet) -> tuple[str, ...]:
    """One line for each field that the document's templates may not set; none: they are fine."""
    spec = fleet.spec
    router = _Ours(
        names.ROUTER_CONTAINER,
        {
            "http": ROUTER_HTTP_PORT,
            "admin": ROUTER_ADMIN_PORT,
            "discovery": spec.router.discovery_port,
        },
    )
    found = list(_problems("spec.router.template", spec.router.template or {}, router))
    for index, pool in enumerate(spec.pools):
        engine = _Ours(
            names.ENGINE_CONTAINER,
            engine_ports(fleet, pool),
            "set by xpyd; use spec.engine.args",
            (pool.resources.gpu_resource_name or names.DEFAULT_GPU_RESOURCE,),
            (PLUGINS, NIXL_HOST, NIXL_PORT) if spec.engine.type == "VLLM" else (),
        )
        found += _problems(f"spec.pools[{index}].template", pool.template or {}, engine)
    return (*found, *_user_problems(fleet))


def _user_problems(fleet: InferenceFleet) -> Iterator[str]:
    """A folder of sockets has one owner, and a socket admits only its own user."""
    pools = [pool for pool in fleet.spec.pools if shares_sockets(fleet, pool)]
    if len({user_of(pool) for pool in pools}) > 1:
        users = ", ".join(f"{pool.name} {user_of(pool)}" for pool in pools)
        yield (
            f"spec.kvTransfer.sameHostPath: the folder has one owner, and the pools' templates "
            f"name several users ({users}); give all pools the same runAsUser"
        )


def _problems(path: str, template: JsonObject, ours: _Ours) -> Iterator[str]:
    metadata, spec = map_in(template, "metadata"), map_in(template, "spec")
    for kind in ("labels", "annotations"):
        for key in map_in(metadata, kind):
            if key.startswith(_OUR_PREFIX) or key in _OUR_LABELS:
                yield f"{path}.metadata.{kind}[{key}]: {_LEAVE_OUT}"
    path = f"{path}.spec"
    yield from pod_mistakes(path, spec)
    yield from (f"{path}.{key}: {_LEAVE_OUT}" for key in _OURS_IN_POD if spec.get(key) is not None)
    for key in ("volumes", "resourceClaims"):
        for item, at in _items(spec, key, path):
            if str(item.get("name", "")).startswith(_RESERVED):
                yield f"{at}.name: names that begin with {_RESERVED} are xpyd's; take another"
    for item, at in _items(spec, "containers", path):
        if item.get("name") == ours.container:
            yield from _container_problems(at, item, ours)
            yield from _item_problems(at, item, ours)
    for key, name in (
        ("initContainers", names.SOCKET_CONTAINER),
        ("containers", names.BEATS_CONTAINER),
    ):
        for item, at in _items(spec, key, path):
            if item.get("name") == name:
                given = (part for part in ("command", "args") if part in item)
                yield from (f"{at}.{part}: {_LEAVE_OUT}" for part in given)
    yield from _unnamed(path, spec)


def _unnamed(path: str, spec: JsonObject) -> Iterator[str]:
    for key in ("containers", "initContainers"):
        for item, at in _items(spec, key, path):
            if item.get("name") is None:
                yield f"{at}.name: missing; a container is merged by its name"


def _container_problems(path: str, container: JsonObject, ours: _Ours) -> Iterator[str]:
    if container.get("command") is not None:
        yield f"{path}.command: {_LEAVE_OUT}"
    if container.get("args") is not None:
        yield f"{path}.args: {ours.args}"
    for probe in _PROBES:
        for handler in _HANDLERS:
            if map_in(container, probe).get(handler) is not None:
                yield f"{path}.{probe}.{handler}: {_LEAVE_OUT}"
    for kind in ("limits", "requests"):
        for device in map_in(map_in(container, "resources"), kind):
            if device in ours.devices:
                yield f"{path}.resources.{kind}[{device}]: set by xpyd; use resources.gpus"


def _item_problems(path: str, container: JsonObject, ours: _Ours) -> Iterator[str]:
    for item, at in _items(container, "env", path):
        if str(item.get("name", "")).startswith("XPYD_"):
            yield f"{at}.name: XPYD_* is set by xpyd; leave it out"
        elif item.get("name") in ours.variables:
            yield f"{at}.name: set by xpyd; use spec.engine.env, which says what is allowed"
    for item, at in _items(container, "ports", path):
        # Compared, not looked up: a name may be anything, a list too.
        named = item.get("name") in tuple(ours.ports)
        if named or item.get("containerPort") in ours.ports.values():
            yield f"{at}: {_LEAVE_OUT}"
    for item, at in _items(container, "volumeMounts", path):
        folder = posixpath.normpath(str(item.get("mountPath", "")))
        if folder in _OUR_FOLDERS:
            yield f"{at}.mountPath: {folder} holds {_OUR_FOLDERS[folder]}; take another"


def _items(above: JsonObject, key: str, path: str) -> Iterator[tuple[JsonObject, str]]:
    """The maps of the list `key`, each with its path."""
    for index, item in enumerate(list_in(above, key)):
        if isinstance(item, dict):
            yield cast("JsonObject", item), f"{path}.{key}[{index}]"


_ENGINES_OWNED = {
    "--model": "spec.model.uri",
    "--role": "spec.pools[].role",
    "--host": "",
    "--port": "",
    "--discovery": "spec.router.discoveryPort",
    "--heartbeat-period-ms": "spec.heartbeat.intervalMilliseconds",
    "--kv-port": "spec.kvTransfer.port",
    DATA_FILE: "spec.pools[].parallelism.maxData",
    ELASTIC: "spec.pools[].parallelism.maxData",
    ON_LOSS: "spec.pools[].parallelism.onRankLoss",
    **dict.fromkeys((LOCAL, START_RANK, ADDRESS, RPC_PORT, HEADLESS), "spec.pools[].parallelism"),
    "--kv-advertise": "",
    "--kv-key-file": "spec.kvTransfer.keySecretRef",
    "--kv-insecure": "spec.kvTransfer.insecure",
    "--kv-encryption": "spec.kvTransfer.encryption",
    "--kv-socket-dir": "spec.kvTransfer.sameHostPath",
    "--ssl-certfile": "spec.engine.tls",
    "--ssl-keyfile": "spec.engine.tls",
    "--ssl-ca-certs": "spec.engine.tls.routerSecretName",
    "--ssl-cert-reqs": "spec.engine.tls.routerSecretName",
    "--ssl-open-probes": "spec.engine.tls.routerSecretName",
}
"""Flags that say what the rest of the fleet must know, and the field that sets each; "": none."""
_ROUTERS_OWNED = {
    "--host": "",
    "--port": "spec.router.service.port",
    "--admin-port": "",
    "--listen-fd": "",
    "--admin-listen-fd": "",
    "--processes": "spec.router.processes",
    "--kv-verify": "spec.kvTransfer.verify",
    "--discovery-host": "",
    "--discovery-port": "spec.router.discoveryPort",
    "--kv-key-file": "spec.kvTransfer.keySecretRef",
    "--kv-insecure": "spec.kvTransfer.insecure",
    "--accept-unsigned-beats": "spec.heartbeat.acceptUnsigned",
    "--admin-key-file": "spec.router.adminKeySecretRef",
    "--canary-file": "spec.rollout.canary",
    "--api-key-file": "spec.router.auth",
    "--api-key": "spec.router.auth",
    "--peers": "",
    "--ssl-certfile": "spec.router.tls",
    "--ssl-keyfile": "spec.router.tls",
    "--ssl-ca-certs": "spec.router.tls.clientCaSecretName",
    "--heartbeat-interval-ms": "spec.heartbeat.intervalMilliseconds",
    "--missed-beats": "spec.heartbeat.missedBeats",
}
_ENGINE_TLS = {
    "--engine-ca-file": "spec.engine.tls.secretName",
    "--engine-server-name": "spec.engine.tls.serverName",
    "--engine-certfile": "spec.engine.tls.routerSecretName",
    "--engine-keyfile": "spec.engine.tls.routerSecretName",
}
"""Of routers, where the document has spec.engine.tls; else they are for engines of elsewhere."""


@dataclass(frozen=True)
class _Program:
    """What is known of a program's flags: kinds and choices, those that are xpyd's, its page."""

    name: str
    flags: Mapping[str, tuple[str, tuple[str, ...]]]
    owned: Mapping[str, str]
    page: str


_OF_ENGINES = _Program("engine", engine_flags.FLAGS, _ENGINES_OWNED, "engine.md")
_OF_ROUTERS = _Program("router", router_flags.FLAGS, _ROUTERS_OWNED, "router.md")
_BOUNDS = engine_flags.BOUNDS
_EXPECTED = {
    "int": "a whole number",
    "float": "a number",
    "tokens": "a number of tokens or auto",
    "json": "a JSON object",
}


def runs_this_version(fleet: InferenceFleet, worker_image: str) -> bool:
    """Whether all engines run `worker_image`, the operator's flag, and its tag says that it is of
    this version: 0.1.0, v0.1.0 or 0.1.0-cuda. A document may name an image for all engines, or one
    in a pool's template."""
    tag = worker_image.partition("@")[0].rpartition("/")[2].partition(":")[2].removeprefix("v")
    if tag != __version__ and not tag.startswith(f"{__version__}-"):
        return False
    templates = (pool.template or {} for pool in fleet.spec.pools)
    containers = (
        one for template in templates for one in list_in(map_in(template, "spec"), "containers")
    )
    rows = (cast("JsonObject", one) for one in containers if isinstance(one, dict))
    own = any(row.get("name") == names.ENGINE_CONTAINER and row.get("image") for row in rows)
    return not fleet.spec.engine.image and not own


def document_mistakes(fleet: InferenceFleet, worker_image: str) -> tuple[str, ...]:
    """Why no new pods are made of a document that parses, one per line. `worker_image`: of the
    operator that makes them."""
    # An image of another version has other flags.
    of_args = engine_args_problems(fleet) if runs_this_version(fleet, worker_image) else ()
    return (*template_problems(fleet), *router_args_problems(fleet), *of_args)


def engine_args_problems(fleet: InferenceFleet) -> tuple[str, ...]:
    """One line for each of engine.args that an engine of this version would refuse. Flags of vLLM
    are known to vLLM alone."""
    if fleet.spec.engine.type == "VLLM":
        return ()
    args = fleet.spec.engine.args
    return (
        *_args_problems("spec.engine.args", args, _OF_ENGINES),
        *_replica_problems(fleet, {one.partition("=")[0] for one in args}),
    )


def _replica_problems(fleet: InferenceFleet, given: Collection[str]) -> Iterator[str]:
    """Flags of experts that a pool's engines would end at."""
    for number, pool in enumerate(fleet.spec.pools):
        where = f"spec.pools[{number}].parallelism"
        if pool.parallelism.max_data is not None:
            if EPLB in given:
                yield f"{where}.maxData: not with {EPLB} in spec.engine.args; leave one out"
            if EXPERT in given and pool.parallelism.expert == 1:
                yield (
                    f"{where}.maxData: not with {EXPERT} in spec.engine.args, which is of all "
                    f"pools; set {where}.expert in place of it"
                )
        if pool.parallelism.on_rank_loss == "Continue" and EPLB in given:
            yield f"{where}.onRankLoss: not with {EPLB} in spec.engine.args; leave one out"


def router_args_problems(fleet: InferenceFleet) -> tuple[str, ...]:
    """One line for each of router.args that a router of this version would refuse, or that would
    say something else than the rest of the document."""
    program = _OF_ROUTERS
    if fleet.spec.engine.tls is not None:
        program = replace(program, owned={**program.owned, **_ENGINE_TLS})
    return tuple(_args_problems("spec.router.args", fleet.spec.router.args, program))


def _args_problems(where: str, args: Sequence[str], program: _Program) -> Iterator[str]:
    index = 0
    while index < len(args):
        path = f"{where}[{index}]"
        name, given, value = args[index].partition("=")
        index += 1
        kind, choices = program.flags.get(name, ("", ()))
        rest: list[str] = []
        if not given and kind not in ("", "switch"):
            most = len(args) if kind == "names" else index + 1
            while index < min(most, len(args)) and not args[index].startswith("--"):
                rest.append(args[index])
                index += 1
        if name in program.owned:
            remedy = f"use {program.owned[name]}" if program.owned[name] else "leave it out"
            yield f"{path}: {name} is set by xpyd; {remedy}"
        elif not kind:
            near = get_close_matches(name, program.flags, 1)
            hint = f"did you mean {near[0]}?" if near else f"docs/{program.page} has all flags"
            yield f"{path}: {_shown(args[index - 1])} is no flag of the {program.name}; {hint}"
        elif kind == "switch":
            if given:
                yield f"{path}: {name} takes no value"
        elif not given and not rest:
            yield f"{path}: {name} needs a value"
        elif "$(" in value or any("$(" in one for one in rest):
            continue  # the kubelet puts a variable there
        elif wrong := _wrong_value(name, value if given else rest[0], kind, choices):
            yield f"{path}: {name}: {wrong}"


def _wrong_value(name: str, value: str, kind: str, choices: tuple[str, ...]) -> str:
    """What is wrong with a flag's value; empty: nothing."""
    if choices:
        known = value in choices
        return "" if known else f"expected {', '.join(choices)}, got {_shown(value)}"
    if kind == "tokens" and value == "auto":
        return ""
    if (form := engine_flags.PATTERNS.get(name)) and not re.fullmatch(form[0], value):
        return f"expected {form[1]}, got {_shown(value)}"
    try:
        match kind:
            case "int" | "tokens":
                return _out_of_bounds(name, int(value))
            case "float":
                return _out_of_bounds(name, float(value))
            case "size":
                return _out_of_bounds(name, parse_bytes(value))
            case "share":
                parse_bytes(value, of=1 << 30)
            case "json":
                if not isinstance(json.loads(value), dict):
                    raise ValueError
            case _:
                pass
    except UserError as error:
        return str(error)
    except (ValueError, RecursionError):
        return f"expected {_EXPECTED[kind]}, got {_shown(value)}"
    return ""


def _out_of_bounds(name: str, value: float) -> str:
    least, most, expected = _BOUNDS.get(name, (-inf, None, ""))
    is_within = least <= value <= (inf if most is None else most)
    return "" if is_within else f"expected {expected}, got {value}"


def _shown(value: str) -> str:
    return repr(value if len(value) <= 80 else f"{value[:77]}...")
