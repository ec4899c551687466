"""Beam search against transformers' generate(num_beams=...), and best_of against n samples."""

from __future__ import annotations

import random

import numpy as np
import pytest
from allspark import AsStatus
from engine_fixture import (
    VOCAB_SIZE,
    read_all,
    start_engine,
)

OK = AsStatus.ALLSPARK_SUCCESS
VOCAB = 101  # that of the models of test_architectures


def collect(queue) -> tuple[list[int], list[float], float]:
    ids, logprobs = [], []
    for elements in queue:
        ids += elements.ids_from_generate
        logprobs += elements.token_logprobs_list
    assert queue.finish_reason in ("stop", "length"), queue.error
    return ids, logprobs, queue.sequence_score


def random_search(rng: random.Random) -> dict:
    """A config with transformers' field names, except for `stop_words_ids`."""

    def token() -> int:
        return rng.randrange(3, VOCAB)

    beams = rng.randint(2, 6)
    config = {
        "num_beams": beams,
        "num_return_sequences": rng.randint(1, beams),
        "max_new_tokens": rng.choice([1, 2, 5, 12, 25]),
        "length_penalty": rng.choice([-2.0, -0.5, 0.0, 0.3, 1.0, 2.0]),
        "early_stopping": rng.choice([False, True, "never"]),
        # Sometimes likely to come and sometimes not: one of 101 nearly equal tokens, or thirty of
        # them.
        "eos_token_id": rng.sample(range(3, VOCAB), rng.choice([1, 1, 4, 30])),
    }
    others = {
        "repetition_penalty": rng.uniform(0.7, 1.6),
        "no_repeat_ngram_size": rng.randint(1, 3),
        "min_new_tokens": rng.randint(1, config["max_new_tokens"]),
        "bad_words_ids": [[t] for t in rng.sample(range(3, VOCAB), 5)]
        + [[token(), token()] for _ in range(40)],
        "sequence_bias": [[[t], rng.uniform(-3, 3)] for t in rng.sample(range(3, VOCAB), 10)],
        "stop_words_ids": [[token(), token()] for _ in range(60)],
    }
    config.update({name: value for name, value in others.items() if rng.random() < 0.4})
    spared = config["eos_token_id"]
    if "bad_words_ids" in config:  # in transformers these have no effect on EOS
        config["bad_words_ids"] = [w for w in config["bad_words_ids"] if w[-1] not in spared]
    return config


def ours_of(config: dict) -> dict:
    """The same config with our field names."""
    fields = {**config, "do_sample": False, "logprobs": True}
    first, *others = fields.pop("eos_token_id")
    fields.update(eos_token_id=first, stop_token_ids=others)
    if "sequence_bias" in fields:
        fields["logit_bias"] = {token: bias for (token,), bias in fields.pop("sequence_bias")}
    return fields


def expected_of(model, prompt: list[int], config: dict) -> list[tuple]:
    """transformers' sequences, with the scores of their tokens and of the sequences."""
    import torch
    from transformers import StoppingCriteria, StoppingCriteriaList

    class StopWords(StoppingCriteria):
        def __call__(self, input_ids, scores, **_):
            output = input_ids[:, len(prompt) :].tolist()
            return torch.tensor(
                [
                    len(row) >= config.get("min_new_tokens", 0)
                    and any(row[-len(word) :] == word for word in words)
                    for row in output
                ]
            )

    fields = dict(config)
    words = fields.pop("stop_words_ids", [])
    found = model.generate(
        torch.tensor([prompt]),
        do_sample=False,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_scores=True,
        output_logits=True,
        stopping_criteria=StoppingCriteriaList([StopWords()]),
        **fields,
    )
    logprobs = model.compute_transition_scores(found.sequences, found.scores, found.beam_indices)
    result = []
    for row, scores, score, beams in zip(
        found.sequences, logprobs, found.sequences_scores, found.beam_indices, strict=True
    ):
        length = int((beams >= 0).sum())
        result.append(
            (row[len(prompt) :][:length].tolist(), scores[:length].numpy(), float(score))
        )
    return result


