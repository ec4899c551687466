"""run_gtests.py names the test that fails, whatever becomes of the process it runs in."""

from __future__ import annotations

import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "run_gtests.py"
# Stands for a program of GoogleTest: what a test does is in its name.
PROGRAM = """
import os, sys, time
arguments = dict(each.split("=", 1) for each in sys.argv[1:] if "=" in each)
names = arguments["--gtest_filter"].split(":")
cases = []
for name in names:
    suite, test = name.split(".")
    body = ""
    if "Dies" in test or ("Hates" in test and len(names) > 1):
        os.abort()
    if "Hangs" in test:
        time.sleep(60)
    if "Fails" in test:
        body = '<failure message="Expected: true"/>'
    if "Skips" in test:
        body = '<skipped message="x_test.cc:1&#10;no such processor"/>'
    if "Lost" not in test:
        cases.append(f'<testcase classname="{suite}" name="{test}" time="0.5">{body}</testcase>')
with open(arguments["--gtest_output"].removeprefix("xml:"), "w") as file:
    file.write("<testsuites><testsuite>" + "".join(cases) + "</testsuite></testsuites>")
sys.exit(any("Fails" in name or "Leaks" in name for name in names) or os.environ["MODE"] != "set")
"""


def run(
    folder: Path, names: list[str], *more: str, filters: tuple[str, ...] = ()
) -> tuple[int, dict[str, str]]:
    program = folder / "program.py"
    program.write_text(PROGRAM)
    limits = [1 if "Hangs" in name else 60 for name in names]
    lines = [
        f'add_test({name} "{sys.executable}" "{program}" "--gtest_filter={filter}" '
        '"--gtest_also_run_disabled_tests")\n'
        f"set_tests_properties({name} PROPERTIES LABELS unit TIMEOUT {limit} ENVIRONMENT MODE=set "
        f'WORKING_DIRECTORY "{folder}")\n'
        for name, filter, limit in zip(names, filters or names, limits, strict=True)
    ]
    (folder / "CTestTestfile.cmake").write_text("".join(lines))
    junit = folder / "junit.xml"
    command = [sys.executable, str(SCRIPT), str(folder), "unit", "--junit", str(junit), *more]
    done = subprocess.run(command, capture_output=True, text=True)
    assert junit.is_file(), done.stderr
    outcomes = {}
    for case in ElementTree.parse(junit).iter("testcase"):
        failure, skipped = case.find("failure"), case.find("skipped")
        outcome = "passed"
        if failure is not None:
            outcome = failure.get("message", "")
        elif skipped is not None:
            outcome = "skipped: " + skipped.get("message", "")
        outcomes[case.get("name", "")] = outcome
    return done.returncode, outcomes


def test_tests_that_pass_or_are_skipped(tmp_path: Path) -> None:
    status, outcomes = run(tmp_path, ["A.One", "A.Skips", "B/C.Two/avx2"])
    assert status == 0
    assert outcomes == {
        "A.One": "passed", "A.Skips": "skipped: no such processor", "B/C.Two/avx2": "passed",
    }  # fmt: skip


def test_tests_have_the_names_that_ctest_shows(tmp_path: Path) -> None:
    """A parameter's value; to GoogleTest its number is the name."""
    names = ["B/C.Two/16", "B/C.Skips/32", "B/C.Dies/64"]
    status, outcomes = run(tmp_path, names, filters=("B/C.Two/0", "B/C.Skips/1", "B/C.Dies/2"))
    assert status == 1 and list(outcomes) == names
    assert outcomes["B/C.Dies/64"].startswith("ended with -6 and no results")


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("A.Fails", "Expected: true"),
        ("A.Dies", "ended with -6 and no results"),
        ("A.Hangs", "still running after 1 s"),
        ("A.Lost", "only 0 of 1 tests have results"),
        ("A.Leaks", "ended with 1 although no test failed"),
    ],
)
def test_the_right_test_is_blamed(tmp_path: Path, name: str, why: str) -> None:
    # A batch has the limit of its first test.
    status, outcomes = run(tmp_path, [name, "A.One", "A.Two"])
    assert status == 1
    assert why in outcomes.pop(name)
    assert outcomes == {"A.One": "passed", "A.Two": "passed"}


def test_tests_that_fail_together_alone(tmp_path: Path) -> None:
    status, outcomes = run(tmp_path, ["A.One", "A.Hates"])
    assert status == 1
    assert "Each test passes alone" in outcomes.pop("A.TogetherWithOthers")
    assert outcomes == {"A.One": "passed", "A.Hates": "passed"}
    assert run(tmp_path, ["A.One", "A.Hates"], "--batch", "1")[0] == 0


def test_tests_left_out_and_wrapped(tmp_path: Path) -> None:
    status, outcomes = run(tmp_path, ["A.One", "A.Fails"], "--without", "Fails$", "--", "env")
    assert (status, outcomes) == (0, {"A.One": "passed"})
    assert run(tmp_path, ["A.One"], "--without", "One")[0] == 1  # No test at all is no success.
