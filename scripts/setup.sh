#!/usr/bin/env bash
# Makes a bare Debian or Ubuntu machine ready: system packages, .venv, the installed package. Each
# part is skipped if nothing has changed since it last ran. The other scripts source this one for
# $venv and PATH.
#
# usage: scripts/setup.sh [--test] [--native] [--slow] [--no-package]
#   --test  also what scripts/test.sh needs: GoogleTest, clang, the dev extra, torch (the parity tests
#           compare with it)
#   --native  also what the slow C++ builds need: clang's sanitizers, compiler and emulator for Arm
#           programs
#   --slow  also what the slow tests need: peft, modelscope, Chromium with selenium, tmux, and the
#           programs that they compare with (scripts/oracles.sh)
#   --no-package  leaves the package itself to a later call of install_package
# ALLSPARK_VENV: another place for the virtual environment.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

want_test=0 want_native=0 want_slow=0 want_package=1
for arg in "$@"; do
  case "$arg" in
    --test) want_test=1 ;;
    --native) want_test=1 want_native=1 ;;
    --slow) want_test=1 want_native=1 want_slow=1 ;;
    --no-package) want_package=0 ;;
    *) echo "setup.sh: unknown argument $arg (see the head of the script)" >&2; exit 2 ;;
  esac
done
venv="$(realpath -m "${ALLSPARK_VENV:-.venv}")"
# The CPU build, torch==V+cpu, where pip's index has it. The public index has none. There the default
# build is taken, which on x86-64 brings gigabytes of CUDA packages. PIP_EXTRA_INDEX_URL, or pip's
# configuration, may name an index of CPU builds.
torch_version=2.13.0
peft_version=0.21.2
modelscope_version=1.40.2
selenium_version=4.51.0

aarch64_root="$PWD/build/aarch64-root"

say() { printf '\n== %s\n' "$*"; }

has_header() { echo "#include <$1>" | c++ -E -x c++ - >/dev/null 2>&1; }

has_clang() { command -v clang++-14 >/dev/null || command -v clang++ >/dev/null; }

has_clang_sanitizers() {
  local resources
  resources="$("$(command -v clang++-14 || command -v clang++)" -print-resource-dir 2>/dev/null)" || return 1
  compgen -G "$resources/lib/*/libclang_rt.tsan*" >/dev/null
}

# The packages whose files are missing, one per line. It looks for files, not for packages, so
# software that was installed in another way also counts.
missing_packages() {
  command -v c++ >/dev/null || echo g++
  command -v cmake >/dev/null || echo cmake
  command -v ninja >/dev/null || echo ninja-build
  command -v protoc >/dev/null || echo protobuf-compiler
  command -v python3 >/dev/null || echo python3
  python3 -c 'import venv, ensurepip' 2>/dev/null || echo python3-venv
  has_header google/protobuf/message_lite.h || echo libprotobuf-dev
  has_header xxhash.h || echo libxxhash-dev
  python_include="$(python3 -c 'import sysconfig; print(sysconfig.get_path("include"))' 2>/dev/null || true)"
  [ -n "$python_include" ] && [ -f "$python_include/Python.h" ] || echo python3-dev
  if [ "$want_test" = 1 ]; then
    has_header gtest/gtest.h || echo libgtest-dev
    # For emulated AVX-512 kernels, on processors without AVX-512.
    has_header simde/x86/avx512.h || echo libsimde-dev
    has_header benchmark/benchmark.h || echo libbenchmark-dev
  fi
  if [ "$want_native" = 1 ] && ! has_clang_sanitizers; then
    # Another clang that is there does not find those of clang 14.
    command -v clang++-14 >/dev/null || echo clang-14
    echo libclang-rt-14-dev
  elif [ "$want_test" = 1 ] && ! has_clang; then
    echo clang-14
  fi
  # For a test of the server whose network fails.
  if [ "$want_slow" = 1 ] && ! command -v ip >/dev/null; then echo iproute2; fi
}

install_packages() {
  local missing
  mapfile -t missing < <(missing_packages)
  [ "${#missing[@]}" -gt 0 ] || return 0
  say "system packages: ${missing[*]}"
  as_root apt-get update -qq  # for apt-cache
  # Releases without clang 14 have a newer default.
  if ! apt-cache show clang-14 >/dev/null 2>&1; then
    missing=("${missing[@]/#clang-14/clang}")
    missing=("${missing[@]/#libclang-rt-14-dev/libclang-rt-dev}")
  fi
  apt_install "${missing[@]}"
}

apt_install() {  # waits for the machine's own updates, which hold the lock for minutes
  as_root apt-get update -qq || return 1
  as_root env DEBIAN_FRONTEND=noninteractive apt-get -o DPkg::Lock::Timeout=600 install -y -qq \
    --no-install-recommends "$@"
}

as_root() {
  if ! command -v apt-get >/dev/null; then
    echo "setup.sh: there is no apt-get here for: $*" >&2
    return 1
  fi
  if [ "$(id -u)" = 0 ]; then
    "$@"
  elif command -v sudo >/dev/null; then
    sudo "$@"
  else
    echo "setup.sh: run as root, or install sudo, for: $*" >&2
    return 1
  fi
}

# For the preset aarch64: compiler, emulator and the libraries of that architecture. The libraries
# are unpacked into build/ and not installed, because beside this machine's own packages they would
# need the same versions.
has_aarch64() {
  command -v aarch64-linux-gnu-g++ >/dev/null && command -v qemu-aarch64 >/dev/null && [ -f "$aarch64_root/complete" ]
}

