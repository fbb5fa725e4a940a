"""The cluster's certificates and kubeconfigs, made by openssl in well under a second.

Elliptic keys everywhere: a cluster lives for one test run. Everything lies in the run folder,
readable by its owner only, and goes with it.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_DAYS = "30"
_CURVE = ("-pkeyopt", "ec_paramgen_curve:prime256v1")
_EC = ("-newkey", "ec", *_CURVE, "-nodes")


@dataclass(frozen=True)
class Pair:
    """A certificate (of service accounts: the public key) and its key."""

    certificate: Path
    key: Path


class Pki:
    """The authorities of one cluster, and what they sign."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ca = self._pair("ca")
        self.front_proxy_ca = self._pair("front-proxy-ca")
        self.service_accounts = Pair(
            folder / "service-accounts.pub", folder / "service-accounts.key"
        )

    @classmethod
    def create(cls, folder: Path) -> Pki:
        """New authorities in a new folder."""
        folder.mkdir(mode=0o700)
        pki = cls(folder)
        for name in ("ca", "front-proxy-ca"):
            pair = pki._pair(name)
            _openssl(
                "req", "-x509", *_EC, "-days", _DAYS, "-subj", f"/CN={name}",
                "-addext", "keyUsage=critical,keyCertSign,digitalSignature",
                "-keyout", str(pair.key), "-out", str(pair.certificate),
            )  # fmt: skip
        key, public = str(pki.service_accounts.key), str(pki.service_accounts.certificate)
        _openssl("genpkey", "-algorithm", "EC", *_CURVE, "-out", key)
        _openssl("pkey", "-in", key, "-pubout", "-out", public)
        return pki

    def issue(
        self,
        name: str,
        user: str,
        *,
        group: str = "",
        addresses: Sequence[str] = (),
        front_proxy: bool = False,
    ) -> Pair:
        """A certificate for a client, and a server's too when it has addresses (DNS:, IP:)."""
        authority = self.front_proxy_ca if front_proxy else self.ca
        pair = self._pair(name)
        usage = "clientAuth,serverAuth" if addresses else "clientAuth"
        extensions = ["-addext", f"extendedKeyUsage={usage}"]
        if addresses:
            extensions += ["-addext", f"subjectAltName={','.join(addresses)}"]
        subject = f"/O={group}/CN={user}" if group else f"/CN={user}"
        _openssl(
            "req", "-x509", *_EC, "-days", _DAYS, "-subj", subject, *extensions,
            "-addext", "basicConstraints=critical,CA:FALSE",
            "-CA", str(authority.certificate), "-CAkey", str(authority.key),
            "-keyout", str(pair.key), "-out", str(pair.certificate),
        )  # fmt: skip
        return pair

    def kubeconfig(self, name: str, user: str, *, server: str, group: str = "") -> Path:
        """A kubeconfig that holds all it needs, for a new certificate of `user`."""
        pair = self.issue(name, user, group=group)
        path = self.folder / f"{name}.kubeconfig"
        # JSON is YAML; data by path keeps the file readable.
        document = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [
                {
                    "name": "test",
                    "cluster": {
                        "server": server,
                        "certificate-authority": str(self.ca.certificate),
                    },
                }
            ],
            "users": [
                {
                    "name": name,
                    "user": {
                        "client-certificate": str(pair.certificate),
                        "client-key": str(pair.key),
                    },
                }
            ],
            "contexts": [{"name": "test", "context": {"cluster": "test", "user": name}}],
            "current-context": "test",
        }
        path.write_text(json.dumps(document, indent=1))
        path.chmod(0o600)
        return path

    def _pair(self, name: str) -> Pair:
        return Pair(self.folder / f"{name}.crt", self.folder / f"{name}.key")


def _openssl(*argv: str) -> None:
    done = subprocess.run(["openssl", *argv], capture_output=True, text=True, timeout=30)
    if done.returncode != 0:
        raise RuntimeError(f"openssl {argv[0]} failed: {done.stderr.strip()}")
