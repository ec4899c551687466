"""The parsers of the loaders and the SDK as fuzz targets: valid seeds, how they are changed, and
which outcomes are allowed.

A parser may accept an input or refuse it with an error of its documented class. Any other exception
is a fault, and so is an input that takes too long or too much memory (run.py).
"""

from __future__ import annotations

import files
import settings
from mutations import mutated_bytes, mutated_json
from target import LOADERS, Target, errors, remove_scratch

__all__ = ["LOADERS", "TARGETS", "Target", "errors", "remove_scratch"]


TARGETS = {
    target.name: target
    for target in (
        Target("safetensors", files.safetensors_seeds, files.run_safetensors,
               files.mutated_safetensors, LOADERS),
        Target("gguf", files.gguf_seeds, files.run_gguf,
               lambda rng, seeds: mutated_bytes(rng, seeds, files.GGUF_TOKENS), LOADERS),
        Target("gguf_tokenizer", settings.gguf_tokenizer_seeds, settings.run_gguf_tokenizer,
               mutated_json, LOADERS),
        Target("pickle", files.pickle_seeds, files.run_pickle, files.mutated_pickle, LOADERS),
        Target("config", settings.config_seeds, settings.run_config, mutated_json, LOADERS),
        Target("quantization", settings.quantization_seeds, settings.run_quantization,
               mutated_json, LOADERS),
        Target("chat_template", settings.chat_template_seeds, settings.run_chat_template,
               mutated_json, LOADERS),
        Target("guided_format", settings.guided_format_seeds, settings.run_guided_format,
               mutated_json, (ValueError, TypeError)),
    )
}  # fmt: skip
