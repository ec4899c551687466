"""The tokens of log-probabilities add up to the text: their bytes where a token is a part of a
character, their texts where each is whole."""

from __future__ import annotations

from pathlib import Path

import pytest
from allspark.serve.logprobs import CompletionRows, chat_rows
from transformers import AutoTokenizer

TOKENIZERS = Path(__file__).resolve().parents[1] / "data" / "tokenizers"
TEXT = "naïve 日本語 🙂🧪 x \x00\xad é"


@pytest.mark.parametrize("name", ["byte_level", "sentencepiece"])
def test_bytes_add_up_to_the_text(name: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(TOKENIZERS / name)
    ids = tokenizer.encode(TEXT, add_special_tokens=False)
    tops = [[(token, -1.0)] for token in ids]
    rows = chat_rows(tokenizer, ids, [-1.0] * len(ids), tops)
    assert any("\ufffd" in row["token"] for row in rows)
    for each_of in [rows, [row["top_logprobs"][0] for row in rows]]:
        found = b"".join(bytes(each["bytes"]) for each in each_of)
        assert found.decode().strip() == TEXT


@pytest.mark.parametrize("name", ["byte_level", "sentencepiece", "unigram"])
def test_texts_add_up_to_the_text(name: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(TOKENIZERS / name)
    text = "What is it? Nothing, I say."
    ids = tokenizer.encode(text, add_special_tokens=False)
    found = CompletionRows(tokenizer, 0).rows(ids, [-1.0] * len(ids), [])
    assert "".join(found["tokens"]).strip() == text
    ends = [*found["text_offset"][1:], sum(map(len, found["tokens"]))]
    assert ends == [
        offset + len(token)
        for offset, token in zip(found["text_offset"], found["tokens"], strict=True)
    ]
