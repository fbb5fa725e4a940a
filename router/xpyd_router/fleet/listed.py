"""Instances of a list: engines that say nothing of themselves, and the beats made for them. Pure.

`--static-instance` names them; `discovery.asker` asks each over HTTP and gives the fleet a beat of
what it answered, so that all else goes as with engines that beat (docs/router.md).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, cast

import msgspec

from xpyd_core.errors import UserError
from xpyd_core.messages import Heartbeat, InstanceType, SpokenDialect
from xpyd_core.request_id import Address, TlsAddress, parse_address
from xpyd_core.vllm_answers import (
    check_compat_name,
    nixl_compatibility,
    read_models,
    read_version,
    takes_prompt_ids,
)

MAX_LISTED = 256
ListedDialect = Literal["nixl", "nixl-push", "pair-id"]
_DIALECTS = ("nixl", "nixl-push", "pair-id")
_OPTIONS = ("dialect", "kv", "prompt-ids", "compat")
_FORM = (
    "expected P|D|A=http[s]://HOST:PORT[,dialect=nixl|nixl-push|pair-id][,kv=HOST:PORT]"
    "[,prompt-ids=no][,compat=NAME]"
)


class ListedInstance(msgspec.Struct, frozen=True):
    """One engine of the list."""

    type: InstanceType
    http: str
    """Its HTTP address, host:port."""
    dialect: ListedDialect | None = None
    """None: it is aggregated."""
    kv: str = ""
    """The address that a pair id needs; empty for the dialects without one."""
    takes_ids: bool = True
    """Whether tokens of an answer may be given to it as prompt, where its version can take them."""
    compat: str = ""
    """What it has in common with those that it may pair with, besides vLLM's version."""
    is_tls: bool = False
    """Its URL is https."""

    @property
    def address(self) -> Address:
        """`http` as an address."""
        found = parse_address(self.http)
        return TlsAddress(*found) if self.is_tls else found


def parse_listed(texts: Iterable[str]) -> tuple[ListedInstance, ...]:
    """The values of --static-instance. UserError names the wrong one, and what is expected."""
    found = tuple(map(_parse, texts))
    if len(found) > MAX_LISTED:
        raise UserError(f"--static-instance: at most {MAX_LISTED}")
    seen: set[str] = set()
    for one in found:
        if one.http in seen:
            raise UserError(f"--static-instance: {one.http} is there twice")
        seen.add(one.http)
    return found


def _parse(text: str) -> ListedInstance:
    first, *options = text.split(",")
    kind, _, url = first.partition("=")
    scheme, _, rest = url.partition("://")
    if kind not in ("P", "D", "A") or scheme not in ("http", "https"):
        raise UserError(f"--static-instance {text!r}: {_FORM}")
    given = {name: value for name, _, value in (option.partition("=") for option in options)}
    if len(given) < len(options) or not given.keys() <= set(_OPTIONS):
        raise UserError(f"--static-instance {text!r}: {_FORM}")
    dialect, kv = given.get("dialect"), given.get("kv", "")
    if kind != "A" and dialect not in _DIALECTS:
        raise UserError(f"--static-instance {text!r}: dialect: expected {', '.join(_DIALECTS)}")
    if kind == "A" and given:
        raise UserError(f"--static-instance {text!r}: an aggregated engine moves no KV")
    if bool(kv) != (dialect == "pair-id"):
        raise UserError(
            f"--static-instance {text!r}: kv: the engine's KV address, for pair-id and only there"
        )
    if given.get("prompt-ids", "no") != "no":
        raise UserError(f"--static-instance {text!r}: prompt-ids: expected no, or leave it out")
    compat = given.get("compat", "")
    if "compat" in given and dialect == "pair-id":
        raise UserError(f"--static-instance {text!r}: compat: only for nixl and nixl-push")
    try:
        if "compat" in given:
            check_compat_name(compat)
        http = str(parse_address(rest.removesuffix("/")))
        kv = kv and str(parse_address(kv))
    except UserError as error:
        raise UserError(f"--static-instance {text!r}: {error}") from error
    takes_ids = "prompt-ids" not in given
    spoken = cast(ListedDialect | None, dialect)
    return ListedInstance(kind, http, spoken, kv, takes_ids, compat, scheme == "https")


def listed_beat(
    one: ListedInstance, models: bytes, version: bytes, *, period_s: float
) -> Heartbeat:
    """A beat for an engine that answers GET /health. `models` and `version` are the bodies of its
    /v1/models and /version, empty without an answer: it then takes every model's name, and no ids.

    vLLM's own connectors work with each other only in one version, so this and `compat` are their
    compatibility key; xpyd's compares what matters itself.
    """
    names, length = read_models(models)
    said = read_version(version)
    spoken: SpokenDialect = one.dialect or ""
    return Heartbeat(
        type=one.type,
        http_address=one.http,
        zmq_address=one.kv or one.http,
        models=names,
        max_model_len=length,
        compatibility=nixl_compatibility(said, one.compat) if spoken.startswith("nixl") else "",
        period_ms=round(period_s * 1000),
        dialect=spoken,
        prompt_ids=1 if one.takes_ids and takes_prompt_ids(said) and spoken else 0,
        tls=1 if one.is_tls else 0,
    )
