"""bad_words: strings that appear nowhere in an output."""

from __future__ import annotations

import re

import pytest
from allspark import ASGenerationConfigBuilder, AsStatus
from allspark.bad_words import to_token_sequences
from allspark.text_options import MAX_WORDS
from engine_fixture import start_engine

QUESTION = "<|im_start|>user\nWhat is a ResultQueue?<|im_end|>\n<|im_start|>assistant\n"


@pytest.fixture(scope="module")
def demo(demo_model):
    engine, loader = start_engine(demo_model)
    yield engine, loader
    engine.stop_model("m")


def answer_ids(demo, **config) -> list[int]:
    engine, loader = demo
    status, _, queue = engine.start_request_text(
        "m", loader, QUESTION, {"do_sample": False, "max_new_tokens": 40, **config}
    )
    assert status == AsStatus.ALLSPARK_SUCCESS, engine.last_error()
    return [token for elements in queue for token in elements.ids_from_generate]


def answer(demo, **config) -> str:
    ids = answer_ids(demo, **config)
    return demo[1].get_tokenizer().decode(ids, skip_special_tokens=True)


def test_no_output_holds_a_bad_word(demo):
    plain = answer(demo)
    words = [word for word in re.findall(r"\w+", plain) if len(word) > 3][:3]
    assert words, plain
    for barred in ([words[0]], words):
        ids = answer_ids(demo, bad_words=barred)
        for sequence in to_token_sequences(demo[1].get_tokenizer(), barred):
            size = len(sequence)
            assert all(ids[i : i + size] != sequence for i in range(len(ids)))
    assert words[0] not in answer(demo, bad_words=words[:1])


def test_a_word_is_barred_at_the_beginning_and_after_a_space(demo):
    tokenizer = demo[1].get_tokenizer()
    sequences = to_token_sequences(tokenizer, ["queue", "queue"])
    texts = {tokenizer.decode(sequence) for sequence in sequences}
    assert {text.strip() for text in texts} == {"queue"}
    assert len(sequences) == len({tuple(sequence) for sequence in sequences})


def test_words_join_the_ids(demo):
    engine, loader = demo
    builder = ASGenerationConfigBuilder({"do_sample": False}).bad_words("queue")
    ids = to_token_sequences(loader.get_tokenizer(), ["queue"])
    by_words = answer(demo, **builder.max_new_tokens(40).build())
    assert by_words == answer(demo, bad_words_ids=ids)
    assert by_words == answer(demo, bad_words=["queue"], bad_words_ids=ids)


class Splitter:
    """Tokens are single characters; counts its calls."""

    def __init__(self):
        self.num_calls = 0

    def __call__(self, texts, add_special_tokens, **_):
        assert not add_special_tokens
        self.num_calls += 1
        return {"input_ids": [[ord(letter) for letter in text] for text in texts]}


def test_many_words_are_tokenised_in_few_calls_and_compared_by_hash():
    # Comparing each with all before it would take an hour.
    words = [f"{i:05d}" for i in range(MAX_WORDS)]
    tokenizer = Splitter()
    sequences = to_token_sequences(tokenizer, words + words[:1000])
    assert len(sequences) == 2 * MAX_WORDS
    assert sequences[:2] == [[48] * 5, [32] + [48] * 5]
    assert tokenizer.num_calls < 2 * MAX_WORDS / 200
    assert to_token_sequences(tokenizer, []) == []


def test_a_batch_of_words_has_the_tokens_of_each(demo):
    tokenizer = demo[1].get_tokenizer()
    words = ["queue", "a queue", " naïve", "日本", "x" * 300, "<|im_end|>"]
    expected = []
    for word in words:
        for text in (word, " " + word):
            ids = tokenizer.encode(text, add_special_tokens=False)
            if ids not in expected:
                expected.append(ids)
    assert to_token_sequences(tokenizer, words) == expected


def test_a_tokenizer_with_encode_alone_serves(demo):
    class Encoder:
        def encode(self, text, add_special_tokens):
            return demo[1].get_tokenizer().encode(text, add_special_tokens=add_special_tokens)

    words = ["queue", "a queue"]
    tokenizer = demo[1].get_tokenizer()
    assert to_token_sequences(Encoder(), words) == to_token_sequences(tokenizer, words)


def test_as_many_words_as_a_request_may_have_are_served(demo, monkeypatch):
    monkeypatch.setattr("allspark.bad_words._PAUSE", 0.0)
    words = [f"{i:05d}" for i in range(MAX_WORDS)]
    plain = answer_ids(demo)
    assert answer_ids(demo, bad_words=words) == plain
    ids = [[4 + i % 50, i % 1000, 3 + i // 1000] for i in range(200_000)]
    assert len(answer_ids(demo, bad_words_ids=ids, stop_words_ids=ids, min_new_tokens=40)) == 40
    status, *_ = demo[0].start_request_ids("m", None, [1], {"bad_words_ids": [*ids, [1]]})
    assert status == AsStatus.ALLSPARK_PARAM_ERROR
    assert "bad_words_ids has 200001 entries; the bound is 200000" in demo[0].last_error()


@pytest.mark.parametrize(
    ("value", "parts"),
    [
        (3, ["bad_words is 3", "list of str"]),
        (["a", 3], ["bad_words[1] is 3", "str"]),
        (["a", " "], ["bad_words[1] is ' '", "white space"]),
        (["a"] * 100_001, ["bad_words has 100001 entries", "the bound is 100000"]),
        (["a" * 1_000_000, "b"], ["bad_words has 1000001 characters", "the bound is 1000000"]),
    ],
)
def test_what_is_refused(demo, value, parts):
    engine, loader = demo
    status, handle, queue = engine.start_request_text("m", loader, "a", {"bad_words": value})
    assert (status, handle, queue) == (AsStatus.ALLSPARK_PARAM_ERROR, None, None)
    assert all(part in engine.last_error() for part in parts), engine.last_error()


def test_words_need_a_tokenizer(demo):
    engine, _ = demo
    status, _, _ = engine.start_request_ids("m", None, [1], {"bad_words": ["queue"]})
    assert status == AsStatus.ALLSPARK_PARAM_ERROR
    assert "model is None" in engine.last_error() and "queue" in engine.last_error()
