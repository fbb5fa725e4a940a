#!/usr/bin/env bash
# Make .venv with everything that developing, testing and the demo need. Run again, it does nothing
# until pyproject.toml, constraints.txt, hatch_build.py or what that compiles changes. uv does the
# installing: its cache, outside the tree, makes the next clone take seconds and (by hard links)
# little disk; xpyd itself is built anew, since the cache does not know what that compiles.
set -euo pipefail
cd "$(dirname "$0")/.."

say() { printf 'setup: %s\n' "$*" >&2; }

if [ "$(uname -s)" != Linux ]; then
  say "xpyd's local mode and engine run on Linux; on another system use a Linux VM or container"
  exit 1
fi

want=$(cat pyproject.toml constraints.txt scripts/setup.sh hatch_build.py \
  kv_transfer/xpyd_kv/native/*.c \
  worker_image/xpyd_worker/{kernels/cpu,parallel/native}/*.{cpp,h} | sha256sum | cut -c1-16)
stamp=.venv/.xpyd-setup
if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$want" ]; then
  exit 0
fi

python=${PYTHON:-python3}
if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
  say "Python 3.11 or newer is needed; '$python' is not. Set PYTHON=/path/to/python3.11"
  exit 1
fi

cache=${XDG_CACHE_HOME:-$HOME/.cache}/xpyd
uv=$(command -v uv || true)
if [ -z "$uv" ]; then
  uv=$cache/uv/bin/uv
  if [ ! -x "$uv" ]; then
    say "installing uv into $cache/uv (once)"
    "$python" -m venv "$cache/uv"
    "$cache/uv/bin/pip" install --quiet uv
  fi
fi

started=$(date +%s)
say "installing xpyd and its dependencies into .venv (torch is about 5 GB on first use; then cached)"
[ -x .venv/bin/python ] || "$uv" venv --quiet --python "$python" .venv
install=("$uv" pip install --python .venv/bin/python --constraint constraints.txt
  --reinstall-package xpyd --editable '.[dev,worker,otel,router,local,operator,tools]')
if [ -t 2 ]; then
  "${install[@]}" # uv draws its progress
else
  "${install[@]}" 2> >(grep -v '^ [-+~] ' >&2) # no list of a hundred packages in a log
fi
# uv compiles nothing, and the first `make demo` would wait for it: what a fleet imports is compiled
# here (container images often set the variable).
env -u PYTHONDONTWRITEBYTECODE .venv/bin/python -c '
import xpyd_operator.up.run, xpyd_router.router
from xpyd_worker.preload import preload
preload()'
printf '%s' "$want" > "$stamp"
say "done in $(($(date +%s) - started)) s"
