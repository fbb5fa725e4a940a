"""What a vLLM's HTTP server says of itself, as routers and `xpyd vllm-beats` read it. Pure."""

from __future__ import annotations

import re

import msgspec

from xpyd_core.errors import UserError

_MAX_MODELS = 64
_MAX_NAME = 512
_MAX_VERSION = 64
_NUMBERS = re.compile(r"(\d{1,6})\.(\d{1,6})")
_TAKES_PROMPT_IDS = (0, 32)
_COMPAT_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")


class _Card(msgspec.Struct):
    id: str
    max_model_len: int | None = None


class _Cards(msgspec.Struct):
    data: list[_Card]


class _Version(msgspec.Struct):
    version: str


def read_models(body: bytes) -> tuple[tuple[str, ...], int]:
    """The names in the body of /v1/models, and the shortest context of them; 0: none says one."""
    try:
        cards = msgspec.json.decode(body, type=_Cards).data
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return (), 0
    names = dict.fromkeys(c.id for c in cards if 0 < len(c.id) <= _MAX_NAME and c.id.isprintable())
    lengths = [card.max_model_len for card in cards if card.max_model_len]
    return tuple(names)[:_MAX_MODELS], max(0, min(lengths, default=0))


def read_version(body: bytes) -> str:
    """The version in the body of /version; "" where there is none."""
    try:
        said = msgspec.json.decode(body, type=_Version).version
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return ""
    return said if len(said) <= _MAX_VERSION and said.isprintable() else ""


def takes_prompt_ids(version: str) -> bool:
    """Whether a vLLM of this version takes a prompt's ids, also of a chat."""
    numbers = _NUMBERS.match(version)
    return numbers is not None and (int(numbers[1]), int(numbers[2])) >= _TAKES_PROMPT_IDS


def nixl_compatibility(version: str, name: str = "") -> str:
    """The compatibility key of vLLM's own connectors, which pair in one version only.

    They compare neither weights nor what changes them (docs/adr/0073): `name` stands for that.
    """
    return f"vllm {version} {name}" if name else f"vllm {version}"


def check_compat_name(name: str) -> str:
    """The name that those who may pair have in common. UserError for one that no beat can hold."""
    if _COMPAT_NAME.fullmatch(name) is None:
        raise UserError(f"{name!r}: expected 1 to 64 letters, digits or . _ -")
    return name
