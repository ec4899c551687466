"""A tokenizer made only from a vocabulary: the bytes of each token, and which have no text."""

from __future__ import annotations

import pytest
from allspark.grammar_compiler import Compiler
from allspark.model_loader.tokenizer import load_tokenizer

pytest.importorskip("allspark._allspark")

from allspark.dashinfer_compat.vocabulary import make_tokenizer

TEXT = (
    "The quick brown fox, naïve – 日本語のテキスト 🎉🎉! def f(x):\n\n    return x + 1\n"
    '{"name": 12345, "value": null}'
)


def compare(real):
    plain = make_tokenizer(real.get_vocab(), real.eos_token_id)
    own, made = Compiler(real), Compiler(plain)
    barred = []
    for token, token_id in real.get_vocab().items():
        is_special = [c._vocabulary.is_special_token(token_id) for c in (own, made)]
        assert is_special[1] or not is_special[0], f"{token!r} stands for no text"
        if is_special[1]:
            # The compiler counts the byte 0xFF, which is in no text, among these.
            barred += [token] if token not in ("ÿ", "<0xFF>") else []
            continue
        assert made._vocabulary.decode_bytes([token_id]) == own._vocabulary.decode_bytes(
            [token_id]
        ), token
    ids = plain.encode(TEXT, add_special_tokens=False)
    assert made._vocabulary.decode_bytes(ids).decode().strip() == TEXT
    own_ids = real.encode(TEXT, add_special_tokens=False)
    assert len(ids) <= len(own_ids) * 1.1, "divided as finely as the model's own, nearly"
    return barred


def test_bytes_as_letters(demo_model):
    barred = compare(load_tokenizer(demo_model))
    assert all(token.startswith("<|") for token in barred)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "mistral-v3", "internlm2", "qwen2.5"])
def test_real_tokenizers(shared_data, name):
    barred = compare(load_tokenizer(shared_data / "tokenizers" / name))
    assert all(token[0] + token[-1] in ("<>", "[]") for token in barred)


def sentencepiece(extra=()):
    """Tokens in SentencePiece's form: ▁ for a space, bytes for characters that it does not have."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), "▁", "a", "b", "▁a"]
    return {token: i for i, token in enumerate([*tokens, *extra])}


def test_sentencepiece():
    vocab = sentencepiece(["[INST]", "<eot>"])
    compiler = Compiler(make_tokenizer(vocab, 2))
    decode = compiler._vocabulary.decode_bytes
    assert decode([vocab["▁a"], vocab["<0x0A>"], vocab["b"], vocab["▁"]]) == b" a\nb "
    special = [t for t, i in vocab.items() if compiler._vocabulary.is_special_token(i)]
    assert set(special) - {"<0xFF>"} == {"<unk>", "<s>", "</s>", "[INST]", "<eot>"}


def test_the_token_that_ends_requests_stands_for_no_text():
    vocab = sentencepiece(["END"])
    for eos, special in ((vocab["END"], True), (2, False)):
        compiler = Compiler(make_tokenizer(vocab, eos))
        assert compiler._vocabulary.is_special_token(vocab["END"]) == special


@pytest.mark.parametrize(
    ("vocab", "words"),
    [
        ({"a": 0, "##b": 1, "[CLS]": 2}, "neither '▁' .* nor 'Ġ'"),
        ({"▁": 0, "a": 1}, "eos_token_id is -1"),
    ],
)
def test_vocabularies_that_say_too_little_are_refused(vocab, words):
    with pytest.raises(ValueError, match=words):
        make_tokenizer(vocab, -1)
