"""`vocab` of a generation config: the tokenizer that guided decoding needs.

A reference config holds a Vocabulary, which knows the loader's tokenizer. Of any other mapping from
tokens to ids a tokenizer is made that writes the same bytes for each.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

# Tokens that stand for no text, as checkpoints write them; barring another that looks like one
# costs nothing, since its characters are tokens too.
_SPECIAL = re.compile(r"<[|｜].*[|｜]>|</?[a-z_]+>|\[/?[A-Za-z_]\w*\]", re.DOTALL)


class Vocabulary(Mapping[str, int]):
    """The vocabulary of a loader's tokenizer, which is loaded when somebody looks."""

    def __init__(self, loader: Any):
        self._loader = loader

    def get_tokenizer(self) -> Any:
        return self._loader.get_tokenizer()

    def _tokens(self) -> dict[str, int]:
        return self.get_tokenizer().get_vocab()

    def __getitem__(self, token: str) -> int:
        return self._tokens()[token]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tokens())

    def __len__(self) -> int:
        return len(self._tokens())

    def __deepcopy__(self, memo: Any) -> Vocabulary:
        return self  # configs are copied, loaders are not

    def __repr__(self) -> str:  # scripts print their configs
        return f"Vocabulary({self._loader.pretrain_model_name!r})"


class PlainVocabulary:
    """Tokens and ids, of which tokenizers are made: one for each token that ends requests."""

    def __init__(self, tokens: Mapping[str, int]):
        self.tokens = tokens
        self._tokenizers: dict[int, Any] = {}

    def ended_by(self, eos_token_id: int) -> Any:
        """The tokenizer for requests that this token ends."""
        if eos_token_id not in self._tokenizers:
            self._tokenizers[eos_token_id] = make_tokenizer(self.tokens, eos_token_id)
        return self._tokenizers[eos_token_id]


def make_tokenizer(tokens: Mapping[str, int], eos_token_id: int) -> Any:
    """A transformers tokenizer that decodes each token to its bytes, and divides texts nearly as
    the model's own does, which has rules that the vocabulary does not show.

    Raises:
        ValueError: the tokens are of no kind that says how bytes are written, or none ends a text.
    """
    import tokenizers
    import transformers

    special = [
        token
        for token, token_id in tokens.items()
        if token_id == eos_token_id or _SPECIAL.fullmatch(token)
    ]
    if not special:
        raise ValueError(
            f"vocab has no token that ends a text: eos_token_id is {eos_token_id}, and no token "
            "looks like <|end|> or </s>"
        )
    tokenizer = tokenizers.Tokenizer.from_str(json.dumps(_description(tokens)))
    if "▁" not in tokens:  # What is not in the letters of bytes is written as it is.
        letters = set(tokenizers.pre_tokenizers.ByteLevel.alphabet())
        tokenizer.add_tokens([t for t in tokens.keys() - special if not letters.issuperset(t)])
    tokenizer.add_special_tokens(special)
    # Which of them ends a request is its config's to say; the grammar compiler wants one.
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=special[0])


def _description(tokens: Mapping[str, int]) -> dict[str, Any]:
    """What tokenizer.json would say of such tokens."""
    model: dict[str, Any] = {"type": "BPE", "vocab": dict(tokens), "merges": _merges(tokens)}
    fields: dict[str, Any] = {"version": "1.0", "added_tokens": [], "model": model}
    if "▁" in tokens:  # SentencePiece
        model["byte_fallback"] = "<0x00>" in tokens
        fields["normalizer"] = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
        back = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
        steps = [back, {"type": "ByteFallback"}, {"type": "Fuse"}]
        fields["decoder"] = {"type": "Sequence", "decoders": steps}
    elif "Ġ" in tokens:  # Bytes as letters, of which this one is the space.
        byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
        fields["pre_tokenizer"] = {**byte_level, "use_regex": False}
        fields["decoder"] = byte_level
    else:
        raise ValueError(
            f"vocab has {len(tokens)} tokens, neither '▁' (SentencePiece) nor 'Ġ' (bytes as "
            "letters) among them; give the request the loader as model"
        )
    return fields


def _merges(tokens: Mapping[str, int]) -> list[tuple[str, str]]:
    """Pairs of tokens that make a token, in the order in which byte pair encoding learns them."""
    pairs = [
        (token_id, tokens[token[:i]], tokens[token[i:]], token[:i], token[i:])
        for token, token_id in tokens.items()
        for i in range(1, len(token))
        if token[:i] in tokens and token[i:] in tokens
    ]
    return [pair[3:] for pair in sorted(pairs)]
