"""scripts/images.sh with a builder that only writes down how it was called."""

import shutil
import subprocess
import tomllib
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
BASE = "docker.io/library/python:3.11.14-slim-bookworm"


@dataclass(frozen=True)
class Machine:
    """One with these builders, and nothing else that could be one."""

    folder: Path

    def has(self, *builders: str) -> None:
        for builder in builders:
            (self.folder / "bin" / builder).symlink_to(Path(__file__).with_name("fake_builder.sh"))

    def note(self, name: str) -> None:
        (self.folder / name).touch()

    def run(self, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
        environment = {"PATH": str(self.folder / "bin"), "FAKE": str(self.folder), **variables}
        script = [str(ROOT / "scripts/images.sh"), *words]
        return subprocess.run(
            script, env=environment, capture_output=True, text=True, timeout=60, check=False
        )

    def calls(self, command: str) -> list[str]:
        log = self.folder / "calls"
        lines = log.read_text().splitlines() if log.exists() else []
        return [line for line in lines if line.split()[1] == command]


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    (tmp_path / "bin").mkdir()
    (tmp_path / "images").mkdir()
    for tool in ("bash", "env", "sed", "dirname", "basename", "cat", "git", "touch"):
        path = shutil.which(tool)
        assert path is not None
        (tmp_path / "bin" / tool).symlink_to(path)
    return Machine(tmp_path)


def _tags(builds: list[str]) -> list[str]:
    return [line.split("--tag ")[1].split()[0] for line in builds]


def test_it_builds_the_three_images_with_the_projects_version(machine: Machine) -> None:
    machine.has("docker")
    done = machine.run()
    assert done.returncode == 0, done.stderr
    builds = machine.calls("build")
    assert _tags(builds) == [f"xpyd-{n}:{VERSION}" for n in ("operator", "router", "worker")]
    for build, target in zip(builds, ("operator", "router", "worker"), strict=True):
        assert f"--file Dockerfile --target {target} " in build
        assert f"--build-arg VERSION={VERSION}" in build
        assert "TORCH_INDEX" not in build
        assert "BASE=" not in build
        assert build.endswith(" .")
    assert [call.split()[-1] for call in machine.calls("pull")] == [BASE]
    table = done.stdout.splitlines()
    assert table[0].split() == ["image", "size", "seconds"]
    assert [row.split()[:3] for row in table[1:]] == [[tag, "12", "MB"] for tag in _tags(builds)]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("ONLY=router", "TAG=1.2"), ("--tag xpyd-router:1.2",)),
        (("ONLY=router", "REGISTRY=r.io/a/", "TAG=1"), ("--tag r.io/a/xpyd-router:1",)),
        (("ONLY=router", "BASE=my/python:3.11"), ("--build-arg BASE=my/python:3.11",)),
        (("ONLY=router", "INDEX=https://m/simple"), ("--build-arg INDEX=https://m/simple",)),
        (("ONLY=router", "CA_BUNDLE=LICENSE"), ("--secret id=ca\\,src=LICENSE",)),
        (("ONLY=router", "BUILD_OPTIONS=-v /a:/b --pull"), ("-v /a:/b --pull",)),
        (
            ("ONLY=worker", "VARIANT=cpu", "TAG=1"),
            (
                "--tag xpyd-worker:1-cpu",
                "--build-arg TORCH_INDEX=https://download.pytorch.org/whl/cpu",
            ),
        ),
        (
            ("ONLY=worker", "VARIANT=cpu", "TORCH_INDEX=https://mirror/cpu"),
            ("--build-arg TORCH_INDEX=https://mirror/cpu",),
        ),
        (("ONLY=operator", "VARIANT=cpu", "TAG=1"), ("--tag xpyd-operator:1 ",)),
    ],
)
def test_what_it_is_told_reaches_the_builder(
    machine: Machine, words: tuple[str, ...], expected: tuple[str, ...]
) -> None:
    machine.has("docker")
    done = machine.run(*words)
    assert done.returncode == 0, done.stderr
    (build,) = machine.calls("build")
    for part in expected:
        assert part in build


def test_makes_variables_are_taken_from_the_environment(machine: Machine) -> None:
    machine.has("docker", "buildah")
    done = machine.run(ONLY="operator,router", TAG="7", BUILDER="buildah")
    assert done.returncode == 0, done.stderr
    assert _tags(machine.calls("build")) == ["xpyd-operator:7", "xpyd-router:7"]
    assert all(line.startswith("buildah ") for line in machine.calls("build"))
    assert all("--layers" in line for line in machine.calls("build"))


