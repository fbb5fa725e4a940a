"""Reads an InferenceFleet from a file or an API object; one UserError lists all its mistakes.

A document may be junk, so its size is limited before it is parsed, keys may not repeat (YAML would
silently take the last), and merge keys are refused, because they can grow without bound.

A file with an unknown field is refused. An object of the API goes without: the server has taken the
field, so a CRD has it that is newer than this version. See docs/adr/0114.
"""

from __future__ import annotations

import json
import math
from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple, cast

import yaml
from pydantic import ValidationError

from xpyd_core.errors import UserError
from xpyd_operator.document.base import LOCAL
from xpyd_operator.document.fleet import API_VERSION, KIND, InferenceFleet
from xpyd_operator.document.mistakes import EXTRA, describe_mistakes, path_of


def excess(
    document: object, *, most_levels: int, most_values: int | None = None
) -> Literal["deep", "many"] | None:
    """What exceeds its limit, None: nothing. A value in several places counts in each of them; one
    that contains itself is too deep."""
    level, count = [document], 0
    for _ in range(most_levels):
        below: list[object] = []
        for value in level:
            if isinstance(value, dict):
                below += cast("dict[object, object]", value).values()
            elif isinstance(value, list):
                below += cast("list[object]", value)
            # Checked for each value: one level can have a thousand times as many as the one before.
            if most_values is not None and count + len(below) > most_values:
                return "many"
        if not below:
            return None
        count += len(below)
        level = below
    return "deep"


MAX_DOCUMENT_BYTES = 1 << 20
_MAX_VALUES = 200_000
_MAX_DEPTH = 100
"""Bounds on a document with its aliases expanded: they grow without bound, and may form a circle.
"""
_INT64 = 1 << 63
_BOOKKEEPING = frozenset(
    {
        "uid", "resourceVersion", "generation", "creationTimestamp", "deletionTimestamp",
        "deletionGracePeriodSeconds", "finalizers", "ownerReferences", "managedFields", "selfLink",
        "generateName",
    }
)  # fmt: skip
"""Metadata fields that the API server sets; `kubectl get -o yaml` shows them."""
_SEPARATOR = "one file holds one InferenceFleet"
_LEFT_OUT = "left out, as the CRDs are newer than this version"


class _Loader(yaml.SafeLoader):
    """SafeLoader that refuses repeated keys and merge keys, and leaves dates the text they are."""

    yaml_implicit_resolvers: ClassVar = {
        first: [entry for entry in entries if entry[0] != "tag:yaml.org,2002:timestamp"]
        for first, entries in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            problem = ""
            if not isinstance(key, yaml.ScalarNode):
                problem = "a key must be plain text"
            elif key.tag == "tag:yaml.org,2002:merge":
                problem = "merge keys (<<) are not supported"
            elif key.value in seen:
                problem = f"key {key.value!r} is there twice"
            if problem:
                raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep)


def load_fleet(path: Path, *, local: bool = False) -> InferenceFleet:
    """The fleet in the YAML or JSON file `path`; UserError with all mistakes, one per line.

    `local`: for local mode, where rules about pods and nodes are not checked.
    """
    try:
        with path.open("rb") as file:
            content = file.read(MAX_DOCUMENT_BYTES + 1)
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from error
    return parse_fleet(content, source=str(path), local=local)


def parse_fleet(content: bytes, *, source: str, local: bool = False) -> InferenceFleet:
    """The fleet in `content`, UTF-8 YAML or JSON; `source` names it in errors; see load_fleet."""
    if len(content) > MAX_DOCUMENT_BYTES:
        raise UserError(f"{source}: more than {MAX_DOCUMENT_BYTES} bytes")
    document = _read_yaml(content, source)
    _refuse_huge(document, source)
    if not isinstance(document, dict):
        raise UserError(f"{source}: expected a map with apiVersion, kind, metadata and spec")
    fields = cast("dict[str, object]", document)
    for name, value in (("apiVersion", API_VERSION), ("kind", KIND)):
        if fields.get(name, value) != value:
            # The fields of another kind of object would all be mistakes.
            raise UserError(
                f"{source}: {name}: given {fields[name]!r:.80}; supported values: {value}"
            )
    return _validate(fields, source, local=local)


class FleetObject(NamedTuple):
    """The fleet in an object of the API, and the paths of fields that this version does not
    know."""

    fleet: InferenceFleet
    unknown: tuple[str, ...] = ()


