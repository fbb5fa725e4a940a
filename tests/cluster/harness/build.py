"""The Go programs of the test cluster, built once into the cache.

The modules lie below the harness (`go.sum` pins every byte of them). Each program has its own
folder in the cache, named by what it was built from, and is built only when something asks for
it. A build shows its progress on standard error and ends within a limit.

    python -m tests.cluster.harness build            # all of them
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

HARNESS = Path(__file__).parent

_VERSION = "k8s.io/component-base/version"


@dataclass(frozen=True)
class Program:
    """A Go program of the cluster."""

    name: str
    version: str
    module: str
    """Its module's folder below the harness."""
    package: str = "."
    """What is built, as `go build` names it."""
    ldflags: str = "-s -w"
    timeout_s: float = 900.0
    """Enough for a cold build on two busy cores."""

    @property
    def folder(self) -> Path:
        """Where its go.mod lies."""
        return HARNESS / self.module


def _release(version: str) -> str:
    """Linker flags without which a server reports a version that clients cannot parse."""
    major, minor, _ = version.removeprefix("v").split(".")
    values = {
        "gitVersion": version,
        "gitMajor": major,
        "gitMinor": minor,
        "gitTreeState": "clean",
        "gitCommit": "unknown",
        "buildDate": "1970-01-01T00:00:00Z",
    }
    return " ".join(["-s -w", *(f"-X {_VERSION}.{key}={value}" for key, value in values.items())])


KUBE = Program("kube", "v1.34.3", "kube", ldflags=_release("v1.34.3"))
TESTPOD = Program("testpod", "v1", "testpod")
# These two share the libraries of Kubernetes' module: with them they take seconds, not minutes.
COREDNS = Program("coredns", "v1.12.4", "kube", package="./coredns")
LWS = Program("lws", "v0.8.0", "kube", package="sigs.k8s.io/lws/cmd")
# These two are of other releases of Kubernetes' libraries.
KWOK = Program("kwok", "v0.7.0", "kwok", package="sigs.k8s.io/kwok/cmd/kwok")
METRICS_SERVER = Program(
    "metrics-server",
    "v0.9.0",
    "metrics_server",
    package="sigs.k8s.io/metrics-server/cmd/metrics-server",
)
PROGRAMS = (KUBE, TESTPOD, COREDNS, KWOK, LWS, METRICS_SERVER)


class BuildFailed(RuntimeError):
    """A program could not be built; the text ends with the compiler's words."""


def binary(program: Program) -> Path:
    """The program, built now if the cache has no build of these sources. Raises BuildFailed."""
    folder = _cache_folder(program)
    found = folder / program.name
    if found.is_file():
        return found
    folder.mkdir(parents=True, exist_ok=True)
    with _lock(folder / "lock"):
        if not found.is_file():
            _build(program, found)
    return found


def module_folder(program: Program, path: str) -> Path:
    """The sources of module `path` as the program uses them: its manifests lie there."""
    return Path(json.loads(_go(program, "mod", "download", "-json", path))["Dir"])


def is_built(program: Program) -> bool:
    """Whether the cache has it."""
    return (_cache_folder(program) / program.name).is_file()


def missing_for_build() -> str | None:
    """Why nothing can be built here, or None."""
    return None if shutil.which("go") else "Go is not installed (https://go.dev/doc/install)"


def _cache_folder(program: Program) -> Path:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    digest = hashlib.sha256(f"{program.package} {program.ldflags} {_go_version()}".encode())
    for source in sorted(program.folder.rglob("*")):
        if source.suffix in (".go", ".mod", ".sum"):
            digest.update(f"\0{source.name}\0".encode() + source.read_bytes())
    return cache / "xpyd" / "cluster" / f"{program.name}-{digest.hexdigest()[:16]}"


def _go_version() -> str:
    """The version of Go, read from its own file: running `go` for it would take 10 ms each time."""
    go = shutil.which("go")
    if go is None:
        return ""
    version = Path(go).resolve().parents[1] / "VERSION"
    return version.read_text().split()[0] if version.is_file() else ""


def _build(program: Program, target: Path) -> None:
    started = time.monotonic()
    _say(f"building {program.name} {program.version} (once; at most {program.timeout_s:.0f} s)")
    made = target.with_suffix(".new")
    argv = ["go", "build", "-trimpath", "-buildvcs=false", "-ldflags", program.ldflags]
    log = target.with_suffix(".log")
    with log.open("wb") as out:
        child = subprocess.Popen(
            [*argv, "-o", str(made), program.package],
            cwd=program.folder,
            env=_environment(),
            stdout=out,
            stderr=subprocess.STDOUT,
        )
        try:
            _follow(program, child, started)
        finally:
            child.kill()
            child.wait()
    if child.returncode != 0:
        words = "\n".join(log.read_text(errors="replace").splitlines()[-20:])
        raise BuildFailed(f"{program.name} could not be built ({log}):\n{words}")
    made.rename(target)
    size_mb = target.stat().st_size / 1e6
    _say(f"built {program.name}: {size_mb:.0f} MB in {time.monotonic() - started:.0f} s")


def _follow(program: Program, child: subprocess.Popen[bytes], started: float) -> None:
    """Wait for the compiler, saying now and then that it still works."""
    while True:
        try:
            child.wait(timeout=30)
            return
        except subprocess.TimeoutExpired:
            spent_s = time.monotonic() - started
            _say(f"building {program.name}: {spent_s:.0f} s")
            if spent_s > program.timeout_s:
                raise BuildFailed(
                    f"{program.name} was not built within {program.timeout_s:.0f} s"
                ) from None


def _go(program: Program, *argv: str) -> str:
    done = subprocess.run(
        ["go", *argv],
        cwd=program.folder,
        env=_environment(),
        capture_output=True,
        text=True,
        timeout=300,
    )
    if done.returncode != 0:
        raise BuildFailed(f"go {' '.join(argv)} failed for {program.name}:\n{done.stderr}")
    return done.stdout.strip()


def _environment() -> dict[str, str]:
    """Static programs, from the committed go.mod and go.sum as they are."""
    return {**os.environ, "CGO_ENABLED": "0", "GOFLAGS": "-mod=readonly", "GOWORK": "off"}


@contextmanager
def _lock(path: Path) -> Generator[None]:
    """Two runs that need the same program build it once; the lock goes with its process."""
    with path.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _say(line: str) -> None:
    sys.stderr.write(f"cluster: {line}\n")
    sys.stderr.flush()
