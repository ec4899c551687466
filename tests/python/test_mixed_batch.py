"""64 requests, each with a random config over all fields, a format, stop strings, several sequences
or an adapter, give the same results together as alone."""

from __future__ import annotations

import json
import random
import shutil
from collections import Counter
from pathlib import Path

import pytest
from allspark import AsCacheMode, AsStatus
from allspark._allspark import GenerateConfig
from engine_fixture import MAX_LENGTH, VOCAB_SIZE, start_engine
from support.checkpoints import CONFIG, llama_tensors, write_checkpoint
from support.lora import adapter_tensors, write_adapter

TENSORS = [
    "prompt_only", "output_logits", "output_last_hidden_state",
    "enable_tensors_from_model_inference", "pooling",
]  # fmt: skip

FORMATS = [
    {"type": "json_object"},
    {"type": "json_schema", "json_schema": {
        "type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 9}},
    {"type": "regex", "regex": "[0-9]{2,40}([+*][0-9]{1,9}){1,5}="},
    {"type": "choice", "choice": ["12", "3+4", "A queue gives tokens"]},
    {"type": "grammar", "grammar": 'start: term ("+" term)+ "="\nterm: /[0-9]{1,30}/'},
]  # fmt: skip
# Few characters each, which the model often generates.
STOP_WORDS = ["1", "A", "7", "==", '"', "4*"]
ADAPTERS = ["", "", "first", "second"]


def random_config(rng: random.Random, prompt_length: int) -> dict:
    """About half of the fields, each with a value that has an effect."""

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
        "prompt_logprobs_start": rng.randint(0, prompt_length - 1),
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
    fixed = {"seed", "max_new_tokens", "lora_name"}  # set by random_request
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


def random_request(rng: random.Random, prompt_length: int) -> tuple[str, dict]:
    """(kind, config) of a request."""
    kind = rng.choices(["fields", "format", "stops", "n"], [4, 2, 2, 1])[0]
    if kind == "fields":
        config = random_config(rng, prompt_length)
    else:
        config = {"do_sample": rng.random() < 0.7, "temperature": rng.uniform(0.5, 2),
                  "seed": rng.randrange(10**9), "max_new_tokens": rng.randint(30, 90),
                  "logprobs": rng.random() < 0.5, "priority": rng.randint(-2, 2)}  # fmt: skip
    if kind == "format":
        config |= {"response_format": rng.choice(FORMATS), "eos_token_id": EOS}
    if kind == "stops" or (kind != "fields" and rng.random() < 0.3):
        config |= {"stop_words": rng.sample(STOP_WORDS, rng.randint(1, 2)),
                   "include_stop_str_in_output": rng.random() < 0.5}  # fmt: skip
    if kind == "n" or (kind != "fields" and rng.random() < 0.2):
        config |= {"n": rng.randint(2, 4), "do_sample": True}
    return kind, config | {"lora_name": rng.choice(ADAPTERS)}


EOS = 2  # of the demo model's tokenizer


def write_model(directory: Path, demo_model: Path) -> list[Path]:
    """Writes a small random model with the demo model's tokenizer, whose tokens below VOCAB_SIZE
    (signs, digits, a few letters) are by far the likeliest. Returns its adapters' directories."""
    size = json.loads((demo_model / "config.json").read_text(encoding="utf-8"))["vocab_size"]
    config = {**CONFIG, "vocab_size": size, "max_position_embeddings": MAX_LENGTH}
    tensors = llama_tensors(config)
    tensors["lm_head.weight"][:VOCAB_SIZE] *= 8
    write_checkpoint(directory, config=config, tensors=tensors)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(demo_model / name, directory)
    adapters = []
    for name, seed, rank in (("first", 3, 4), ("second", 4, 8)):
        adapter = adapter_tensors(config=config, seed=seed, rank=rank)
        adapters.append(write_adapter(directory / name, adapter, r=rank))
    return adapters


def outcome(queue) -> tuple:
    if isinstance(queue, list):  # a group; the first one is counted for all
        first, *others = [outcome(one) for one in queue]
        return (*first[:-2], others, *first[-2:])
    text = ""
    ids, logprobs, top, prompt = [], [], [], []
    tensors: dict[str, bytes] = {}
    for elements in queue:
        text += getattr(elements, "text", "")
        ids += elements.ids_from_generate
        logprobs += elements.token_logprobs_list
        top += elements.log_probs_list
        prompt += elements.prompt_token_logprobs_list
        prompt += elements.prompt_log_probs_list
        for arrays in elements.tensors_from_model_inference:
            for name, array in arrays.items():
                tensors[name] = tensors.get(name, b"") + array.tobytes()
    score = queue.sequence_score
    return ids, text, logprobs, top, prompt, tensors, score, queue.finish_reason, queue.error


@pytest.mark.parametrize("blocks", [0, 20], ids=["roomy", "preempting"])
@pytest.mark.parametrize("cache_mode", AsCacheMode, ids=lambda mode: mode.name)
def test_mixed_batch_equals_each_alone(tmp_path, demo_model, blocks, cache_mode):
    adapters = write_model(tmp_path, demo_model)
    engine, loader = start_engine(
        tmp_path, engine_max_batch=64, engine_max_length=256, engine_max_prefill_length=64,
        cache_span_size=16, cache_span_num_init=blocks, kv_cache_mode=cache_mode,
        lora_max_num=len(adapters), lora_max_rank=8,
        prefill_policy="first_token" if blocks else "balanced",
    )  # fmt: skip
    for adapter in adapters:
        assert engine.load_lora("m", adapter.name, adapter) == AsStatus.ALLSPARK_SUCCESS
    rng = random.Random(17)
    lengths = [rng.randint(1, 100) for _ in range(64)]
    prompts = [[rng.randrange(VOCAB_SIZE) for _ in range(length)] for length in lengths]
    kinds, configs = zip(*(random_request(rng, length) for length in lengths), strict=True)

    def start(prompt, config):
        status, _, queue = engine.start_request_ids("m", loader, prompt, config)
        assert status == AsStatus.ALLSPARK_SUCCESS, engine.last_error()
        return queue

    jobs = list(zip(prompts, configs, strict=True))
    alone = [outcome(start(*job)) for job in jobs]
    queues = [start(*job) for job in jobs]
    for job, expected, queue in zip(jobs, alone, queues, strict=True):
        assert outcome(queue) == expected, job
    preemptions = engine.get_as_engine_stat("m").num_preemptions
    assert (preemptions > 0) == (blocks > 0)
    # They differ: some stop, some reach their length, and the outputs are not the same. Each kind
    # of request occurs, also with an adapter, and formats and strings end some of those that have
    # them.
    assert {"stop", "length"} <= {reason for *_, reason, _ in alone}
    assert len({tuple(ids) for ids, *_ in alone}) > 50
    with_adapter = Counter(kind for kind, c in zip(kinds, configs, strict=True) if c["lora_name"])
    assert set(with_adapter) == {"fields", "format", "stops", "n"}
    for kind in ("format", "stops"):
        reasons = Counter(end[-2] for k, end in zip(kinds, alone, strict=True) if k == kind)
        assert reasons["stop"] > 3, (kind, reasons)
    # The adapter has an effect.
    prompt, config = prompts[0], {"do_sample": False, "max_new_tokens": 40}
    outputs = [outcome(start(prompt, {**config, "lora_name": name})) for name in set(ADAPTERS)]
    assert len({tuple(ids) for ids, *_ in outputs}) == 3
