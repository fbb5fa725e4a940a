"""The Dockerfile keeps to the rules of dockerfile.py, and the rules find what breaks them."""

import re
import tomllib
from pathlib import Path

import pytest

from tests.cluster.images.build import FILES, TARGETS, image_key
from tests.images.dockerfile import chain, problems, read

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "Dockerfile").read_text()
STAGES = {stage.name: stage for stage in read(TEXT)[1]}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_the_dockerfile_keeps_to_the_rules() -> None:
    assert problems(TEXT, TARGETS) == []


def test_each_version_that_is_installed_has_the_hashes_of_its_files() -> None:
    lines = (ROOT / "constraints.txt").read_text().replace("\\\n", " ").splitlines()
    pins = [line.split() for line in lines if not line.startswith("#")]
    assert len(pins) > 100
    for name, *hashes in pins:
        assert re.fullmatch(r"[a-z0-9-]+==\S+", name), name
        assert hashes, f"{name} has no hash"
        assert all(re.fullmatch(r"--hash=sha256:[0-9a-f]{64}", each) for each in hashes), name


BREAKS = {
    "a base of any version": (":3.11.14-slim-bookworm", ":3.11-slim", "exact version"),
    "a base without a tag": (":3.11.14-slim-bookworm", "", "exact version"),
    "a stage from elsewhere": ("FROM ${BASE} AS base", "FROM debian:12.1.0 AS base", "FROM debian"),
    "root": ("USER 10001:10001", "USER 0:0", "USER"),
    "a user by name": ("USER 10001:10001", "USER xpyd", "USER"),
    "no user": ("USER 10001:10001\n", "", "USER"),
    "an ADD": ("EXPOSE", "ADD https://example.com/x /x\nEXPOSE", "ADD"),
    "a fetch in the last stage": ("USER", "RUN apt-get update && true\nUSER", "itself"),
    "an open version": ("uv==${UV_VERSION}", "uv", "left open"),
    "no constraints": ("--constraints constraints.txt", "", "left open"),
    "hashes ignored": ("--constraints", "--no-verify-hashes --constraints", "hashes"),
    "an editable wheel": ("/wheel/*.whl", "--editable .", "editable"),
    "code before dependencies": ("constraints.txt ./", "constraints.txt core ./", "more than"),
    "an entrypoint in a shell": ('["/opt/xpyd/bin/xpyd"]', "xpyd", "entrypoint"),
    "a label less": ("image.revision", "image.nothing", "revision"),
    "a secret argument": ("ARG VERSION=0", "ARG HF_TOKEN=", "history"),
}


@pytest.mark.parametrize("case", BREAKS)
def test_what_breaks_a_rule_is_found(case: str) -> None:
    good, bad, message = BREAKS[case]
    text = TEXT.replace(good, bad)
    assert text != TEXT
    found = problems(text, ["router"])
    assert any(message in problem for problem in found), found


@pytest.mark.parametrize(
    ("good", "bad"),
    [
        ("gcc libc6-dev", "gcc libc6-dev git"),
        ("rm -rf /var/lib", "curl x.example && rm -rf /var/lib"),
    ],
)
def test_a_worker_that_has_more_than_tritons_compiler_is_found(good: str, bad: str) -> None:
    text = TEXT.replace(good, bad)
    assert text != TEXT
    assert any("more than triton's compiler" in problem for problem in problems(text, ["worker"]))
    assert problems(text, ["operator", "router"]) == []


def _copied_from(name: str) -> list[str]:
    return [words.split()[0] for words in STAGES[name].of("COPY") if words.startswith("--from")]


def test_the_images_share_the_stages_that_are_not_their_own() -> None:
    # Equal steps are written and built once for the three images.
    for name in TARGETS:
        assert chain([*STAGES.values()], name)[0] is STAGES["base"]
        code = "worker-code" if name == "worker" else "code"
        assert _copied_from(name) == [f"--from={name}-dependencies", f"--from={code}"]
        assert STAGES[f"{name}-dependencies"].base == "tools"
    # The worker's wheel is compiled for; what is installed is the same otherwise.
    assert "${COMPILER}" in STAGES["compiler"].of("RUN")[0]
    assert STAGES["worker-code"].base == "compiler"
    assert STAGES["worker-code"].of("COPY") == ["--from=sources /src /src"]
    assert STAGES["code"].base == "sources"
    assert STAGES["worker-code"].of("RUN") == STAGES["code"].of("RUN")
    assert {STAGES[name].base for name in ("sources", "compiler")} == {"tools"}


def test_only_engines_have_a_compiler() -> None:
    assert [stage.name for stage in chain([*STAGES.values()], "operator")] == ["base", "operator"]
    assert [stage.name for stage in chain([*STAGES.values()], "router")] == ["base", "router"]
    assert not any("apt-get" in run for run in STAGES["base"].of("RUN"))


@pytest.mark.parametrize("name", TARGETS)
def test_an_image_installs_its_own_extra(name: str) -> None:
    # The engine sends traces where it is told to; the rest of the extras is for other machines.
    extras = [name, "otel"] if name == "worker" else [name]
    wanted = "".join(f" --extra {extra}" for extra in extras)
    (install,) = STAGES[f"{name}-dependencies"].of("RUN")
    assert install.endswith(f"--requirements pyproject.toml{wanted}")
    assert {*extras} <= PROJECT["project"]["optional-dependencies"].keys()


def test_every_package_is_copied_for_the_wheel() -> None:
    packages = PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    copied = {words.split()[0] for words in STAGES["sources"].of("COPY")}
    assert {package.split("/")[0] for package in packages} <= copied


def test_the_build_sees_the_files_it_copies_and_no_others() -> None:
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    assert lines[1] == "*"  # behind the comment: nothing that is not named
    allowed = {line[1:].rstrip("/") for line in lines if line.startswith("!")} - {"examples"}
    copied: set[str] = set()
    for stage in STAGES.values():
        for words in stage.of("COPY"):
            if not words.startswith("--from="):
                copied |= set(words.split()[:-1])
    assert copied == allowed
    assert all((ROOT / path).exists() for path in copied)


def _tree(folder: Path) -> Path:
    """A small tree with what the images' keys read."""
    for path in FILES:
        (folder / path).write_text(path)
    for path in (Path("scripts/images.sh"), Path("core/x/y.py")):
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(str(path))
    test_images = folder / "tests/cluster/images"
    test_images.mkdir(parents=True)
    for name in ("environment", "vllm"):
        (test_images / f"{name}.Dockerfile").write_text("")
    return folder


@pytest.mark.parametrize(
    ("changed", "rebuilt"),
    [
        ("core/x/y.py", {"operator", "router", "worker", "vllm"}),
        ("core/x/new.py", {"operator", "router", "worker", "vllm"}),
        ("constraints.txt", {"operator", "router", "worker", "vllm"}),
        ("Dockerfile", {"operator", "router", "worker", "vllm"}),
        ("tests/cluster/images/environment.Dockerfile", {"worker"}),
        ("tests/cluster/images/vllm.Dockerfile", {"vllm"}),
        ("core/x/y.pyc", set[str]()),
        ("tests/test_x.py", set[str]()),
        ("docs.md", set[str]()),
    ],
)
def test_a_change_rebuilds_the_test_images_that_hold_it(
    tmp_path: Path, changed: str, rebuilt: set[str]
) -> None:
    tree = _tree(tmp_path)
    images = (*TARGETS, "vllm")
    before = {name: image_key(name, tree) for name in images}
    (tree / changed).write_text("changed")
    after = {name: image_key(name, tree) for name in images}
    assert {name for name in images if before[name] != after[name]} == rebuilt
