"""buildah with a storage of its own below the tests' cache, and the base image in it.

The base stands in for the Dockerfiles' official Python image, because a machine that runs the
tests may reach no registry: Debian with Python 3.11, made from Debian's packages and kept as a
tar file. It is made anew only when what goes into it changes; the storage lives as long, but at
most `STORE_LIFETIME_S`, since layers of old sources gather in it. Knows nothing of xpyd's images.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import ssl
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.cluster.harness.packages import Need, install

PYTHON = (3, 11)
"""Of the base, which is that of Debian bookworm."""
BASE_IMAGE = "localhost/xpyd-test-base:1"
STORE_LIFETIME_S = 14 * 24 * 3600.0
NEEDS = (
    Need("mmdebstrap", "mmdebstrap"),
    Need("buildah", "buildah"),
    Need("debian-archive-keyring", "/usr/share/keyrings/debian-archive-keyring.gpg"),
)
_MMDEBSTRAP = (
    "mmdebstrap",
    "--quiet",
    "--variant=essential",
    # libstdc++6: wheels of zmq and torch are linked with it; official images have it too.
    "--include=python3,python3-venv,libstdc++6",
    "--dpkgopt=path-exclude=/usr/share/doc/*",
    "--dpkgopt=path-exclude=/usr/share/man/*",
    "--dpkgopt=path-exclude=/usr/share/locale/*",
    "bookworm",
)
_BASE_TIMEOUT_S = 420.0
_LOG_LINES = 30


class ImagesUnavailable(RuntimeError):
    """This machine cannot build the images; the text says what it lacks."""


class ImagesFailed(RuntimeError):
    """A build went wrong; the text ends with the builder's last words."""


@dataclass(frozen=True)
class Store:
    """buildah's storage below `folder`."""

    folder: Path

    def environment(self) -> dict[str, str]:
        """For buildah and whatever calls it: everything it writes lies below `folder`."""
        return {
            **os.environ,
            "CONTAINERS_STORAGE_CONF": str(self.folder / "storage.conf"),
            # Also where buildah keeps the builds' cache mounts.
            "TMPDIR": str(self.folder / "tmp"),
            "BUILDAH_ISOLATION": "chroot",
        }

    def run(self, argv: Sequence[str | Path], *, timeout_s: float = 120.0) -> str:
        """The command's output. Raises ImagesFailed."""
        return run_logged(argv, self.folder / "log", self.environment(), timeout_s)

    def has_image(self, name: str) -> bool:
        """Whether the storage has it."""
        probe = ["buildah", "inspect", "--type", "image", name]
        done = subprocess.run(
            probe, env=self.environment(), capture_output=True, timeout=60, check=False
        )
        return done.returncode == 0


def base_key() -> str:
    """Names what the base is made of."""
    return hashlib.sha256("\0".join(_MMDEBSTRAP).encode()).hexdigest()[:12]


def open_store(cache: Path) -> Store:
    """The storage below `cache`, with BASE_IMAGE in it. Call under the cache's lock.

    Raises ImagesUnavailable where programs or rights are missing, ImagesFailed.
    """
    problem = install(NEEDS)
    if problem:
        raise ImagesUnavailable(f"images cannot be built here: {problem}")
    store = Store(cache / f"store-{base_key()}")
    for old in cache.glob("store-*"):
        if old != store.folder or _age_s(old / "storage.conf") > STORE_LIFETIME_S:
            _remove(old)
    if not (store.folder / "storage.conf").is_file():
        make_store(store.folder)
    if not store.has_image(BASE_IMAGE):
        _make_base(cache, store)
    return store


def ca_bundle() -> Path | None:
    """The machine's certificates: a base without any must trust what the machine trusts."""
    found = os.environ.get("SSL_CERT_FILE") or ssl.get_default_verify_paths().cafile
    for path in (found, "/etc/ssl/certs/ca-certificates.crt"):
        if path and Path(path).is_file():
            return Path(path)
    return None


def run_logged(
    argv: Sequence[str | Path], log: Path, environment: dict[str, str], timeout_s: float
) -> str:
    """The command's standard output; the rest goes to `log`. Raises ImagesFailed."""
    words = [str(word) for word in argv]
    with log.open("w") as out:
        try:
            done = subprocess.run(
                words,
                env=environment,
                stdout=subprocess.PIPE,
                stderr=out,
                stdin=subprocess.DEVNULL,
                text=True,
                timeout=timeout_s,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise ImagesFailed(f"{words[0]} took over {timeout_s:.0f} s ({log})") from None
    if done.returncode != 0:
        said = (done.stdout + log.read_text(errors="replace")).splitlines()[-_LOG_LINES:]
        raise ImagesFailed(f"{' '.join(words[:3])} ... failed ({log}):\n" + "\n".join(said))
    return done.stdout


def say(line: str) -> None:
    """Progress, for a person who waits for the first build."""
    sys.stderr.write(f"images: {line}\n")
    sys.stderr.flush()


def make_store(folder: Path) -> Store:
    """A new, empty storage there."""
    (folder / "tmp").mkdir(parents=True)
    (folder / "storage.conf").write_text(
        f'[storage]\ndriver = "overlay"\nrunroot = "{folder}/run"\ngraphroot = "{folder}/root"\n'
    )
    return Store(folder)


def _make_base(cache: Path, store: Store) -> None:
    tar = cache / f"base-{base_key()}.tar"
    if not tar.is_file():
        started = time.monotonic()
        say("making the base: Debian with Python (once, about a minute)")
        made = tar.with_suffix(".new")
        store.run([*_MMDEBSTRAP, "--format=tar", made], timeout_s=_BASE_TIMEOUT_S)
        for old in cache.glob("base-*.tar"):
            old.unlink()
        made.rename(tar)
        say(f"base: {tar.stat().st_size / 1e6:.0f} MB in {time.monotonic() - started:.0f} s")
    container = store.run(["buildah", "from", "scratch"]).strip()
    try:
        store.run(["buildah", "add", "--quiet", container, tar, "/"])
        path = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
        store.run(["buildah", "config", "--env", path, container])
        store.run(["buildah", "commit", "--quiet", container, BASE_IMAGE])
    finally:
        store.run(["buildah", "rm", container])


def _age_s(path: Path) -> float:
    try:
        return time.time() - path.stat().st_mtime
    except FileNotFoundError:
        return 0.0


def _remove(folder: Path) -> None:
    """A storage as a whole: buildah unmounts its overlays when its commands end."""
    say(f"removing the old storage {folder.name}")
    shutil.rmtree(folder)
