"""Requests over several LoRA adapters against the same requests to the base model, interleaved.

All requests start together and are decoded in one batch. Weights are random in a real model's
shape; so are the adapters, which are as large as real ones. In each round every set of adapters
and the base model serve the same prompts.
"""

from __future__ import annotations

import argparse
import statistics
import time

import numpy as np
from allspark import TargetDevice
from bench_engine import MODEL, BenchEngine, make_parser
from checkpoints import SHAPES, ensure_adapter, ensure_checkpoint

SETS = {
    "all linear": ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
    "q and v": ("q_proj", "v_proj"),
}


def parse_arguments() -> argparse.Namespace:
    parser = make_parser(__doc__, rounds=5, precisions=True)
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--adapters", type=int, default=8, help="requests take them in turn")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--prompt", type=int, default=128, help="tokens of each prompt")
    parser.add_argument("--output", type=int, default=128, help="tokens of each output")
    return parser.parse_args()


class Bench(BenchEngine):
    def __init__(self, options: argparse.Namespace):
        super().__init__()
        self.options = options
        shape = SHAPES[options.shape]
        rng = np.random.default_rng(0)
        ids = rng.integers(3, shape.vocab_size, (options.requests, options.prompt))
        self.prompts = [list(map(int, prompt)) for prompt in ids]
        folder = options.work_dir / options.shape
        directory = ensure_checkpoint(shape, folder / "checkpoint")
        loader = self.serialize(directory, precision=options.precision)
        builder = loader.create_reference_runtime_config_builder(
            MODEL, TargetDevice.CPU, max_batch=options.requests,
            max_context_length=options.prompt + options.output,
        )  # fmt: skip
        builder.prefill_cache(False)
        builder.lora_max_num(options.adapters * len(SETS)).lora_max_rank(options.rank)
        self.start(builder, options.threads, options.precision)
        for number, (name, modules) in enumerate(SETS.items()):
            for i in range(options.adapters):
                adapter = folder / f"lora-{number}-{options.rank}-{i}"
                adapter = ensure_adapter(shape, adapter, modules, options.rank, seed=i)
                self.expect(self.engine.load_lora(MODEL, f"{name} {i}", adapter))

    def measure(self, name: str) -> tuple[float, float]:
        """Seconds until every request has its first token, and from there until all have ended;
        `name`: a set, or "" for the base model.
        """
        config = {"do_sample": False, "eos_token_id": -1, "max_new_tokens": self.options.output}
        configs = [
            {**config, "lora_name": f"{name} {i % self.options.adapters}" if name else ""}
            for i in range(len(self.prompts))
        ]
        begin = time.perf_counter()
        self.start_requests(self.prompts, configs)
        prefilled = time.perf_counter()
        self.expect(self.engine.sync_request(MODEL))
        return prefilled - begin, time.perf_counter() - prefilled


def main() -> None:
    options = parse_arguments()
    bench = Bench(options)
    results: dict[str, list[tuple[float, float]]] = {name: [] for name in ("", *SETS)}
    for number in range(options.rounds + 1):
        for name, times in results.items():
            measured = bench.measure(name)
            if number > 0:  # the first warms up
                times.append(measured)
    print(
        f"{options.shape} {options.precision}, {options.requests} requests of {options.prompt} + "
        f"{options.output} tokens, {options.adapters} adapters of rank {options.rank}\n"
    )
    print("| adapters | prompts, s | output, s | output tokens/s | of the base model's |")
    print("|---|---|---|---|---|")
    for name, times in results.items():
        prompts, output = (statistics.median(column) for column in zip(*times, strict=True))
        # Of each round, so that what else the machine did falls out.
        pairs = zip(times, results[""], strict=True)
        share = statistics.median(sum(base) / sum(ours) for ours, base in pairs)
        rate = options.requests * options.output / statistics.median(map(sum, times))
        print(f"| {name or 'none'} | {prompts:.3f} | {output:.3f} | {rate:.0f} | {share:.3f} |")
    bench.expect(bench.engine.stop_model(MODEL))


if __name__ == "__main__":
    main()
