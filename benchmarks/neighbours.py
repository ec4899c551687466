"""What is left of an engine's decode speed while another program keeps one core busy.

Each engine decodes one sequence, quiet and beside a loop that never waits, in turns. The share is
that of a pair: speed beside the loop / quiet speed.

usage: neighbours.py [--engines allspark/A8W8,llama.cpp/Q8_0] [--shape 0.5B] [--rounds N]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import bench
from checkpoints import SHAPES, WORK_DIR
from metrics import from_times
from peers.base import Engine
from workloads import make_workload

_TIMEOUT_S = 600
_LOOP = "while True: pass"


@contextlib.contextmanager
def busy_loop() -> Iterator[None]:
    with subprocess.Popen([sys.executable, "-c", _LOOP]) as process:
        try:
            yield
        finally:
            process.kill()


class Contestant:
    def __init__(self, name: str, options: argparse.Namespace) -> None:
        self.name = name
        engine, _, precision = name.partition("/")
        self.engine: Engine = bench.ENGINES[engine](options.work_dir / "peers" / engine)
        self.engine.install()
        contestant = bench.Contestant(self.engine, precision)
        model = bench.prepared(contestant, options.shape, options.work_dir)
        vocab_size = SHAPES[options.shape].vocab_size
        self.work = make_workload("single", vocab_size, options.divisor)
        self.job = {
            "task": "requests",
            "model": str(model),
            "threads": options.threads,
            "chunk": 0,
            "cache_mode": contestant.precision.cache_mode,
            "max_batch": 1,
            "max_length": self.work.max_length,
            "waves": [[vars(request) for request in wave] for wave in self.work.waves],
            "warm_up": [vars(request) for request in self.work.warm_up()],
        }

    def decode_tok_s(self) -> float:
        output = self.engine.run_worker(json.dumps(self.job), _TIMEOUT_S)
        measured = {**json.loads(output.splitlines()[-1]), "others_share": 0.0}
        return from_times(self.work, measured)["decode_tok_s"]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--engines", default="allspark/A8W8,llama.cpp/Q8_0")
    parser.add_argument("--shape", default="0.5B", choices=SHAPES)
    parser.add_argument("--rounds", type=int, default=5, help="medians are shown")
    parser.add_argument("--divisor", type=int, default=1, help="shortens prompt and output")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--work-dir", type=Path, default=WORK_DIR)
    options = parser.parse_args()
    contestants = [Contestant(name, options) for name in options.engines.split(",")]
    quiet: dict[str, list[float]] = {each.name: [] for each in contestants}
    shares: dict[str, list[float]] = {each.name: [] for each in contestants}
    for _ in range(options.rounds):
        for each in contestants:
            quiet[each.name].append(each.decode_tok_s())
            with busy_loop():
                shares[each.name].append(each.decode_tok_s() / quiet[each.name][-1])
    print(
        "| engine | quiet tok/s | share beside a busy loop | least | most |\n|---|---|---|---|---|"
    )
    for each in contestants:
        values = shares[each.name]
        print(
            f"| {each.name} | {statistics.median(quiet[each.name]):.1f} "
            f"| {statistics.median(values):.3f} | {min(values):.3f} | {max(values):.3f} |"
        )


if __name__ == "__main__":
    main()
