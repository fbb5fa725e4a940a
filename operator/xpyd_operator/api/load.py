"""From a file to an InferenceFleet, or to one UserError that lists every mistake in it.

The document is a person's, but it may also be junk: its size is limited before it is read, keys may
not repeat (YAML would silently take the last), and merge keys, which can grow without bound, are
refused.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from pathlib import Path
from typing import Any, cast

import yaml
from pydantic import ValidationError

from xpyd_core.errors import UserError
from xpyd_operator.api.fleet import API_VERSION, KIND, InferenceFleet
from xpyd_operator.api.problems import problems

MAX_DOCUMENT_BYTES = 1 << 20
_SEPARATOR = "one file holds one InferenceFleet"


class _Loader(yaml.SafeLoader):
    """SafeLoader that refuses repeated keys and merge keys."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise yaml.constructor.ConstructorError(
                    None, None, "a key must be plain text", key.start_mark
                )
            if key.tag == "tag:yaml.org,2002:merge":
                raise yaml.constructor.ConstructorError(
                    None, None, "merge keys (<<) are not supported", key.start_mark
                )
            if key.value in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"key {key.value!r} is there twice", key.start_mark
                )
            seen.add(key.value)
        return super().construct_mapping(node, deep)


def load_fleet(path: Path) -> InferenceFleet:
    """The fleet in the YAML or JSON file `path`; UserError with all mistakes, one per line."""
    try:
        with path.open("rb") as file:
            content = file.read(MAX_DOCUMENT_BYTES + 1)
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from error
    return parse_fleet(content, source=str(path))


def parse_fleet(content: bytes, *, source: str) -> InferenceFleet:
    """The fleet in `content`, UTF-8 YAML or JSON; `source` names it in errors."""
    if len(content) > MAX_DOCUMENT_BYTES:
        raise UserError(f"{source}: more than {MAX_DOCUMENT_BYTES} bytes")
    document = _read_yaml(content, source)
    if not isinstance(document, dict):
        raise UserError(f"{source}: expected a map with apiVersion, kind, metadata and spec")
    fields = cast("dict[str, object]", document)
    for name, value in (("apiVersion", API_VERSION), ("kind", KIND)):
        if fields.get(name, value) != value:
            # Another kind of object: its fields would all be mistakes.
            raise UserError(
                f"{source}: {name}: given {fields[name]!r:.80}; supported values: {value}"
            )
    return _validate(fields, source)


def parse_object(obj: Mapping[str, Any]) -> InferenceFleet:
    """The fleet in an object of the Kubernetes API, whose status and bookkeeping are left out.

    UserError with all mistakes: the object was stored under the rules of another version.
    """
    metadata = cast("dict[str, Any]", obj.get("metadata") or {})
    names = {key: metadata[key] for key in ("name", "namespace") if key in metadata}
    fields = {key: obj[key] for key in ("apiVersion", "kind", "spec") if key in obj}
    return _validate({**fields, "metadata": names}, metadata.get("name", "object"))


def _validate(fields: Mapping[str, object], source: str) -> InferenceFleet:
    try:
        return InferenceFleet.model_validate(fields)
    except ValidationError as error:
        lines = problems(error)
        count = f"{len(lines)} mistakes" if len(lines) > 1 else "1 mistake"
        raise UserError("\n  ".join([f"{source}: {count}", *lines])) from error


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
