"""Statistics, texts and windows of evaluations: no model is needed."""

from __future__ import annotations

import bz2
import codecs
import hashlib
import json
import math
import types
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

pytest.importorskip("allspark._allspark")

from allspark.eval import Text, read_tasks  # noqa: E402
from allspark.eval.divergence import _top, token_figures  # noqa: E402
from allspark.eval.files import to_texts  # noqa: E402
from allspark.eval.statistics import (  # noqa: E402
    Estimate,
    exponential,
    mean,
    ratio_of,
    root_mean_square,
    spread,
)
from allspark.eval.windows import check_settings, cut, ids_of  # noqa: E402

RNG = np.random.default_rng(7)


# Statistics, against sums as llama.cpp's perplexity keeps them.


def from_sums(values):
    """The mean and its uncertainty, from the sums of the values and of their squares."""
    count = len(values)
    average = math.fsum(values) / count
    variance = math.fsum(v * v for v in values) / count - average**2
    return average, math.sqrt(variance / (count - 1))


def test_a_mean_has_the_error_of_independent_values():
    values = RNG.gamma(2.0, 1.5, 400).tolist()
    found = mean(values)
    assert (found.value, found.error) == pytest.approx(from_sums(values), rel=1e-9)
    flags = [True] * 30 + [False] * 10
    assert mean(flags) == Estimate(0.75, pytest.approx(math.sqrt(0.75 * 0.25 / 39)))
    assert mean([2.0]).value == 2.0 and math.isnan(mean([2.0]).error)
    assert math.isnan(mean([]).value)


def test_ratios_know_that_both_models_read_the_same_text():
    losses = RNG.gamma(2.0, 1.5, 500)
    others = losses + RNG.normal(0.02, 0.1, 500)
    (a, ea), (b, eb) = from_sums(losses.tolist()), from_sums(others.tolist())
    products = math.fsum(x * y for x, y in zip(losses.tolist(), others.tolist(), strict=True))
    covariance = (products / 500 - a * b) / 499
    found = ratio_of(losses, others)
    error = math.sqrt(ea**2 + eb**2 - 2 * covariance)
    assert found.log_ratio == Estimate(pytest.approx(a - b), pytest.approx(error, rel=1e-6))
    assert found.ratio.value == pytest.approx(math.exp(a - b))
    assert found.ratio.error == pytest.approx(math.exp(a - b) * error, rel=1e-6)
    assert found.correlation == pytest.approx(covariance / (ea * eb), rel=1e-6)
    ours, theirs = math.exp(a), math.exp(b)
    spread_of = (ours * ea) ** 2 + (theirs * eb) ** 2 - 2 * ours * theirs * covariance
    assert found.difference.value == pytest.approx(ours - theirs)
    assert found.difference.error == pytest.approx(math.sqrt(spread_of), rel=1e-6)
    assert found.ratio.error < exponential(mean(losses)).error / ours


def test_a_model_against_itself_has_no_error():
    losses = RNG.gamma(2.0, 1.5, 100)
    found = ratio_of(losses, losses)
    assert found.ratio.value == 1.0 and found.ratio.error < 1e-8
    assert found.correlation == pytest.approx(1.0)
    assert math.isnan(ratio_of(np.ones(9), np.ones(9)).correlation)


def test_roots_and_exponentials_propagate_errors():
    changes = RNG.normal(0, 0.1, 300).tolist()
    square, error = from_sums([change**2 for change in changes])
    found = root_mean_square(changes)
    assert found.value == pytest.approx(math.sqrt(square))
    assert found.error == pytest.approx(0.5 / math.sqrt(square) * error)
    assert root_mean_square([0.0, 0.0]) == Estimate(0.0, 0.0)
    assert exponential(Estimate(2.0, 0.5)) == Estimate(math.exp(2), 0.5 * math.exp(2))
    assert exponential(Estimate(1e9, 1.0)) == Estimate(math.inf, math.inf)


def test_percentiles_are_interpolated_between_ranks():
    found = spread([4.0, 1.0, 3.0, 2.0], ("50", "75", "99.9"))
    assert (found.smallest, found.largest, found.percentiles["50"]) == (1.0, 4.0, 2.5)
    assert found.percentiles == {"50": 2.5, "75": 3.25, "99.9": pytest.approx(3.997)}


# Figures of tokens, against a loop in Python's own numbers.


def softmax(row):
    top = max(row)
    exps = [math.exp(float(value) - float(top)) for value in row]
    return [value / math.fsum(exps) for value in exps]


def likeliest(row, count):
    return set(sorted(range(len(row)), key=lambda token: (-row[token], token))[:count])


