"""Makes ``tokenizer.json`` and ``tokenizer_config.json`` from the vocabulary in a GGUF file.

Files have only the name of the rule that splits texts before merging (``tokenizer.ggml.pre``), not
the rule itself. An unknown name is refused, since a guess could give other tokens.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ..config import ModelConfig
from ..errors import ModelSerializerException, UnsupportedModelError
from ..notices import notice
from ..tokenizer import is_refusal

_DIGIT, _DIGITS = r"\p{N}", r"\p{N}{1,3}"
# Placeholder: digits.
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
# Placeholders: what may follow a word (twice), and digits.
_CASED_WORDS = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+%s|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*%s"
    r"|%s| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SHORT_FORM = "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_LINE_END, _CJK = r"[\r\n]", "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
# Letters with upper and lower case, without Georgian, the lower case of Armenian, and most scripts
# added since Unicode 12.
_DEEPSEEK_LETTERS = (
    r"[\p{Lu}\p{Ll}\p{Lt}&&[\x{41}-\x{556}\x{10a0}-\x{10c5}\x{13a0}-\x{13fd}\x{1c90}-\x{2cf3}"
    r"\x{a640}-\x{a78e}\x{ab70}-\x{104fb}\x{10c80}-\x{10cf2}\x{118a0}-\x{118df}"
    r"\x{1e900}-\x{1e943}]]+"
)
_DEEPSEEK3_WORDS = (
    r"[!-/:-@\[-`{-~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_DEEPSEEK_MARKS = "[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+"


@dataclass(frozen=True)
class _Words:
    """How texts are split before merging: first by the expressions ``before``, one after the other;
    with ``gpt2`` by GPT-2's own expression; then by the expressions ``after``, which see each byte
    as its letter in ByteLevel. ``whole``: a word that is a token needs no merges. ``composed``:
    texts are normalised to NFC first.
    """

    before: tuple[str, ...] = ()
    gpt2: bool = False
    after: tuple[str, ...] = ()
    whole: bool = False
    composed: bool = False


_GPT2 = _Words(gpt2=True)
_THREE_DIGITS, _ONE_DIGIT = _Words((_WORDS % _DIGITS,)), _Words((_WORDS % _DIGIT,), composed=True)
_LLAMA3, _SINGLE_DIGITS = replace(_THREE_DIGITS, whole=True), _Words((_DIGIT,), gpt2=True)
# By tokenizer.ggml.pre. Where the models' own tokenizer.json does more than llama.cpp (Falcon's
# digits, NFC for MPT), this follows the models.
_PRE = {
    "default": _Words(
        (
            r"[\p{P}$+<=>^~|]+",
            r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)",
            r"\p{N}+",
            "[0-9][0-9][0-9]",
        )
    ),
    "gpt-2": _GPT2,
    "phi-2": _GPT2,
    "mpt": replace(_GPT2, composed=True),
    "falcon": _Words((r"[\p{P}$+<=>^~|`]+",), True, (r"\p{N}+", "[0-9][0-9][0-9]")),
    "deepseek-llm": _Words(
        (_LINE_END, rf"\s?{_DEEPSEEK_LETTERS}", rf"\s?{_DEEPSEEK_MARKS}", r"\s+$", _CJK, _DIGIT)
    ),
    "deepseek-coder": _Words((_LINE_END, r"\s?\p{L}+", r"\s?\p{P}+", _CJK, _DIGIT)),
    "deepseek-v3": _Words((_DIGITS, "[\u4e00-\u9fa5\u3040-\u30ff]+", _DEEPSEEK3_WORDS)),
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama-bpe": _LLAMA3,
    "dbrx": _THREE_DIGITS,
    "smaug-bpe": _THREE_DIGITS,
    "glm4": _THREE_DIGITS,
    "chatglm-bpe": _THREE_DIGITS,
    "qwen2": _ONE_DIGIT,
    "deepseek-r1-qwen": _ONE_DIGIT,
    "tekken": _Words((_CASED_WORDS % ("", "", _DIGIT),), whole=True),
    "gpt-4o": _Words((_CASED_WORDS % (_SHORT_FORM, _SHORT_FORM, _DIGITS),)),
    "bloom": _Words((r" ?[^\s(|)" + "\u2026.,!?\u3002\uff0c\u3001\u0964\u06d4\u060c]+",)),
    "refact": _SINGLE_DIGITS,
    "starcoder": _SINGLE_DIGITS,
    "smollm": _SINGLE_DIGITS,
}
# Those that need no trial (tokenizer_expressions.py).
EXPRESSIONS = frozenset(text for words in _PRE.values() for text in (*words.before, *words.after))
# For files without the key: by general.architecture, if all its models share one tokenizer.
_PRE_OF_ARCHITECTURES = {
    "bloom": "bloom",
    "falcon": "falcon",
    "gpt2": "gpt-2",
    "gptneox": "mpt",
    "mpt": "mpt",
    "phi2": "gpt-2",
    "qwen": "qwen2",
    "qwen2": "qwen2",
    "starcoder2": "starcoder",
}

_UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 2, 3, 4, 6
# Every way to cut a token in two is looked at, and one in which both parts are tokens is a merge.
# Published vocabularies have pieces of 128 characters and fewer than 3 merges a token.
_MAX_PIECE, _MAX_MERGES = 512, 16
# Tokens that end a text or a turn. Many files name none but the end of a text, so llama.cpp finds
# them by what they are called.
_ENDS = frozenset(
    (
        "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|im_end|>", "<|end|>", "<|endoftext|>",
        "<end_of_turn>", "<end_of_utterance>", "<EOT>", "_<EOT>",
    )
)  # fmt: skip
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
    if templates := _chat_templates(config):
        settings["chat_template"] = templates
    if "tokenizer.huggingface.json" in config:
        text = config.text("tokenizer.huggingface.json")
    else:
        text = _tokenizer(config, tokens, special)
    return {
        "tokenizer.json": text,
        "tokenizer_config.json": json.dumps(settings, indent=1, ensure_ascii=False),
    }


def _chat_templates(config: ModelConfig) -> str | list[dict[str, str]]:
    """As ``tokenizer_config.json`` has them: the only one as a text, several with their names."""
    key = "tokenizer.chat_template"
    names = {name.removeprefix(f"{key}."): name for name in config if name.startswith(f"{key}.")}
    if key in config:
        names["default"] = key
    if names.keys() <= {"default"}:
        return config.text(names["default"]) if names else ""
    return [{"name": name, "template": config.text(own)} for name, own in names.items()]


def end_tokens(config: ModelConfig) -> list[int]:
    """The tokens of a file's vocabulary, if it has one, that end a text or a turn by their name."""
    tokens = config.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list):
        return []
    return [token_id for token_id, token in enumerate(tokens) if token in _ENDS]


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
    except BaseException as error:
        if not is_refusal(error):
            raise
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
        try:
            tokenizer.post_processor = processors.TemplateProcessing(template, pair, ids)
        except ValueError as error:  # a colon, which means something in a template
            raise ModelSerializerException(
                f"{config.source}: the tokens {ends} cannot stand around a text: {error}"
            ) from error
    return str(tokenizer.to_str())


