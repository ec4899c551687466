"""lm-eval with a model of this process: how tasks ask for answers, and, in the slow tests, that the
command line gives the numbers that it gives over a server."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

pytest.importorskip("allspark._allspark")

import allspark  # noqa: E402
from allspark.eval.generation import Generation, generate  # noqa: E402
from support import oracles  # noqa: E402

# How tasks ask for answers: no lm-eval is needed.


def test_generation_arguments_become_a_config():
    greedy = Generation.of([1], {"until": "\n", "do_sample": False, "temperature": 0.7}, 32)
    assert greedy.until == ["\n"] and greedy.config.max_new_tokens == 32
    assert not greedy.config.do_sample
    given = {"until": ["a", "b"], "temperature": 0.5, "top_p": 0.9, "seed": 3, "max_tokens": 9}
    sampled = Generation.of([1], {**given, "max_gen_toks": 5, "min_p": None}, 32)
    config = sampled.config
    assert (config.do_sample, config.temperature, config.top_p) == (True, 0.5, 0.9)
    assert (config.random_seed, config.max_new_tokens) == (3, 5)
    assert Generation.of([1], {}, 32).until == []


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"num_beams": 4}, r"generation arguments have \{'num_beams': 4\}; known are until, do_s"),
        ({"do_sample": True, "temperature": 9}, "GenerationConfig.temperature is 9; it must be"),
        ({"max_gen_toks": -1}, "GenerationConfig.max_new_tokens is -1; it must be"),
    ],
)
def test_bad_generation_arguments_are_refused(given, message):
    with pytest.raises((ValueError, TypeError), match=message):
        Generation.of([1], given, 32)


def test_answers_end_at_stop_strings(model):
    template = model.template
    ids = template.encode(model.tokenizer, template.get_prompt("What is 12+35?"))
    asked = [
        Generation.of(ids, {"until": until, "max_gen_toks": 20}, 9)
        for until in ([], ["="], ["35", "nothing"], [""])
    ]
    counted = []
    found = generate(model, asked, progress=counted.append)
    assert found == ["12 + 35 = 47", "12 + 35 ", "12 + ", "12 + 35 = 47"] and sum(counted) == 4
    thought = generate(model, asked[:2], think_end="+")
    assert thought == ["35 = 47", "35 "]


def test_long_prompts_lose_their_beginning(model):
    template = model.template
    prompt = template.encode(model.tokenizer, template.get_prompt("What is 12+35?"))
    ids = model.tokenizer.encode("word " * model.session_len) + prompt
    (answer,) = generate(model, [Generation.of(ids, {"max_gen_toks": 16}, 9)])
    assert answer
    message = r"max_gen_toks is 2048; it must be in \[1, 2047\], so that a prompt has room"
    with pytest.raises(ValueError, match=f"request 0: {message}"):
        generate(model, [Generation.of(prompt, {"max_gen_toks": 2048}, 9)])


def test_without_lm_eval_the_extra_is_named(tmp_path):
    (tmp_path / "lm_eval").mkdir()  # a package without a command line
    (tmp_path / "lm_eval" / "__init__.py").touch()
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"}
    result = subprocess.run(
        [sys.executable, "-m", "allspark.eval.lm_eval"],
        capture_output=True, text=True, timeout=60, env=environment,
    )  # fmt: skip
    assert result.returncode == 1
    assert "allspark.eval.lm_eval needs the extra 'eval' (docs/" in result.stderr


# The command line beside a server.

ROWS = [
    {"question": f"{a}+{b}=", "options": [str(a + b), str(a + b + 1), str(a + b + 10)], "label": 0}
    for a, b in ((1, 2), (2, 2), (3, 4), (5, 3))
]
# Longer than a window of 64 tokens.
TEXTS = [{"text": "A ResultQueue is where the tokens of a request arrive. " * 9}, {"text": "1+2=3"}]
COMMON = """
dataset_path: json
dataset_kwargs:
  data_files: {{test: {data}}}
test_split: test
"""
TASKS = {
    "sums_choice": """
output_type: multiple_choice
doc_to_text: "Sums that are right, as everyone knows who has ever learned to count: {{question}}"
doc_to_choice: "{{options}}"
doc_to_target: label
target_delimiter: ""
""",
    "sums_answer": """
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{options[0]}}"
generation_kwargs: {until: ["\\n", "."], do_sample: false, temperature: 0.0, max_gen_toks: 16}
metric_list: [{metric: exact_match}]
""",
    "texts": """
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list: [{metric: word_perplexity}, {metric: bits_per_byte}]
""",
}
LENGTH = 64


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The tasks, as files."""
    folder = tmp_path_factory.mktemp("tasks")
    rows = {"sums_choice": ROWS, "sums_answer": ROWS, "texts": TEXTS}
    for name, task in TASKS.items():
        data = folder / f"{name}.jsonl"
        data.write_text("".join(json.dumps(row) + "\n" for row in rows[name]))
        text = f"task: {name}\n{task}{COMMON.format(data=data)}"
        (folder / f"{name}.yaml").write_text(text)
    return folder