def test_token_figures_are_those_of_the_formulas():
    base = (RNG.standard_normal((70, 90)) * 3).astype(np.float32)
    own = (base + RNG.standard_normal((70, 90)) * 0.4).astype(np.float32)
    targets = RNG.integers(0, 90, 70)
    with ThreadPoolExecutor(3) as pool:
        _, found = token_figures([base, own], base, targets, pool)
    for row, target in enumerate(targets.tolist()):
        p, q = softmax(base[row].tolist()), softmax(own[row].tolist())
        divergence = math.fsum(a * math.log(a / b) for a, b in zip(p, q, strict=True))
        assert found.kl_divergences[row] == pytest.approx(divergence, rel=1e-9)
        assert found.losses[row] == pytest.approx(-math.log(q[target]))
        assert found.reference_losses[row] == pytest.approx(-math.log(p[target]))
        assert found.changes[row] == pytest.approx(q[target] - p[target], abs=1e-12)
        assert found.is_same_top[row] == (likeliest(own[row], 1) == likeliest(base[row], 1))
        common = likeliest(own[row], 5) & likeliest(base[row], 5)
        assert found.overlaps[row] == pytest.approx(len(common) / 5)


def test_extreme_logits_stay_numbers():
    base = np.zeros((2, 50), np.float32)
    base[:, 3] = 1e4
    own = -base
    with ThreadPoolExecutor(1) as pool:
        found, same = token_figures([own, base], base, np.array([3, 4]), pool)
    assert np.isfinite(found.kl_divergences).all() and found.kl_divergences[0] > 9e3
    assert (same.kl_divergences == 0).all() and (same.overlaps == 1).all()


def test_of_equal_logits_the_lowest_ids_count():
    logits = np.zeros((3, 40), np.float32)
    logits[1, 30:33] = 2
    assert set(_top(logits)[0].tolist()) == {0, 1, 2, 3, 4}
    assert set(_top(logits)[1].tolist()) == {30, 31, 32, 0, 1}
    assert _top(np.zeros((1, 3), np.float32)).shape == (1, 3)


# Texts.


def test_texts_are_files_and_their_digests(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes("one\r\nzwei é".encode())
    text = Text.read(path)
    assert text.content == "one\r\nzwei é"
    assert text.facts.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    packed = tmp_path / "a.txt.bz2"
    packed.write_bytes(bz2.compress(path.read_bytes()))
    assert Text.read(packed).content == text.content
    assert Text.read(packed).facts.num_bytes == packed.stat().st_size
    given = Text.of("three", "mine")
    assert [each.facts.name for each in to_texts([path, given])] == [str(path), "mine"]
    assert to_texts(str(path)) == [text]


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("a.txt", b"", "a.txt: the file is empty; it must be a text in UTF-8"),
        ("a.txt", b"ab\0c", "a.txt: byte 2 is 0; the file must be a text in UTF-8"),
        ("a.txt", b"caf\xe9!", r"a.txt: byte 3 is 0xe9 \(.*\); the file must be a text in UTF-8"),
        ("a.bz2", b"plain", "a.bz2: not compressed by bzip2, as its name says"),
        ("b.bz2", bz2.compress(b"x" * 99)[:-9], "b.bz2: not compressed by bzip2, as its name"),
    ],
)
def test_what_is_no_text_is_refused(tmp_path, name, data, message):
    (tmp_path / name).write_bytes(data)
    with pytest.raises(ValueError, match=message):
        Text.read(tmp_path / name)


def test_texts_that_are_none_are_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="missing.txt"):
        to_texts(tmp_path / "missing.txt")
    with pytest.raises(ValueError, match="texts is empty; it must have at least one"):
        to_texts([])
    with pytest.raises(TypeError, match=r"texts\[0\] is a int; it must be a path or a Text"):
        to_texts([7])


# Windows.


class Tokenizer:
    """A token for each character, after some special ones."""

    def __init__(self, first=(), last=()):
        self._first, self._last = list(first), list(last)

    def encode(self, text, add_special_tokens=True, verbose=True):
        ids = [ord(each) for each in text]
        return [*self._first, *ids, *self._last] if add_special_tokens else ids


def model_of(tokenizer, session_len=64):
    return types.SimpleNamespace(tokenizer=tokenizer, session_len=session_len)


def test_windows_begin_with_the_tokens_of_a_text_and_score_their_later_half():
    model = model_of(Tokenizer(first=[1], last=[2]))
    found = cut(model, [Text.of("abcdefghijklmnopqrstuvwxyz")], 10, None)
    assert [window.ids.tolist() for window in found.windows] == [
        [1, *map(ord, "abcdefghi")],
        [1, *map(ord, "klmnopqrs")],  # j made room
    ]
    assert found.windows[0].first == 5 and found.windows[0].targets.tolist() == [*map(ord, "fghi")]
    assert found.num_scored == 8 and str(found.windows[1]) == "window 1 of text"
    plain = cut(model_of(Tokenizer()), [Text.of("abcdefghijklmnopqrstuvwxyz")], 9, None)
    assert [window.ids.tolist() for window in plain.windows][1] == [*map(ord, "jklmnopqr")]
    assert ids_of(Tokenizer(first=[8, 9]), "a").tolist() == [8, 9, 97]