@pytest.mark.parametrize("row", ["llama", "mistral-window", "qwen2-tied", "qwen3-head-dim"])
def test_sequences_and_scores_equal_transformers(tmp_path, row):
    pytest.importorskip("transformers")
    from allspark import TargetDevice
    from support.parity import exact_model
    from test_architectures import NAME, build, image_of, prompt_ids, save

    model = build(row)
    loader, engine = image_of(save(model, tmp_path), "float32")
    builder = loader.create_reference_runtime_config_builder(NAME, TargetDevice.CPU, max_batch=16)
    builder.update_from_dict({"cache_span_size": 16, "engine_max_prefill_length": 24})
    assert engine.install_model(builder.build()) == OK, engine.last_error()
    assert engine.start_model(NAME) == OK
    rng = random.Random(row)
    jobs = []
    for _ in range(40):
        prompt = prompt_ids(rng.randint(1, 70), rng.randrange(10**6))
        config = random_search(rng)
        status, handles, queues = engine.start_request_ids(NAME, None, prompt, ours_of(config))
        assert status == OK, engine.last_error()
        jobs.append((prompt, config, queues if isinstance(queues, list) else [queues]))
    reasons = set()
    for prompt, config, queues in jobs:
        found = [collect(queue) for queue in queues]
        expected = expected_of(model, prompt, config)
        if [ids for ids, *_ in found] != [ids for ids, *_ in expected]:
            # If rounding decides, transformers may keep another sequence than exact arithmetic
            # would. Then the exact one counts.
            expected = expected_of(exact_model(model), prompt, config)
        assert len(found) == len(expected) == config["num_return_sequences"]
        for ours, queue, (ids, logprobs, score) in zip(found, queues, expected, strict=True):
            our_ids, our_logprobs, our_score = ours
            assert our_ids == ids, config
            np.testing.assert_allclose(our_logprobs, logprobs, rtol=1e-4, atol=1e-4)
            # There, sums are float32: one rounding for each token, before the division.
            rounding = 1e-5 * len(ids) / len(ids) ** config["length_penalty"]
            np.testing.assert_allclose(our_score, score, rtol=1e-4, atol=rounding)
            reasons.add(queue.finish_reason)
    assert reasons == {"stop", "length"}
    assert engine.get_as_engine_stat(NAME).used_span == 0


@pytest.fixture(scope="module")
def running(checkpoint):
    engine, loader = start_engine(checkpoint)
    engine.loader = loader
    return engine


def start(engine, config, prompt=(1, 2, 3)):
    status, handles, queues = engine.start_request_ids("m", None, list(prompt), config)
    assert status == OK, engine.last_error()
    return handles, queues


BEAMS = {"num_beams": 4, "do_sample": False, "max_new_tokens": 12}


def test_one_sequence_is_the_first_of_several(running):
    _, queue = start(running, BEAMS)
    _, queues = start(running, {**BEAMS, "num_return_sequences": 4})
    best = collect(queue)
    several = [collect(queue) for queue in queues]
    assert several[0] == best and len(several) == 4
    assert len({tuple(ids) for ids, _, _ in several}) == 4
    scores = [score for _, _, score in several]
    assert scores == sorted(scores, reverse=True)
    _, greedy = start(running, {"do_sample": False, "max_new_tokens": 12})
    read_all(greedy)
    assert greedy.sequence_score is None


def test_log_probabilities_add_up_to_the_score(running):
    config = {**BEAMS, "logprobs": True, "top_logprobs": 5, "length_penalty": 0.7}
    _, queue = start(running, config)
    elements = queue.Get()
    assert queue.Get() is None  # all of it came at once
    ids, logprobs = elements.ids_from_generate, elements.token_logprobs_list
    assert len(ids) == len(logprobs) == len(elements.log_probs_list) == 12
    assert queue.sequence_score == pytest.approx(sum(logprobs) / 12**0.7, rel=1e-5)
    for token, logprob, top in zip(ids, logprobs, elements.log_probs_list, strict=True):
        assert len(top) == 5 and top == sorted(top, key=lambda pair: -pair[1])
        assert dict(top).get(token, logprob) == logprob
    # Raw log-probabilities are those that the model gives the same tokens without penalties.
    penalties = {"repetition_penalty": 1.5, "logprobs_mode": "raw"}
    _, queue = start(running, {**config, **penalties})
    elements = queue.Get()
    prompt = [1, 2, 3, *elements.ids_from_generate]
    _, scored = start(running, {"max_new_tokens": 1, "prompt_logprobs": True}, prompt)
    raw = scored.Get().prompt_token_logprobs_list[2:]
    assert elements.token_logprobs_list == pytest.approx(raw, rel=1e-5)


def test_early_stopping_has_two_meanings(running):
    config = {**BEAMS, "eos_token_id": 5, "stop_token_ids": list(range(20)), "max_new_tokens": 40}
    for ours, theirs in (("false", False), ("true", True), ("never", "never")):
        _, one = start(running, {**config, "early_stopping": theirs})
        _, other = start(running, {**config, "beam_early_stopping": ours})
        assert collect(one) == collect(other)
    # Without beams, early_stopping has DashInfer's meaning: whether EOS ends a request.
    _, queue = start(running, {"do_sample": False, "early_stopping": False, "max_new_tokens": 5})
    assert len(read_all(queue)) == 5