def evaluate(folder, model, arguments, tasks, *more):
    """What lm-eval writes: {task: (results, samples)}."""
    out = folder / f"out-{model}-{len(more)}"
    packages = [Path(allspark.__file__).parents[1], sysconfig.get_path("purelib")]
    oracles.run(
        oracles.environment("clients"), "lm_eval_model_run.py",
        os.pathsep.join(map(str, packages)), "allspark.eval.lm_eval",
        "--model", model, "--model_args", ",".join(f"{k}={v}" for k, v in arguments.items()),
        "--tasks", ",".join(tasks), "--include_path", folder, "--log_samples",
        "--output_path", out, *more,
        HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", HF_HOME=str(folder), TQDM_DISABLE="1",
    )  # fmt: skip
    (results,) = out.rglob("results_*.json")
    found = json.loads(results.read_text())
    samples = {}
    for task in tasks:
        (file,) = out.rglob(f"samples_{task}_*.jsonl")
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        samples[task] = [line["resps"] for line in sorted(lines, key=lambda line: line["doc_id"])]
    return found, samples


@pytest.mark.slow
def test_the_numbers_are_those_over_a_server(folder, demo_model, model, server):
    """Of log-likelihoods, whole texts and answers."""
    tasks = [*TASKS]
    own, own_samples = evaluate(
        folder, "allspark", {"pretrained": demo_model, "max_length": LENGTH}, tasks
    )
    url = f"http://127.0.0.1:{server.port}/v1/completions"
    # Its windows have a token less than max_length says.
    arguments = {"model": "demo", "base_url": url, "tokenizer": demo_model, "num_concurrent": 3,
                 "max_length": LENGTH + 1, "tokenizer_backend": "huggingface"}  # fmt: skip
    remote, remote_samples = evaluate(folder, "local-completions", arguments, tasks)
    for task in ("sums_choice", "sums_answer"):
        assert own_samples[task] == remote_samples[task]
    for task in tasks:
        for metric, value in remote["results"][task].items():
            if isinstance(value, float):
                assert own["results"][task][metric] == pytest.approx(value, rel=1e-6), metric
    assert own["results"]["sums_choice"]["acc,none"] >= 0.5
    assert own["config"]["model_sha256"] and own["config"]["model_compute_type"] == "bfloat16"
    # The log-likelihoods are the engine's own.
    context = "Sums that are right, as everyone knows who has ever learned to count: 1+2="
    begin = len(model.tokenizer.encode(context))
    for answer, option in zip(own_samples["sums_choice"][0], ROWS[0]["options"], strict=True):
        likelihood, _ = answer[0]
        (score,) = model.engine.score("demo", model.loader, context + option)
        assert float(likelihood) == pytest.approx(sum(score.logprobs[begin - 1 :]), abs=1e-6)


@pytest.mark.slow
@pytest.mark.torch
def test_the_numbers_are_those_of_transformers(folder, demo_model):
    """In float32: log-likelihoods within 1e-3, the same choices and answers."""
    tasks = [*TASKS]
    common = {"pretrained": demo_model, "dtype": "float32"}
    arguments = {**common, "max_length": LENGTH}
    own, own_samples = evaluate(folder, "allspark", arguments, tasks, "--seed", "1")
    # Its windows have a token more, which is predicted and not read.
    arguments = {**common, "max_length": LENGTH - 1}
    theirs, their_samples = evaluate(folder, "hf", arguments, tasks, "--device", "cpu")
    for ours, others in zip(own_samples["sums_choice"], their_samples["sums_choice"], strict=True):
        for ((likelihood, is_greedy),), ((other, is_others),) in zip(ours, others, strict=True):
            assert float(likelihood) == pytest.approx(float(other), abs=1e-3)
            assert str(is_greedy) == str(is_others)
    assert own_samples["sums_answer"] == their_samples["sums_answer"]
    for task in tasks:
        for metric, value in theirs["results"][task].items():
            if isinstance(value, float):
                assert own["results"][task][metric] == pytest.approx(value, rel=1e-4), metric


@pytest.mark.slow
def test_chat_templates_are_applied(folder, demo_model):
    _, samples = evaluate(
        folder, "allspark", {"pretrained": demo_model, "dtype": "float32"}, ["sums_answer"],
        "--apply_chat_template",
    )  # fmt: skip
    answers = [answer[0] if isinstance(answer, list) else answer
               for (answer,) in samples["sums_answer"]]  # fmt: skip
    assert [answer.split("= ")[-1] for answer in answers] == ["3", "4", "7", "8"]