def test_a_docker_whose_daemon_is_silent_gives_way_to_buildah(machine: Machine) -> None:
    machine.has("docker", "buildah")
    machine.note("no-daemon")
    assert machine.run("ONLY=router").returncode == 0
    assert machine.calls("build")[0].startswith("buildah ")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("biuld",), "'biuld' is not understood"),
        (("PLATFORM=arm",), "'PLATFORM=arm' is not understood"),
        (("ONLY=router,gateway",), "'gateway' is none of operator, router, worker"),
        (("VARIANT=rocm",), "neither cuda nor cpu"),
        (("TAG=a/b",), "TAG=a/b is no image tag"),
        (("BUILDER=kaniko",), "neither docker nor buildah"),
        (("BUILDER=buildah",), "buildah is not installed"),
        (("CA_BUNDLE=/nowhere.pem",), "/nowhere.pem is no file"),
        (("push",), "push needs REGISTRY"),
        (("push", "REGISTRY=https://r.io"), "without the scheme, e.g. r.io"),
        (("push", "REGISTRY=r.io"), f"r.io/xpyd-operator:{VERSION} is not built"),
    ],
)
def test_a_mistake_is_said_before_anything_is_built(
    machine: Machine, words: tuple[str, ...], message: str
) -> None:
    machine.has("docker")
    done = machine.run(*words)
    assert done.returncode == 2
    assert message in done.stderr
    assert not machine.calls("build")
    assert not machine.calls("push")


@pytest.mark.parametrize(
    ("builders", "note", "words", "message"),
    [
        ((), "", (), "neither docker (with a daemon that answers) nor buildah is installed"),
        (("docker",), "no-daemon", (), "neither docker (with a daemon that answers)"),
        (("docker",), "no-daemon", ("BUILDER=docker",), "docker's daemon does not answer"),
        (("docker",), "down", (), f"the base {BASE} is neither here nor can it be fetched"),
        (("docker",), "down", ("BASE=my:1",), "the base my:1 is neither here"),
    ],
)
def test_what_the_machine_lacks_is_said_before_anything_is_built(
    machine: Machine, builders: tuple[str, ...], note: str, words: tuple[str, ...], message: str
) -> None:
    machine.has(*builders)
    machine.note(note or "nothing")
    done = machine.run(*words)
    assert done.returncode == 2
    assert message in done.stderr
    assert not machine.calls("build")


def test_a_base_that_is_here_needs_no_registry(machine: Machine) -> None:
    machine.has("docker")
    machine.note("down")
    machine.note("images/localhost_base:1")
    assert machine.run("ONLY=router", "BASE=localhost/base:1").returncode == 0


def test_a_build_that_fails_ends_it_with_the_builders_words(machine: Machine) -> None:
    machine.has("docker")
    machine.note("broken")
    done = machine.run()
    assert done.returncode == 125
    assert "no space left" in done.stderr
    assert "[1/3]" in done.stderr
    assert "[2/3]" not in done.stderr
    assert not done.stdout


def test_push_pushes_what_was_built_and_says_how_the_chart_finds_it(machine: Machine) -> None:
    machine.has("docker")
    values = ("REGISTRY=r.io/llm", "VARIANT=cpu")
    assert machine.run("build", *values).returncode == 0
    done = machine.run("push", *values, "PUSH_OPTIONS=--tls-verify=false")
    assert done.returncode == 0, done.stderr
    images = [f"r.io/llm/xpyd-operator:{VERSION}", f"r.io/llm/xpyd-router:{VERSION}"]
    images.append(f"r.io/llm/xpyd-worker:{VERSION}-cpu")
    assert machine.calls("push") == [f"docker push --tls-verify=false {i}" for i in images]
    settings = f"--set images.registry=r.io/llm --set-string images.worker.tag={VERSION}-cpu"
    assert done.stderr.splitlines()[-1].endswith(settings)


def test_build_and_push_in_one_go_ask_for_the_registry_first(machine: Machine) -> None:
    machine.has("docker")
    assert machine.run("build", "push").returncode == 2
    assert not machine.calls("build")
    done = machine.run("build", "push", "REGISTRY=r.io", "ONLY=router,operator")
    assert done.returncode == 0, done.stderr
    order = [line.split()[1] for line in (machine.folder / "calls").read_text().splitlines()]
    assert [word for word in order if word in ("build", "push")] == ["build", "push"] * 2


def test_make_images_push_does_both_with_the_variables_of_its_command_line(
    machine: Machine,
) -> None:
    machine.has("docker")
    values = ["REGISTRY=r.io", "ONLY=router", "TAG=7", "BUILD_OPTIONS=-v /a:/b"]
    make = shutil.which("make")
    assert make is not None
    done = subprocess.run(
        [make, "-C", str(ROOT), "images", "push", *values],
        env={"PATH": str(machine.folder / "bin"), "FAKE": str(machine.folder)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (build,), (push,) = machine.calls("build"), machine.calls("push")
    assert "--tag r.io/xpyd-router:7" in build
    assert build.endswith(" -v /a:/b .")
    assert push == "docker push r.io/xpyd-router:7"


def test_help_names_every_variable_that_is_read() -> None:
    script = ROOT / "scripts/images.sh"
    shown = subprocess.run(
        [str(script), "--help"], capture_output=True, text=True, timeout=60, check=True
    ).stdout
    names = ("BUILDER", "ONLY", "TAG", "REGISTRY", "VARIANT", "BASE", "INDEX", "CA_BUNDLE")
    for name in (*names, "TORCH_INDEX", "BUILD_OPTIONS", "PUSH_OPTIONS"):
        assert f"  {name}=" in shown
        assert f"{name}=*" in script.read_text()
