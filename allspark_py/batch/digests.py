"""Digests of models and adapters, by which a resumed run knows them again."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from allspark.model_loader.companion_files import ENDINGS, named_templates
from allspark.model_loader.gguf import read_gguf

if TYPE_CHECKING:
    from allspark.model_loader import LLM

# Files of a model's folder on which outputs can depend.
_SUFFIXES = {
    *ENDINGS, ".asgraph", ".asparam", ".bin", ".gguf", ".pt", ".pth", ".py", ".safetensors",
}  # fmt: skip
# Of a large file so many pieces are read: two models of the same sizes differ everywhere.
_NUM_PIECES = 32
_PIECE_BYTES = 64 << 10


def model_digest(loader: LLM) -> str:
    """Of the files that a loader has opened."""
    return _digest(model_files(loader))


def model_files(loader: LLM) -> list[Path]:
    """The files that a loader has opened, sorted."""
    path = Path(loader.pretrain_model_name_or_path).expanduser()
    own = getattr(loader, "files", None)
    if path.suffix == ".gguf":
        return read_gguf(path).paths
    # Files of other models may lie beside those of a native model.
    return sorted(own if own is not None else _files_of(loader.directory))


def folder_digest(folder: Path) -> str:
    """Of the files of a checkpoint or an adapter."""
    if folder.is_file():
        return _digest([folder])
    return _digest(_files_of(folder))


def _files_of(folder: Path) -> list[Path]:
    paths = (*folder.iterdir(), *named_templates(folder))
    return [path for path in paths if path.suffix in _SUFFIXES and path.is_file()]


def _digest(files: Iterable[Path]) -> str:
    digest = hashlib.sha256()
    for path in sorted(file for file in files if file.is_file()):
        size = path.stat().st_size
        digest.update(f"{path.name}\n{size}\n".encode())
        with path.open("rb") as file:
            if size <= _NUM_PIECES * _PIECE_BYTES:
                digest.update(file.read())
                continue
            for index in range(_NUM_PIECES):
                file.seek((size - _PIECE_BYTES) * index // (_NUM_PIECES - 1))
                digest.update(file.read(_PIECE_BYTES))
    return digest.hexdigest()[:32]
