#!/usr/bin/env python3
"""Runs cases that are made to end, stall or fill a process: `run.py` all families, `run.py NAME...`
some.

    --cases N   of each family; default: the number in families.py
    --begin N   the first seed; default 0
    --jobs N    cases that run at a time; default: the number of cores
    --list      instead, prints the names and numbers

A case is a seed of its family. Each runs in a process of its own, with MOST_BYTES of address space
and MOST_SECONDS of time. One that takes longer runs again when the others have ended, since they
and other programs may have taken the cores. It passes where it returns what happened: `taken`,
`refused` or `ended`. It fails where the process dies, hangs, prints to its standard error, or
raises what no document names.
Exit status 1: a case failed.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "python")]

MOST_BYTES = 4 << 30
MOST_SECONDS = 20
TOO_LATE = f"ended by {signal.SIGALRM.name}"


def child(family: Any, seed: int, folder: Path, report: int) -> None:
    """Runs one case. What it returns or raises is written to `report`, a descriptor."""
    resource.setrlimit(resource.RLIMIT_AS, (MOST_BYTES, MOST_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # Without a handler the signal ends the process, whatever it does.
    signal.setitimer(signal.ITIMER_REAL, MOST_SECONDS)
    try:
        outcome = family.run(random.Random(seed), folder)
    except BaseException:
        outcome = "raised " + traceback.format_exc()
    os.write(report, outcome.encode(errors="replace")[-4000:])
    os.close(report)


def run_case(family: Any, name: str, seed: int, scratch: Path) -> dict[str, Any]:
    folder = scratch / f"{name}-{seed}"
    folder.mkdir()
    errors = folder / "stderr"
    reader, writer = os.pipe()
    begin = time.perf_counter()
    pid = os.fork()
    if pid == 0:
        os.close(reader)
        error_file = os.open(errors, os.O_WRONLY | os.O_CREAT)
        os.dup2(error_file, 2)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # the tokenizers package prints there
        os.close(error_file)
        child(family, seed, folder, writer)
        sys.exit(0)  # with all that Python does at its end
    os.close(writer)
    with open(reader, "rb") as file:
        outcome = file.read().decode(errors="replace")
    _, status, usage = os.wait4(pid, 0)
    code = os.waitstatus_to_exitcode(status)
    text = errors.read_text(errors="replace") if errors.exists() else ""
    shutil.rmtree(folder, ignore_errors=True)
    kind = outcome.partition(" ")[0]
    fault = None
    if code != 0:
        fault = f"ended by {signal.Signals(-code).name if code < 0 else code}"
    elif kind not in ("taken", "refused", "ended"):
        fault = "raised what nothing documents"
    elif text.strip():
        fault = "printed to its standard error"
    return {
        "seed": seed, "outcome": kind, "fault": fault, "seconds": time.perf_counter() - begin,
        "bytes": usage.ru_maxrss * 1024, "text": (outcome + "\n" + text)[-3000:] if fault else "",
    }  # fmt: skip


def zygote(name: str, begin: int, end: int, scratch: Path) -> None:
    """A process that imports and prepares everything once and forks for each case."""
    from families import FAMILIES

    family = FAMILIES[name]
    (scratch / "prepared").mkdir()
    family.prepare(scratch / "prepared")
    for seed in range(begin, end):
        print(json.dumps(run_case(family, name, seed, scratch)), flush=True)


class Tally:
    """What happened in a family; its cases may come from several threads."""

    def __init__(self, name: str) -> None:
        self.faults = 0
        self.late: list[int] = []  # seeds of cases that had too little time, and run again
        self.is_repeating = False
        self._name = name
        self._lock = threading.Lock()
        self._outcomes: Counter[str] = Counter()
        self._slowest: dict[str, Any] = {"seconds": 0.0, "seed": None}
        self._largest = 0

    def add(self, case: dict[str, Any]) -> None:
        """Counts a case, and prints the first faults."""
        with self._lock:
            if case["fault"] == TOO_LATE and not self.is_repeating:
                self.late.append(case["seed"])
                return
            self._outcomes[case["outcome"]] += 1
            self._largest = max(self._largest, case["bytes"])
            self._slowest = max(self._slowest, case, key=lambda c: c["seconds"])
            if case["fault"]:
                self.fault(f"{case['seed']}: {case['fault']}\n{case['text']}")

    def fault(self, text: str) -> None:
        self.faults += 1
        if self.faults <= 5:
            print(f"{self._name} {text}", flush=True)

    def __str__(self) -> str:
        counts = ", ".join(f"{count} {kind}" for kind, count in sorted(self._outcomes.items()))
        slowest = f"{self._slowest['seconds']:.1f} s (seed {self._slowest['seed']})"
        return (
            f"{self._name}: {self._outcomes.total()} cases, {self.faults} faults ({counts}); "
            f"{len(self.late)} ran twice; slowest {slowest}, largest {self._largest >> 20} MiB"
        )


def run_part(name: str, begin: int, end: int, tally: Tally) -> None:
    """Runs some seeds of a family, one after the other."""
    # In memory where there is such a file system: a disk that others use may stall a case.
    base = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="allspark-hostile-", dir=base) as scratch:
        command = [sys.executable, __file__, "--zygote", scratch, "--begin", str(begin),
                   "--cases", str(end - begin), name]  # fmt: skip
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        count = 0
        for line in process.stdout:
            tally.add(json.loads(line))
            count += 1
        if process.wait() != 0 or count != end - begin:
            tally.fault(f"{begin} to {end}: the process that forks ended by {process.returncode}")


def run_family(name: str, begin: int, end: int, jobs: int) -> int:
    """Prints a line for the family and the first faults; returns the number of faults."""
    tally = Tally(name)
    cuts = [begin + (end - begin) * i // jobs for i in range(jobs + 1)]
    threads = [
        threading.Thread(target=run_part, args=(name, first, last, tally))
        for first, last in itertools.pairwise(cuts)
        if first < last
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    tally.is_repeating = True
    for seed in sorted(tally.late):
        run_part(name, seed, seed + 1, tally)
    print(tally, flush=True)
    return tally.faults


def main() -> int:
    from families import NUM_CASES

    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*")
    parser.add_argument("--cases", type=int)
    parser.add_argument("--begin", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--zygote", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    for name in options.names:
        if name not in NUM_CASES:
            parser.error(f"there is no family {name!r}; there are {', '.join(NUM_CASES)}")
    if options.list:
        for name, count in NUM_CASES.items():
            print(name, count)
        return 0
    if options.zygote:
        zygote(options.names[0], options.begin, options.begin + options.cases, options.zygote)
        return 0
    faults = 0
    for name in options.names or NUM_CASES:
        count = NUM_CASES[name] if options.cases is None else options.cases
        faults += run_family(name, options.begin, options.begin + count, options.jobs)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
