"""The engine's own cost per step: its loop over a model whose kernels do nothing.

Runs the program that `scripts/bench.sh engine` builds (csrc/bench/engine_bench.cc).
"""

from __future__ import annotations

import argparse
import functools
import json
from pathlib import Path

import tables
from bench_engine import Recorder, about_engine, add_recording
from machine import Others
from peers.base import run_command

PROGRAM = Path(__file__).resolve().parents[1] / "build" / "release" / "engine_bench"
STREAMS = (1, 16, 64, 512)


def measure(program: Path, streams: int, threads: int) -> dict[str, float]:
    name = f"StepLoop/streams:{streams}/threads:{threads}/real_time"
    output = run_command([program, f"--benchmark_filter=^{name}$", "--benchmark_format=json"])
    (entry,) = json.loads(output)["benchmarks"]
    return {"step_us": entry["us_per_step"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--streams", type=int, nargs="+", default=STREAMS, choices=STREAMS)
    parser.add_argument("--program", type=Path, default=PROGRAM)
    add_recording(parser, rounds=5)
    options = parser.parse_args()
    if not options.program.is_file():
        parser.error(f"there is no {options.program}; scripts/bench.sh engine builds it")
    recorder = Recorder("step_loop", options, about_engine(options.work_dir))
    for number in range(1, options.rounds + 1):
        for streams in options.streams:
            for threads in options.threads:
                of = {"streams": streams, "threads": threads}
                call = functools.partial(measure, options.program, streams, threads)
                recorder.measure(number, of, call, begin_others=Others)
    print("\n".join(tables.step_loop(recorder.finish())))


if __name__ == "__main__":
    main()
