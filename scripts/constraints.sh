#!/usr/bin/env bash
# Write the versions in .venv to constraints.txt, behind its comment lines. See docs/adr/0005.
set -euo pipefail
cd "$(dirname "$0")/.."
comments=$(grep '^#' constraints.txt)
frozen=$(.venv/bin/python - <<'PY'
from importlib.metadata import distributions
names = {d.metadata["Name"].lower().replace("_", "-"): d.version for d in distributions()}
print("\n".join(f"{n}=={v}" for n, v in sorted(names.items()) if n not in ("xpyd", "pip")))
PY
)
printf '%s\n%s\n' "$comments" "$frozen" > constraints.txt
