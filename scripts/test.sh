#!/usr/bin/env bash
# Runs the tests, from a fresh clone on a bare machine: does all the set-up itself
# (scripts/setup.sh), then layers, C++ build, a check by clang, C++ tests, package, lint, Python
# tests. CI runs only this script.
#
# usage: scripts/test.sh [--fast | --slow [tests] [lowest] [clang] [asan] [tsan] [fuzz] [aarch64]]
#   --fast  what takes two minutes after a small change: the C++ unit tests, Python tests without
#           torch
#   --slow  also the slow tests, the promises of docs/promises.md about time and memory, the Python
#           tests with the lowest versions of all dependencies, a build of everything with clang, the
#           C++ tests under ASan+UBSan and TSan and, on x86-64, on an emulated Arm processor, and a
#           quarter of an hour of fuzzing: more than three hours on two cores. With names, only
#           those parts, in the order given; "tests" is the usual tests, the slow ones and the
#           promises.
#           Soaks run for ALLSPARK_SOAK_SECONDS, that of the server for
#           ALLSPARK_SERVER_SOAK_SECONDS (1800)
# Logs and JUnit files are left in build/test-results. The last line is the count of all tests.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
tier="${1:-}"
case "$tier" in
  "" | --fast | --slow) ;;
  *) echo "test.sh: unknown argument $tier (see the head of the script)" >&2; exit 2 ;;
esac
slow_parts=()
for part in "${@:2}"; do
  case "$tier $part" in
    "--slow tests" | "--slow lowest" | "--slow clang" | "--slow asan" | "--slow tsan" | "--slow fuzz" | "--slow aarch64")
      slow_parts+=("$part")
      ;;
    *) echo "test.sh: unknown argument $part (see the head of the script)" >&2; exit 2 ;;
  esac
done
set --
if [ "$tier" = --slow ]; then
  case " ${slow_parts[*]:-tests} " in
    *" tests "*) set -- --slow ;;
    " lowest ") ;;
    *) set -- --native ;;
  esac
fi
# One build directory serves the C++ tests and the package.
export ALLSPARK_BUILD_DIR="$PWD/build/release"
results="$PWD/build/test-results"
rm -rf "$results"
mkdir -p "$results"
jobs="$(nproc)"
failed_steps=()

# step NAME COMMAND...: runs it, and remembers whether it failed; later steps still run.
step() {
  local begin=$SECONDS status=ok
  name="$1"  # the log, and the JUnit file of run_ctest and run_pytest, have this name
  shift
  printf '\n=== %s\n' "$name"
  "$@" 2>&1 | tee "$results/$name.log" || { status=FAILED; failed_steps+=("$name"); }
  printf '%-24s %-6s %4d s\n' "$name" "$status" $((SECONDS - begin)) >>"$results/summary.txt"
  [ "$status" = ok ]
}

build() {  # build PRESET [CMAKE-ARGUMENT...]
  local preset="$1"
  shift
  cmake --preset "$preset" "$@" >"$results/configure-$preset.log" 2>&1 || {
    cat "$results/configure-$preset.log"
    return 1
  }
  cmake --build "build/$preset" --parallel "$jobs" -- -k 0 --quiet
}

run_ctest() {  # run_ctest PRESET LABEL [WRAPPER...]: a process for each test
  local preset="$1" label="$2"
  shift 2
  "$@" ctest --test-dir "build/$preset" -L "^$label\$" -j "$jobs" --output-on-failure --no-tests=error \
    --output-junit "$results/$name.xml" | grep -vE '^ *Start +[0-9]+:|Passed +[0-9.]+ sec$'
}

# Unit tests, many in a process: to start one takes longer than most tests.
run_batches() {  # run_batches PRESET [WRAPPER...], without the tests that $without matches
  local preset="$1"
  shift
  "$venv/bin/python" scripts/run_gtests.py "build/$preset" unit --jobs "$jobs" \
    --without "${without:-^$}" --junit "$results/$name.xml" -- "$@"
}

