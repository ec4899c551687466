"""Prompts of a wrong type: the exception names the argument, its type and the expected type."""

from __future__ import annotations

import asyncio
import re

import numpy as np
import pytest
from allspark import AsStatus
from engine_fixture import install_engine


class Loader:
    def get_tokenizer(self):
        raise AssertionError("nothing is tokenised")


@pytest.fixture(scope="module")
def engine(checkpoint):
    engine, _ = install_engine(checkpoint)
    return engine


@pytest.fixture(scope="module")
def started(engine):
    assert engine.start_model("m") == AsStatus.ALLSPARK_SUCCESS
    yield engine
    engine.stop_model("m")


IDS = "a list, NumPy array or torch tensor of integers"
TEXTS = "a str or a list of str"
INPUTS = "a text, ids, or a sequence of them"
# For each call: the argument's name in messages, its expected type, and how to make the call.
CALLS = {
    "start_request_ids": (
        "input_ids", IDS, lambda e, value: e.start_request_ids("m", None, value),
    ),
    "start_request_ids_async": (
        "input_ids", IDS, lambda e, value: asyncio.run(e.start_request_ids_async("m", None, value)),
    ),
    "start_request": (
        "input_ids", IDS, lambda e, value: e.start_request("m", {"input_ids": value}),
    ),
    "start_request's dict": (
        "inputs", "a dict with the key 'input_ids'", lambda e, value: e.start_request("m", value),
    ),
    "start_request_text": (
        "input_str_or_array", TEXTS, lambda e, value: e.start_request_text("m", Loader(), value),
    ),
    "start_request_text_async": (
        "input_str_or_array", TEXTS,
        lambda e, value: asyncio.run(e.start_request_text_async("m", Loader(), value)),
    ),
    "score": ("inputs", INPUTS, lambda e, value: e.score("m", Loader(), value)),
    "get_ppl": ("inputs", INPUTS, lambda e, value: e.get_ppl("m", Loader(), value)),
    "embed": ("inputs", INPUTS, lambda e, value: e.embed("m", Loader(), value)),
    "find_prefix": ("input_ids", IDS, lambda e, value: e.find_prefix("m", value)),
}  # fmt: skip


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize(
    ("value", "what"),
    [(None, "None"), (b"text", "a bytes"), (bytearray(b"ab"), "a bytearray"),
     (memoryview(b"ab"), "a memoryview")],
    ids=["None", "bytes", "bytearray", "memoryview"],
)  # fmt: skip
def test_no_prompt_and_bytes(engine, call, value, what):
    name, expected, act = CALLS[call]
    with pytest.raises(TypeError) as caught:
        act(engine, value)
    assert str(caught.value) == f"{name} is {what}; it must be {expected}"


@pytest.mark.parametrize("call", ["start_request_ids", "find_prefix", "start_request"])
@pytest.mark.parametrize(
    ("value", "words"),
    [
        (5, "input_ids is a int; it must be a list"),
        ("text", "input_ids is a str; it must be a list"),
        ({1: 2}, "input_ids is a dict; it must be a list"),
        ({1, 2}, "input_ids is a set; it must be a list"),
        (iter([1]), "input_ids is a list_iterator; it must be a list"),
        ([1, None], "input_ids has elements of type object; they must be integers"),
        ([b"a"], r"input_ids has elements of type \|S1; they must be integers"),
        ([1.5], "input_ids has elements of type float64; they must be integers"),
        ([[1, 2], [3]], r"input_ids has rows of several lengths; it must be \[n\] or \[1, n\]"),
        ([[1], [2]], r"input_ids has shape \[2, 1\]; it must be \[n\] or \[1, n\]"),
        (np.array(5), r"input_ids has shape \[\]; it must be \[n\] or \[1, n\]"),
    ],
)
def test_other_ids(engine, call, value, words):
    with pytest.raises(TypeError, match=f"^{words}"):
        CALLS[call][2](engine, value)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (5, "input_str_or_array is a int; it must be a str or a list of str"),
        ({"a": 1}, "input_str_or_array is a dict; it must be a str or a list of str"),
        (["a", None], r"input_str_or_array\[1\] is None; it must be a str"),
        ([b"a"], r"input_str_or_array\[0\] is a bytes; it must be a str"),
        ([[1, 2]], r"input_str_or_array\[0\] is a list; it must be a str"),
    ],
)
def test_other_texts(engine, value, words):
    with pytest.raises(TypeError, match=f"^{words}$"):
        engine.start_request_text("m", Loader(), value)


def test_elements_of_many_inputs(engine):
    for value, words in (
        ([[1, 2], None], r"^inputs\[1\]: input_ids is None; it must be a list"),
        ([[1, 2], b"ab"], r"^inputs\[1\]: input_ids is a bytes; it must be a list"),
    ):
        with pytest.raises(TypeError, match=words):
            engine.score("m", None, value)


def test_no_loader_for_a_text(engine):
    with pytest.raises(TypeError, match="^model is None; it must be the loader"):
        engine.start_request_text("m", None, "text")


def test_a_dict_without_ids(engine):
    with pytest.raises(ValueError, match=r"inputs has the keys \['ids'\]; it must have"):
        engine.start_request("m", {"ids": [1]})


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([1, -1], "input_ids[1] is -1; it must be in [0, "),
        ([1, 2**31], "input_ids[1] is 2147483648; it must be in [0, "),
        ([1, 2**63], "input_ids[1] is 9223372036854775808; token ids are below 2^31"),
        ([[1, 2**63]], "input_ids[1] is 9223372036854775808; token ids are below 2^31"),
        ([-1, 2**63], "input_ids[1] is 9223372036854775808; token ids are below 2^31"),
        ((1, 2**64), "input_ids[1] is 18446744073709551616; token ids are below 2^31"),
        ([-(2**70)], f"input_ids[0] is {-(2**70)}; token ids are below 2^31"),
        ([10**400], f"input_ids[0] is 1{'0' * 199}...; token ids are below 2^31"),
        ([10**5000], "input_ids[0] is of too many digits to show; token ids are below 2^31"),
        (np.array([2**63], np.uint64), "input_ids[0] is 9223372036854775808; token ids are below"),
    ],
)
def test_an_id_of_no_vocabulary_gives_a_status(started, ids, message):
    for start in (
        lambda: started.start_request_ids("m", None, ids),
        lambda: asyncio.run(started.start_request_ids_async("m", None, ids)),
        lambda: started.start_request("m", {"input_ids": ids}),
    ):
        assert start() == (AsStatus.ALLSPARK_PARAM_ERROR, None, None)
        assert started.last_error().startswith(message)
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        started.find_prefix("m", ids)


@pytest.mark.parametrize("call", ["stop_request", "release_request", "sync_request"])
@pytest.mark.parametrize(
    ("value", "what"),
    [
        ("7", "a str"),
        (b"7", "a bytes"),
        (7, "a int"),
        ({7: 7}, "a dict"),
        (["handle"], "a str"),
        ([[None]], "None"),
    ],
)
def test_what_is_no_handle(engine, call, value, what):
    with pytest.raises(TypeError) as caught:
        getattr(engine, call)("m", value)
    expected = "a RequestHandle or a list of them"
    assert str(caught.value) == f"request_handle is {what}; it must be {expected}"
