"""What a stream notices of hostile requests beside it: its gaps, quiet and attacked, in turns.

The attack starts requests one after the other, from one thread of the same process, with at most
`--at-once` of them in the engine: expressions whose lexers explode, long choices, chains of
references, tens of thousands of bad words and stop words.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import tables
from allspark import AsStatus, TargetDevice
from bench_engine import MODEL, BenchEngine, Recorder, make_parser

LIMIT = 2.0  # times the quiet stream's p99 gap
_MOST_REQUESTS = 240  # of one attack


def parse_arguments() -> argparse.Namespace:
    parser = make_parser(__doc__, rounds=5)
    parser.add_argument("--tokenizer", type=Path, help="directory; default: one of bytes")
    parser.add_argument("--output", type=int, default=400, help="tokens of the stream")
    parser.add_argument("--at-once", type=int, default=4, help="hostile requests in the engine")
    return parser.parse_args()


def attacks() -> Iterator[dict[str, Any]]:
    """Generation configs without end, no two with the same grammar."""
    for i in itertools.count():
        chain = {str(k): {"$ref": f"#/$defs/{k + 1}"} for k in range(900 + i)}
        schema = {"$ref": "#/$defs/0", "$defs": {**chain, str(900 + i): {"type": "string"}}}
        choice = [f"choice {i} {k * 7919}" for k in range(20_000)]
        yield {"response_format": {"type": "regex", "regex": f"q{i}((a{{1000}}){{1000}}){{1000}}"}}
        yield {"response_format": {"type": "regex", "regex": f"([a-z ]*[ab]{{{30 + i}}})*x{i}"}}
        yield {"response_format": {"type": "json_schema", "json_schema": schema}}
        yield {"response_format": {"type": "choice", "choice": choice}}
        yield {"bad_words": [f"bad {i} {k}" for k in range(5_000)]}
        yield {"stop_words": [f"stop {i} {k}" for k in range(10_000)]}


class Attack(threading.Thread):
    def __init__(self, bench: Bench):
        super().__init__(daemon=True)
        self.bench = bench
        # An attacker makes requests elsewhere, so the stream need not notice it.
        self.configs = list(itertools.islice(bench.attacks, _MOST_REQUESTS))
        self.ends = threading.Event()
        self.ran_out = False  # of requests, before the stream ended
        self.num_started = 0

    def run(self) -> None:
        engine, loader = self.bench.engine, self.bench.loader
        alive: list[Any] = []
        for config in self.configs:
            if self.ends.is_set():
                break
            full = {"max_new_tokens": 16, "timeout_ms": 5000, **config}
            status, handle, queue = engine.start_request_ids(MODEL, loader, [5, 6, 7], full)
            if status == AsStatus.ALLSPARK_SUCCESS:
                self.num_started += 1
                alive.append((handle, queue))
            while len(alive) >= self.bench.options.at_once:
                alive = [(h, q) for h, q in alive if not q.finished]
                time.sleep(0.001)
        else:
            self.ran_out = True
        for handle, _ in alive:
            engine.release_request(MODEL, handle)


class Bench(BenchEngine):
    def __init__(self, options: argparse.Namespace):
        super().__init__()
        self.options = options
        self.attacks = attacks()
        self.loader = self.serialize_guided(options.shape, options.work_dir, options.tokenizer)
        builder = self.loader.create_reference_runtime_config_builder(
            MODEL, TargetDevice.CPU, max_batch=8, max_context_length=options.output + 64
        )
        self.start(builder, options.threads)

    def measure(self, attacked: bool) -> dict[str, float]:
        """Gaps of the stream, in seconds."""
        attack = Attack(self) if attacked else None
        if attack is not None:
            attack.start()
        config = {"max_new_tokens": self.options.output, "eos_token_id": -1, "do_sample": False}
        status, _, queue = self.engine.start_request_ids(MODEL, None, [3] * 40, config)
        self.expect(status)
        begin, times, num_tokens = time.perf_counter(), [], 0
        for elements in queue:  # As they come: one token, or what a slow reader finds.
            times.append(time.perf_counter())
            num_tokens += len(elements.ids_from_generate)
        num_started = 0
        if attack is not None:
            attack.ends.set()
            attack.join()
            if attack.ran_out:
                raise RuntimeError(f"the stream outlasted {len(attack.configs)} hostile requests")
            num_started = attack.num_started
            self.expect(self.engine.sync_request(MODEL))
        # A reader that slept through the whole stream had one gap.
        gaps = np.diff(times if len(times) > 1 else [begin, *times])
        if num_tokens != self.options.output:
            raise RuntimeError(f"{num_tokens} tokens came: {queue.error}")
        p50, p99 = np.percentile(gaps, [50, 99])
        most = float(gaps.max())
        return {"p50": float(p50), "p99": float(p99), "most": most, "attacks": num_started}


def main() -> None:
    options = parse_arguments()
    bench = Bench(options)
    recorder = Recorder("hostile", options, bench.about())
    for number in range(options.rounds + 1):  # Round 0 warms up and reads the vocabulary.
        for kind in ("quiet", "attacked"):
            measure = functools.partial(bench.measure, kind == "attacked")
            recorder.measure(number, {"kind": kind}, measure)
    record = recorder.finish()
    print("\n".join(tables.hostile(record)))
    ratio = tables.hostile_ratio(record)
    verdict = "nothing measured" if ratio is None else "PASS" if ratio <= LIMIT else "FAIL"
    shown = "–" if ratio is None else f"{ratio:.2f}"
    print(f"p99 gap under attack: x {shown} of the quiet one, at most x {LIMIT:g}: {verdict}")
    bench.expect(bench.engine.stop_model(MODEL))


if __name__ == "__main__":
    main()
