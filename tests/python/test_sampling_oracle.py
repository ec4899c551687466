"""The sampler against transformers' logits processors and warpers, on the same logits and ids."""

from __future__ import annotations

import math

import numpy as np
import pytest
from allspark._allspark import GenerateConfig, testing
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
from transformers.generation import logits_process as hf  # noqa: E402

VOCAB = 24
EOS = 3

ids = st.integers(0, VOCAB - 1)
# Few distinct tokens, so that n-grams and words repeat.
tokens = st.lists(st.integers(0, 5), max_size=14)
words = st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=3), max_size=4)
logits = st.lists(
    st.one_of(st.floats(-30, 30, width=32), st.just(-math.inf)), min_size=VOCAB, max_size=VOCAB
).filter(lambda row: any(math.isfinite(x) for x in row))


def processors_of(config: dict, prompt_length: int) -> hf.LogitsProcessorList:
    """The processors that transformers' generate() makes from the config, in its order. Its
    sequence_bias is our logit_bias; it has no frequency and presence penalties."""
    result = hf.LogitsProcessorList()
    if config.get("logit_bias"):
        bias = {(token,): value for token, value in config["logit_bias"].items()}
        result.append(hf.SequenceBiasLogitsProcessor(bias))
    if config.get("repetition_penalty", 1.0) != 1.0:
        ignored = prompt_length if config.get("suppress_repetition_in_generation") else None
        result.append(
            hf.RepetitionPenaltyLogitsProcessor(
                config["repetition_penalty"], prompt_ignore_length=ignored
            )
        )
    if config.get("no_repeat_ngram_size", 0) > 0:
        result.append(hf.NoRepeatNGramLogitsProcessor(config["no_repeat_ngram_size"]))
    if config.get("bad_words_ids"):
        result.append(hf.NoBadWordsLogitsProcessor(config["bad_words_ids"]))
    if config.get("min_length", 0) > 0:
        result.append(hf.MinLengthLogitsProcessor(config["min_length"], EOS))
    if config.get("min_new_tokens", 0) > 0:
        result.append(
            hf.MinNewTokensLengthLogitsProcessor(prompt_length, config["min_new_tokens"], EOS)
        )
    return result


def oracle(config: dict, prompt: list[int], output: list[int], row: list[float]) -> np.ndarray:
    scores = torch.tensor([row], dtype=torch.float32)
    all_ids = torch.tensor([prompt + output])
    return processors_of(config, len(prompt))(all_ids, scores)[0].numpy()


@settings(max_examples=400, derandomize=True, deadline=None)
@given(
    config=st.fixed_dictionaries(
        {},
        optional={
            "logit_bias": st.dictionaries(ids, st.floats(-100, 100, width=32), max_size=4),
            "repetition_penalty": st.floats(0.5, 2, width=32),
            "suppress_repetition_in_generation": st.booleans(),
            "no_repeat_ngram_size": st.integers(0, 4),
            "bad_words_ids": words,
            "min_length": st.integers(0, 20),
            "min_new_tokens": st.integers(0, 10),
        },
    ),
    prompt=tokens.filter(bool),
    output=tokens,
    row=logits,
)
def test_processors_equal_transformers(config, prompt, output, row):
    native = GenerateConfig.from_dict({**config, "eos_token_id": EOS, "do_sample": False})
    (token,), processed, _, _ = testing.sample_tokens(native, prompt, output, row, [0])
    expected = oracle(config, prompt, output, row)
    np.testing.assert_array_equal(np.isneginf(processed), np.isneginf(expected))
    np.testing.assert_allclose(processed, expected, rtol=3e-7)
    # Greedy takes the highest logit after the processors.
    if np.isneginf(processed).all():
        assert token == -1
    else:
        assert token == processed.argmax()


@pytest.mark.parametrize(("frequency", "presence"), [(0.5, 0), (0, 1.5), (-2, 0.25), (1.25, -2)])
def test_frequency_and_presence_penalties(frequency, presence):
    prompt, output = [0, 1, 1], [1, 2, 2, 2]
    row = np.linspace(-3, 3, VOCAB, dtype=np.float32)
    config = GenerateConfig(frequency_penalty=frequency, presence_penalty=presence)
    _, processed, _, _ = testing.sample_tokens(config, prompt, output, list(row), [0])
    expected = row.copy()
    for token in set(output):
        expected[token] -= frequency * output.count(token) + presence
    np.testing.assert_allclose(processed, expected, rtol=1e-6, atol=1e-6)


