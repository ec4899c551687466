"""How much of the engine's speed is left over HTTP: 32 streams in process and through the server,
in turns.

Engine and server start once, so that their turns follow each other closely: other programs on the
machine change its speed within seconds, and a pair of turns has about the same. A request's ids
change from turn to turn, also where one is repeated, so that the prefix cache holds nothing of it.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import os
from collections.abc import Callable, Mapping
from typing import Any

import tables
from bench import Contestant, prepared
from bench_engine import Recorder, about_engine, make_parser
from checkpoints import SHAPES
from machine import Others
from measure import Running
from metrics import from_timelines
from ours import Allspark
from peers.worker import Server, measure
from serve_worker import Server as HttpServer
from verdicts import page
from workloads import FIRST_ID, make_workload

# By the names in the table.
_LOADS: Mapping[str, Callable[[Mapping[str, Any]], Server]] = {
    tables.IN_PROCESS: Running,
    tables.OVER_HTTP: lambda job: HttpServer(dict(job)),
}


def parse_arguments() -> argparse.Namespace:
    parser = make_parser(__doc__, rounds=20)
    parser.add_argument("--precisions", default="bf16,A8W8")
    parser.add_argument("--divisor", type=int, default=1, help="shortens prompts and outputs")
    return parser.parse_args()


class Bench:
    def __init__(self, options: argparse.Namespace, precision: str) -> None:
        shape = SHAPES[options.shape]
        self._num_ids = shape.vocab_size - FIRST_ID
        self._work = make_workload("b32", shape.vocab_size, options.divisor)
        ours = Contestant(Allspark(options.work_dir / "peers" / Allspark.name), precision)
        self._job = {
            "model": str(prepared(ours, options.shape, options.work_dir)),
            "threads": options.threads or len(os.sched_getaffinity(0)),
            "chunk": 0,
            "cache_mode": ours.precision.cache_mode,
            "max_batch": self._work.max_batch,
            "max_length": self._work.max_length,
            "warm_up": [vars(request) for request in self._work.warm_up()],
        }
        self._turns = itertools.count()
        self.servers = {name: load(self._job) for name, load in _LOADS.items()}

    def measure(self, name: str) -> dict[str, float]:
        job = {**self._job, "waves": self._work.turn(next(self._turns), self._num_ids)}
        return from_timelines(self._work, measure(self.servers[name], job)["requests"])

    def others(self) -> Others:
        """All but this process and the server."""
        return Others(in_process=True, cpu_seconds=self.servers[tables.OVER_HTTP].cpu_seconds)

    def close(self) -> None:
        for server in self.servers.values():
            server.close()


def main() -> None:
    options = parse_arguments()
    recorder = Recorder("server_speed", options, about_engine(options.work_dir))
    for precision in options.precisions.split(","):
        bench = Bench(options, precision)
        for number in range(options.rounds + 1):  # round 0 warms up
            # Either goes first as often as the other.
            for name in list(_LOADS)[:: 1 if number % 2 else -1]:
                recorder.measure(
                    number,
                    {"precision": precision, "way": name},
                    functools.partial(bench.measure, name),
                    bench.others,
                )
        bench.close()
    print("\n".join(page(recorder.finish())))


if __name__ == "__main__":
    main()
