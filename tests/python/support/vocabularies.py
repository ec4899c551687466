"""Tokenizers for tests: the repository's small ones, and real ones of the shared data."""

from __future__ import annotations

from pathlib import Path

from support.checkpoints import shared_data

DATA = Path(__file__).resolve().parents[2] / "data"

# tests/data/make_tokenizers.py describes them.
SMALL = ("byte_level", "unigram", "sentencepiece", "characters")


def tokenizer_directory(name: str) -> Path:
    """The directory of a tokenizer; a tokenizer of missing shared data skips the test, visibly."""
    if name in SMALL:
        return DATA / "tokenizers" / name
    folder = "checkpoints" if name == "stories260K" else "tokenizers"
    return shared_data() / folder / name


def qwen_tokenizer():
    """Qwen2.5's tokens, with a BOS that its model has not."""
    import transformers

    path = tokenizer_directory("qwen2.5") / "tokenizer.json"
    return transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(path), bos_token="<|endoftext|>", eos_token="<|im_end|>"
    )
