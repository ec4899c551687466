"""64 requests, each with a random config over all fields, give together what each gives alone."""

from __future__ import annotations

import random

import pytest
from allspark import AsCacheMode, AsStatus
from allspark._allspark import GenerateConfig
from engine_fixture import VOCAB_SIZE, start_engine, write_small_checkpoint

TENSORS = [
    "prompt_only", "output_logits", "output_last_hidden_state",
    "enable_tensors_from_model_inference", "pooling",
]  # fmt: skip


def random_config(rng: random.Random, prompt_length: int) -> dict:
    """About half of the fields, each with a value that changes something."""

    def token() -> int:
        return rng.randrange(VOCAB_SIZE)

    def words() -> list[list[int]]:
        return [[token() for _ in range(rng.randint(1, 3))] for _ in range(rng.randint(1, 3))]

    values = {
        "do_sample": rng.random() < 0.8,
        "temperature": rng.uniform(0.3, 2),
        "top_k": rng.choice([0, 1, 5, 40]),
        "top_p": rng.uniform(0.3, 1),
        "min_p": rng.uniform(0, 0.2),
        "max_length": prompt_length + rng.randint(20, 90),
        "num_generated_in_prompt": rng.randrange(min(prompt_length, 20)),
        "min_length": prompt_length + rng.randint(0, 10),
        "min_new_tokens": rng.randint(0, 10),
        "early_stopping": rng.random() < 0.5,
        "ignore_eos": rng.random() < 0.5,
        "eos_token_id": token(),
        "stop_token_ids": [token() for _ in range(rng.randint(0, 3))],
        "stop_words_ids": words(),
        "bad_words_ids": words(),
        "logit_bias": {token(): rng.uniform(-5, 5) for _ in range(rng.randint(0, 5))},
        "repetition_penalty": rng.uniform(0.7, 1.5),
        "suppress_repetition_in_generation": rng.random() < 0.5,
        "presence_penalty": rng.uniform(-2, 2),
        "frequency_penalty": rng.uniform(-2, 2),
        "no_repeat_ngram_size": rng.randint(0, 4),
        "repetition_ngram_size": rng.randint(0, 3),
        "repetition_ngram_threshold": rng.randint(0, 4),
        "prompt_lookup_num_tokens": rng.randint(0, 8),
        "use_draft_model": rng.random() < 0.5,
        "logprobs": rng.random() < 0.8,
        "top_logprobs": rng.randint(0, 20),
        "logprobs_mode": rng.choice(["processed", "raw"]),
        "prompt_logprobs": rng.random() < 0.5,
        "prompt_only": rng.random() < 0.2,
        "output_logits": rng.choice(["", "all", "generation"]),
        "output_last_hidden_state": rng.choice(["", "all", "generation"]),
        "enable_tensors_from_model_inference": rng.random() < 0.5,
        "pooling": rng.choice(["", "mean", "last"]),
        "normalize": rng.random() < 0.5,
        "priority": rng.randint(-2, 2),
        "timeout_ms": rng.choice([0, 10**8]),
    }
    config = {name: value for name, value in values.items() if rng.random() < 0.5}
    group = random_group(rng)
    fixed = {"seed", "max_new_tokens", "lora_name"}  # adapters: test_lora.py
    fields = set(values) | set(group) | fixed
    assert fields == set(GenerateConfig().to_dict()), "a field is not in this test"
    refused = {
        "num_beams": [*TENSORS, "num_generated_in_prompt", "prompt_lookup_num_tokens",
                      "prompt_logprobs", "repetition_ngram_threshold"],
        "best_of": [*TENSORS, "num_generated_in_prompt", "do_sample"],
    }  # fmt: skip
    for name in [name for kind, names in refused.items() if group[kind] > 1 for name in names]:
        config.pop(name, None)
    if group["num_beams"] > 1:
        config["do_sample"] = False
    config.update(group)
    return {**config, "seed": rng.randrange(10**9), "max_new_tokens": rng.randint(30, 90)}


def random_group(rng: random.Random) -> dict:
    """A beam search, some samples, or neither."""
    kind, count = rng.randrange(4), rng.randint(2, 5)
    return {
        "num_beams": count if kind == 0 else 1,
        "best_of": count if kind == 1 else 1,
        "num_return_sequences": rng.randint(1, count) if kind < 2 else 1,
        "length_penalty": rng.uniform(-1, 2),
        "beam_early_stopping": rng.choice(["false", "true", "never"]),
    }


def outcome(queue) -> tuple:
    if isinstance(queue, list):  # of a group; the best one stands for it in what is counted
        best, *others = [outcome(one) for one in queue]
        return (*best[:-2], others, *best[-2:])
    ids, logprobs, top, prompt = [], [], [], []
    tensors: dict[str, bytes] = {}
    for elements in queue:
        ids += elements.ids_from_generate
        logprobs += elements.token_logprobs_list
        top += elements.log_probs_list
        prompt += elements.prompt_token_logprobs_list
        prompt += elements.prompt_log_probs_list
        for arrays in elements.tensors_from_model_inference:
            for name, array in arrays.items():
                tensors[name] = tensors.get(name, b"") + array.tobytes()
    score = queue.sequence_score
    return ids, logprobs, top, prompt, tensors, score, queue.finish_reason, queue.error


@pytest.mark.parametrize("blocks", [0, 20], ids=["roomy", "preempting"])
@pytest.mark.parametrize("cache_mode", AsCacheMode, ids=lambda mode: mode.name)
def test_mixed_batch_equals_each_alone(tmp_path, blocks, cache_mode):
    engine, _ = start_engine(
        write_small_checkpoint(tmp_path), engine_max_batch=64, engine_max_length=256,
        engine_max_prefill_length=64, cache_span_size=16, cache_span_num_init=blocks,
        kv_cache_mode=cache_mode,
    )  # fmt: skip
    engine.start_model("m")
    rng = random.Random(17)
    lengths = [rng.randint(1, 100) for _ in range(64)]
    jobs = [
        ([rng.randrange(VOCAB_SIZE) for _ in range(length)], random_config(rng, length))
        for length in lengths
    ]

    def start(job):
        status, _, queue = engine.start_request_ids("m", None, *job)
        assert status == AsStatus.ALLSPARK_SUCCESS, engine.last_error()
        return queue

    alone = [outcome(start(job)) for job in jobs]
    queues = [start(job) for job in jobs]
    for job, expected, queue in zip(jobs, alone, queues, strict=True):
        assert outcome(queue) == expected, job
    preemptions = engine.get_as_engine_stat("m").num_preemptions
    assert (preemptions > 0) == (blocks > 0)
    # They are not all alike: some stop, some reach their length, and the outputs differ.
    assert {"stop", "length"} <= {reason for *_, reason, _ in alone}
    assert len({tuple(ids) for ids, *_ in alone}) > 50
