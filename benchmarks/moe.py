"""Decoding of a mixture of experts: how much of the machine's read bandwidth it uses, interleaved.

A token needs only the weights of its own experts. First one stream is decoded, then several
together, which share the reads of experts that they have in common. The engine's profile counts the
bytes that a step reads. The machine's read bandwidth is measured between rounds.
"""

from __future__ import annotations

import argparse
import functools
import os
import re
import time

import numpy as np
import tables
from allspark import TargetDevice
from bench_engine import MODEL, BenchEngine, Recorder, make_parser
from checkpoints import SHAPES, ensure_checkpoint
from machine import compile_limits, measure_limits


def parse_arguments() -> argparse.Namespace:
    parser = make_parser(__doc__, rounds=5, precisions=True)
    parser.set_defaults(shape="A2.7B")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--prompt", type=int, default=64, help="tokens of each prompt")
    parser.add_argument("--output", type=int, default=48, help="tokens of each output")
    return parser.parse_args()


def bytes_read(profile: str) -> tuple[int, float]:
    """(forward passes, bytes that they read) of the engine's profile."""
    passes = re.search(r"(\d+) forward passes", profile)
    rates = re.findall(r"([\d.]+) +[\d.]+ % +([\d.]+) +\S+$", profile, re.MULTILINE)
    return int(passes[1]) if passes else 0, sum(1e6 * float(ms) * float(gb) for ms, gb in rates)


class Bench(BenchEngine):
    def __init__(self, options: argparse.Namespace):
        super().__init__()
        self.options = options
        shape = SHAPES[options.shape]
        most = max(options.streams)
        ids = np.random.default_rng(0).integers(3, shape.vocab_size, (most, options.prompt))
        self.prompts = [list(map(int, prompt)) for prompt in ids]
        directory = ensure_checkpoint(shape, options.work_dir / options.shape / "checkpoint")
        loader = self.serialize(directory, precision=options.precision)
        builder = loader.create_reference_runtime_config_builder(
            MODEL, TargetDevice.CPU, max_batch=most,
            max_context_length=options.prompt + options.output,
        )  # fmt: skip
        builder.prefill_cache(False)
        builder.op_profiling(True)
        self.start(builder, options.threads, options.precision)

    def step(self, streams: int) -> dict[str, float]:
        """Decodes this many requests together: a step's seconds and the bytes that it reads, from
        the last one's first token on."""
        config = {"do_sample": False, "eos_token_id": -1, "max_new_tokens": self.options.output}
        queues = self.start_requests(self.prompts[:streams], [config] * streams)
        passes, num_bytes = bytes_read(self.engine.get_op_profiling_info(MODEL))
        begin = time.perf_counter()
        done = queues[-1].GeneratedLength()
        self.finish_requests(queues, self.options.output)
        steps = max(queues[-1].GeneratedLength() - done, 1)  # A tiny model may be done already.
        seconds = time.perf_counter() - begin
        all_passes, all_bytes = bytes_read(self.engine.get_op_profiling_info(MODEL))
        read = (all_bytes - num_bytes) / max(all_passes - passes, 1)
        return {"step_s": seconds / steps, "step_bytes": read}


def main() -> None:
    options = parse_arguments()
    shape = SHAPES[options.shape]
    if not shape.num_experts:
        raise SystemExit(f"moe.py: --shape is {options.shape}, which has no experts")
    threads = options.threads or len(os.sched_getaffinity(0))
    bench = Bench(options)
    limits = compile_limits(options.work_dir)
    recorder = Recorder("moe", options, bench.about())

    def measure(streams: int) -> dict[str, float]:
        """Times a step, and measures the read bandwidth with it."""
        values = bench.step(streams)
        bandwidth = measure_limits(limits, threads, options.retries, options.most_others)
        read = bandwidth["read_gb_s"]
        return {**values, "read_gb_s": read} if read else values

    for number in range(options.rounds + 1):
        for streams in options.streams:
            step = measure if number else bench.step  # round 0 is not kept
            recorder.measure(number, {"streams": streams}, functools.partial(step, streams))
    whole = sum(float(np.prod(size)) for size in shape.tensors().values())
    one = shape.bytes_per_decoded_token() / 2
    print(
        f"{options.shape} {options.precision}: {whole / 1e9:.2f} billion weights, of which a token "
        f"reads {one / 1e9:.2f}\n"
    )
    print("\n".join(tables.moe(recorder.finish())))
    bench.expect(bench.engine.stop_model(MODEL))


if __name__ == "__main__":
    main()