run_pytest() {  # run_pytest MARKER-EXPRESSION [ARGUMENT...]
  "$venv/bin/python" -m pytest tests/python -q --junitxml "$results/$name.xml" -m "$@"
}

# A process per core. A file's tests stay in one, since they share models and servers.
run_pytest_in_parallel() {  # run_pytest_in_parallel MARKER-EXPRESSION
  run_pytest "$1" --numprocesses "$jobs" --dist loadfile
}

lint() {
  "$venv/bin/ruff" check --output-format concise . && scripts/format.sh --check && types
}

types() {  # of the installed package, because the source folders have other names than the packages
  (cd "$results" && "$venv/bin/python" -m mypy --config-file "$OLDPWD/pyproject.toml" -p allspark)
}

# At most a million runs of a target, or 300 s, from its own seeds, the inputs of earlier faults and
# the corpus of earlier runs. The input of a new fault is saved among the cases, for git.
fuzz_native() {  # fuzz_native build/fuzz/NAME_fuzz
  local target_name corpus seeds cases
  target_name="$(basename "$1" _fuzz)"
  corpus="build/fuzz-corpus/$target_name" seeds="build/fuzz-seeds/$target_name"
  cases="tests/fuzz/cases/$target_name"
  rm -rf "$seeds"
  mkdir -p "$corpus" "$seeds" "$cases"
  ALLSPARK_FUZZ_SEEDS="$seeds" "$1" -runs=1000000 -max_total_time=300 -rss_limit_mb=4096 -timeout=25 \
    -print_final_stats=1 -artifact_prefix="$cases/" "$corpus" "$seeds" "$cases" 2>&1 | grep -vE '^#[0-9]+'
}

fuzz_python() {  # fuzz_python NAME
  "$venv/bin/python" tests/fuzz/run.py "$1"
}

