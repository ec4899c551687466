"""Regular expressions of a tokenizer that somebody else made: those of published tokenizers cost
nothing, others are tried in a process that may be killed, and slow ones are refused by name.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

from allspark.model_loader import HuggingFaceModel, ModelSerializerException  # noqa: E402
from allspark.model_loader import tokenizer_expressions as module  # noqa: E402
from allspark.model_loader.errors import CheckpointError  # noqa: E402
from allspark.model_loader.tokenizer_expression_trial import texts_for  # noqa: E402
from allspark.model_loader.tokenizer_expressions import (  # noqa: E402
    check_expressions,
    expressions_in,
    known_expressions,
)
from support.vocabularies import SMALL, tokenizer_directory  # noqa: E402

DEMO = Path(__file__).parents[2] / "examples" / "demo_model"
# One start of a match takes a while, and a text has many; or one start takes for ever.
SLOW = [r"\S+$", "a*a*b", r"\s*\s*x"]
EXPLODING = ["(a+)+$", "(?:abcde|abcde)+!", r"(\w+\s?)+$", "(x+x+)+y", "(?:\u3042|\\x{3042})*z"]
# Of no published tokenizer that is known here.
HONEST = [
    r"[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+", r"(?:\p{L}\p{M}*)+", r"(?i:q+w+)+\d"
]  # fmt: skip


def part(kind, expression):
    pattern = {"Regex": expression}
    return {
        "pre_tokenizer": {"type": "Split", "pattern": pattern, "behavior": "Isolated",
                          "invert": False},
        "normalizer": {"type": "Replace", "pattern": pattern, "content": "x"},
        "decoder": {"type": "Replace", "pattern": pattern, "content": "x"},
    }[kind]  # fmt: skip


def write_tokenizer(directory, kind, expression, name="tokenizer.json"):
    """A tokenizer with the expression, as itself or within a sequence of others."""
    inner = part(kind, expression)
    list_name = kind.replace("_", "") + "s"
    for number, value in enumerate((inner, {"type": "Sequence", list_name: [inner]})):
        fields = {
            "version": "1.0", "truncation": None, "padding": None, "normalizer": None,
            "pre_tokenizer": None, "post_processor": None, "decoder": None,
            # Normalised while it is loaded.
            "added_tokens": [{"id": 1, "content": "a" * 5000 + "\0", "single_word": False,
                              "lstrip": False, "rstrip": False, "normalized": True,
                              "special": False}],
            "model": {"type": "WordLevel", "vocab": {"<unk>": 0, "a" * 5000 + "\0": 1},
                      "unk_token": "<unk>"},
            kind: value,
        }  # fmt: skip
        place = directory / str(number)
        place.mkdir(parents=True)
        (place / "tokenizer_config.json").write_text("{}")
        (place / name).write_text(json.dumps(fields))
        yield place


def load(directory):
    return HuggingFaceModel(str(directory), "m").get_tokenizer()


@pytest.mark.parametrize("kind", ["pre_tokenizer", "normalizer", "decoder"])
def test_an_expression_that_explodes_is_refused_before_anything_is_loaded(tmp_path, kind):
    for directory in write_tokenizer(tmp_path, kind, "(a+)+$"):
        with pytest.raises(CheckpointError) as caught:
            load(directory)
        assert str(caught.value) == (
            f"{directory}: the tokenizer's regular expression '(a+)+$' fails: Onig: Regex search "
            "error: retry-limit-in-match over"
        )


@pytest.mark.parametrize("expression", EXPLODING)
def test_expressions_that_explode(expression):
    with pytest.raises(CheckpointError, match="retry-limit"):
        check_expressions([expression], "m")


@pytest.mark.parametrize("expression", SLOW)
def test_expressions_that_are_slow(expression, monkeypatch):
    monkeypatch.setattr(module, "MAX_SECONDS", 2)
    with pytest.raises(CheckpointError) as caught:
        check_expressions([*HONEST, expression], "m")
    assert str(caught.value) == (
        f"m: the tokenizer's regular expression {expression!r} takes more than 2 s for "
        "texts of 4000 characters"
    )


def test_others_pass_and_are_tried_once(tmp_path, monkeypatch):
    runs = []
    run = subprocess.run
    monkeypatch.setattr(subprocess, "run", lambda *a, **k: runs.append(1) or run(*a, **k))
    module._try.cache_clear()
    for expression in HONEST:
        for directory in write_tokenizer(tmp_path / str(len(runs)), "pre_tokenizer", expression):
            assert load(directory).backend_tokenizer.pre_tokenizer is not None
    assert len(runs) == len(HONEST)


@pytest.fixture
def no_process(monkeypatch):
    def refuse(*arguments, **options):
        raise AssertionError("a process was started")

    monkeypatch.setattr(subprocess, "run", refuse)


@pytest.mark.parametrize("name", [*SMALL, "demo", "qwen2.5", "gpt2", "mistral-v3"])
def test_published_tokenizers_cost_nothing(name, no_process):
    directory = DEMO if name == "demo" else tokenizer_directory(name)
    try:
        assert load(directory) is not None
    except ModelSerializerException as error:
        pytest.skip(f"transformers does not load {name}: {error}")


def test_what_is_known_would_pass():
    for expression in known_expressions():
        assert module._try((expression,)) is None


def test_keys_are_found_in_any_spelling(tmp_path):
    text = rb'{"\u0052eg\u0065x" : "a\"\\b"}, {"Regex":"\u00e9"}'
    assert expressions_in([text, b'"Regex": "\xff", "Regex": "z"'], "m") == {'a"\\b', "é", "z"}
    # Tokens of a vocabulary, not expressions.
    text = b'{"Regex": 17, "vocab": ["Regex", "x"], "aRegex": "b"}'
    assert expressions_in([text], "m") == set()
    longest = b'{"Regex": "' + rb"\ud83d\ude42" * 4000 + b'"}'
    assert expressions_in([longest], "m") == {"🙂" * 4000}
    with pytest.raises(CheckpointError, match="^m: .* more than 4000 characters: .*aaa.*\\.\\.\\."):
        expressions_in([b'{"Regex": "' + b"a" * 100_000_000 + b'"}'], "m")
    (directory, _) = write_tokenizer(tmp_path, "normalizer", "(a+)+$")
    path = directory / "tokenizer.json"
    path.write_text(path.read_text().replace("Regex", "R\\u0065gex"))
    with pytest.raises(CheckpointError, match="regular expression"):
        load(directory)


def test_a_tokenizer_under_another_name_is_tried_too(tmp_path):
    for directory in write_tokenizer(tmp_path, "pre_tokenizer", "(a+)+$", "tokenizer.1.0.0.json"):
        inner = directory / "inner"
        inner.mkdir()
        (directory / "tokenizer.1.0.0.json").rename(inner / "tokenizer.1.0.0.json")
        settings = {"fast_tokenizer_files": ["inner/tokenizer.1.0.0.json"]}
        (directory / "tokenizer_config.json").write_text(json.dumps(settings))
        (directory / "tokenizer.json").write_text("{}")
        with pytest.raises(ModelSerializerException, match="regular expression"):
            load(directory)


def test_what_cannot_be_tried_is_refused(monkeypatch):
    with pytest.raises(CheckpointError, match="has more than 4000 characters: 'aaa"):
        check_expressions(["a" * 4001], "m")
    with pytest.raises(CheckpointError, match="has 65 regular expressions, more than 64"):
        check_expressions(["a" * size for size in range(1, 66)], "m")
    with pytest.raises(CheckpointError, match="has more than 300 different characters"):
        check_expressions(["".join(map(chr, range(0x4E00, 0x4E00 + 301)))], "m")
    with pytest.raises(CheckpointError, match="regular expression '\\(' fails: .*parenthesis"):
        check_expressions(["("], "m")
    monkeypatch.setattr(sys, "path", [])
    with pytest.raises(ModelSerializerException, match="cannot be tried: tokenizers cannot be imp"):
        check_expressions(["never tried 1"], "m")
    monkeypatch.setattr(sys, "executable", "")
    with pytest.raises(ModelSerializerException, match=r"sys.executable does not say"):
        check_expressions(["never tried 2"], "m")


def test_texts_are_made_of_what_the_expression_has():
    texts = set(texts_for(r"[\x{e000}-\u00df]|(?:cat|\p{Lu})"))
    for run in ("\ue000", "\u00df", "c", "\u65e5", " "):
        assert any(text == run * 4000 for text in texts)
    assert any(text.startswith("catcatcat") for text in texts)
    assert not any("Lu" * 2 in text for text in texts)
    assert all(text.isascii() or text.encode() for text in texts)
