#!/usr/bin/env python3
"""Sums the JUnit files of ctest and pytest, and detects tests that no longer run.

usage: sum_results.py RESULTS_DIR [FAILED_STEP...] [--of PART...] [--expected FILE]
       sum_results.py --update RESULTS_DIR [--expected FILE]

A step's JUnit file is RESULTS_DIR/STEP.xml. These count as failures, in addition to failed tests:
- a failed step that no failed test explains (lint, a build, a crash of the runner),
- a skipped test that allowed_skips.py does not allow,
- a group (a suite of ctest, a file of pytest) with fewer tests than tests/expected_tests.json has,
- a file of pytest that is not in it, and so could lose its tests unnoticed,
- a step of a PART (default, fast, tests, lowest, clang, asan, tsan, fuzz, aarch64) that left no
  results.
--update writes the counts of the steps in RESULTS_DIR into that file. What this machine cannot
cover is listed at the end. The last line is `N passed, N failed, N skipped`; the exit status is 1
if anything failed, or if no test at all passed.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from allowed_skips import TABLES, Machine, allowed_skip, is_emulator

EXPECTED = Path(__file__).resolve().parents[1] / "tests" / "expected_tests.json"
# The steps that run tests, for each part of scripts/test.sh.
STEPS = {
    "default": ("ctest", "pytest"),
    "fast": ("ctest", "pytest-fast"),
    "tests": ("ctest", "pytest", "ctest-slow", "pytest-slow"),
    "lowest": ("pytest-lowest",),
    "clang": ("ctest-clang",),
    "asan": ("ctest-asan", "ctest-asan-slow"),
    "tsan": ("ctest-tsan", "ctest-tsan-slow"),
    "fuzz": ("fuzz",),
    "aarch64": ("ctest-aarch64",),
}
# Steps that run the tests of another step, and so have its counts, except for ...
SAME_TESTS = {
    "pytest-fast": "pytest",
    "pytest-lowest": "pytest",
    "ctest-clang": "ctest",
    "ctest-asan": "ctest",
    "ctest-tsan": "ctest",
    "ctest-asan-slow": "ctest-slow",
    "ctest-tsan-slow": "ctest-slow",
}
# ... the tests with this property, which tests/python/conftest.py gives to tests with that marker.
LEFT_OUT = {"pytest-fast": "torch", "pytest-lowest": "torch"}

TABLE_NAMES = "|".join(sorted(TABLES, key=len, reverse=True))
TABLE = re.compile(rf"(?<=[/_])({TABLE_NAMES})(_?emulated)?(?=$|[/_])")


@dataclass
class Case:
    """One test of a JUnit file."""

    name: str  # Suite.Test/parameter or folder/file.py::test[parameter]
    outcome: str  # passed, failed or skipped
    reason: str = ""  # of a skip
    properties: frozenset[str] = frozenset()

    @property
    def group(self) -> str:
        return re.split(r"::|\.(?!py::|py$)", self.name)[0]

    @property
    def is_file(self) -> bool:
        """Whether this stands for a whole file that was skipped at its import."""
        return self.name.endswith(".py")

    @property
    def table(self) -> tuple[str, bool] | None:
        """The kernel table that the test is about, and whether it is emulated."""
        found = TABLE.search(self.name) if "::" not in self.name else None
        return (found[1], found[2] is not None) if found else None


def name_of(case: ElementTree.Element) -> str:
    name, folder = case.get("name", ""), case.get("classname", "")
    if folder.startswith("tests.python.") or (not folder and name.startswith("tests.python.")):
        # pytest: the module and the class; for a module skipped as a whole, the name is the module.
        parts = (folder or name).removeprefix("tests.python.").split(".")
        end = next((i for i, part in enumerate(parts) if part.startswith("test_")), 0) + 1
        test = "::".join([*parts[end:], name]) if folder else ""
        return "/".join(parts[:end]) + ".py" + (f"::{test}" if test else "")
    return re.sub(r"\s+# GetParam\(\).*", "", name, flags=re.DOTALL)


def reason_of(case: ElementTree.Element) -> str:
    """Why a test was skipped: in pytest's message, or in the output of a GoogleTest test."""
    skipped = case.find("skipped")
    message = (skipped.get("message") or "") if skipped is not None else ""
    if message == "collection skipped" and skipped is not None:
        return (skipped.text or "").partition("Skipped: ")[2].rstrip("\"')") or message
    output = case.findtext("system-out") or ""
    found = re.search(r": Skipped\n(.*?)\n\[  SKIPPED \]", output, re.DOTALL)
    return found[1] if found else message


