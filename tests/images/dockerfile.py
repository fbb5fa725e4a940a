"""What the Dockerfile of the project keeps to, as a checker of its text.

It reads the few instructions that the project uses, not the whole language. `problems` gives a
line for each rule that is broken.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

_FETCHES = re.compile(r"\b(pip|uv|apt|apt-get|curl|wget|gcc)\b")
_PINNED = re.compile(r":\d+\.\d+\.\d+[\w.-]*$|@sha256:[0-9a-f]{64}$")
_SECRET = re.compile(r"(?i)(token|password|passwd|secret|credential|api_?key)")
LABELS = ("title", "description", "licenses", "version", "revision")


@dataclass(frozen=True)
class Instruction:
    """One instruction, its continued lines joined."""

    keyword: str
    words: str


@dataclass
class Stage:
    """From one FROM to the next."""

    base: str
    name: str
    instructions: list[Instruction] = field(default_factory=list[Instruction])

    def of(self, keyword: str) -> list[str]:
        """The words of its instructions of this keyword."""
        return [i.words for i in self.instructions if i.keyword == keyword]


def read(text: str) -> tuple[list[Instruction], list[Stage]]:
    """What stands before the first FROM, and the stages."""
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", " ", "\n".join(lines))
    head: list[Instruction] = []
    stages: list[Stage] = []
    for line in filter(str.strip, joined.splitlines()):
        keyword, _, words = line.strip().partition(" ")
        words = re.sub(r"\s+", " ", words.strip())
        if keyword == "FROM":
            base, _, name = words.partition(" AS ")
            stages.append(Stage(base, name))
        else:
            (stages[-1].instructions if stages else head).append(Instruction(keyword, words))
    return head, stages


def chain(stages: list[Stage], name: str) -> list[Stage]:
    """The stages that the image of this stage consists of, the base's first."""
    by_name = {stage.name: stage for stage in stages}
    found: list[Stage] = []
    while name in by_name:
        found.insert(0, by_name[name])
        name = found[0].base
    return found


def problems(text: str, targets: Iterable[str]) -> list[str]:
    """The rules that this Dockerfile breaks; `targets`: the stages that are images."""
    head, stages = read(text)
    found = [*_base_problems(head, stages), *_build_problems(stages)]
    for target in targets:
        found += _final_problems(chain(stages, target))
        found += _runtime_problems(chain(stages, target))
    return [*found, *_secret_problems(head, stages)]


def _base_problems(head: list[Instruction], stages: list[Stage]) -> Iterator[str]:
    defaults = [i.words.partition("=")[2] for i in head if i.words.startswith("BASE=")]
    if len(defaults) != 1 or not _PINNED.search(defaults[0]):
        yield "ARG BASE names no image of one exact version"
    known = {"${BASE}"}
    for stage in stages:
        if stage.base not in known:
            yield f"FROM {stage.base}: neither ${{BASE}} nor an earlier stage"
        known.add(stage.name)


def _build_problems(stages: list[Stage]) -> Iterator[str]:
    for stage in stages:
        if stage.of("ADD"):
            yield "ADD: fetches and unpacks; COPY does neither"
        for run in stage.of("RUN"):
            for command in run.split("&&"):
                if "pip install" in command:
                    yield from _install_problems(command)
    for name in (stage.name for stage in stages if stage.name.endswith("dependencies")):
        copied = [words for stage in chain(stages, name) for words in stage.of("COPY")]
        if copied != ["pyproject.toml constraints.txt ./"]:
            yield f"{name} depend on more than pyproject.toml and constraints.txt"


def _install_problems(command: str) -> Iterator[str]:
    if re.search(r"(^|\s)(-e|--editable)\s", command):
        yield "an editable installation needs the tree"
    if "--no-verify-hashes" in command and "${TORCH_INDEX}" not in command:
        yield "hashes are not looked at, and the index is not one of other builds"
    if "--constraints constraints.txt" in command or "--no-deps" in command:
        return
    words = re.sub(r"\$\([^)]*\)", "", command).split("pip install", 1)[1].split()
    if any("==" not in word for word in words if not word.startswith("-")):
        yield f"versions are left open: {command.strip()[:60]}"


def _final_problems(image: list[Stage]) -> Iterator[str]:
    def of(keyword: str) -> list[str]:
        return [words for stage in image for words in stage.of(keyword)]

    users = of("USER")
    if not users or not re.fullmatch(r"[1-9]\d*:[1-9]\d*", users[-1]):
        yield "the last USER is no number other than 0"
    if any(_FETCHES.search(run) for run in image[-1].of("RUN")):
        yield "the image itself installs or fetches something"
    if of("ENTRYPOINT") != ['["/opt/xpyd/bin/xpyd"]'] or of("CMD"):
        yield "the entrypoint is not xpyd alone, without a shell"
    labels = " ".join(of("LABEL"))
    missing = [name for name in LABELS if f"org.opencontainers.image.{name}=" not in labels]
    if missing:
        yield f"labels are missing: {', '.join(missing)}"


def _runtime_problems(image: list[Stage]) -> Iterator[str]:
    """What the last stage stands on: a user, and for engines on a GPU a compiler, no more."""
    for below in image[:-1]:
        for run in below.of("RUN"):
            if not _FETCHES.search(run):
                continue
            installs = re.findall(r"apt-get install ((?:-\S+\s+)*)([^&;|]*)", run)
            rest = re.sub("apt-get|gcc|/var/lib/apt/lists", "", run)
            is_compiler = [what.split() for _, what in installs] == [["gcc", "libc6-dev"]]
            if not is_compiler or _FETCHES.search(rest):
                yield f"{below.name}: the image installs more than triton's compiler"


def _secret_problems(head: list[Instruction], stages: list[Stage]) -> Iterator[str]:
    for instruction in [*head, *(i for stage in stages for i in stage.instructions)]:
        if instruction.keyword in ("ARG", "ENV") and _SECRET.search(instruction.words):
            yield f"{instruction.keyword} would stay in the image's history: {instruction.words}"
