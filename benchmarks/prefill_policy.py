"""First tokens against gaps: each prefill policy under the same loads, interleaved.

A model file is started once for each policy. In each round every policy serves every load: requests
that all come at once. A request's ids change from turn to turn, also where one is repeated, so that
the prefix cache holds nothing of it.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import os

import tables
from allspark.pipeline.engine_config import PREFILL_POLICIES
from bench import Contestant, prepared
from bench_engine import Recorder, make_parser
from checkpoints import SHAPES
from measure import Running, about
from metrics import from_timelines
from ours import Allspark
from peers.worker import measure
from workloads import FIRST_ID, Workload, make_workload


def parse_arguments() -> argparse.Namespace:
    parser = make_parser(__doc__, rounds=5, precisions=True)
    parser.set_defaults(precision="A8W8")
    parser.add_argument("--workloads", default="b32,mixed")
    parser.add_argument("--divisor", type=int, default=1, help="shortens prompts and outputs")
    return parser.parse_args()


class Bench:
    def __init__(self, options: argparse.Namespace) -> None:
        shape = SHAPES[options.shape]
        self._num_ids = shape.vocab_size - FIRST_ID
        self.workloads = [
            make_workload(name, shape.vocab_size, options.divisor)
            for name in options.workloads.split(",")
        ]
        ours = Contestant(Allspark(options.work_dir / "peers" / Allspark.name), options.precision)
        self._job = {
            "model": str(prepared(ours, options.shape, options.work_dir)),
            "threads": options.threads or len(os.sched_getaffinity(0)),
            "chunk": 0,
            "cache_mode": ours.precision.cache_mode,
            "max_batch": max(work.max_batch for work in self.workloads),
            "max_length": max(work.max_length for work in self.workloads),
        }
        self._turns = itertools.count()
        self.running = {
            policy: Running({**self._job, "prefill_policy": policy}) for policy in PREFILL_POLICIES
        }
        for running in self.running.values():
            for work in self.workloads:
                running.serve([vars(request) for request in work.warm_up()])

    def about(self) -> dict[str, str]:
        return about(next(iter(self.running.values())).engine)

    def measure(self, policy: str, work: Workload) -> dict[str, float]:
        waves = work.turn(next(self._turns), self._num_ids)
        job = {**self._job, "waves": waves, "warm_up": []}
        return from_timelines(work, measure(self.running[policy], job)["requests"])


def main() -> None:
    options = parse_arguments()
    bench = Bench(options)
    recorder = Recorder("prefill_policy", options, bench.about())
    for number in range(1, options.rounds + 1):
        for work in bench.workloads:
            for policy in bench.running:
                recorder.measure(
                    number,
                    {"workload": work.name, "policy": policy},
                    functools.partial(bench.measure, policy, work),
                )
    print("\n".join(tables.prefill_policy(recorder.finish())))
    for running in bench.running.values():
        running.close()


if __name__ == "__main__":
    main()