def cases_of(file: Path) -> Iterator[Case]:
    for case in ElementTree.parse(file).iter("testcase"):
        failed = case.find("failure") is not None or case.find("error") is not None
        is_skipped = case.find("skipped") is not None
        is_skipped = is_skipped or case.get("status") in ("notrun", "disabled")
        outcome = "failed" if failed else "skipped" if is_skipped else "passed"
        properties = frozenset(p.get("name", "") for p in case.iter("property"))
        yield Case(name_of(case), outcome, reason_of(case) if is_skipped else "", properties)


@dataclass
class Group:
    """The number of tests in a group: without a kernel table (by property), and for each table."""

    tests: Counter[str] = field(default_factory=Counter)
    native: Counter[str] = field(default_factory=Counter)
    emulated: Counter[str] = field(default_factory=Counter)


def groups_of(cases: list[Case]) -> dict[str, Group]:
    groups: dict[str, Group] = {}
    for case in cases:
        if case.is_file:
            continue
        group = groups.setdefault(case.group, Group())
        if case.table is None:
            group.tests["torch" if "torch" in case.properties else "tests"] += 1
        else:
            table, is_emulated = case.table
            (group.emulated if is_emulated else group.native)[table] += 1
    return groups


def counts_of(group: Group, before: dict[str, Any]) -> dict[str, Any]:
    """The entry of a group in the file of expected counts, which was `before`. A suite runs alike
    with every native table, so one count holds for machines with other tables too. Emulated tables
    may have fewer; the counts of those that this machine does not emulate stay."""
    counts: dict[str, Any] = dict(sorted(group.tests.items(), reverse=True))
    if group.native:
        counts["of_each_table"] = min(group.native.values())
    emulated = {**before.get("of_emulated", {}), **group.emulated}
    if emulated:
        counts["of_emulated"] = {t: emulated[t] for t in TABLES if emulated.get(t)}
    return counts


def check_counts(
    machine: Machine, step: str, groups: dict[str, Group], expected: dict[str, dict[str, Any]]
) -> Iterator[str]:
    """Says which groups of a step have fewer tests than expected."""
    native, emulated = machine.native_tables(step), machine.emulated_tables(step)
    for name, counts in expected.items():
        group = groups.get(name, Group())
        wanted = []  # (kind, number found, number required)
        for kind in ("tests", "torch"):
            if kind != LEFT_OUT.get(step):
                of = " with the marker torch" if kind == "torch" else ""
                wanted.append((of, group.tests[kind], counts.get(kind, 0)))
        for table in native:
            least = counts.get("of_each_table", 0)
            wanted.append((f" with the kernel table {table}", group.native[table], least))
        for table in emulated:
            # A suite may leave out emulated tables that the processor has natively.
            if table not in native or group.emulated[table]:
                least = counts.get("of_emulated", {}).get(table, 0)
                of = f" with the kernel table {table}, emulated"
                wanted.append((of, group.emulated[table], least))
        for of, number, least in wanted:
            if number < least:
                yield f"{step}: {name} has {number} tests{of}, of {least} that are expected"


