"""Lines of a batch against the same requests straight through the SDK, interleaved.

Every output has the same number of tokens. With --sdk-lines the SDK serves only the first of them.
It is given ids, so templates and tokenizer are part of a batch's cost, as reading, ordering and
writing lines are.

Memory is what the process has at most during a turn above what it had before the first one, when
the engine alone had taken all of its own. What earlier turns have kept is part of it: a turn may
need less, and never more.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import json
import re
import tempfile
import time
from pathlib import Path
from typing import Any

from allspark import AsStatus
from allspark.batch.lines import scan
from allspark.batch.output import OutputFile
from allspark.batch.prompts import PromptLines
from allspark.batch.runner import Totals, run_file
from allspark.bench.workload import Lengths, random_requests, vocabulary_of
from allspark.pipeline import EngineConfig, GenerationConfig, pipeline
from allspark.pipeline.pipe import Pipeline
from allspark.serve.batches.requests import RequestLines
from allspark.serve.catalog import Catalog
from allspark.serve.state import ServerState
from bench_engine import Recorder, add_recording
from verdicts import page

KINDS = ("sdk", "own lines", "requests")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="smollm2", help="what a pipeline opens")
    parser.add_argument("--kinds", default=",".join(KINDS), help="what is measured")
    parser.add_argument("--lines", type=int, default=512)
    parser.add_argument("--sdk-lines", type=int, help="that the SDK serves; default: all lines")
    parser.add_argument(
        "--plain", action="store_true",
        help="lines without a chat template: the engine has less to do, so a line's own cost "
        "counts more",
    )  # fmt: skip
    parser.add_argument("--output", type=int, default=64, help="tokens of each output")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--threads", type=int, default=0)
    add_recording(parser, rounds=3, work_dir=Path(tempfile.gettempdir()))
    options = parser.parse_args()
    for kind in options.kinds.split(","):
        if kind not in KINDS:
            parser.error(f"--kinds has {kind!r}; it must be one of {', '.join(KINDS)}")
    return options


def resident(name: str) -> int:
    """VmRSS or VmHWM of this process, in bytes."""
    (found,) = re.findall(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return 1024 * int(found)


class Bench:
    def __init__(self, options: argparse.Namespace, pipe: Pipeline, folder: Path):
        self.options = options
        self.pipe = pipe
        self.folder = folder
        self.questions = [f"What is {i} + {i * 7 % 100}?" for i in range(options.lines)]
        self._take_memory()
        self.alone = resident("VmRSS")

    def _take_memory(self) -> None:
        """Serves as many requests as run at a time, each as long as may be: the engine takes memory
        as its cache is used, and whoever comes first would seem to need it."""
        model, num_output = self.pipe.model, 1
        size = model.session_len - num_output
        lengths = (Lengths(size, size), Lengths(num_output, num_output))
        ids = vocabulary_of(model.tokenizer)
        requests = random_requests(self.options.batch, *lengths, seed=0, vocabulary=ids)
        self._serve([request.prompt for request in requests], num_output)

    def value(self, kind: str, question: str, custom_id: str) -> Any:
        """A line."""
        prompt: dict[str, Any] = {"messages": [{"role": "user", "content": question}]}
        url = "/v1/chat/completions"
        if self.options.plain:
            prompt, url = {"prompt": question}, "/v1/completions"
        if kind == "own lines":
            return prompt
        fields = {"max_tokens": self.options.output, "ignore_eos": True, "temperature": 0}
        body = {**prompt, **fields, "model": self.pipe.model.name}
        return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}

    def sdk(self, questions: list[str]) -> int:
        """Starts all requests, and reads each when it has ended. Returns the tokens."""
        model = self.pipe.model
        if not self.options.plain:
            questions = [model.template.messages2prompt(question) for question in questions]
        prompts = [model.template.encode(model.tokenizer, question) for question in questions]
        self.begin()
        return self._serve(prompts, self.options.output)

    def _serve(self, prompts: list[Any], num_output: int) -> int:
        """Serves prompts of ids through the SDK. Returns the tokens."""
        model = self.pipe.model
        config = {"do_sample": False, "max_new_tokens": num_output, "eos_token_id": -1}
        queues = []
        for ids in prompts:
            status, handle, queue = model.engine.start_request_ids(model.name, None, ids, config)
            if status != AsStatus.ALLSPARK_SUCCESS:
                raise RuntimeError(model.engine.last_error())
            queues.append((handle, queue))
        count = 0
        for handle, queue in queues:
            model.engine.sync_request(model.name, handle)
            while (elements := queue.GetNoWait()) is not None:
                count += len(elements.ids_from_generate)
            model.engine.release_request(model.name, handle)
        return count

    def batch(self, kind: str, questions: list[str]) -> int:
        """Answers a file. Returns the tokens."""
        source, target = self.folder / "in.jsonl", self.folder / "out.jsonl"
        with source.open("w") as file:
            for number, question in enumerate(questions):
                file.write(json.dumps(self.value(kind, question, str(number))) + "\n")
        config = GenerationConfig(max_new_tokens=self.options.output, ignore_eos=True)
        lines: Any = PromptLines(self.pipe, config, do_preprocess=not self.options.plain)
        if kind == "requests":
            lines = RequestLines(ServerState(Catalog([self.pipe.model])), "bench", 0, 0)
        totals, output = Totals(), OutputFile(target)
        output.clear()
        room = 2 * self.pipe.model.max_batch_size
        self.begin()
        asyncio.run(
            run_file(
                source, scan(source), output, totals,
                lambda line: lines.answer(line.number, line.parse()), room,
            )
        )  # fmt: skip
        output.finish()
        if totals.num_errors:
            raise RuntimeError(target.read_text()[:1000])
        return totals.num_output_tokens

    def begin(self) -> None:
        """Starts the clock, and the peak of memory."""
        self.pipe.model.engine.clear_prefix_cache(self.pipe.model.name)
        Path("/proc/self/clear_refs").write_text("5")
        self.clock, self.cpu = time.perf_counter(), time.process_time()

    def measure(self, kind: str, lines: int) -> dict[str, float]:
        if kind == "sdk" and self.options.sdk_lines is not None:
            lines = min(lines, self.options.sdk_lines)
        questions = self.questions[:lines]
        count = self.sdk(questions) if kind == "sdk" else self.batch(kind, questions)
        seconds, cpu = time.perf_counter() - self.clock, time.process_time() - self.cpu
        if count != (wanted := lines * self.options.output):
            raise RuntimeError(f"{kind}: {count} of {wanted} tokens came")
        # The kernel counts pages late: a peak may seem a few below the beginning.
        above = max(0, resident("VmHWM") - self.alone)
        values = {"tok_s": count / seconds, "cpu_ms": 1e3 * cpu / count}
        return {**values, "above_engine_mb": above / 1e6}


def main() -> None:
    options = parse_arguments()
    config = EngineConfig(max_batch_size=options.batch, threads=options.threads, session_len=512)
    with (
        pipeline(options.model, backend_config=config) as pipe,
        tempfile.TemporaryDirectory(dir=options.work_dir) as folder,
    ):
        bench = Bench(options, pipe, Path(folder))
        model = pipe.model
        isa = model.engine.get_as_engine_stat(model.name).kernel_table
        about = {"version": model.engine.get_version_full(), "isa": isa}
        recorder = Recorder("batch", options, about)
        kinds = options.kinds.split(",")
        for number in range(options.rounds + 1):
            # The first round only warms up.
            lines = options.lines if number > 0 else min(options.lines, 4 * options.batch)
            # Each kind is first in turn: what the machine does to the first of a round hits all.
            first = number % len(kinds)
            for kind in kinds[first:] + kinds[:first]:
                call = functools.partial(bench.measure, kind, lines)
                recorder.measure(number, {"kind": kind}, call)
        print("\n".join(page(recorder.finish())))


if __name__ == "__main__":
    main()
