"""Time to the first token with and without the prefix cache, interleaved, by share found.

One model is installed twice, with and without the cache. In each round both serve the same prompts:
a new one, and prompts that share a prefix of the given length with one served before.
"""

from __future__ import annotations

import argparse
import functools
import time

import numpy as np
import tables
from allspark import TargetDevice
from bench_engine import BenchEngine, Recorder, make_parser
from checkpoints import SHAPES, ensure_checkpoint

SPAN = 32  # tokens per KV block
OUTPUT = 3


def parse_arguments() -> argparse.Namespace:
    parser = make_parser(__doc__, rounds=5)
    parser.add_argument("--prompt", type=int, default=4000, help="tokens of each prompt")
    parser.add_argument("--shares", default="0,0.288,0.576,0.896,0.96", help="found, of the prompt")
    return parser.parse_args()


class Bench(BenchEngine):
    def __init__(self, options: argparse.Namespace):
        super().__init__()
        self.options = options
        self.rng = np.random.default_rng(0)
        directory = ensure_checkpoint(options.shape, options.work_dir / f"prefix-{options.shape}")
        for name, cached in (("with", True), ("without", False)):
            loader = self.serialize(directory, name)
            builder = loader.create_reference_runtime_config_builder(
                name, TargetDevice.CPU, max_batch=2, max_context_length=options.prompt + OUTPUT
            )
            builder.kv_cache_span_size(SPAN).prefill_cache(cached)
            self.start(builder, options.threads)

    def ids(self, count: int) -> list[int]:
        vocab_size = SHAPES[self.options.shape].vocab_size
        return [int(token) for token in self.rng.integers(3, vocab_size, size=count)]

    def ttft_ms(self, name: str, prompt: list[int], found: int) -> float:
        """Times one request alone; `found`: how many of its tokens the cache must have."""
        config = {"do_sample": False, "max_new_tokens": OUTPUT, "eos_token_id": -1}
        begin = time.perf_counter()
        status, handle, queue = self.engine.start_request_ids(name, None, prompt, config)
        self.expect(status)
        elements = queue.Get()
        elapsed = time.perf_counter() - begin
        self.expect(self.engine.sync_request(name, handle))
        self.expect(self.engine.release_request(name, handle))
        if elements is None or elements.prefix_cache_len != found:
            raise RuntimeError(f"not {found} tokens were found: {elements} {queue.error}")
        return elapsed * 1e3

    def measure(self, share: float) -> dict[str, float]:
        """Time to the first token with and without the cache."""
        length = self.options.prompt
        found = int(share * length) // SPAN * SPAN
        self.engine.clear_prefix_cache("with")
        beginning = self.ids(found)
        if found > 0:
            self.ttft_ms("with", [*beginning, 1], 0)
        prompt = beginning + self.ids(length - found)
        with_ms = self.ttft_ms("with", prompt, found)
        return {"with_ms": with_ms, "without_ms": self.ttft_ms("without", prompt, 0)}


def main() -> None:
    options = parse_arguments()
    shares = [float(share) for share in options.shares.split(",")]
    bench = Bench(options)
    recorder = Recorder("prefix_cache", options, bench.about("with"))
    for number in range(options.rounds + 1):
        for share in shares:
            recorder.measure(number, {"found": share}, functools.partial(bench.measure, share))
    print("\n".join(tables.prefix_cache(recorder.finish())))
    for name in ("with", "without"):
        bench.expect(bench.engine.stop_model(name))


if __name__ == "__main__":
    main()
