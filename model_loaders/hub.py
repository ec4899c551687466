"""Finds the directory of a model: a local one, or a download through the hub's own client."""

from __future__ import annotations

import importlib
import os
import re
from collections.abc import Callable
from pathlib import Path

from .companion_files import CODE, ENDINGS
from .errors import CheckpointNotFoundError, ModelSerializerException

_METADATA = tuple(f"*{ending}" for ending in ENDINGS)
# In order of preference; the second is downloaded only if there are no files of the first.
_WEIGHTS = ("*.safetensors", "*.bin")
_WEIGHT_FILES = (".safetensors", ".bin", ".pt", ".pth", ".ckpt")
_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")


def local_directory(name_or_path: str, fetch: Callable[[str], Path]) -> Path:
    """``name_or_path`` if it is a directory; the directory of a GGUF file; otherwise the result of
    ``fetch`` for the name.

    A name that looks like a path is never used as the name of a model on a hub.
    """
    path = Path(name_or_path).expanduser()
    if path.is_dir():
        return path
    if path.suffix == ".gguf" and (path.is_file() or os.path.lexists(path.parent)):
        return path.parent
    if os.path.lexists(path):
        if path.is_symlink() and not path.exists():
            kind = "a symbolic link that leads nowhere"
        elif path.suffix in _WEIGHT_FILES:
            kind = "weights without the configuration (config.json) that belongs to them"
        else:
            kind = "not a directory"
        raise CheckpointNotFoundError(
            f"{path}: {kind}; expected the directory of a model or a .gguf file"
        )
    if not _HUB_NAME.fullmatch(name_or_path) or name_or_path.startswith("."):
        kind = "file" if str(name_or_path).endswith(".gguf") else "directory"
        raise CheckpointNotFoundError(f"{name_or_path}: no such {kind}")
    return fetch(name_or_path)


def download(
    client: str,
    name: str,
    revision: str | None = None,
    cache_dir: str | None = None,
    with_code: bool = False,
) -> Path:
    """The directory of a model of the hub whose package is ``client``, which downloads it."""
    try:
        fetch = importlib.import_module(client).snapshot_download
    except (ImportError, AttributeError) as error:
        raise ModelSerializerException(
            f"{name}: no such directory, and downloading needs the package {client!r} "
            f"(docs/quick_start.md#installing): {error}"
        ) from error
    metadata = (*_METADATA, CODE) if with_code else _METADATA

    def fetched(weights: str) -> Path:
        patterns = [*metadata, weights]
        return Path(fetch(name, revision=revision, cache_dir=cache_dir, allow_patterns=patterns))

    try:
        directory = fetched(_WEIGHTS[0])
        return directory if any(directory.glob(_WEIGHTS[0])) else fetched(_WEIGHTS[1])
    except Exception as error:  # each client has its own: offline, not found, not allowed
        said, cause = str(error), str(error.__cause__ or "")
        # huggingface_hub before version 1 says only in the cause what the server answered.
        reason = said if cause in said else f"{said} ({cause})"
        raise CheckpointNotFoundError(
            f"{name}: no such directory, and the download through {client} failed: {reason}"
        ) from error
