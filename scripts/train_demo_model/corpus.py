"""The text the demo model learns from: documentation that every Python brings along.

Where it sits: `train.py` reads the corpus, documents (plain text) and dialogues (question, answer),
and turns both into tokens. Source files of the standard library are parsed, never imported, so
nothing runs and optional modules need not work. Everything is sorted: one Python version gives one
corpus.

It must not know tokens, tensors or the model.
"""

import ast
import re
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from pydoc_data.topics import topics
from typing import NamedTuple

from scripts.train_demo_model.small_talk import SENTENCES, SMALL_TALK

# Tests, installed packages, generated tables, and packages that Python has dropped since or that
# would fill a tenth of the text alone: a small model remembers less text better.
_SKIPPED_PARTS = frozenset(
    {"test", "tests", "site-packages", "dist-packages", "idlelib", "lib2to3", "ensurepip"}
    | {"turtledemo", "pydoc_data", "encodings", "__pycache__", "msilib", "distutils", "tkinter"}
    | {"turtle.py", "_pydecimal.py", "_pyio.py"}
)
# `os.path` is another module's alias; people ask for the alias.
_ALIASES = {"posixpath": "os.path", "_pydatetime": "datetime"}
_LONGEST_ANSWER_CHARS = 320
_SHORTEST_DOC_CHARS = 24


class Documented(NamedTuple):
    """One documented thing: dotted name, kind (module, class, function), signature, its text."""

    name: str
    kind: str
    signature: str
    doc: str


class Dialogue(NamedTuple):
    """One question and its answer, without any role token."""

    question: str
    answer: str


class Corpus(NamedTuple):
    """All that the model reads."""

    documents: list[str]
    """One per documented thing and one per topic of `help()`."""
    dialogues: list[Dialogue]
    """Small talk first, then questions about names, sorted."""

    def texts(self) -> list[str]:
        """Everything, role tokens aside: what the tokenizer learns from."""
        return [*self.documents, *(f"{each.question}\n{each.answer}" for each in self.dialogues)]

    def words(self) -> set[str]:
        """Every word there is: what counts as readable in generated text."""
        return {word for text in self.texts() for word in words_of(text)}


def standard_library() -> Iterator[Documented]:
    """Every documented public module, class and function of the library, file by file."""
    root = Path(sysconfig.get_path("stdlib"))
    seen: set[str] = set()
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if _SKIPPED_PARTS.intersection(relative.parts):
            continue
        for item in _documented_in(path, _module_name(relative)):
            private = any(part.startswith("_") for part in item.name.split("."))
            if not private and item.doc not in seen:
                seen.add(item.doc)
                yield item


def read_corpus() -> Corpus:
    """The corpus of the Python that runs this; takes some seconds."""
    items = list(standard_library())
    found: dict[str, Dialogue] = {}
    for item in items:
        answer = first_sentences(item.doc)
        if len(answer) >= _SHORTEST_DOC_CHARS:
            found.setdefault(item.name, Dialogue(question=_question(item), answer=answer))
    return Corpus(
        documents=[
            *(f"{sentence}\n" for sentence in SENTENCES),
            *(f"{item.signature or f'Module {item.name}'}\n\n{item.doc}\n" for item in items),
            *(f"{prose(topics[name])}\n" for name in sorted(topics)),
        ],
        dialogues=[
            *map(Dialogue._make, SMALL_TALK),
            *(found[name] for name in sorted(found)),
        ],
    )


def prose(doc: str) -> str:
    """`doc` without its interactive examples: numbers of a session cannot be guessed."""
    paragraphs = re.split(r"\n\s*\n", doc)
    return "\n\n".join(paragraph for paragraph in paragraphs if ">>>" not in paragraph).strip()


def first_sentences(doc: str) -> str:
    """The opening paragraphs of `doc` as one line of whole sentences, at most 320 characters."""
    kept: list[str] = []
    for paragraph in doc.split("\n\n"):
        if paragraph.startswith((" ", "-", "*", "=")) or "\n    " in paragraph:
            break
        kept.append(" ".join(paragraph.split()))
        if sum(map(len, kept)) > _LONGEST_ANSWER_CHARS // 2:
            break
    text = " ".join(kept)
    if len(text) <= _LONGEST_ANSWER_CHARS and text.endswith("."):
        return text
    return text[: text.rfind(". ", 0, _LONGEST_ANSWER_CHARS) + 1]


def words_of(text: str) -> list[str]:
    """The words of `text` in lower case."""
    return re.findall(r"[a-z]+", text.lower())


def _module_name(relative: Path) -> str:
    parts = list(relative.with_suffix("").parts)
    if parts[-1] == "__init__":
        parts.pop()
    name = ".".join(parts)
    return _ALIASES.get(name, name)


def _documented_in(path: Path, module: str) -> Iterator[Documented]:
    tree = ast.parse(path.read_text(encoding="utf-8", errors="replace"))
    text = _doc_of(tree)
    if text:
        yield Documented(name=module, kind="module", signature="", doc=text)
    yield from _members(tree, module)


def _members(parent: ast.AST, prefix: str) -> Iterator[Documented]:
    for node in ast.iter_child_nodes(parent):
        if not isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        name = f"{prefix}.{node.name}"
        text = _doc_of(node)
        if isinstance(node, ast.ClassDef):
            if text:
                yield Documented(name=name, kind="class", signature=f"class {name}", doc=text)
            yield from _members(node, name)
        elif text:
            signature = f"{name}({ast.unparse(node.args)})"
            yield Documented(name=name, kind="function", signature=signature, doc=text)


def _doc_of(node: ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    text = prose(ast.get_docstring(node) or "")
    return text if len(text) >= _SHORTEST_DOC_CHARS else ""


def _question(item: Documented) -> str:
    if item.kind == "function":
        return f"What does {item.name} do?"
    return f"What is {item.name}?"