class Summary:
    """All results in a folder."""

    def __init__(self, results: Path, machine: Machine) -> None:
        self.machine = machine
        self.steps = {file.stem: list(cases_of(file)) for file in sorted(results.glob("*.xml"))}
        self.problems: list[str] = []
        self.not_covered: Counter[str] = Counter()
        self.skipped_files: dict[str, set[str]] = {}

    def sum_step(self, step: str) -> Counter[str]:
        counts: Counter[str] = Counter()
        for case in self.steps[step]:
            outcome = case.outcome
            if outcome == "skipped":
                rule = allowed_skip(self.machine, step, case.name, case.reason)
                if rule is None:
                    outcome = "failed"
                    reason = " ".join(case.reason.split())
                    print(f"skipped, but not allowed: {step}: {case.name}: {reason or 'no reason'}")
                elif rule.not_covered:
                    self.not_covered[rule.not_covered] += 1
                if rule is not None and (case.is_file or case.name == step):
                    self.skipped_files.setdefault(step, set()).add(case.name)
            counts[outcome] += 1
        return counts

    def check_step(self, step: str, all_expected: dict[str, dict[str, dict[str, Any]]]) -> None:
        expected = all_expected.get(SAME_TESTS.get(step, step))
        if expected is None:
            self.problems.append(f"{step}: no counts are expected (sum_results.py --update)")
            return
        skipped = self.skipped_files.get(step, set())
        if step in skipped:
            return
        expected = {name: counts for name, counts in expected.items() if name not in skipped}
        groups = groups_of(self.steps[step])
        self.problems += check_counts(self.machine, step, groups, expected)
        if step in SAME_TESTS:
            return
        for name, group in groups.items():
            if name.endswith(".py") and name not in expected:
                self.problems.append(f"{step}: {name} is not expected (sum_results.py --update)")
                continue
            for kind in ("tests", "torch"):
                number, least = group.tests[kind], expected.get(name, {}).get(kind, 0)
                if number > 1.2 * least + 5:
                    print(f"note: {step}: {name} has {number} tests, and {least} are expected: "
                          "sum_results.py --update raises that")  # fmt: skip

    def coverage(self, parts: list[str]) -> Iterator[str]:
        """What was not tested, one line each."""
        for what, number in self.not_covered.items():
            yield f"{what}: {number} test(s) skipped"
        ran: dict[tuple[str, bool], int] = Counter()
        for cases in self.steps.values():
            ran.update(c.table for c in cases if c.table is not None and c.outcome == "passed")
        for table in TABLES:
            if ran[table, False] == 0:
                how = "not at all"
                if ran[table, True]:
                    how = f"on a processor; {ran[table, True]} tests ran on emulated instructions"
                yield f"kernel table {table}: {how}"
        arm = [step for step in self.steps if is_emulator(step)]
        if arm and self.machine.architecture == "x86_64":
            yield "64-bit Arm on a processor; its tables ran in an emulator"
        yield "GPUs: the engine computes on CPUs alone"
        left_out = [part for part in STEPS if part not in (*parts, "default", "fast")]
        if parts and ("default" in parts or "fast" in parts):
            yield "what takes hours (scripts/test.sh --slow): " + ", ".join(left_out)


def update(results: Path, file: Path) -> int:
    expected = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    for junit in sorted(results.glob("*.xml")):
        if junit.stem in SAME_TESTS:
            continue
        cases = list(cases_of(junit))
        skipped = {case.name for case in cases if case.is_file}
        before = expected.get(junit.stem, {})
        counts = {name: before[name] for name in skipped if name in before}
        groups = groups_of(cases)
        counts |= {name: counts_of(groups[name], before.get(name, {})) for name in groups}
        expected[junit.stem] = dict(sorted(counts.items()))
        print(f"{junit.stem}: {len(cases)} tests in {len(counts)} groups")
    steps = [f" {json.dumps(step)}: {{\n" + ",\n".join(
        f"  {json.dumps(name)}: {json.dumps(counts)}" for name, counts in groups.items()) + "\n }"
        for step, groups in sorted(expected.items())]  # fmt: skip
    file.write_text("{\n" + ",\n".join(steps) + "\n}\n", encoding="utf-8")
    return 0


def report(
    results: Path, failed_steps: list[str], parts: list[str], expected: Path, machine: Machine
) -> int:
    summary = Summary(results, machine)
    all_expected = json.loads(expected.read_text(encoding="utf-8")) if expected.exists() else {}
    total: Counter[str] = Counter()
    for step in summary.steps:
        counts = summary.sum_step(step)
        print(f"{step:24} {counts['passed']} passed, {counts['failed']} failed, "
              f"{counts['skipped']} skipped")  # fmt: skip
        if step in failed_steps and counts["failed"] == 0:
            summary.problems.append(f"failed step: {step}")
        if step not in failed_steps:
            summary.check_step(step, all_expected)
        total += counts
    summary.problems += [f"failed step: {s}" for s in failed_steps if s not in summary.steps]
    wanted = dict.fromkeys(step for part in parts for step in STEPS[part])
    if not failed_steps:  # A failed build explains why results are missing.
        summary.problems += [f"{step}: no results" for step in wanted if step not in summary.steps]
    for problem in summary.problems:
        print(problem)
    print("\nnot covered here:")
    for line in summary.coverage(parts):
        print(f"- {line}")
    failed = total["failed"] + len(summary.problems)
    print(f"{total['passed']} passed, {failed} failed, {total['skipped']} skipped")
    return 1 if failed or not total["passed"] else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("results", type=Path)
    parser.add_argument("failed_steps", nargs="*", metavar="FAILED_STEP")
    parser.add_argument("--of", nargs="+", default=[], choices=STEPS, metavar="PART")
    parser.add_argument("--update", action="store_true")
    parser.add_argument("--expected", type=Path, default=EXPECTED)
    args = parser.parse_args()
    if args.update:
        return update(args.results, args.expected)
    return report(args.results, args.failed_steps, args.of, args.expected, Machine())


if __name__ == "__main__":
    sys.exit(main())
