"""Loads the tokenizer of a model in the fastest way.

transformers' AutoTokenizer imports torch if it is installed, which takes seconds; its tokenizer
classes do not. So the class is chosen here. ``tokenizer.json`` needs only the general class. A
SentencePiece ``tokenizer.model`` needs the class named in ``tokenizer_config.json``. AutoTokenizer
loads everything else. Code that comes with a checkpoint is run only if the caller trusts it.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from pathlib import Path
from typing import Any

from .companion_files import ENDINGS, TOKENIZER_FILES, named_templates, tokenizer_settings
from .errors import CheckpointNotFoundError, ModelSerializerException
from .files import MAX_COMPANION_BYTES, check_file, check_no_pointer, read_file
from .tokenizer_expressions import backend_expressions, check_expressions, expressions_in

# Classes of transformers that convert a SentencePiece model without torch. Since version 5 both are
# the same; before it the first is not made of `tokenizers`, which guided decoding needs.
_SENTENCEPIECE_CLASSES = ("LlamaTokenizer", "LlamaTokenizerFast")


def is_refusal(error: BaseException) -> bool:
    """Whether the package 'tokenizers' raised the error to refuse its input: a bare Exception, or
    the exception of a panic in its Rust code, which is not derived from Exception.
    """
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


def has_tokenizer(directory: Path) -> bool:
    return any((directory / name).exists() for name in TOKENIZER_FILES)


def needs_code(directory: Path) -> bool:
    """Whether the tokenizer is code that comes with the checkpoint."""
    config = tokenizer_settings(directory)
    return "auto_map" in config and _known_class(directory, config) is None


def load_tokenizer(
    directory: Path, padding_side: str = "left", trust_remote_code: bool = False
) -> Any:
    """A transformers tokenizer. Errors name the directory."""
    if padding_side not in ("left", "right"):
        raise ValueError(f"padding_side is {padding_side!r}, expected 'left' or 'right'")
    if not has_tokenizer(directory):
        raise CheckpointNotFoundError(
            f"{directory}: holds no tokenizer; looked for {', '.join(TOKENIZER_FILES)}"
        )
    config = tokenizer_settings(directory)
    for path in (*directory.iterdir(), *named_templates(directory)):
        if path.suffix in ENDINGS and not path.is_dir():
            check_file(path, MAX_COMPANION_BYTES)
    files = (path for path in directory.glob("*.json") if not path.is_dir())
    tried = expressions_in((read_file(path, MAX_COMPANION_BYTES) for path in files), directory)
    check_expressions(tried, directory)
    loader = _tokenizer_class(directory, config, trust_remote_code)
    options: dict[str, Any] = {"padding_side": padding_side, "local_files_only": True}
    if not config and loader.__name__ in _SENTENCEPIECE_CLASSES:
        options["add_bos_token"] = True  # As Meta's models were trained.
    if loader.__name__ == "AutoTokenizer":
        options["trust_remote_code"] = trust_remote_code  # Without an answer it asks on stdin.
    try:
        tokenizer = _read(loader, directory, options)
    except BaseException as error:
        if not is_refusal(error):
            raise
        for name in TOKENIZER_FILES:
            if (directory / name).is_file():
                check_no_pointer(directory / name)
        raise ModelSerializerException(
            f"{directory}: the tokenizer cannot be loaded: {error}"
        ) from error
    check_expressions(backend_expressions(tokenizer, directory) - tried, directory)
    return tokenizer


def _read(loader: Any, directory: Path, options: dict[str, Any]) -> Any:
    try:
        return loader.from_pretrained(str(directory), **options)
    except BaseException as error:
        # Of transformers 4; reads the SentencePiece models that the other cannot convert.
        slow = getattr(loader, "slow_tokenizer_class", None)
        if slow is None or not is_refusal(error):
            raise
        return slow.from_pretrained(str(directory), **options)


def import_transformers() -> Any:
    """Imports transformers. Where torch is missing, its first import advises to install it; here
    only the tokenizers are used, which do not need torch."""
    advice = "TRANSFORMERS_NO_ADVISORY_WARNINGS"
    if advice in os.environ or importlib.util.find_spec("torch") is not None:
        return importlib.import_module("transformers")
    os.environ[advice] = "1"
    try:
        return importlib.import_module("transformers")
    finally:
        os.environ.pop(advice, None)


def _tokenizer_class(directory: Path, config: dict[str, Any], trust_remote_code: bool) -> Any:
    try:
        transformers = import_transformers()
    except ImportError as error:
        raise ModelSerializerException(
            f"tokenizers need the package 'transformers', which cannot be imported: {error}"
        ) from error
    remote = "auto_map" in config and trust_remote_code
    known = None if remote else _known_class(directory, config)
    return getattr(transformers, known or "AutoTokenizer")


def _known_class(directory: Path, config: dict[str, Any]) -> str | None:
    """The class that reads the files without AutoTokenizer; None if there is none."""
    if (directory / "tokenizer.json").exists():
        return "PreTrainedTokenizerFast"
    if not (directory / "tokenizer.model").exists():
        return None
    # No settings: a checkpoint from Meta.
    own = str(config.get("tokenizer_class")) if config else "LlamaTokenizer"
    return "LlamaTokenizerFast" if own in _SENTENCEPIECE_CLASSES else None