def test_tokens_bound_the_windows_of_all_texts():
    texts = [Text.of("a" * 25, "one"), Text.of("b" * 45, "two"), Text.of("c" * 5, "short")]
    model = model_of(Tokenizer())
    found = cut(model, texts, 10, 49)
    assert [str(window) for window in found.windows] == [
        "window 0 of one", "window 1 of one", "window 0 of two", "window 1 of two",
    ]  # fmt: skip
    assert [facts.name for facts in found.texts] == ["one", "two"]
    with pytest.raises(ValueError, match="short has 5 tokens; it must have at least context, 10"):
        cut(model, texts, 10, None)


@pytest.mark.parametrize(
    ("context", "tokens", "message"),
    [
        (7, None, "context is 7; it must be an integer of at least 8"),
        ("512", None, r"context is '512' \(str\); it must be an integer"),
        (512, 511, "tokens is 511; it must be None or at least context, which is 512"),
        (512, 0, "tokens is 0; it must be None or an integer of at least 1"),
    ],
)
def test_bad_settings_name_field_value_and_bound(context, tokens, message):
    with pytest.raises((ValueError, TypeError), match=message):
        check_settings(context, tokens)


def test_a_context_beyond_the_model_is_refused():
    with pytest.raises(ValueError, match=r"context is 65; it must be in \[8, 64\], the model's"):
        cut(model_of(Tokenizer()), [Text.of("a" * 99)], 65, None)


# Files of tasks.


def test_both_forms_of_tasks_are_read(repo_root, tmp_path):
    data = repo_root / "tests" / "data"
    file = read_tasks(data / "choices.txt")
    assert [task.label for task in file.tasks] == [0, 2, 1]
    assert file.tasks[1].context == "Sums: 12+35 is"
    assert file.tasks[1].choices == ("46", "57", "47", "37")
    assert file.tasks[0].delimiter == " "
    packed = tmp_path / "tasks.txt.bz2"
    packed.write_bytes(bz2.compress((data / "choices.txt").read_bytes()))
    assert read_tasks(packed).tasks == file.tasks
    windows = tmp_path / "crlf.txt"
    windows.write_bytes((data / "choices.txt").read_bytes().replace(b"\n", b"\r\n"))
    assert read_tasks(windows).tasks == file.tasks
    for name in ("choices.txt", "choices.jsonl"):
        marked = tmp_path / name
        marked.write_bytes(codecs.BOM_UTF8 + (data / name).read_bytes())
        assert read_tasks(marked).tasks == read_tasks(data / name).tasks
    found = read_tasks(data / "choices.jsonl").tasks
    assert [len(task.choices) for task in found] == [3, 3, 2] and found[2].delimiter == ""


def test_the_whole_of_hellaswag_is_read(shared_data):
    tasks = read_tasks(shared_data / "eval" / "hellaswag_val_full.txt.bz2").tasks
    assert len(tasks) == 10_042 and {len(task.choices) for task in tasks} == {4}
    assert tasks[0].label == 3 and tasks[0].context.startswith("Roof shingle removal: ")


GOOD = {"context": "c", "choices": ["a", "b"], "label": 0}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("one\n0\na\nb\nc\n", "t has 5 lines; it must have 6 for each task"),
        ("one\n4\na\nb\nc\nd\n", r"task of line 1: label is 4; it must be an integer in \[0, 3\]"),
        ("one\nx\na\nb\nc\nd\n", "t: line 2 is 'x'; it must be the index of the right ending"),
        ("one\n0\na\n\nc\nd\n", r"t: task of line 1: choices\[1\] is ''; it must not be empty"),
        ("\n0\na\nb\nc\nd\n", "t: task of line 1: context is ''; it must not be empty"),
        ("{nonsense", "t: line 1 is no JSON: "),
        ('{"a": 1}\n[1]', "t: line 1 has 'a'; its keys must be of context, choices, label"),
        (json.dumps(GOOD) + "\n[1]", r"t: line 2 is \[1\]; it must be an object"),
        (json.dumps({"context": "c", "label": 0}), "t: line 1 has no 'choices'; it must have"),
        (json.dumps({**GOOD, "choices": ["a"]}), "it must have at least two texts"),
        (json.dumps({**GOOD, "choices": "ab"}), "choices is 'ab'; it must be a list of texts"),
        (json.dumps({**GOOD, "choices": ["a", 1]}), r"choices\[1\] is 1; it must be a str"),
        (json.dumps({**GOOD, "label": 2}), r"1: label is 2; it must be an integer in \[0, 1\]"),
        (json.dumps({**GOOD, "label": True}), "label is True; it must be an integer"),
        (json.dumps({**GOOD, "delimiter": 1}), "delimiter is 1; it must be a str"),
    ],
)
def test_bad_tasks_name_line_field_and_value(tmp_path, monkeypatch, content, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "t").write_text(content)
    with pytest.raises((ValueError, TypeError), match=message):
        read_tasks("t")
