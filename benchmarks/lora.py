"""Requests over several LoRA adapters against the same requests to the base model, interleaved.

All requests start together and are decoded in one batch. The model has random weights in a real
model's shape; the adapters are random too, and as large as real ones. In each round every set of
adapters and the base model serve the same prompts.
"""

from __future__ import annotations

import argparse
import functools
import time

import numpy as np
import tables
from allspark import TargetDevice
from bench_engine import MODEL, BenchEngine, Recorder, make_parser
from checkpoints import SHAPES, ensure_adapter, ensure_checkpoint

NONE = "none"
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

    def measure(self, name: str) -> dict[str, float]:
        """Seconds until every request has its first token, and from there until all have ended;
        `name`: a set, or NONE for the base model.
        """
        config = {"do_sample": False, "eos_token_id": -1, "max_new_tokens": self.options.output}
        configs = [
            {**config, "lora_name": f"{name} {i % self.options.adapters}" if name != NONE else ""}
            for i in range(len(self.prompts))
        ]
        begin = time.perf_counter()
        queues = self.start_requests(self.prompts, configs)
        prefilled = time.perf_counter()
        self.finish_requests(queues, self.options.output)
        return {"prompts_s": prefilled - begin, "output_s": time.perf_counter() - prefilled}


def main() -> None:
    options = parse_arguments()
    bench = Bench(options)
    recorder = Recorder("lora", options, bench.about())
    for number in range(options.rounds + 1):
        for name in (NONE, *SETS):
            of = {"adapters": name}
            recorder.measure(number, of, functools.partial(bench.measure, name))
    print("\n".join(tables.lora(recorder.finish())))
    bench.expect(bench.engine.stop_model(MODEL))


if __name__ == "__main__":
    main()
