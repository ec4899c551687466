"""Guided against free decoding of this engine, interleaved, at a full batch.

The grammar never ends, so that every request generates the same number of tokens with and without
it. Costs depend on the vocabulary: give the tokenizer of the shape's real model.
"""

from __future__ import annotations

import argparse
import functools
import json
import time
from pathlib import Path
from typing import Any

import tables
from allspark import TargetDevice
from allspark.grammar_compiler import Compiler
from bench_engine import MODEL, BenchEngine, Recorder, make_parser

RECORD = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}},
        "address": {"type": "object", "properties": {"zip": {"type": "string"}}},
    },
    "required": ["name", "age", "tags"],
}


def parse_arguments() -> argparse.Namespace:
    parser = make_parser(__doc__, rounds=5)
    parser.add_argument("--tokenizer", type=Path, help="directory; default: one of bytes")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--output", type=int, default=128, help="tokens of each request")
    return parser.parse_args()


def endless(properties: dict[str, Any]) -> dict[str, str]:
    """A format of records that follow one another without end."""
    schema = {**RECORD, "properties": {**RECORD["properties"], **properties}}
    lark = f"start: record+\nrecord: %json {json.dumps(schema)}"
    return {"type": "grammar", "grammar": lark}


class Bench(BenchEngine):
    def __init__(self, options: argparse.Namespace):
        super().__init__()
        self.options = options
        self.loader = self.serialize_guided(options.shape, options.work_dir, options.tokenizer)
        builder = self.loader.create_reference_runtime_config_builder(
            MODEL, TargetDevice.CPU,
            max_batch=options.batch, max_context_length=options.output + 64,
        )  # fmt: skip
        self.start(builder, options.threads)

    def measure(self, formats: list[dict[str, str] | None]) -> dict[str, float]:
        """Serves one request for each format; times from the first start to the last token."""
        begin = time.perf_counter()
        queues = []
        for seed, response_format in enumerate(formats):
            config = {
                "max_new_tokens": self.options.output, "eos_token_id": -1, "seed": seed,
                "top_k": 0, "response_format": response_format,
            }  # fmt: skip
            status, _, queue = self.engine.start_request_ids(MODEL, self.loader, [3] * 40, config)
            self.expect(status)
            queues.append(queue)
        self.finish_requests(queues, self.options.output)
        seconds = time.perf_counter() - begin
        return {"tok_s": len(formats) * self.options.output / seconds}


def main() -> None:
    options = parse_arguments()
    bench = Bench(options)
    one = endless({})
    kinds = {
        tables.FREE: [None] * options.batch,
        "one schema": [one] * options.batch,
        "a schema each": [endless({f"own_{i}": {"type": "integer"}}) for i in range(options.batch)],
    }
    begin = time.perf_counter()
    Compiler.of(bench.loader.get_tokenizer())
    print(f"vocabulary read in {time.perf_counter() - begin:.2f} s")
    recorder = Recorder("guided", options, bench.about())
    for number in range(options.rounds + 1):  # Round 0 warms up and compiles.
        for kind, formats in kinds.items():
            recorder.measure(number, {"kind": kind}, functools.partial(bench.measure, formats))
    print("\n".join(tables.guided(recorder.finish())))
    bench.expect(bench.engine.stop_model(MODEL))


if __name__ == "__main__":
    main()
