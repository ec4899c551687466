"""Speculative decoding against decoding token by token, interleaved, on the same requests.

The model has random weights in a real model's shape, so a step costs as much as there; its greedy
text falls into cycles. The sets:

  greedy   random prompts, continued greedily
  copy     the same after 512 tokens of their greedy continuation, which are part of the prompt: the
           text has reached its cycle, and the output repeats parts of the prompt
  drawn    sampled at temperature 0.7 from the 50 likeliest tokens
  noise    sampled from the whole distribution: nothing repeats
  others   files of ALLSPARK_SHARED_DATA/prompts whose names begin so, continued greedily

Draft tokens come from prompt lookup or, with --draft-layers N, from a draft model: the model's
first N layers, quantised. The model's other layers then add almost nothing.

Rates are of decoding alone: the tokens of a batch after the first ones, divided by the time from
the first of all to the last. A round before those that count leaves the prompts in the prefix
cache, so that this time holds next to nothing of them.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import gzip
import itertools
import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tables
from allspark import TargetDevice
from bench_engine import MODEL, BenchEngine, Recorder, make_parser
from checkpoints import SHAPES, ensure_checkpoint
from ours import PRECISIONS
from workloads import shared_data

_PROMPT = 32
_COPIED = 512
_LONGEST_PROMPT = 1024

Ids = list[int]


def parse_arguments() -> argparse.Namespace:
    parser = make_parser(__doc__, rounds=3, precisions=True)
    parser.add_argument("--sets", default="greedy,copy,noise", help="see above")
    parser.add_argument("--batches", default="1,4,16")
    parser.add_argument("--prompts", type=int, default=8, help="of a set, or the batch if more")
    parser.add_argument("--output", type=int, default=128, help="tokens of each request")
    parser.add_argument("--lookup", type=int, default=31, help="prompt_lookup_num_tokens")
    parser.add_argument("--draft-layers", type=int, help="use a draft model instead")
    parser.add_argument("--draft-precision", default="A8W4", choices=PRECISIONS)
    parser.add_argument("--draft-tokens", type=int, default=5, help="num_draft_tokens")
    return parser.parse_args()


@dataclasses.dataclass(frozen=True)
class Decoded:
    tok_s: float
    drafted: int  # Draft tokens, and how many of them were
    accepted: int
    outputs: list[Ids]


class Bench(BenchEngine):
    def __init__(self, options: argparse.Namespace):
        super().__init__()
        self.options = options
        shape, layers = SHAPES[options.shape], options.draft_layers
        self.vocab_size = shape.vocab_size
        folder = options.work_dir / options.shape
        if layers is None:
            directory = ensure_checkpoint(shape, folder / "checkpoint")
        else:
            directory = ensure_checkpoint(shape, folder / f"silent-{layers}", silent_from=layers)
            draft = dataclasses.replace(shape, num_layers=layers)
            draft_directory = ensure_checkpoint(draft, folder / f"draft-{layers}")
            self.serialize(draft_directory, "draft", options.draft_precision)
        loader = self.serialize(directory, MODEL, options.precision)
        self.batches = [int(batch) for batch in options.batches.split(",")]
        self.num_prompts = max(options.prompts, *self.batches)
        builder = loader.create_reference_runtime_config_builder(
            MODEL, TargetDevice.CPU, max_batch=max(self.batches),
            max_context_length=_LONGEST_PROMPT + _COPIED + options.output,
        )  # fmt: skip
        if layers is not None:
            builder.draft_model("draft", options.draft_tokens)
        self.start(builder, options.threads, options.precision)

    def run(self, prompts: list[Ids], config: dict[str, Any]) -> list[Any]:
        """Queues of the requests, all of which have ended."""
        queues = []
        for seed, ids in enumerate(prompts):
            own = {"eos_token_id": -1, "seed": seed, "use_draft_model": False, **config}
            status, _, queue = self.engine.start_request_ids(MODEL, None, ids, own)
            self.expect(status)
            queues.append(queue)
        self.finish_requests(queues, config["max_new_tokens"])
        return queues

    def measure(self, prompts: list[Ids], batch: int, config: dict[str, Any]) -> Decoded:
        """Runs `batch` prompts at a time."""
        config = {"max_new_tokens": self.options.output, **config}
        seconds, tokens, drafted, accepted, outputs = 0.0, 0, 0, 0, []
        for begin in range(0, len(prompts), batch):
            wave = self.run(prompts[begin : begin + batch], config)
            infos = [queue.RequestStatInfo() for queue in wave]
            seconds += decode_seconds(infos)
            for info in infos:
                tokens += info["generated_token_length"] - 1
                drafted += info["draft_token_length"]
                accepted += info["accepted_draft_token_length"]
            outputs += [list(queue.Get().ids_from_generate) for queue in wave]
        return Decoded(tokens / seconds, drafted, accepted, outputs)

    def random_prompts(self) -> list[Ids]:
        rng = np.random.default_rng(7)
        ids = rng.integers(0, self.vocab_size, (self.num_prompts, _PROMPT))
        return [list(map(int, prompt)) for prompt in ids]

    def copied_prompts(self) -> list[Ids]:
        prompts = self.random_prompts()
        config = {"do_sample": False, "max_new_tokens": _COPIED, "prompt_lookup_num_tokens": 31}
        queues = self.run(prompts, config)
        return [
            ids + list(queue.Get().ids_from_generate)
            for ids, queue in zip(prompts, queues, strict=True)
        ]


def decode_seconds(infos: Sequence[Mapping[str, int]]) -> float:
    """Of a batch: a stream that ends late makes all of it late."""
    first = min(info["first_token_time"] for info in infos)
    last = max(info["last_token_time"] for info in infos)
    # Milliseconds are too coarse for a tiny model.
    return max(1, last - first) / 1000


def data_prompts(name: str, count: int) -> list[Ids]:
    """The first texts of a file of ALLSPARK_SHARED_DATA/prompts, as tokens of qwen2.5."""
    from tokenizers import Tokenizer

    data = shared_data()
    (path,) = (data / "prompts").glob(f"{name}*")
    content = path.read_bytes()
    text = (gzip.decompress(content) if path.suffix == ".gz" else content).decode()
    if path.suffix == ".txt":
        step = len(text) // count
        texts = [text[i * step : (i + 1) * step] for i in range(count)]
    else:
        records = json.loads(text) if path.suffix == ".json" else map(json.loads, text.splitlines())
        texts = [prompt_of(record) for record in itertools.islice(records, count)]
    tokenizer = Tokenizer.from_file(str(data / "tokenizers" / "qwen2.5" / "tokenizer.json"))
    return [tokenizer.encode(text).ids[:_LONGEST_PROMPT] for text in texts]


def prompt_of(record: dict[str, Any]) -> str:
    """The prompt in a line of any of the files."""
    if "turns" in record:
        return str(record["turns"][0])
    if "conversations" in record:
        return "\n".join(turn["value"] for turn in record["conversations"][:-1])
    return str(record.get("question") or record["prompt"])


def main() -> None:
    options = parse_arguments()
    bench = Bench(options)
    drawn = {"drawn": {"temperature": 0.7, "top_k": 50}, "noise": {"temperature": 1.5, "top_k": 0}}
    prompts = {
        "greedy": bench.random_prompts, "copy": bench.copied_prompts,
        "drawn": bench.random_prompts, "noise": bench.random_prompts,
    }  # fmt: skip
    drafting: dict[str, Any] = {"prompt_lookup_num_tokens": options.lookup}
    if options.draft_layers is not None:
        drafting = {"use_draft_model": True}
    recorder = Recorder("speculative", options, bench.about())

    def compare(used: list[Ids], batch: int, config: dict[str, Any]) -> dict[str, float]:
        """Serves the same requests token by token, and with draft tokens."""
        plain = bench.measure(used, batch, config)
        fast = bench.measure(used, batch, {**config, **drafting})
        if fast.outputs != plain.outputs:
            raise RuntimeError(f"batch {batch}: drafts changed the output")
        return {
            "plain_tok_s": plain.tok_s, "fast_tok_s": fast.tok_s,
            "drafted": fast.drafted, "accepted": fast.accepted,
        }  # fmt: skip

    for name in options.sets.split(","):
        config = drawn.get(name, {"do_sample": False})
        make = prompts.get(name, lambda name=name: data_prompts(name, bench.num_prompts))
        texts = make()
        for batch in bench.batches:
            used = texts[: max(options.prompts, batch)]
            for number in range(options.rounds + 1):
                of = {"set": name, "batch": batch}
                recorder.measure(number, of, functools.partial(compare, used, batch, config))
            print(f"{name}, {batch}: done", file=sys.stderr, flush=True)
    print("\n".join(tables.speculative(recorder.finish())))
    bench.expect(bench.engine.stop_model(MODEL))


if __name__ == "__main__":
    main()
