"""What belongs to a model beside its weights: the files that are downloaded, read and copied with
it. Code is downloaded and copied, as it is run, only for those who trust it: a Python file that
lies beside a program can be imported by its name.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .config import read_json_object
from .files import check_link

# Ends of the names of all files that loaders and tokenizers may read, weights apart.
ENDINGS = (".json", ".jinja", ".model", ".tiktoken", ".txt")
CODE = "*.py"

# The files of a tokenizer by their names.
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "spiece.model",
    "chat_template.jinja",
    "chat_template.json",
)
# A tokenizer that is code names its vocabulary as it likes.
_VOCABULARIES = ("*.tiktoken", "*.model")
_TEMPLATES = "additional_chat_templates"


def named_templates(directory: Path) -> list[Path]:
    """The chat templates beside the default one."""
    folder = directory / _TEMPLATES
    if not folder.is_dir():
        return []
    check_link(folder)
    return sorted(folder.glob("*.jinja"))


def tokenizer_settings(directory: Path) -> dict[str, Any]:
    path = directory / "tokenizer_config.json"
    return read_json_object(path, "a tokenizer's settings") if path.exists() else {}


def companion_names(directory: Path, config: Mapping[str, Any], with_code: bool) -> list[str]:
    """The names, relative to the ``directory`` of a model with this ``config``, of the files that a
    copy of the model needs and that may be there. ``with_code``: also Python files, if the model
    brings code.
    """
    names = ["config.json", "generation_config.json", *TOKENIZER_FILES]
    names += (path.relative_to(directory).as_posix() for path in named_templates(directory))
    if "auto_map" in tokenizer_settings(directory) or "auto_map" in config:
        patterns = (*_VOCABULARIES, CODE) if with_code else _VOCABULARIES
        found = (path for pattern in patterns for path in sorted(directory.glob(pattern)))
        names += (path.name for path in found if not path.is_dir())
    return list(dict.fromkeys(names))
