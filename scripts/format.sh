#!/usr/bin/env bash
# Formats the C++ and Python sources with the versions that pyproject.toml pins.
#
# usage: scripts/format.sh [--check] [FILE...]
#   --check  changes nothing; fails where something would be changed
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
  mapfile -t files < <(find csrc tests examples -type f \( -name '*.h' -o -name '*.cc' -o -name '*.inl' \) 2>/dev/null | sort)
fi
if [ "${#files[@]}" -gt 0 ]; then "$venv/bin/clang-format" "${mode[@]}" "${files[@]}"; fi
