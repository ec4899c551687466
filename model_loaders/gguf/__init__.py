"""GGUF, the format of llama.cpp: one or several files with weights, configuration and tokenizer.

Their contents get transformers' names, so that the declarations of architectures can read them.
Blocks of integers in a format that the engine has, too, are kept (docs/models.md).
"""

from __future__ import annotations

from pathlib import Path

from ..checkpoint import Checkpoint
from ..config import ModelConfig
from ..errors import CheckpointNotFoundError
from .families import FAMILIES, Source, find_family, model_config, model_tensors
from .file import GgufFile, is_first, read_gguf
from .tokenizer import tokenizer_files

__all__ = ["FAMILIES", "find_gguf", "open_gguf", "read_gguf", "tokenizer_files"]

_OTHERS = ("*.safetensors", "*.bin", "*.pth")


def find_gguf(path: Path) -> Path | None:
    """``path`` if it is a GGUF file; the only GGUF model in a directory that has no weights in
    another form; else None.
    """
    if path.suffix == ".gguf" and not path.is_dir():
        return path
    files = sorted(file for file in path.glob("*.gguf") if is_first(file))
    if not files or any(any(path.glob(pattern)) for pattern in _OTHERS):
        return None
    if len(files) > 1:
        names = ", ".join(file.name for file in files)
        raise CheckpointNotFoundError(f"{path}: holds several models ({names}); name one of them")
    return files[0]


def open_gguf(file: GgufFile) -> tuple[ModelConfig, Checkpoint]:
    """Configuration and tensors under transformers' names. Errors name the file and the tensor or
    key.
    """
    source = Source(file)
    family = find_family(source)
    config = model_config(family, source)
    tensors = model_tensors(family, source, config)
    return config, Checkpoint(file.paths[0].with_suffix(""), file.paths, tensors, "gguf")
