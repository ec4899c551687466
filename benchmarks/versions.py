"""Compares two installations of allspark, in turns of a second or two.

Both serve from a process of their own, with the same model files: what slows the machine down for a
minute slows both. They are started anew several times, since where a process's memory lies makes
some per cent of its speed. So a start has one value, the median of its pairs' ratios. A ratio above
1 says that the second one is faster. The median of the starts is shown, and from six starts on the
95 % interval of the median: fewer cannot give one.

usage: versions.py BEFORE AFTER [--precisions bf16,A8W8] [--workloads single,b32] [--starts N]
BEFORE and AFTER are folders with a package allspark (pip install --target FOLDER .). The model
files are those of compare.py, which makes them.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

from checkpoints import WORK_DIR

# By workload: what its requests are shortened by, so that a turn takes a second or two.
DIVISORS = {"single": 8, "b32": 16, "mixed": 16, "long": 32}
_NUM_IDS = 7000


def serve_turns(model: str, threads: int) -> None:
    """The worker: serves workloads that stdin names, and prints the seconds of each."""
    import measure
    from workloads import make_workload

    running = measure.Running(
        {
            "model": model, "max_batch": 32, "max_length": 8192, "threads": threads, "chunk": 0,
            "cache_mode": "AsCacheDefault",
        }
    )  # fmt: skip
    print("ready", flush=True)
    for line in sys.stdin:
        name, turn = line.split()
        waves = make_workload(name, _NUM_IDS, DIVISORS[name]).turn(int(turn), _NUM_IDS)
        begin = time.perf_counter()
        for wave in waves:
            running.serve(wave)
        print(time.perf_counter() - begin, flush=True)


class Worker:
    """A process that serves with one installation."""

    def __init__(self, folder: Path, model: Path, threads: int) -> None:
        command = [sys.executable, __file__, "--worker", str(model), str(threads)]
        self._process = subprocess.Popen(
            command, env={**os.environ, "PYTHONPATH": str(folder)}, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        if self._read() != "ready":
            raise SystemExit(f"{folder}: its worker did not start")

    def _read(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def seconds(self, workload: str, turn: int) -> float:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{workload} {turn}\n")
        self._process.stdin.flush()
        answer = self._read()
        if not answer:
            raise SystemExit(f"a worker ended with status {self._process.wait()}")
        return float(answer)

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def median_interval(values: list[float]) -> tuple[float, float] | None:
    """The 95 % interval of the median of what the values were drawn from, independently of each
    other; None if they are too few. It is exact: a value is above the median every second time."""
    ordered, count = sorted(values), len(values)
    rank, beyond = 0, 0  # Of 2^count cases, those with at most `rank` values on one side.
    while (beyond := beyond + math.comb(count, rank)) <= 0.025 * 2**count:
        rank += 1
    return (ordered[rank - 1], ordered[count - rank]) if rank > 0 else None


def compare(before: Worker, after: Worker, pairs: int, workloads: list[str]) -> dict[str, float]:
    """The median ratio of seconds in the pairs of a start, by workload."""
    ratios: dict[str, list[float]] = {name: [] for name in workloads}
    for turn in range(pairs + 1):  # the first warms up
        for name, values in ratios.items():
            # Who comes first changes, since a turn warms the machine up for the next.
            order = (before, after) if turn % 2 else (after, before)
            seconds = {id(worker): worker.seconds(name, turn) for worker in order}
            if turn > 0:
                values.append(seconds[id(before)] / seconds[id(after)])
    return {name: statistics.median(values) for name, values in ratios.items()}


def shown(values: list[float]) -> str:
    """The median of the starts' ratios, with its interval."""
    interval = median_interval(values)
    bounds = "" if interval is None else " [{:.3f}, {:.3f}]".format(*interval)
    return f"{statistics.median(values):.3f}{bounds}"


def main() -> None:
    if sys.argv[1:2] == ["--worker"]:
        return serve_turns(sys.argv[2], int(sys.argv[3]))
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("before", type=Path, help="a folder with a package allspark")
    parser.add_argument("after", type=Path)
    parser.add_argument("--precisions", default="bf16,A8W8,A8W4")
    parser.add_argument("--workloads", default=",".join(DIVISORS))
    parser.add_argument("--pairs", type=int, default=5, help="of each start")
    parser.add_argument("--starts", type=int, default=8)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--shape", default="0.5B")
    parser.add_argument("--work-dir", type=Path, default=WORK_DIR)
    options = parser.parse_args()
    workloads = options.workloads.split(",")
    if unknown := set(workloads) - set(DIVISORS):
        parser.error(f"--workloads has {unknown}; it may have {', '.join(DIVISORS)}")
    for precision in options.precisions.split(","):
        model = options.work_dir / options.shape / f"allspark-{precision}"
        if not model.is_dir():
            parser.error(f"there is no {model}; compare.py makes it")
        ratios: dict[str, list[float]] = {name: [] for name in workloads}
        for _ in range(options.starts):
            before, after = (
                Worker(folder, model, options.threads) for folder in (options.before, options.after)
            )
            for name, ratio in compare(before, after, options.pairs, workloads).items():
                ratios[name].append(ratio)
            before.close()
            after.close()
        for name, values in ratios.items():
            print(f"{precision:6} {name:7} {shown(values)}", flush=True)


if __name__ == "__main__":
    main()