install_aarch64() {
  local missing=(g++-aarch64-linux-gnu qemu-user) state="$aarch64_root/apt" package
  say "cross build for aarch64: ${missing[*]}, libraries"
  apt_install "${missing[@]}" || return 1
  mkdir -p "$state/lists/partial" "$state/archives/partial"
  printf '%s\n' "Dir::State::lists \"$state/lists\"; Dir::State::status \"/dev/null\"; Dir::Cache \"$state\";" \
    'APT::Architecture "arm64"; APT::Architectures "arm64"; APT::Sandbox::User "root";' >"$state/apt.conf"
  local -x APT_CONFIG="$state/apt.conf"
  apt-get update -qq || return 1
  for package in libprotobuf-dev libgtest-dev libxxhash-dev \
    "$(apt-cache depends libprotobuf-dev | sed -n 's/^ *Depends: \(libprotobuf-lite.*\)/\1/p')"; do
    (cd "$state" && apt-get download -qq "$package") || return 1
    dpkg-deb -x "$state/${package}"_*.deb "$aarch64_root" || return 1
  done
  touch "$aarch64_root/complete"
}

# One hash of all files under the given paths, names included.
hash_of() {
  find "$@" -type f ! -name '*.pyc' ! -name '*.so' -print0 | sort -z | xargs -0 sha256sum | sha256sum
}

# A stamp holds the hash of the inputs with which a step last succeeded.
is_done() { [ -f "$venv/.allspark-$1" ] && [ "$(cat "$venv/.allspark-$1")" = "$2" ]; }
set_done() { printf '%s\n' "$2" >"$venv/.allspark-$1"; }

pip() { "$venv/bin/python" -m pip "$@"; }

# CMakePresets.json needs 3.25.
has_recent_cmake() {
  local version
  version="$(cmake --version 2>/dev/null | sed -n 's/^cmake version \([0-9.]*\).*/\1/p')"
  [ "$(printf '%s\n' 3.25 "${version:-0}" | sort -V | head -n 1)" = 3.25 ]
}

make_venv() {
  # An environment whose making was interrupted has a python, but no pip.
  if ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
    python3 -c 'import sys; sys.exit(sys.version_info < (3, 10))' || {
      echo "setup.sh: $(python3 --version) is too old; 3.10 or later is needed" >&2
      exit 1
    }
    say "virtual environment in $venv"
    rm -f "$venv"/.allspark-*
    python3 -m venv "$venv"
  fi
  local tools=("setuptools>=68" wheel "pybind11>=3.0") hash
  hash="$(hash_of pyproject.toml scripts/setup.sh)"
  if ! has_recent_cmake; then
    tools+=("cmake>=3.25")
    PATH="$venv/bin:$PATH"
  fi
  is_done tools "$hash" && return 0
  say "build tools"
  pip install -q "${tools[@]}"
  set_done tools "$hash"
}

install_package() {
  local hash dev_hash extras=""
  hash="$(hash_of pyproject.toml setup.py VERSION CMakeLists.txt cmake csrc allspark_py model_loaders)"
  dev_hash="$(hash_of pyproject.toml)"
  if [ "$want_test" = 1 ] && ! is_done dev "$dev_hash"; then extras="[dev]"; fi
  if [ -z "$extras" ] && is_done package "$hash"; then return 0; fi
  say "pip install .$extras"
  pip install -q --no-build-isolation ".$extras" || return 1
  set_done package "$hash"
  if [ -n "$extras" ]; then set_done dev "$dev_hash"; fi
}

install_torch() {
  is_done torch "$torch_version" && return 0
  if ! "$venv/bin/python" -c 'import torch' 2>/dev/null; then
    say "torch $torch_version, for the tests only"
    if ! pip install -q "torch==$torch_version+cpu" 2>/dev/null; then
      echo "setup.sh: pip finds no torch==$torch_version+cpu, so it takes the default build, which may bring gigabytes of CUDA packages (PIP_EXTRA_INDEX_URL may name an index of CPU builds)" >&2
      pip install -q "torch==$torch_version"
    fi
  fi
  set_done torch "$torch_version"
}

install_pinned() {  # NAME VERSION WHY
  is_done "$1" "$2" && return 0
  say "$1 $2, $3"
  pip install -q "$1==$2" || return 1
  set_done "$1" "$2"
}

install_browser() {
  if ! command -v chromium >/dev/null || ! command -v chromedriver >/dev/null; then
    say "Chromium, in which the page of the server is tested"
    apt_install chromium chromium-driver || return 1
  fi
  install_pinned selenium "$selenium_version" "which steers Chromium"
}

install_tmux() {
  command -v tmux >/dev/null && return 0
  say "tmux, in which the command chat is tested"
  apt_install tmux
}

optional() {  # WHAT COMMAND...: tests do without what the command cannot install
  local what="$1"
  shift
  "$@" || echo "setup.sh: WARNING: no $what here; its tests will be skipped" >&2
}

export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore
install_packages
if [ "$want_native" = 1 ] && [ "$(uname -m)" = x86_64 ] && ! has_aarch64; then
  install_aarch64 || echo "setup.sh: WARNING: no cross build for aarch64 here" >&2
fi
make_venv
if [ "$want_test" = 1 ]; then install_torch; fi
if [ "$want_slow" = 1 ]; then
  optional peft install_pinned peft "$peft_version" "which slow tests compare with"
  optional modelscope install_pinned modelscope "$modelscope_version" \
    "whose downloads are tested against a local server"
  optional Chromium install_browser
  optional tmux install_tmux
  scripts/oracles.sh
fi
if [ "$want_package" = 1 ]; then install_package; fi
