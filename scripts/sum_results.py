#!/usr/bin/env python3
"""Sums the JUnit files of ctest and pytest; the last line is `N passed, N failed, N skipped`.

usage: sum_results.py RESULTS_DIR [FAILED_STEP...]

A step's JUnit file is RESULTS_DIR/STEP.xml. A failed step that no failed test explains (lint, a
build, a crash of the runner) counts as one failure.
Exit status 1 when anything failed, or when not a single test passed.
"""

from __future__ import annotations

import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path


def count(file: Path) -> tuple[int, int, int]:
    """(passed, failed, skipped) of one JUnit file."""
    passed = failed = skipped = 0
    for case in ElementTree.parse(file).iter("testcase"):
        if case.find("failure") is not None or case.find("error") is not None:
            failed += 1
        elif case.find("skipped") is not None or case.get("status") in ("notrun", "disabled"):
            skipped += 1
        else:
            passed += 1
    return passed, failed, skipped


def main() -> int:
    results, failed_steps = Path(sys.argv[1]), sys.argv[2:]
    counts = {file.stem: count(file) for file in sorted(results.glob("*.xml"))}
    for name, (passed, failed, skipped) in counts.items():
        print(f"{name:24} {passed} passed, {failed} failed, {skipped} skipped")
    passed, failed, skipped = (sum(row[i] for row in counts.values()) for i in range(3))
    for step in failed_steps:
        if counts.get(step, (0, 0, 0))[1] == 0:
            print(f"failed step: {step}")
            failed += 1
    print(f"{passed} passed, {failed} failed, {skipped} skipped")
    return 1 if failed or not passed else 0


if __name__ == "__main__":
    sys.exit(main())
