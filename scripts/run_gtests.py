#!/usr/bin/env python3
"""Runs the C++ tests that CTest knows, many in a process, and writes their JUnit file.

CTest starts a process for each of thousands of tests. To start takes longer than most tests do:
sanitizers prepare their shadow memory, an emulator translates the same code anew. Here a process
runs a batch. If it dies, hangs or names no result, each test of the batch runs alone, so that the
right one is blamed; if all of them then pass, the batch itself is the failure.

usage: run_gtests.py BUILD_DIR LABEL --junit FILE [--jobs N] [--batch N] [--without REGEX]
                     [-- WRAPPER...]
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

KEPT_OUTPUT = 20_000  # characters of a failed process
BATCH_TIMEOUTS = 3  # A batch may take this many times what one test may.


@dataclass(frozen=True)
class Test:
    """A test of CTest."""

    name: str  # Suite.Test/value of the parameter
    program: tuple[str, ...]  # an emulator and its options may come first
    filter: str  # GoogleTest's name of it: Suite.Test/number of the parameter
    folder: str
    timeout_s: float
    environment: tuple[str, ...]


@dataclass
class Result:
    name: str
    seconds: float = 0.0
    failure: str | None = None
    skipped: str | None = None


def tests_of(build_dir: Path, label: str, without: str | None) -> list[Test]:
    command = ["ctest", "--test-dir", str(build_dir), "-L", f"^{label}$", "--show-only=json-v1"]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    tests = []
    for entry in json.loads(listed)["tests"]:
        if without and re.search(without, entry["name"]):
            continue
        properties = {each["name"]: each["value"] for each in entry.get("properties", ())}
        *program, wanted = [part for part in entry["command"] if "also_run_disabled" not in part]
        tests.append(
            Test(
                entry["name"],
                tuple(program),
                wanted.removeprefix("--gtest_filter="),
                properties.get("WORKING_DIRECTORY", "."),
                float(properties.get("TIMEOUT", 600)),
                tuple(properties.get("ENVIRONMENT", ())),
            )
        )
    return tests


def batches_of(tests: list[Test], size: int) -> list[list[Test]]:
    """Tests of one program, with the same environment. Neighbours stay together, since they share
    the set-up of their suite."""
    by_program: dict[tuple[tuple[str, ...], tuple[str, ...]], list[Test]] = {}
    for test in tests:
        by_program.setdefault((test.program, test.environment), []).append(test)
    return [
        same[first : first + size]
        for same in by_program.values()
        for first in range(0, len(same), size)
    ]


def result_of(case: ElementTree.Element) -> Result:
    result = Result(f"{case.get('classname')}.{case.get('name')}", float(case.get("time", 0)))
    failures = [each.get("message", "") for each in case.findall("failure")]
    skipped = case.find("skipped")
    if failures:
        result.failure = "\n".join(failures)
    elif skipped is not None:
        # The first line is where the test says it.
        result.skipped = skipped.get("message", "").partition("\n")[2]
    elif case.get("result") in ("suppressed", "skipped"):
        result.skipped = case.get("result")
    return result


def run_together(tests: list[Test], wrapper: list[str]) -> tuple[list[Result], str | None]:
    """Runs tests in one process. Returns their results and, where some have none, why."""
    first = tests[0]
    timeout_s = first.timeout_s * (BATCH_TIMEOUTS if len(tests) > 1 else 1)
    environment = {**os.environ, **dict(each.split("=", 1) for each in first.environment)}
    with tempfile.TemporaryDirectory(prefix="allspark-gtest-") as folder:
        file = Path(folder) / "results.xml"
        filters = ":".join(test.filter for test in tests)
        command = [*wrapper, *first.program, f"--gtest_filter={filters}"]
        command.append(f"--gtest_output=xml:{file}")
        try:
            done = subprocess.run(
                command, cwd=first.folder, env=environment, timeout=timeout_s,
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
            )  # fmt: skip
        except subprocess.TimeoutExpired as late:
            output = (late.stdout or b"").decode(errors="replace")
            return [], f"still running after {timeout_s:.0f} s\n{output[-KEPT_OUTPUT:]}"
        output = done.stdout.decode(errors="replace")[-KEPT_OUTPUT:]
        try:
            cases = ElementTree.parse(file).iter("testcase")
        except (FileNotFoundError, ElementTree.ParseError):  # It may also end while it writes.
            return [], f"ended with {done.returncode} and no results\n{output}"
        results = [result_of(case) for case in cases]
    names = {test.filter: test.name for test in tests}
    for result in results:
        result.name = names.get(result.name, result.name)
    if len(results) < len(tests):
        return results, f"only {len(results)} of {len(tests)} tests have results\n{output}"
    # A sanitizer may report at the end of the process, after the tests have passed.
    if done.returncode != 0 and not any(result.failure for result in results):
        return results, f"ended with {done.returncode} although no test failed\n{output}"
    return results, None


def run_batch(tests: list[Test], wrapper: list[str]) -> list[Result]:
    results, problem = run_together(tests, wrapper)
    if problem is None:
        return results
    results = []
    for test in tests:
        alone, why = run_together([test], wrapper)
        result = alone[0] if alone else Result(test.name)
        if why is not None and result.failure is None:
            result.failure = why
        results.append(result)
    if len(tests) > 1 and not any(result.failure for result in results):
        names = ":".join(test.filter for test in tests)
        together = f"{tests[0].name.partition('.')[0]}.TogetherWithOthers"
        failure = f"{problem}\nEach test passes alone; together: --gtest_filter={names}"
        results.append(Result(together, failure=failure))
    return results


def write_junit(file: Path, results: list[Result]) -> None:
    suite = ElementTree.Element("testsuite")
    for result in results:
        attributes = {"name": result.name, "time": f"{result.seconds:.3f}"}
        case = ElementTree.SubElement(suite, "testcase", attributes)
        if result.failure is not None:
            ElementTree.SubElement(case, "failure", message=plain(result.failure))
        elif result.skipped is not None:
            ElementTree.SubElement(case, "skipped", message=plain(result.skipped))
    ElementTree.ElementTree(suite).write(file, encoding="unicode")


def plain(text: str) -> str:
    """Without the control characters that XML has no place for."""
    return re.sub(r"[^\t\n\x20-\ud7ff\ue000-\ufffd]", "?", text)


def main() -> int:
    own, wrapper = split_arguments(sys.argv[1:])
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("build_dir", type=Path)
    parser.add_argument("label", help="unit or slow")
    parser.add_argument("--junit", type=Path, required=True)
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--batch", type=int, default=50, help="tests in a process")
    parser.add_argument("--without", help="leaves out tests whose names this expression finds")
    options = parser.parse_args(own)

    begin = time.monotonic()
    tests = tests_of(options.build_dir, options.label, options.without)
    batches = batches_of(tests, options.batch)
    results: list[Result] = []
    with ThreadPoolExecutor(options.jobs) as pool:
        for found in pool.map(lambda batch: run_batch(batch, wrapper), batches):
            results += found
            for result in found:
                if result.failure is not None:
                    print(f"FAILED: {result.name}\n{result.failure}\n", flush=True)
    write_junit(options.junit, results)
    failed = sum(result.failure is not None for result in results)
    skipped = sum(result.skipped is not None for result in results)
    took_s = time.monotonic() - begin
    print(f"{len(results) - failed - skipped} passed, {failed} failed, {skipped} skipped, "
          f"in {len(batches)} processes and {took_s:.0f} s")  # fmt: skip
    return 1 if failed or not results else 0


def split_arguments(arguments: list[str]) -> tuple[list[str], list[str]]:
    end = arguments.index("--") if "--" in arguments else len(arguments)
    return arguments[:end], arguments[end + 1 :]


if __name__ == "__main__":
    sys.exit(main())
