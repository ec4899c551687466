#!/usr/bin/env python3
"""Fuzzes the Python parsers: `run.py` all of them, `run.py NAME...` some.

    --runs N    of each target; default: a million
    --seed N    of the mutations; default: a new one each time, which is printed
    --replay    instead, runs the seeds and the inputs of earlier faults in tests/fuzz/cases
    --list      instead, prints the names

The input of a fault is saved in tests/fuzz/cases/NAME, for git. Exit status 1: there was a fault.
"""

from __future__ import annotations

import argparse
import hashlib
import random
import resource
import signal
import sys
import time
import traceback
from collections.abc import Iterable
from pathlib import Path

from parsers import TARGETS, Target, remove_scratch

CASES = Path(__file__).resolve().parent / "cases"
# Limits for one input: processor time, and memory beyond what the process has at the start.
MOST_SECONDS = 10
MOST_BYTES = 2 << 30
# A target ends after this many different faults.
MOST_FAULTS = 10


class TookTooLong(BaseException):
    """A BaseException, so that handlers of Exception do not catch it."""


def _too_long(*_: object) -> None:
    raise TookTooLong(f"it took {MOST_SECONDS} s of processor time")


def bound_memory() -> None:
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MOST_BYTES, resource.RLIM_INFINITY))


def fault_of(target: Target, data: bytes) -> BaseException | None:
    """The fault that the target showed with this input; None if it behaved as documented."""
    signal.setitimer(signal.ITIMER_VIRTUAL, MOST_SECONDS)
    try:
        target.run(data)
    except target.documented as error:
        if not str(error):
            return error
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # Also TookTooLong, and panics of Rust libraries.
        return error
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
    return None


def _place(error: BaseException) -> tuple:
    """The place of a fault; faults from the same place count as one."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return type(error), frame.filename, frame.lineno


def report(target: Target, data: bytes, error: BaseException, what: str) -> None:
    print(f"FAULT in {target.name}: {what}", file=sys.stderr)
    traceback.print_exception(error, limit=-6)
    print(f"input: {data[:300]!r}{'...' if len(data) > 300 else ''}", file=sys.stderr)


def fuzz(target: Target, runs: int, seed: int) -> int:
    """Fuzzes a target; returns how many different faults there were."""
    rng = random.Random(f"{target.name} {seed}")
    seeds, faults = target.seeds(), set()
    begin = time.monotonic()
    for _ in range(runs):
        data = target.mutate(rng, seeds)
        error = fault_of(target, data)
        if error is None or _place(error) in faults:
            continue
        faults.add(_place(error))
        case = CASES / target.name / hashlib.sha256(data).hexdigest()[:16]
        case.parent.mkdir(parents=True, exist_ok=True)
        case.write_bytes(data)
        report(target, data, error, f"kept as {case}")
        if len(faults) == MOST_FAULTS:
            break
    seconds = time.monotonic() - begin
    print(f"{target.name}: {runs} runs, seed {seed}, {runs / seconds:.0f} a second, "
          f"{len(faults)} faults", flush=True)  # fmt: skip
    return len(faults)


def replay(target: Target) -> int:
    """Returns the faults of the seeds, which must all be accepted, and of the cases."""
    faults = 0
    for number, data in enumerate(target.seeds()):
        try:
            target.run(data)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:
            report(target, data, error, f"seed {number} is refused")
            faults += 1
    cases = sorted(path for path in (CASES / target.name).glob("*"))
    for path in cases:
        data = path.read_bytes()
        error = fault_of(target, data)
        if error is not None:
            report(target, data, error, f"case {path.name}")
            faults += 1
    print(f"{target.name}: {number + 1} seeds and {len(cases)} cases, {faults} faults", flush=True)
    return faults


def main(arguments: Iterable[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", choices=[[], *TARGETS], metavar="NAME")
    parser.add_argument("--runs", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--replay", action="store_true")
    parser.add_argument("--list", action="store_true")
    options = parser.parse_args(list(arguments))
    if options.list:
        print("\n".join(TARGETS))
        return 0
    seed = random.randrange(10**9) if options.seed is None else options.seed
    targets = [TARGETS[name] for name in options.names or TARGETS]
    signal.signal(signal.SIGVTALRM, _too_long)
    faults = 0
    try:
        # Imports and caches are not counted for any input.
        for target in targets:
            fault_of(target, target.seeds()[0])
        bound_memory()
        for target in targets:
            if options.replay:
                faults += replay(target)
            else:
                faults += fuzz(target, options.runs, seed)
    finally:
        remove_scratch()
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
