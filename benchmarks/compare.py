"""Compares allspark on this machine with other engines and with the machine's own limits.

usage: compare.py [--quick] [--engines allspark,openvino/int8,...] [--rounds N] [--name NAME] ...
       compare.py ... --resume     resumes a run of these settings that was cut off
       compare.py --report         writes the documents' figures again from the results

Rounds are interleaved: in each round one engine after the other serves every workload, and limits
are measured between the workloads. Every measurement is a process of its own.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from pathlib import Path

import figures
from bench import ENGINES, TASKS, Bench, Unfit, render, say
from checkpoints import SHAPES, WORK_DIR
from machine import MOST_OTHERS
from peers import process_tree
from record import RESULTS, read
from report import markdown
from rules import TIMES_OURS

QUICK = {
    "rounds": 1,
    "minutes": 9.5,
    "shapes": "0.5B",
    "workloads": "single,p1024,b32,mixed",
    "engines": "allspark/bf16,allspark/A8W8,allspark/A8W4,openvino/int8,llama.cpp/Q4_0",
}

# Without those that only differ by the protocol before them.
DEFAULT_ENGINES = [name for name, engine in ENGINES.items() if not engine.is_server]


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=5, help="rounds; medians are shown")
    parser.add_argument("--quick", action="store_true", help=f"defaults become {QUICK}")
    parser.add_argument("--shapes", default="0.5B,1B", help=f"of {','.join(SHAPES)}")
    parser.add_argument("--workloads", default=",".join(TASKS), help="which measurements")
    parser.add_argument(
        "--engines", default=",".join(DEFAULT_ENGINES), help="ENGINE or ENGINE/PRECISION"
    )
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--chunk", type=int, default=0, help="our prefill chunk, 0: the default")
    parser.add_argument("--divisor", type=int, default=1, help="shortens requests, for a try")
    parser.add_argument("--work-dir", type=Path, default=WORK_DIR)
    parser.add_argument("--output-dir", type=Path, help="default: results/KIND-OF-MACHINE")
    parser.add_argument("--name", default="engines", help="of the result files")
    parser.add_argument("--note", default="", help="a remark for the report")
    parser.add_argument("--no-limits", action="store_true", help="leave the machine's limits out")
    parser.add_argument("--lock", type=Path, help="a file to lock alone for every measurement")
    parser.add_argument("--retries", type=int, default=2, help="of a measurement others disturbed")
    parser.add_argument(
        "--most-others", type=float, default=MOST_OTHERS,
        help="part of the cores that others may take; where they took more, there is no value",
    )  # fmt: skip
    parser.add_argument("--timeout", type=float, default=300, help="seconds for one measurement")
    parser.add_argument(
        "--times-ours", type=float, default=TIMES_OURS,
        help="a peer's measurement may take this many times what ours took; 0: --timeout only",
    )  # fmt: skip
    parser.add_argument(
        "--all-peers", action="store_true", help="in all rounds, also those who are far behind"
    )
    parser.add_argument("--minutes", type=float, help="measure no longer; what does not fit is out")
    parser.add_argument("--resume", action="store_true", help="go on with what was cut off")
    parser.add_argument("--render", type=Path, help="only make table and plot of this JSON again")
    parser.add_argument("--report", action="store_true", help="only write the documents' figures")
    if "--quick" in (sys.argv[1:] if arguments is None else arguments):
        parser.set_defaults(**QUICK)
    options = parser.parse_args(arguments)
    for name, known in (("shapes", SHAPES), ("workloads", TASKS), ("engines", ENGINES)):
        values = getattr(options, name).split(",")
        for value in values:
            engine, _, precision = value.partition("/")
            if value not in known and not (
                name == "engines" and engine in known and precision in ENGINES[engine].precisions
            ):
                parser.error(f"--{name} has {value!r}; it must be one of {', '.join(known)}")
        setattr(options, name, values)
    for name in ("rounds", "threads", "divisor"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} is {getattr(options, name)}; it must be at least 1")
    for name in ("chunk", "retries", "times_ours"):
        if getattr(options, name) < 0:
            option = name.replace("_", "-")
            parser.error(f"--{option} is {getattr(options, name)}; it must be at least 0")
    if options.minutes is not None and options.minutes <= 0:
        parser.error(f"--minutes is {options.minutes}; it must be above 0")
    return options


def main() -> int:
    options = parse_arguments()
    if options.report:
        figures.write_documents(RESULTS)
        return 0
    if options.render is not None:
        print(render(options.render))
        return 0
    # On SIGTERM the stack unwinds, so that run_command also ends the process that it runs.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    # A server whose worker is ended for its time has been measured, and is none of the others.
    process_tree.adopt_orphans()
    try:
        bench = Bench(options)
    except Unfit as error:
        say(f"compare.py: {error}")
        return 2
    bench.run()
    print(markdown(read(bench.path)))
    return 1 if bench.has_failures else 0


if __name__ == "__main__":
    sys.exit(main())
