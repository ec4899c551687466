#!/usr/bin/env bash
# Makes build/lowest/venv: a virtual environment with this package and the lowest versions of its
# dependencies that pyproject.toml allows, for tests that they are enough. What the tests themselves
# need is as new as that permits. torch is not installed.
#
# usage: scripts/lowest.sh
# ALLSPARK_BUILD_DIR: a build directory, as for setup.py
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
uv_version=0.13.9
root="$PWD/build/lowest"

# shellcheck source=setup.sh
. scripts/setup.sh --test --no-package
rm -rf "$root"
mkdir -p "$root"
pip install -q "uv==$uv_version"
uv() { "$venv/bin/uv" --quiet "$@"; }

uv pip compile --resolution lowest-direct --python "$venv/bin/python" pyproject.toml \
  --extra serve --extra gguf --extra metrics --extra modelscope --output-file "$root/lowest.txt" >/dev/null
echo "the lowest versions:"
grep -v '^ *#' "$root/lowest.txt"
uv venv --python "$venv/bin/python" "$root/venv"
uv pip install --python "$root/venv/bin/python" -r "$root/lowest.txt" \
  anthropic httpx hypothesis matplotlib openai "pytest>=8" pytest-timeout pytest-xdist
pip wheel -q --no-deps --no-build-isolation --wheel-dir "$root" .
uv pip install --python "$root/venv/bin/python" --no-deps "$root"/allspark-*.whl
