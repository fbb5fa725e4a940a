#!/usr/bin/env bash
# Write the versions in .venv to constraints.txt, behind its comment lines, each with the hashes of
# the files that the index has of it. See docs/adr/0005.
set -euo pipefail
cd "$(dirname "$0")/.."
uv=$(command -v uv || echo "${XDG_CACHE_HOME:-$HOME/.cache}/xpyd/uv/bin/uv")
comments=$(grep '^#' constraints.txt)
frozen=$(.venv/bin/python - <<'PY'
from importlib.metadata import distributions
names = {d.metadata["Name"].lower().replace("_", "-"): d.version for d in distributions()}
print("\n".join(f"{n}=={v}" for n, v in sorted(names.items()) if n not in ("xpyd", "pip")))
PY
)
hashed=$("$uv" pip compile --quiet --generate-hashes --no-deps --no-annotate --no-header \
  --python .venv/bin/python - <<< "$frozen")
printf '%s\n%s\n' "$comments" "$hashed" > constraints.txt
