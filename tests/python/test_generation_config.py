"""Every field of the generation config: bad values are refused, it is documented, and fluent."""

from __future__ import annotations

import math
import re
from decimal import Decimal
from pathlib import Path

import numpy as np
import pytest
from allspark import ASGenerationConfigBuilder
from allspark._allspark import AsModelConfig, GenerateConfig
from allspark.generation_config import RequestConfig
from engine_fixture import MAX_LENGTH, VOCAB_SIZE, start_engine

FIELDS = GenerateConfig.fields()
DEFAULTS = GenerateConfig().to_dict()
BOUNDS = {name: bounds for name, _, *bounds in FIELDS}
TABLE = Path(__file__).parents[2] / "docs" / "generation.md"


@pytest.fixture(scope="module")
def engine(checkpoint):
    engine, _ = start_engine(checkpoint)
    return engine


def refusal(engine, config) -> str:
    """The message with which the engine refuses the config."""
    status, handle, queue = engine.start_request_ids("m", None, [1, 2], config)
    assert status.name in ("ALLSPARK_PARAM_ERROR", "ALLSPARK_EXCEED_LIMIT_ERROR")
    assert not handle and not queue
    return engine.last_error()


@pytest.mark.parametrize(("name", "kind"), [field[:2] for field in FIELDS])
@pytest.mark.parametrize("value", [object(), {"a": []}, b"\xff", [object()], None, [[0.5]]])
def test_wrong_types_are_refused(engine, name, kind, value):
    message = refusal(engine, {name: value})
    assert message.startswith(f"{name} is ") and kind in message


def out_of_range():
    for name, kind, low, high in FIELDS:
        if low is None:
            continue
        if kind == "an integer":
            values = [int(low) - 1, int(high) + 1]
        else:
            values = [low - 1e-3, high + 1e-3, math.nan]
        for value in values:
            yield pytest.param(name, value, low if value < low else high, id=f"{name}={value}")


@pytest.mark.parametrize(("name", "value", "bound"), list(out_of_range()))
def test_values_out_of_range_are_refused(engine, name, value, bound):
    message = refusal(engine, {name: value})
    assert message.startswith(f"{name} is ")
    assert re.search(r"must be in \[(.*)\]", message)
    if not math.isnan(value):
        assert f"{bound:g}" in message or str(int(bound)) in message


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"max_length": 10, "min_length": 11}, ["min_length", "11", "max_length", "10"]),
        ({"max_new_tokens": 3, "min_new_tokens": 4}, ["min_new_tokens", "4", "3"]),
        ({"max_length": 10, "min_new_tokens": 9}, ["min_new_tokens", "9", "8"]),
        ({"max_new_tokens": 3, "min_length": 6}, ["min_length", "6", "5"]),
        ({"max_length": MAX_LENGTH + 1}, ["max_length", "engine_max_length", str(MAX_LENGTH)]),
        ({"max_length": 2}, ["input_ids", "max_length", "2"]),
        ({"eos_token_id": VOCAB_SIZE}, ["eos_token_id", str(VOCAB_SIZE)]),
        ({"stop_token_ids": [1, VOCAB_SIZE]}, ["stop_token_ids", str(VOCAB_SIZE)]),
        ({"stop_token_ids": [1, -4]}, ["stop_token_ids[1]", "-4", "[0, "]),
        ({"stop_words_ids": [[1], [VOCAB_SIZE]]}, ["stop_words_ids[1]", str(VOCAB_SIZE)]),
        ({"stop_words_ids": [[]]}, ["stop_words_ids[0]", "empty"]),
        ({"bad_words_ids": [[1], [2, VOCAB_SIZE]]}, ["bad_words_ids[1]", str(VOCAB_SIZE)]),
        ({"bad_words_ids": [[1], []]}, ["bad_words_ids[1]", "empty"]),
        ({"logit_bias": {VOCAB_SIZE: 1.0}}, ["logit_bias", str(VOCAB_SIZE)]),
        ({"logit_bias": {-1: 1.0}}, ["logit_bias", "-1", "[0, "]),
        ({"logit_bias": {4: 101.0}}, ["logit_bias[4]", "101", "[-100, 100]"]),
        ({"logit_bias": {4: math.nan}}, ["logit_bias[4]", "nan", "[-100, 100]"]),
        ({"logit_bias": [4]}, ["logit_bias", "[4]", "dict"]),
        ({"logprobs_mode": "log"}, ["logprobs_mode", "log", "processed", "raw"]),
        ({"output_logits": "prompt"}, ["output_logits", "prompt", "all", "generation"]),
        ({"output_last_hidden_state": "x"}, ["output_last_hidden_state", "x", "all"]),
        ({"pooling": "max"}, ["pooling", "max", "mean", "last"]),
        ({"typical_p": 0.5}, ["typical_p", "0.5", "1"]),
        ({"repetition_penality": 1.5}, ["repetition_penality", "repetition_penalty"]),
    ],
)
def test_contradictions_and_ids_outside_the_vocabulary_are_refused(engine, config, words):
    message = refusal(engine, config)
    for word in words:
        assert word in message, message


def huge(kind: str, number: int):
    """A value of a field's type, with a number that no field takes."""
    if kind == "a list of integers":
        return [number]
    if kind == "a list of lists of integers":
        return [[1], [number]]
    return {1: number} if kind.startswith("a dict") else number


