#!/usr/bin/env python3
"""Trains the small tokenizers of tests/data/tokenizers, one for each kind that tests need.

usage: make_tokenizers.py [DIRECTORY]

byte_level     byte-level BPE as GPT-2's, with special tokens and a chat template
unigram        a tokenizer.json with SentencePiece's spaces and a Unigram model, as T5's
sentencepiece  a SentencePiece model (BPE) that spells the unknown in bytes, as Llama's
characters     a SentencePiece model of single characters, without a token for any other
"""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import sentencepiece
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

HERE = Path(__file__).resolve().parent
DEMO_DATA = HERE.parent.parent / "examples" / "demo_model_data"

# Text unlike the demo model's English: tokens of several bytes, white space, code, JSON.
OTHER_TEXT = [
    "def f(x):\n\n    return x + 1\n",
    '{"name": "Anna", "age": 41, "tags": [true, false, null], "place": {"x": -1.5e3}}',
    "Le café est naïve, déjà vu à l'été ; où êtes-vous ? ÀÉÎ",
    "你好，世界。你好，世界！今天天气很好。 日本語のテキスト、日本語の文。",
    "Observation: none\nUser: hello\tworld",
]
CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"
)


def corpus() -> list[str]:
    lines = [json.loads(line) for line in (DEMO_DATA / "facts.jsonl").read_text().splitlines()]
    return [text for line in lines for text in (*line["questions"], line["answer"])] + OTHER_TEXT


def write(directory: Path, tokenizer: Tokenizer | bytes, config: dict[str, object]) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    if isinstance(tokenizer, bytes):
        (directory / "tokenizer.model").write_bytes(tokenizer)
    else:
        tokenizer.save(str(directory / "tokenizer.json"), pretty=False)
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=1) + "\n")


def byte_level() -> tuple[Tokenizer, dict[str, object]]:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=800,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus(), trainer)
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>"]
    tokenizer.add_special_tokens(special)
    config: dict[str, object] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    return tokenizer, config


def sentence_piece(**settings: object) -> tuple[bytes, dict[str, object]]:
    model = io.BytesIO()
    lines = [line for text in corpus() for line in text.splitlines()]
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines),
        model_writer=model,
        character_coverage=1.0,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        num_threads=1,
        minloglevel=2,
        **settings,
    )
    config: dict[str, object] = {
        "tokenizer_class": "LlamaTokenizer",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
        "legacy": False,
        "clean_up_tokenization_spaces": False,
    }
    return model.getvalue(), config


def unigram() -> tuple[Tokenizer, dict[str, object]]:
    # SentencePiece trains the pieces, because its trainer gives the same ones every time.
    trained, _ = sentence_piece(model_type="unigram", vocab_size=500)
    model = sentencepiece.SentencePieceProcessor(model_proto=trained)
    pieces = [(model.id_to_piece(i), model.get_score(i)) for i in range(model.vocab_size())]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=model.unk_id(), byte_fallback=False))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    config: dict[str, object] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
        "clean_up_tokenization_spaces": False,
    }
    return tokenizer, config


def main(directory: Path) -> None:
    write(directory / "byte_level", *byte_level())
    write(directory / "unigram", *unigram())
    bpe = sentence_piece(model_type="bpe", vocab_size=700, byte_fallback=True, split_digits=True)
    write(directory / "sentencepiece", *bpe)
    characters = sentence_piece(model_type="char", vocab_size=1000, hard_vocab_limit=False)
    write(directory / "characters", *characters)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else HERE / "tokenizers")