fuzz_targets() {  # one per core at a time; each counts as a test
  local targets
  mapfile -t targets < <("$venv/bin/python" tests/fuzz/run.py --list | sed 's/^/fuzz_python /'
    printf 'fuzz_native %s\n' build/fuzz/*_fuzz)
  export venv
  export -f fuzz_native fuzz_python
  printf '%s\n' "${targets[@]}" | xargs -P "$jobs" -I '{}' bash -o pipefail -c '{}' || return 1
  { printf '<testsuite>'
    printf '<testcase name="%s"/>' "${targets[@]##*[ /]}"
    printf '</testsuite>\n'; } >"$results/$name.xml"
}

# Checks which kernel tables some processors get: those they support, and no others.
dispatch_aarch64() {
  local cpu tables found
  while read -r cpu tables; do
    found="$(QEMU_CPU="$cpu" qemu-aarch64 -L /usr/aarch64-linux-gnu build/aarch64/test_kernels \
      --gtest_filter='Tables/RowwiseTest.RmsNorm*' | sed -n 's,.* OK .*/\([a-z0-9_]*\) .*,\1,p' | sort -u | tr '\n' ' ')"
    echo "$cpu: $found"
    [ "$found" = "$tables reference " ] || return 1
  done <<<'cortex-a57 neon
cortex-a76 neon neon_dotprod
max neon neon_bf16 neon_dotprod neon_i8mm'
}

# Tests that take an emulator an hour and do not depend on the instruction set: the reference
# kernels' own tests, and tests that hardly use kernels.
emulated_without='reference|DraftModel|SoakTest|MemoryFault|FuzzReplay|LargeNumerics|AllocationTest|^(SchedulerScripts|TokenChoice|ObservationTest)\.'
emulated_without+='|^(ModelWriter|QuantizedModel|ModelReaderDamage)\.'

aarch64() {
  if ! has_aarch64; then
    local reason="there is no cross compiler, no emulator, or no library for it"
    echo "SKIPPED: aarch64: $reason" | tee -a "$results/summary.txt"
    printf '<testsuite><testcase name="ctest-aarch64"><skipped message="%s"/></testcase></testsuite>\n' \
      "$reason" >"$results/ctest-aarch64.xml"
    return 0
  fi
  step build-aarch64 build aarch64 || return 0
  step isa-symbols-aarch64 "$venv/bin/python" scripts/check_isa_symbols.py build/aarch64 || true
  step dispatch-aarch64 dispatch_aarch64 || true
  without="$emulated_without" step ctest-aarch64 run_batches aarch64 || true
}

asan() {
  step build-asan build asan || return 0
  step ctest-asan run_batches asan || true
  step ctest-asan-slow run_ctest asan slow env "ALLSPARK_SOAK_SECONDS=${ALLSPARK_SOAK_SECONDS:-20}" || true
}

clangxx() { command -v clang++-14 || command -v clang++; }

clang() {
  step build-clang build clang "-DCMAKE_CXX_COMPILER=$(clangxx)" -DALLSPARK_BENCH=ON || return 0
  step isa-symbols-clang "$venv/bin/python" scripts/check_isa_symbols.py build/clang || true
  step ctest-clang run_batches clang || true
}

tsan() {
  step build-tsan build tsan "-DCMAKE_CXX_COMPILER=$(clangxx)" || return 0
  # ThreadSanitizer's shadow memory has fixed addresses, which randomised mappings can hit.
  step ctest-tsan run_batches tsan setarch -R || true
  step ctest-tsan-slow run_ctest tsan slow setarch -R || true
}

fuzz() {
  step build-fuzz build fuzz "-DCMAKE_CXX_COMPILER=$(clangxx)" || return 0
  step fuzz fuzz_targets || true
}

tests() {
  usual_tests
  step ctest-slow run_ctest release slow || true
  ALLSPARK_SERVER_SOAK_SECONDS="${ALLSPARK_SERVER_SOAK_SECONDS:-1800}" \
    step pytest-slow run_pytest slow || true
  step promises "$venv/bin/python" benchmarks/promises.py || true
}

lowest() {
  step lowest-versions scripts/lowest.sh || return 0
  step pytest-lowest run_pytest_lowest || true
}

run_pytest_lowest() {  # `tests` runs what needs torch
  local venv=build/lowest/venv
  run_pytest_in_parallel "not slow and not torch"
}

usual_tests() {
  step layers "$venv/bin/python" scripts/check_layers.py || true
  if step build build release -DALLSPARK_BENCH=ON; then  # so that benchmarks keep compiling
    step isa-symbols "$venv/bin/python" scripts/check_isa_symbols.py build/release || true
    if [ "$tier" != --fast ]; then
      step clang-syntax "$venv/bin/python" scripts/check_clang.py build/release \
        "$(clangxx)" -Wthread-safety || true
      step arm-syntax "$venv/bin/python" scripts/check_arm_kernels.py "$(clangxx)" || true
    fi
  fi
  step ctest run_batches release || true
  if step package install_package; then
    step lint lint || true  # the dev extra brings the tools
    if [ "$tier" = --fast ]; then
      step pytest-fast run_pytest_in_parallel "not slow and not torch" || true
    else
      step pytest run_pytest_in_parallel "not slow" || true
      step model-table "$venv/bin/python" scripts/model_table.py --check "$results/pytest.xml" || true
    fi
  fi
}

# shellcheck source=setup.sh
. scripts/setup.sh --test --no-package "$@"
parts=("${slow_parts[@]}")  # sum_results.py expects the results of these
case "$tier" in
  "") usual_tests; parts=(default) ;;
  --fast) usual_tests; parts=(fast) ;;
esac
if [ "$tier" = --slow ] && [ ${#parts[@]} -eq 0 ]; then
  parts=(tests lowest clang asan tsan fuzz)
  if [ "$(uname -m)" = x86_64 ]; then parts+=(aarch64); fi
fi
if [ "$tier" = --slow ]; then
  for part in "${parts[@]}"; do "$part"; done
fi

printf '\n=== summary\n'
cat "$results/summary.txt"
"$venv/bin/python" scripts/sum_results.py "$results" "${failed_steps[@]}" --of "${parts[@]}"
