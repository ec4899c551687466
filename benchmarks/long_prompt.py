"""What streams notice of a very long prompt that arrives at the server: their gaps, and quiet ones.

All requests come over HTTP, the long one as text, so that reading and tokenising it count. A step
is the median gap between chunks of the streams while the prompt is computed: the engine computes a
part of the prompt in each of its steps, and nobody can have less. Newcomers with short prompts come
after it, and in the quiet run, too.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
from pathlib import Path

import numpy as np
from allspark.bench.load import Load, run_load
from allspark.bench.openai_target import Asking, OpenAITarget
from allspark.bench.outcome import Outcome
from allspark.bench.workload import Lengths, Request, random_requests
from allspark.remote.address import Address
from bench_engine import Recorder, about_engine, add_recording
from checkpoints import SHAPES, ensure_with_tokenizer
from servers import own_server
from verdicts import page

_QUIET, _BESIDE = "quiet", "beside the prompt"
_SHORT = 64  # words of the prompt of a stream or newcomer
_QUIET_OUTPUT = 1024  # tokens of a quiet stream at most


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--shape", default="0.5B", choices=SHAPES)
    parser.add_argument("--tokenizer", type=Path, help="directory; default: one of bytes")
    parser.add_argument("--prompt", type=int, default=100_000, help="tokens of the long prompt")
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--output", type=int, default=8192,
                        help="tokens of each stream beside the prompt, which it must outlast")
    parser.add_argument("--newcomers", type=int, default=4, help="with short prompts")
    parser.add_argument("--delay", type=float, default=2.0,
                        help="seconds until the prompt arrives, and from then to each newcomer")
    add_recording(parser, rounds=1)
    return parser.parse_args()


def gaps(outcomes: list[Outcome], begin: float, end: float) -> list[float]:
    """Times between chunks of the streams, of those that are not over before `begin` and do not
    begin after `end`."""
    return [
        new - old
        for outcome in outcomes
        for old, new in zip(outcome.times, outcome.times[1:], strict=False)
        if new > begin and old < end
    ]


class Bench:
    def __init__(self, options: argparse.Namespace):
        self.options = options
        directory = options.work_dir / f"long-{options.shape}"
        self.model = ensure_with_tokenizer(options.shape, directory, options.tokenizer)
        from allspark.pipeline.model_source import open_tokenizer

        self._tokenizer = open_tokenizer(str(self.model))

    def _text(self, num_tokens: int, seed: int) -> str:
        """Words that are so many tokens, or a few less."""
        lengths = Lengths(num_tokens, num_tokens), Lengths(1, 1)
        (request,) = random_requests(1, *lengths, seed, None, "long")
        encoded = self._tokenizer(str(request.prompt), add_special_tokens=False)["input_ids"]
        text: str = self._tokenizer.decode(encoded[:num_tokens])
        return text

    def measure(self, number: int, kind: str) -> dict[str, float]:
        options = self.options
        output = options.output if kind == _BESIDE else min(options.output, _QUIET_OUTPUT)
        num_streams, num_short = options.streams, options.streams + options.newcomers
        requests = [
            Request(self._text(_SHORT, 100 * number + index), output if index < num_streams else 1)
            for index in range(num_short)
        ]
        due = [0.0] * num_streams
        due += [options.delay * (2 + index) for index in range(options.newcomers)]
        if kind == _BESIDE:
            requests.append(Request(self._text(options.prompt, number), 1))
            due.append(options.delay)
        flags = ["--max-batch-size", str(num_short + 1)]
        flags += ["--session-len", str(options.prompt + options.output)]
        with own_server(f"{self.model}=bench", *flags) as (_, port):
            outcomes = asyncio.run(self._ask(port, requests, due))
        failed = [each.error for each in outcomes if each.error]
        if failed:
            raise RuntimeError(failed[0])
        streams, newcomers = outcomes[:num_streams], outcomes[num_streams:num_short]
        values = {}
        if newcomers:
            values["newcomer_s"] = max(each.times[0] - each.sent for each in newcomers)
        begin, end = options.delay, float("inf")
        if kind == _BESIDE:
            prompt = outcomes[-1]
            begin, end = prompt.sent, prompt.times[0]
            if min(stream.times[-1] for stream in streams) < end:
                raise RuntimeError("a stream ended before the prompt; give it more --output")
            values["prompt_s"] = end - begin
            values["prompt_tokens"] = float(prompt.prompt_tokens or 0)
        found = gaps(streams, begin, end)
        if not found:
            raise RuntimeError("the streams ended within --delay; give them more --output")
        p50, p99 = (float(each) for each in np.percentile(found, [50, 99]))
        return {**values, "step": p50, "p99": p99, "most": max(found), "gaps": float(len(found))}

    async def _ask(self, port: int, requests: list[Request], due: list[float]) -> list[Outcome]:
        """The outcomes, after a few short requests that open connections and load code."""
        asking = Asking("bench", "completions", extra={"ignore_eos": True}, timeout=3600)
        target = OpenAITarget(Address.parse(f"http://127.0.0.1:{port}"), {}, asking)
        try:
            warm_up = [Request(f"warm-up {index}", 8) for index in range(len(requests))]
            await run_load(target, warm_up, Load(len(warm_up)))
            return (await run_load(target, requests, Load(due=due))).outcomes
        finally:
            await target.close()


def main() -> None:
    options = parse_arguments()
    bench = Bench(options)
    recorder = Recorder("long_prompt", options, about_engine(options.work_dir))
    for number in range(1, options.rounds + 1):  # each has a server of its own, which is warm
        for kind in (_QUIET, _BESIDE):
            call = functools.partial(bench.measure, number, kind)
            recorder.measure(number, {"kind": kind}, call)
    print("\n".join(page(recorder.finish())))


if __name__ == "__main__":
    main()
