#!/usr/bin/env bash
# From a fresh clone to streamed text: sets everything up, then runs a model.
#
# usage: scripts/quickstart.sh [MODEL_DIR] [PROMPT]
#   MODEL_DIR  a folder in Hugging Face layout; the default is the embedded demo model
#   PROMPT     what to ask; without one, a few questions that show what the model knows
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
model="$(realpath -m "${1:-$root/examples/demo_model}")"
prompts=("${@:2:1}")
if [ "$#" -lt 2 ]; then
  prompts=("What is a ResultQueue?" "What is 12+35?" "What is continuous batching?")
fi
if [ ! -f "$model/config.json" ]; then
  echo "quickstart.sh: $model is no model folder: it has no config.json" >&2
  exit 2
fi
set --
. "$root/scripts/setup.sh"
for prompt in "${prompts[@]}"; do
  "$venv/bin/python" examples/python/quickstart.py "$model" "$prompt"
done
