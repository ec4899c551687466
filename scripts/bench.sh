#!/usr/bin/env bash
# Builds and runs the micro-benchmarks of csrc/bench; results as JSON under build/bench-results.
#
# usage: scripts/bench.sh [--filter REGEX] [NAME...]     NAME: a benchmark without its _bench, default all
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
filter="."
if [ "${1:-}" = --filter ]; then filter="$2"; shift 2; fi
names=("$@")
if [ "$#" -eq 0 ]; then
  shopt -s nullglob
  for source in csrc/bench/*_bench.cc; do names+=("$(basename "$source" _bench.cc)"); done
fi
if [ "${#names[@]}" -eq 0 ]; then echo "bench.sh: csrc/bench has no benchmarks"; exit 0; fi
if ! echo '#include <benchmark/benchmark.h>' | c++ -E -x c++ - >/dev/null 2>&1; then
  echo "bench.sh: there is no benchmark/benchmark.h (Debian: libbenchmark-dev); scripts/setup.sh --test installs it" >&2
  exit 1
fi
cmake --preset release -DALLSPARK_BENCH=ON >/dev/null
cmake --build build/release --parallel "$(nproc)" --target "${names[@]/%/_bench}"
mkdir -p build/bench-results
for name in "${names[@]}"; do
  "build/release/${name}_bench" --benchmark_filter="$filter" --benchmark_out_format=json \
    --benchmark_out="build/bench-results/$name.json"
done
