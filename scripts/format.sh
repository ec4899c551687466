#!/usr/bin/env bash
# Formats the C++ sources with the clang-format version of pyproject.toml. Without --check and FILEs
# it also lets ruff fix the Python sources.
#
# usage: scripts/format.sh [--check] [FILE...]
#   --check  changes nothing; fails if something would be changed
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
venv="$(realpath -m "${ALLSPARK_VENV:-.venv}")"
mode=(-i)
if [ "${1:-}" = --check ]; then mode=(--dry-run --Werror); shift; fi
if [ ! -x "$venv/bin/clang-format" ]; then
  echo "format.sh: $venv has no clang-format (the dev extra brings it); nothing is done"
  exit 0
fi
files=("$@")
if [ "$#" -eq 0 ]; then
  if [ "${mode[0]}" = -i ]; then "$venv/bin/ruff" check --fix --quiet . || true; fi
  mapfile -t files < <(find csrc tests examples -type f \( -name '*.h' -o -name '*.cc' -o -name '*.inl' \) 2>/dev/null | sort)
fi
if [ "${#files[@]}" -gt 0 ]; then "$venv/bin/clang-format" "${mode[@]}" "${files[@]}"; fi