# A float cannot be as large as either; Python does not write the second.
@pytest.mark.parametrize("number", [10**400, -(10**400), 10**5000], ids=["400", "-400", "5000"])
def test_numbers_of_any_size_are_refused_by_name(engine, number):
    for name, kind, _, _ in GenerateConfig.fields():
        message = refusal(engine, {name: huge(kind, number)})
        assert message.startswith(f"{name} is ") and len(message) < 400, message
        with pytest.raises((TypeError, ValueError), match=f"^{name} is "):
            setattr(GenerateConfig(), name, huge(kind, number))
    for name, _, _, _ in AsModelConfig.fields():
        with pytest.raises((TypeError, ValueError), match=f"^{name} is "):
            AsModelConfig.from_dict({name: number})
    for name in ("n", "typical_p", "stop_words", "bad_words", "skip_special_tokens"):
        message = refusal(engine, {name: number})
        assert message.startswith(f"{name} is ") and len(message) < 400, message


# NumPy's and torch's integers are integers; of what is none, nothing is cut off.
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_new_tokens", np.float32(3.7)),
        ("max_new_tokens", Decimal(3)),
        ("max_new_tokens", np.True_),
        ("stop_token_ids", np.array([1.9, 2.9], np.float32)),
        ("stop_token_ids", [True]),
        ("stop_words_ids", [[np.float32(1.5)]]),
        ("logit_bias", {np.float32(5.5): 1.0}),
        ("logit_bias", {True: 1.0}),
        ("logit_bias", {5: True}),
    ],
)
def test_what_is_no_integer_is_refused_wherever_it_stands(engine, name, value):
    assert refusal(engine, {name: value}).startswith(f"{name} is ")
    with pytest.raises(TypeError, match=f"^{name} is "):
        GenerateConfig.from_dict({name: value})


def test_integers_of_numpy_are_integers():
    config = GenerateConfig.from_dict(
        {
            "max_new_tokens": np.uint8(3),
            "stop_token_ids": np.array([1, 2]),
            "stop_words_ids": np.array([[1, 2], [3, 4]]),
            "logit_bias": {np.int64(6): np.float32(2), 5: 1},
        }
    )
    assert (config.max_new_tokens, config.stop_token_ids) == (3, [1, 2])
    assert (config.stop_words_ids, config.logit_bias) == ([[1, 2], [3, 4]], {5: 1, 6: 2})


def test_a_seed_has_room_for_those_that_follow(engine):
    message = refusal(engine, {"seed": 2**63 - 1, "n": 2})
    assert "seed is 9223372036854775807; it must be in" in message


def test_single_tokens_that_end_a_request_have_no_text():
    config = {"eos_token_id": 2, "stop_token_ids": [3], "stop_words_ids": [[4], [5, 6]]}
    assert RequestConfig.parse(config).end_ids() == [3, 4, 2]
    config = {**config, "ignore_eos": True}
    assert RequestConfig.parse(config).end_ids() == [3, 4]


def test_neutral_values_of_fields_that_are_not_served_are_fine(engine):
    config = {"length_penalty": 1.0, "num_beams": 1, "typical_p": 1.0, "max_new_tokens": 1}
    status, _, queue = engine.start_request_ids("m", None, [1, 2], config)
    assert status.name == "ALLSPARK_SUCCESS", engine.last_error()
    assert queue.Get().ids_from_generate


def rows_of_the_table() -> dict[str, list[str]]:
    rows = {}
    for line in TABLE.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split(" | ")]
        if match := re.fullmatch(r"`(\w+)`", cells[0]):
            rows[match[1]] = cells
    return rows


def default_of(name: str) -> str:
    default = DEFAULTS[name]
    return f"{default:g}" if isinstance(default, float) else repr(default)


@pytest.mark.parametrize("name", DEFAULTS)
def test_the_table_documents_the_field(name):
    row = rows_of_the_table()[name]
    assert f"`{default_of(name)}`" in row[2], f"the table says {row[2]}"
    low, high = BOUNDS[name]
    numbers = re.findall(r"-?\d+(?:\.\d+)?", row[3])
    if low is not None and high <= 100:
        assert [float(number) for number in numbers[:2]] == [low, high], row[3]


@pytest.mark.parametrize("name", DEFAULTS)
def test_the_builder_sets_the_field(name):
    builder = ASGenerationConfigBuilder()
    if name.startswith("repetition_ngram"):
        built = builder.repetition_ngram(4, 3).build()
        assert built == {"repetition_ngram_size": 4, "repetition_ngram_threshold": 3}
        return
    assert getattr(builder, name)(DEFAULTS[name]) is builder
    assert builder.build() == {name: DEFAULTS[name]}
    assert GenerateConfig.from_dict(builder.build()) == GenerateConfig()


@pytest.mark.parametrize("name", [name for name in DEFAULTS if "repetition_ngram" not in name])
def test_the_builder_documents_the_field(name):
    text = " ".join(getattr(ASGenerationConfigBuilder, name).__doc__.split())
    # Python writes the strings of beam_early_stopping as bools.
    default = default_of(name).replace("'", '"') if name != "beam_early_stopping" else "False"
    assert f"Default {default}" in text.replace("'", '"')
    low, high = BOUNDS[name]
    if low is not None and high <= 100:
        assert f"in [{low:g}, {high:g}]" in text