def test_stopping_one_sequence_stops_all(running):
    for group in ({**BEAMS, "num_return_sequences": 3}, {"best_of": 4, "n": 3}):
        config = {**group, "max_new_tokens": 400}
        # Without memory there is no step, so the search cannot end.
        assert running.unload_device_mem("m") == OK
        handles, queues = start(running, config)
        assert running.stop_request("m", handles[1]) == OK
        assert running.load_device_mem("m") == OK
        assert running.sync_request("m", handles) == OK
        assert {queue.finish_reason for queue in queues} == {"cancelled"}
        assert running.release_request("m", handles) == OK
    assert running.get_as_engine_stat("m").used_span == 0


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"num_beams": 4}, ["do_sample", "true", "false", "num_beams is 4"]),
        ({**BEAMS, "n": 2}, ["n is 2", "num_beams is 4"]),
        ({**BEAMS, "best_of": 3}, ["best_of is 3", "1", "num_beams is 4"]),
        ({**BEAMS, "num_beams": 9}, ["num_beams is 9", "engine_max_batch", "8"]),
        ({**BEAMS, "num_return_sequences": 5}, ["num_return_sequences is 5", "num_beams", "4"]),
        ({**BEAMS, "prompt_lookup_num_tokens": 2}, ["prompt_lookup_num_tokens is 2", "num_beams"]),
        ({**BEAMS, "prompt_logprobs": True}, ["prompt_logprobs is true", "num_beams is 4"]),
        (
            {**BEAMS, "repetition_ngram_size": 2, "repetition_ngram_threshold": 3},
            ["repetition_ngram_threshold is 3", "num_beams is 4"],
        ),
        ({**BEAMS, "early_stopping": "maybe"}, ["beam_early_stopping", "maybe", "never"]),
        ({**BEAMS, "stop_words": ["x"]}, ["stop_words", "x", "num_beams is 4"]),
        ({**BEAMS, "response_format": {"type": "regex", "regex": "a*"}}, ["num_beams is 4"]),
        ({"best_of": 2, "response_format": {"type": "regex", "regex": "a*"}}, ["best_of is 2"]),
        ({**BEAMS, "output_logits": "all"}, ['output_logits is "all"', "num_beams is 4"]),
        ({"best_of": 2, "prompt_only": True}, ["prompt_only is true", "best_of is 2"]),
        ({"best_of": 2, "pooling": "mean"}, ['pooling is "mean"', "best_of is 2"]),
        ({"best_of": 2, "do_sample": False}, ["do_sample is false", "best_of is 2"]),
        ({"best_of": 2, "n": 3}, ["num_return_sequences is 3", "best_of", "2"]),
        ({"best_of": 2, "stop_words": ["x"]}, ["stop_words", "best_of is 2"]),
        ({"n": 3, "num_return_sequences": 2}, ["n is 3", "num_return_sequences is 2"]),
        ({"num_return_sequences": 2, "do_sample": False}, ["num_return_sequences is 2"]),
    ],
)
def test_contradictions_are_refused(running, config, words):
    status, *_ = running.start_request_ids("m", running.loader, [1, 2], config)
    assert status == AsStatus.ALLSPARK_PARAM_ERROR
    for word in words:
        assert word in running.last_error(), running.last_error()


def test_num_return_sequences_alone_is_n(running):
    config = {"seed": 3, "max_new_tokens": 10}
    _, n = start(running, {**config, "n": 3})
    _, sequences = start(running, {**config, "num_return_sequences": 3})
    assert [read_all(queue) for queue in n] == [read_all(queue) for queue in sequences]


@pytest.mark.parametrize("mode", ["processed", "raw"])
@pytest.mark.parametrize("penalty", [0.0, 1.0, 2.0])
def test_best_of_ranks_the_samples_of_n(running, mode, penalty):
    config = {
        "seed": 11, "temperature": 1.4, "top_k": 0, "max_new_tokens": 30, "logprobs": True,
        "top_logprobs": 3, "logprobs_mode": mode, "stop_token_ids": list(range(0, VOCAB_SIZE, 9)),
        "frequency_penalty": 0.3,
    }  # fmt: skip
    _, samples = start(running, {**config, "n": 6})
    samples = [collect(queue)[:2] for queue in samples]
    ranked = sorted(samples, key=lambda s: -sum(s[1]) / len(s[1]) ** penalty)
    config["length_penalty"] = penalty
    _, best = start(running, {**config, "best_of": 6, "n": 3})
    best = [collect(queue) for queue in best]
    assert [(ids, logprobs) for ids, logprobs, _ in best] == ranked[:3]
    for _, logprobs, score in best:
        assert score == pytest.approx(sum(logprobs) / len(logprobs) ** penalty, rel=1e-5)
    # Returns one queue; the tokens are the same without log-probabilities.
    _, queue = start(running, {**config, "best_of": 6, "logprobs": False, "top_logprobs": 0})
    assert (read_all(queue), queue.sequence_score) == (best[0][0], best[0][2])