def _words(config: ModelConfig) -> _Words:
    pre = config.get("tokenizer.ggml.pre")
    if pre is None:
        pre = _PRE_OF_ARCHITECTURES.get(config.text("general.architecture"), "default")
        notice(
            f"{config.source}: tokenizer.ggml.pre is missing; texts are split as {pre!r} says, "
            "unless tokenizer.json is beside the file"
        )
    if pre not in _PRE:
        raise UnsupportedModelError(
            f"{config.source}: tokenizer.ggml.pre is {pre!r}, supported are {', '.join(_PRE)}; put "
            "tokenizer.json beside the file"
        )
    return _PRE[pre]


def _byte_level(config: ModelConfig, tokens: list[str]) -> tuple[Any, bool]:
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    words = _words(config)
    pairs = (merge.partition(" ") for merge in _strings(config, "tokenizer.ggml.merges"))
    merges = [(left, right) for left, _, right in pairs]
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=words.whole))
    if words.composed:
        tokenizer.normalizer = normalizers.NFC()

    def splits(expressions: tuple[str, ...]) -> list[Any]:
        return [pre_tokenizers.Split(Regex(text), "isolated") for text in expressions]

    octets = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=words.gpt2)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [*splits(words.before), octets, *splits(words.after)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, words.whole  # llama.cpp adds BOS for the same models.


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
    """SentencePiece joins the pair whose result has the best score. So each way to cut a token in
    two is a merge, in the order of the tokens' scores.
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
        if len(token) > _MAX_PIECE:
            raise UnsupportedModelError(
                f"{config.source}: tokenizer.ggml.tokens: token {token_id} has {len(token)} "
                f"characters, supported are {_MAX_PIECE}; put tokenizer.json beside the file"
            )
        for cut in range(1, len(token)):
            left, right = vocabulary.get(token[:cut]), vocabulary.get(token[cut:])
            if left is not None and right is not None:
                ranked.append((-scores[token_id], token_id, left, right))
        if len(ranked) > _MAX_MERGES * len(tokens):
            raise UnsupportedModelError(
                f"{config.source}: tokenizer.ggml.tokens can be joined from each other in more "
                f"than {_MAX_MERGES} ways a token; put tokenizer.json beside the file"
            )
    ranked.sort()
    return [(tokens[left], tokens[right]) for _, _, left, right in ranked]
