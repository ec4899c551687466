"""Makes ``tokenizer.json`` and ``tokenizer_config.json`` of the vocabulary in a GGUF file.

Files name the way their texts are split into words before merging (``tokenizer.ggml.pre``), not
the way itself; one that is not known here is refused, since a guess would give other tokens.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ..config import ModelConfig
from ..errors import ModelSerializerException, UnsupportedModelError

_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,%d}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED_WORDS = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_DIGITS = r"\p{N}"

# tokenizer.ggml.pre -> (expressions that split one after the other, whether GPT-2's own comes last,
# whether a word that is a token needs no merges).
_THREE_DIGITS, _ONE_DIGIT = ((_WORDS % 3,), False, False), ((_WORDS % 1,), False, False)
_LLAMA3, _SINGLE_DIGITS = ((_WORDS % 3,), False, True), ((_DIGITS,), True, False)
_PRE: dict[str, tuple[tuple[str, ...], bool, bool]] = {
    "gpt-2": ((), True, False),
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama-bpe": _LLAMA3,
    "dbrx": _THREE_DIGITS,
    "smaug-bpe": _THREE_DIGITS,
    "glm4": _THREE_DIGITS,
    "chatglm-bpe": _THREE_DIGITS,
    "qwen2": _ONE_DIGIT,
    "deepseek-r1-qwen": _ONE_DIGIT,
    "tekken": ((_CASED_WORDS,), False, True),
    "refact": _SINGLE_DIGITS,
    "starcoder": _SINGLE_DIGITS,
    "smollm": _SINGLE_DIGITS,
}
# Whose texts are normalised first.
_NFC = ("qwen2", "deepseek-r1-qwen")

_UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 2, 3, 4, 6
_ROLES = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}


def tokenizer_files(metadata: Mapping[str, Any], source: str) -> dict[str, str]:
    """The two files by name. Errors name ``source`` and the key."""
    config = ModelConfig(metadata, source)
    tokens = _strings(config, "tokenizer.ggml.tokens")
    special = {}
    for role, name in _ROLES.items():
        key = f"tokenizer.ggml.{name}_token_id"
        if key in config:
            token = config.integer(key, minimum=0, maximum=len(tokens) - 1)
            special[f"{role}_token"] = tokens[token]
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        **special,
    }
    if "tokenizer.chat_template" in config:
        settings["chat_template"] = config.text("tokenizer.chat_template")
    if "tokenizer.huggingface.json" in config:
        text = config.text("tokenizer.huggingface.json")
    else:
        text = _tokenizer(config, tokens, special)
    return {
        "tokenizer.json": text,
        "tokenizer_config.json": json.dumps(settings, indent=1, ensure_ascii=False),
    }


def _strings(config: ModelConfig, key: str) -> list[str]:
    values = config.get(key)
    if not isinstance(values, list) or not values or not isinstance(values[0], str):
        raise config.error(key, "is missing or no list of strings; put tokenizer.json beside it")
    return values


def _tokenizer(config: ModelConfig, tokens: list[str], special: Mapping[str, str]) -> str:
    """``tokenizer.json``."""
    from tokenizers import AddedToken, processors

    kind = config.text("tokenizer.ggml.model")
    if kind not in ("gpt2", "llama"):
        raise UnsupportedModelError(
            f"{config.source}: tokenizer.ggml.model is {kind!r}, supported are gpt2, llama; put "
            "tokenizer.json beside the file"
        )
    try:
        if kind == "gpt2":
            tokenizer, begins = _byte_level(config, tokens)
        else:
            tokenizer, begins = _sentence_piece(config, tokens, special), True
        types = config.get("tokenizer.ggml.token_type") or []
        added = (
            AddedToken(token, special=type_id == _CONTROL, normalized=False)
            for token, type_id in zip(tokens, types, strict=False)
            if type_id in (_CONTROL, _USER_DEFINED)
        )
        tokenizer.add_tokens(list(added))
    except ModelSerializerException:
        raise
    except Exception as error:  # tokenizers raises bare Exception
        raise ModelSerializerException(
            f"{config.source}: the vocabulary makes no tokenizer: {error}"
        ) from error
    ends = [
        special[f"{role}_token"]
        for role, default in (("bos", begins), ("eos", False))
        if f"{role}_token" in special
        and config.flag(f"tokenizer.ggml.add_{role}_token", default)
    ]  # fmt: skip
    if ends:
        before = [token for token in ends if token == special.get("bos_token")][:1]
        after = ends[len(before) :]
        template = [*before, "$A", *after]
        pair = [*template, *(f"{token}:1" for token in before), "$B:1", *(f"{t}:1" for t in after)]
        ids = [(token, tokens.index(token)) for token in dict.fromkeys(ends)]
        tokenizer.post_processor = processors.TemplateProcessing(template, pair, ids)
    return str(tokenizer.to_str())


def _byte_level(config: ModelConfig, tokens: list[str]) -> tuple[Any, bool]:
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    pre = config.text("tokenizer.ggml.pre", "default")
    if pre not in _PRE:
        raise UnsupportedModelError(
            f"{config.source}: tokenizer.ggml.pre is {pre!r}, supported are {', '.join(_PRE)}; put "
            "tokenizer.json beside the file"
        )
    expressions, gpt2, whole_words = _PRE[pre]
    pairs = (merge.partition(" ") for merge in _strings(config, "tokenizer.ggml.merges"))
    merges = [(left, right) for left, _, right in pairs]
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=whole_words))
    if pre in _NFC:
        tokenizer.normalizer = normalizers.NFC()
    splits = [pre_tokenizers.Split(Regex(text), "isolated") for text in expressions]
    words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=gpt2)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, words])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, whole_words  # Of the same models llama.cpp takes it that texts begin so.


def _sentence_piece(config: ModelConfig, tokens: list[str], special: Mapping[str, str]) -> Any:
    from tokenizers import Tokenizer, decoders, models, normalizers

    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    model = models.BPE(
        vocabulary,
        _merges(config, tokens, vocabulary),
        unk_token=special.get("unk_token"),
        fuse_unk=True,
        byte_fallback=True,
    )
    tokenizer = Tokenizer(model)
    prefix = config.flag("tokenizer.ggml.add_space_prefix", True)
    before = [normalizers.Prepend("▁")] if prefix else []
    tokenizer.normalizer = normalizers.Sequence([*before, normalizers.Replace(" ", "▁")])
    after = [decoders.Strip(" ", left=1)] if prefix else []
    spaces = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*spaces, *after])
    return tokenizer


def _merges(
    config: ModelConfig, tokens: list[str], vocabulary: Mapping[str, int]
) -> list[tuple[str, str]]:
    """SentencePiece joins the pair whose whole has the best score: each way of cutting a token in
    two is a merge, in the order of the wholes.
    """
    scores = config.get("tokenizer.ggml.scores")
    if not isinstance(scores, list) or len(scores) != len(tokens):
        raise config.error("tokenizer.ggml.scores", f"is not a list of {len(tokens)} numbers")
    types = config.get("tokenizer.ggml.token_type") or [1] * len(tokens)
    whole = {_UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE}
    ranked = []
    for token_id, (token, type_id) in enumerate(zip(tokens, types, strict=False)):
        if type_id in whole:
            continue
        for cut in range(1, len(token)):
            left, right = vocabulary.get(token[:cut]), vocabulary.get(token[cut:])
            if left is not None and right is not None:
                ranked.append((-scores[token_id], token_id, left, right))
    ranked.sort()
    return [(tokens[left], tokens[right]) for _, _, left, right in ranked]