def parse_object(obj: Mapping[str, Any]) -> InferenceFleet:
    """The fleet in an object of the Kubernetes API; see read_object."""
    return read_object(obj).fleet


def read_object(obj: Mapping[str, Any]) -> FleetObject:
    """The fleet in an object of the Kubernetes API; the server's own fields are ignored.

    Labels and annotations are left out: they have the API server's bounds, not the document's.
    Unknown fields are left out and named; all others are checked as in a file. UserError with all
    mistakes, for an object that was stored under another version's rules.
    """
    metadata: Mapping[str, Any] = obj.get("metadata") or {}
    names = {key: metadata[key] for key in ("name", "namespace") if key in metadata}
    document, unknown = _document({**obj, "metadata": names}), list[str]()
    while True:
        try:
            return FleetObject(InferenceFleet.model_validate(document), tuple(unknown))
        except ValidationError as error:
            extra = [e["loc"] for e in error.errors(include_url=False) if e["type"] == EXTRA]
            taken = [path_of(loc) for loc in extra if _take_out(document, loc)]
            if not taken:
                lines = [f'unknown field "{path}"; {_LEFT_OUT}' for path in unknown]
                raise _refusal(error, metadata.get("name", "object"), lines) from error
            unknown += taken


def _take_out(document: Any, loc: Sequence[int | str]) -> bool:  # noqa: ANN401 - any JSON
    """Delete the field at `loc`; whether it was there."""
    *above, name = loc
    try:
        for part in above:
            document = document[part]
        del document[name]
    except (KeyError, IndexError, TypeError):
        return False
    return True


def _refuse_huge(document: object, source: str) -> None:
    match excess(document, most_levels=_MAX_DEPTH, most_values=_MAX_VALUES):
        case "many":
            raise UserError(f"{source}: more than {_MAX_VALUES} values; has it many aliases?")
        case "deep":
            raise UserError(f"{source}: deeper than {_MAX_DEPTH} levels")
        case None:
            pass


def _validate(fields: Mapping[str, object], source: str, *, local: bool) -> InferenceFleet:
    try:
        return InferenceFleet.model_validate(_document(fields), context=LOCAL if local else None)
    except ValidationError as error:
        raise _refusal(error, source) from error


def _refusal(error: ValidationError, source: str, more: Sequence[str] = ()) -> UserError:
    lines = [*describe_mistakes(error, InferenceFleet), *more]
    count = f"{len(lines)} mistakes" if len(lines) > 1 else "1 mistake"
    return UserError("\n  ".join([f"{source}: {count}", *lines]))


def _document(fields: Mapping[str, object]) -> dict[str, Any]:
    """A copy of what a user wrote, without what the API server adds."""
    document = as_sent(fields)
    document.pop("status", None)  # the API server drops a user's status, too
    if isinstance(metadata := document.get("metadata"), dict):
        known = cast("dict[str, Any]", metadata)
        document["metadata"] = {k: v for k, v in known.items() if k not in _BOOKKEEPING}
    return document


def as_sent(fields: Mapping[Any, object]) -> dict[str, Any]:
    """The map as kubectl sends it: whole floats become integers, integers have 64 bits."""
    return {_key_text(key): _as_sent(value) for key, value in fields.items()}


def _as_sent(value: object) -> object:
    match value:
        case dict():
            return as_sent(cast("dict[Any, object]", value))
        case list():
            return [_as_sent(item) for item in cast("list[object]", value)]
        case float() if value.is_integer() and abs(value) < _INT64:
            return int(value)
        case int() if not -_INT64 <= value < _INT64:
            return float(value) if abs(value) < 1 << 1000 else math.inf
        case _:
            return value


def _key_text(key: object) -> str:
    return key if isinstance(key, str) else json.dumps(key)


def _read_yaml(content: bytes, source: str) -> object:
    try:
        text = content.decode()
        documents = list(yaml.load_all(text, Loader=_Loader))
    except UnicodeDecodeError as error:
        raise UserError(f"{source}: not UTF-8 text (byte {error.start})") from error
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise UserError(f"{source}{where}: {error.problem}") from error
    except (yaml.YAMLError, ValueError) as error:
        # ValueError: a number or a date that Python does not have.
        raise UserError(f"{source}: {' '.join(str(error).split())}") from error
    except RecursionError as error:
        raise UserError(f"{source}: nested too deeply") from error
    documents = [document for document in documents if document is not None]
    if len(documents) != 1:
        found = f"{len(documents)} documents" if documents else "no document"
        raise UserError(f"{source}: {found}; {_SEPARATOR}")
    return documents[0]
