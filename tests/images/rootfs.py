"""An image's files unpacked, and its processes run on them as in a pod of a fleet.

That is: as the image's user without capabilities or new privileges, on a root that is read-only,
with a /tmp of its own. No container runtime is asked, so what fails here is the image's fault.
"""

from __future__ import annotations

import json
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# $1: the root; $2: "from:to" words, mounted read-only; $3: the user; the rest: environment, words.
_IN_A_NAMESPACE = r"""
set -eu
root=$1 mounts=$2 user=$3; shift 3
mount --bind "$root" "$root"
mount -t proc proc "$root/proc"
mount --rbind /dev "$root/dev"
mount -t tmpfs -o mode=1777,size=64m tmpfs "$root/tmp"
for pair in $mounts; do
  mount --bind "${pair%%:*}" "$root${pair#*:}"
  mount -o remount,ro,bind "$root${pair#*:}"
done
mount -o remount,ro,bind "$root"
exec setpriv --no-new-privs chroot --userspec="$user" --groups="${user#*:}" "$root" env -i "$@"
"""


@dataclass(frozen=True)
class Image:
    """An unpacked image."""

    root: Path
    config: Mapping[str, Any]
    """What the image says of itself: User, Entrypoint, Env, Labels, ExposedPorts."""

    def argv(self, *words: str, mounts: Mapping[str, str] | None = None) -> list[str]:
        """What runs the image's entrypoint with these words, as root of the machine.

        `mounts`: folders of the machine, and where they are in the image, read-only.
        """
        return self.argv_of([*self.config["Entrypoint"], *words], mounts or {})

    def argv_of(self, command: Sequence[str], mounts: Mapping[str, str]) -> list[str]:
        """As `argv`, of any command in the image."""
        for target in mounts.values():
            (self.root / target.lstrip("/")).mkdir(parents=True, exist_ok=True)
        pairs = " ".join(f"{source}:{target}" for source, target in mounts.items())
        unshare = ["unshare", "--mount", "--propagation", "private"]
        script = ["sh", "-c", _IN_A_NAMESPACE, "sh", str(self.root), pairs, self.config["User"]]
        return [*unshare, *script, *self.config["Env"], *command]


def unpack(archive: Path, folder: Path) -> Image:
    """The image of a docker-archive, its layers on top of each other below `folder`."""
    with tarfile.open(archive) as outer:
        manifest = json.load(_member(outer, "manifest.json"))[0]
        config = json.load(_member(outer, manifest["Config"]))
        for layer in manifest["Layers"]:
            with tarfile.open(fileobj=_member(outer, layer)) as inner:
                assert not any("/.wh." in name for name in inner.getnames()), "a removed file"
                inner.extractall(folder, filter="fully_trusted")
    return Image(folder, config["config"])


def _member(archive: tarfile.TarFile, name: str) -> Any:
    found = archive.extractfile(name)
    assert found is not None, name
    return found
