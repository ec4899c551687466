"""Requests over several LoRA adapters against the same requests to the base model, interleaved.

All requests start together and are decoded in one batch. Weights are random in a real model's
shape; so are the adapters, which are as large as real ones. In each round every set of adapters
and the base model serve the same prompts.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path

import numpy as np
from allspark import AsStatus, Engine, HuggingFaceModel, TargetDevice
from checkpoints import SHAPES, ensure_adapter, ensure_checkpoint
from ours import PRECISIONS

MODEL = "bench"
SETS = {
    "all linear": ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
    "q and v": ("q_proj", "v_proj"),
}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--shape", default="0.5B", choices=SHAPES)
    parser.add_argument("--precision", default="bf16", choices=PRECISIONS)
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--adapters", type=int, default=8, help="requests take them in turn")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--prompt", type=int, default=128, help="tokens of each prompt")
    parser.add_argument("--output", type=int, default=128, help="tokens of each output")
    parser.add_argument("--rounds", type=int, default=5, help="medians are shown")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--work-dir", type=Path, default=Path("/tmp/allspark-bench"))
    return parser.parse_args()


class Bench:
    def __init__(self, options: argparse.Namespace):
        self.options = options
        shape = SHAPES[options.shape]
        rng = np.random.default_rng(0)
        ids = rng.integers(3, shape.vocab_size, (options.requests, options.prompt))
        self.prompts = [list(map(int, prompt)) for prompt in ids]
        folder = options.work_dir / options.shape
        self.engine = Engine()
        quantisation = PRECISIONS[options.precision].options
        directory = ensure_checkpoint(shape, folder / "checkpoint")
        loader = HuggingFaceModel(str(directory), MODEL, user_set_data_type="bfloat16")
        loader.load_model().serialize_to_memory(
            self.engine,
            enable_quant=bool(quantisation), customized_quant_config=quantisation or None,
        ).free_model()  # fmt: skip
        builder = loader.create_reference_runtime_config_builder(
            MODEL, TargetDevice.CPU, max_batch=options.requests,
            max_context_length=options.prompt + options.output,
        )  # fmt: skip
        builder.num_threads(options.threads).prefill_cache(False)
        builder.lora_max_num(options.adapters * len(SETS)).lora_max_rank(options.rank)
        self.expect(self.engine.install_model(builder.build()))
        self.expect(self.engine.start_model(MODEL))
        for number, (name, modules) in enumerate(SETS.items()):
            for i in range(options.adapters):
                adapter = folder / f"lora-{number}-{options.rank}-{i}"
                adapter = ensure_adapter(shape, adapter, modules, options.rank, seed=i)
                self.expect(self.engine.load_lora(MODEL, f"{name} {i}", adapter))

    def expect(self, status: AsStatus) -> None:
        if status != AsStatus.ALLSPARK_SUCCESS:
            raise RuntimeError(f"{status.name}: {self.engine.last_error()}")

    def measure(self, name: str) -> tuple[float, float]:
        """Seconds until every request has its first token, and from there until all have ended;
        `name`: a set, or "" for the base model.
        """
        begin = time.perf_counter()
        queues = []
        for i, ids in enumerate(self.prompts):
            config = {
                "do_sample": False,
                "eos_token_id": -1,
                "max_new_tokens": self.options.output,
                "lora_name": f"{name} {i % self.options.adapters}" if name else "",
            }
            status, _, queue = self.engine.start_request_ids(MODEL, None, ids, config)
            self.expect(status)
            queues.append(queue)
        for queue in queues:
            queue.Get()
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
