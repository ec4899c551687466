"""`vocab` of a generation config: the tokenizer that guided decoding needs.

A reference config holds a Vocabulary, which has the loader's tokenizer. For any other mapping from
tokens to ids, a tokenizer is made that decodes each token to the same bytes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

# Special tokens, as checkpoints write them. Masking a normal token that looks like one does no
# harm, since its characters are tokens too.
_SPECIAL = re.compile(r"<[|｜].*[|｜]>|</?[a-z_]+>|\[/?[A-Za-z_]\w*\]", re.DOTALL)


class Vocabulary(Mapping[str, int]):
    """The vocabulary of a loader's tokenizer, loaded at first use."""

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
    """Tokens and ids; makes one tokenizer for each token that ends requests."""

    def __init__(self, tokens: Mapping[str, int]):
        self.tokens = tokens
        self._tokenizers: dict[int, Any] = {}

    def ended_by(self, eos_token_id: int) -> Any:
        """The tokenizer for requests that this token ends."""
        if eos_token_id not in self._tokenizers:
            self._tokenizers[eos_token_id] = make_tokenizer(self.tokens, eos_token_id)
        return self._tokenizers[eos_token_id]


def make_tokenizer(tokens: Mapping[str, int], eos_token_id: int) -> Any:
    """A transformers tokenizer that decodes each token to its bytes. It splits texts nearly as the
    model's own tokenizer does, whose rules the vocabulary does not show.

    Raises:
        ValueError: the tokens do not show how bytes are written, or no token ends a text.
    """
    import tokenizers
    from allspark.model_loader.tokenizer import import_transformers

    transformers = import_transformers()

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
    if "▁" not in tokens:  # Characters outside the byte letters are written as they are.
        letters = set(tokenizers.pre_tokenizers.ByteLevel.alphabet())
        tokenizer.add_tokens([t for t in tokens.keys() - special if not letters.issuperset(t)])
    tokenizer.add_special_tokens(special)
    # The config says which of them ends a request; the grammar compiler needs one.
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=special[0])


def _description(tokens: Mapping[str, int]) -> dict[str, Any]:
    """What a tokenizer.json with these tokens would contain."""
    model: dict[str, Any] = {"type": "BPE", "vocab": dict(tokens), "merges": _merges(tokens)}
    fields: dict[str, Any] = {"version": "1.0", "added_tokens": [], "model": model}
    if "▁" in tokens:  # SentencePiece
        model["byte_fallback"] = "<0x00>" in tokens
        fields["normalizer"] = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
        back = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
        steps = [back, {"type": "ByteFallback"}, {"type": "Fuse"}]
        fields["decoder"] = {"type": "Sequence", "decoders": steps}
    elif "Ġ" in tokens:  # Bytes written as letters; this one is the space.
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
    """The pairs of tokens that make up a token, in the order in which BPE learns them."""
    pairs = [
        (token_id, tokens[token[:i]], tokens[token[i:]], token[:i], token[i:])
        for token, token_id in tokens.items()
        for i in range(1, len(token))
        if token[:i] in tokens and token[i:] in tokens
    ]
    return [pair[3:] for pair in sorted(pairs)]
