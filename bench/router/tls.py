"""TLS for clients of the routers: a certificate, and nginx from Debian before a peer that has none.

nginx is the system's, or Debian's package unpacked into the cache: nothing is installed. It is one
process of the peer's tree, on the same core, so that its processor time and memory count as the
peer's. Its settings are those that cost it least: no access log, connections to the router are
kept, streams pass unbuffered.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from functools import cache as once
from pathlib import Path

import trustme

from bench.environments import NotHere, cache, run

_FETCH_S = 60.0
_CONFIG = """
worker_processes 1;
pid {folder}/nginx.pid;
events {{ worker_connections 8192; }}
http {{
  access_log off;
  client_body_buffer_size 128k;
  client_max_body_size 0;
  client_body_temp_path {folder}/body;
  proxy_temp_path {folder}/proxy;
  fastcgi_temp_path {folder}/fastcgi;
  uwsgi_temp_path {folder}/uwsgi;
  scgi_temp_path {folder}/scgi;
  upstream router {{ server 127.0.0.1:{inner}; keepalive 1024; keepalive_requests 1000000; }}
  server {{
    listen 127.0.0.1:{port} ssl backlog=4096;
    ssl_certificate {certificate};
    ssl_certificate_key {key};
    ssl_protocols TLSv1.2 TLSv1.3;
    keepalive_requests 1000000;
    keepalive_timeout 300s;
    location / {{
      proxy_pass http://router;
      proxy_http_version 1.1;
      proxy_set_header Connection "";
      proxy_buffering off;
      proxy_read_timeout 300s;
    }}
  }}
}}
"""


def certificate(folder: Path) -> tuple[Path, Path]:
    """Certificate and key (ECDSA P-256), in `folder`, made if they are not there."""
    shown, key = folder / "tls.crt", folder / "tls.key"
    if not shown.exists():
        made = trustme.CA().issue_cert("127.0.0.1", "localhost")
        key.touch(0o600)
        made.private_key_pem.write_to_path(key)
        shown.write_bytes(b"".join(one.bytes() for one in made.cert_chain_pems))
    return shown, key


@once
def nginx() -> Path:
    """The program. NotHere where there is none and Debian's package cannot be fetched."""
    if found := shutil.which("nginx", path=f"{os.environ.get('PATH', '')}:/usr/sbin"):
        return Path(found)
    folder = cache() / "bench-router" / "nginx"
    program = folder / "usr/sbin/nginx"
    if not program.exists():
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        run(["apt-get", "download", "nginx"], _FETCH_S, cwd=folder)
        [package] = folder.glob("nginx_*.deb")
        run(["dpkg-deb", "--extract", str(package), str(folder)], _FETCH_S)
    run([str(program), "-V"], _FETCH_S)  # of a library that is missing it says so
    return program


def nginx_version() -> str:
    """As it names itself: 1.22.1."""
    try:
        said = subprocess.run(
            [str(nginx()), "-v"], capture_output=True, text=True, timeout=_FETCH_S
        )
    except NotHere:
        return ""
    return said.stderr.strip().rpartition("/")[2]


def behind_nginx(argv: Sequence[str], folder: Path, *, port: int, inner: int) -> list[str]:
    """A command that runs `argv`, which serves HTTP on `inner`, and nginx on `port` before it."""
    own = folder / f"nginx-{port}"
    own.mkdir()
    shown, key = certificate(folder)
    config = own / "nginx.conf"
    config.write_text(
        _CONFIG.format(folder=own, port=port, inner=inner, certificate=shown, key=key)
    )
    start = '"$@" & exec "$0" -e stderr -c "$NGINX_CONF" -g "daemon off;"'
    return ["env", f"NGINX_CONF={config}", "sh", "-c", start, str(nginx()), *argv]
