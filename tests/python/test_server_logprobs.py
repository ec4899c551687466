"""The tokens of log-probabilities add up to the text: their bytes where a token is a part of a
character, their texts where each is whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from allspark.serve.logprobs import CompletionRows, Rows, chat_rows
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
    found = CompletionRows(tokenizer, 0).rows(ids, [-1.0] * len(ids), [()] * len(ids))
    assert "".join(found["tokens"]).strip() == text
    ends = [*found["text_offset"][1:], sum(map(len, found["tokens"]))]
    assert ends == [
        offset + len(token)
        for offset, token in zip(found["text_offset"], found["tokens"], strict=True)
    ]


class Counting:
    """A tokenizer that counts what it decodes."""

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer
        self.num_decoded = 0

    def decode(self, ids: list[int], **options: Any) -> str:
        self.num_decoded += 1
        return str(self._tokenizer.decode(ids, **options))

    def convert_ids_to_tokens(self, token: int) -> Any:
        return self._tokenizer.convert_ids_to_tokens(token)


def test_a_token_is_decoded_once() -> None:
    tokenizer = Counting(AutoTokenizer.from_pretrained(TOKENIZERS / "byte_level"))
    ids = [5, 6, 7, 6, 5] * 20
    tops = [[(5, -1.0), (8, -2.0)]] * len(ids)
    first = chat_rows(tokenizer, ids, [-1.0] * len(ids), tops)
    num_decoded = tokenizer.num_decoded
    assert num_decoded <= 2 * 4  # for the text, and for the bytes
    assert chat_rows(tokenizer, ids, [-1.0] * len(ids), tops) == first
    rows = CompletionRows(tokenizer, 2).rows(ids, [-1.0] * len(ids), tops)
    assert tokenizer.num_decoded == num_decoded
    assert rows["tokens"] == [row["token"] for row in first]


def test_rows_in_parts_are_the_same() -> None:
    tokenizer = AutoTokenizer.from_pretrained(TOKENIZERS / "byte_level")
    ids = list(range(300, 400))
    logprobs = [None, *[-0.5 * i for i in range(99)]]
    tops = [[], *[[(id + 1, -0.25)] for id in ids[1:60]]]  # the others have none
    whole = CompletionRows(tokenizer, 1).rows(ids, logprobs, [*tops, *[[]] * 40])
    rows = Rows(CompletionRows(tokenizer, 1).rows)
    rows.put(ids[:60], logprobs[:60], tops)
    parts = [rows.take(7)]
    rows.put(ids[60:], logprobs[60:], [])
    while rows:
        parts.append(rows.take(7))
    assert {name: sum((part[name] for part in parts), []) for name in whole} == whole
    assert [len(part["tokens"]) for part in parts] == [7] * 14 + [2]
    assert rows.take()["tokens"] == []
