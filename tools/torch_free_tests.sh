#!/usr/bin/env bash
# The store's tests on Python 3.12 without torch, with zarr 3.4 and numcodecs 0.17 (constraints.txt chooses them).
# Proves two promises at once: the store needs no torch, and both zarr lines work.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# A pyenv shim named python3.12 may exist and still not run, so each candidate is asked for its version.
python=
for candidate in python3.12 "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.12*/bin/python; do
    if "$candidate" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 12))' 2>/dev/null; then
        python=$candidate
        break
    fi
done
if [ -z "$python" ]; then
    echo "##############################################################################"
    echo "# SKIPPED: no Python 3.12 here, so zarr 3.4 and numcodecs 0.17 were NOT TESTED #"
    echo "##############################################################################"
    exit 0
fi

venv=$(mktemp -d "${TMPDIR:-/tmp}/hsloader-312.XXXXXX")
trap 'rm -rf "$venv"' EXIT
"$python" -m venv "$venv"
mapfile -t needs < <("$python" - <<'PY'
import tomllib
project = tomllib.load(open("pyproject.toml", "rb"))["project"]
for need in [*project["dependencies"], *project["optional-dependencies"]["test"]]:
    if not need.startswith("torch"):
        print(need)
PY
)
"$venv/bin/pip" install -q -c constraints.txt "${needs[@]}"
"$venv/bin/pip" install -q --no-deps .
"$venv/bin/python" -c 'import importlib.util as u; assert u.find_spec("torch") is None, "torch is installed"'
"$venv/bin/python" -m pytest tests/store