def probabilities(config: dict, row: list[float]) -> np.ndarray:
    """transformers' warpers, in its order, and softmax."""
    warpers = hf.LogitsProcessorList()
    warpers.append(hf.TemperatureLogitsWarper(config["temperature"]))
    if config["top_k"] > 0:
        warpers.append(hf.TopKLogitsWarper(config["top_k"]))
    if config["top_p"] < 1:
        warpers.append(hf.TopPLogitsWarper(config["top_p"]))
    if config["min_p"] > 0:
        warpers.append(hf.MinPLogitsWarper(config["min_p"]))
    scores = torch.tensor([row], dtype=torch.float64)
    return torch.softmax(warpers(torch.tensor([[0]]), scores), dim=-1)[0].numpy()


# The 1 - 1e-9 quantile of chi-square by Wilson and Hilferty: there are many tests with fixed seeds.
def chi_square_bound(freedom: int) -> float:
    a = 2 / (9 * freedom)
    return freedom * (1 - a + 6.0 * math.sqrt(a)) ** 3


@settings(max_examples=60, derandomize=True, deadline=None)
@given(
    config=st.fixed_dictionaries(
        {
            "temperature": st.sampled_from([0.3, 0.7, 1.0, 1.7]),
            "top_k": st.sampled_from([0, 2, 5, 20]),
            "top_p": st.sampled_from([1.0, 0.95, 0.7, 0.3]),
            "min_p": st.sampled_from([0.0, 0.02, 0.1, 0.5]),
        }
    ),
    seed=st.integers(0, 10**6),
)
def test_draws_follow_transformers_distribution(config, seed):
    row = np.random.default_rng(seed).normal(0, 2, VOCAB).astype(np.float32).tolist()
    native = GenerateConfig.from_dict(config)
    num_draws = 1500
    seeds = list(range(seed, seed + num_draws))
    drawn, *_ = testing.sample_tokens(native, [1, 2], [], row, seeds)
    counts = np.bincount(drawn, minlength=VOCAB)
    expected = probabilities(config, row) * num_draws
    assert counts[expected == 0].sum() == 0, "drawn outside of what the warpers keep"
    # Rare tokens count as one class, as the chi-square test requires.
    rare = (expected < 5) & (expected > 0)
    observed = np.append(counts[expected >= 5], counts[rare].sum())
    wanted = np.append(expected[expected >= 5], expected[rare].sum())
    observed, wanted = observed[wanted > 0], wanted[wanted > 0]
    statistic = float(((observed - wanted) ** 2 / wanted).sum())
    assert statistic <= chi_square_bound(max(len(wanted) - 1, 1))


@settings(max_examples=150, derandomize=True, deadline=None)
@given(row=logits, num_top=st.integers(0, 20), raw=st.booleans(), banned=st.lists(ids, max_size=8))
def test_logprobs_equal_log_softmax(row, num_top, raw, banned):
    config = GenerateConfig(
        do_sample=False, logprobs=True, top_logprobs=num_top,
        logprobs_mode="raw" if raw else "processed", bad_words_ids=[[token] for token in banned],
    )  # fmt: skip
    (token,), processed, logprob, top = testing.sample_tokens(config, [0], [], row, [0])
    if token < 0:
        return
    seen = np.array(row, dtype=np.float32) if raw else processed
    expected = torch.log_softmax(torch.tensor(seen, dtype=torch.float64), dim=-1).numpy()
    assert logprob == pytest.approx(expected[token], rel=1e-6, abs=1e-6)
    order = sorted((-seen[i], i) for i in range(VOCAB) if not np.isneginf(seen[i]))[:num_top]
    assert [i for i, _ in top] == [i for _, i in order]
    np.testing.assert_allclose([p for _, p in top], expected[[i for i, _ in top]], 1e-6, 1e-6)


def test_greedy_ignores_the_warpers():
    row = [0.0, 1.0, 2.0, 2.0]
    config = GenerateConfig(do_sample=False, temperature=9.0, top_k=0, top_p=0.1, min_p=1.0)
    drawn, *_ = testing.sample_tokens(config, [0], [], row, [1, 2, 3])
    assert drawn == [2, 2, 2]
