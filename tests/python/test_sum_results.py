"""What sum_results.py counts as a failure: skips, and missing tests and steps."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))
import allowed_skips  # noqa: E402
import sum_results  # noqa: E402

AVX2 = {"avx2", "fma"}
AMX = set().union(*allowed_skips.X86_TABLES.values())


def machine(**changes) -> allowed_skips.Machine:
    """A machine that lacks nothing but AVX-512 and Arm."""
    settings = {"architecture": "x86_64", "flags": AVX2, "num_cores": 2, "has_shared_data": True,
                "has_peft": True, "has_browser": True, "can_mount": True, "is_debian": True,
                "needs_oracles": False}  # fmt: skip
    return allowed_skips.Machine(**{**settings, **changes})


def gtest(name: str, skipped: str | None = None) -> str:
    """A test as ctest reports it."""
    if skipped is None:
        return f'<testcase name="{name}" classname="{name}" status="run"/>'
    output = f"[ RUN      ] {name}\n../x_test.cc:9: Skipped\n{skipped}\n[  SKIPPED ] {name} (0 ms)"
    return (f'<testcase name="{name}" classname="{name}" status="notrun">'
            '<skipped message="SKIP_REGULAR_EXPRESSION_MATCHED"/>'
            f"<system-out>{output}</system-out></testcase>")  # fmt: skip


def pytest_case(file: str, name: str, skipped: str | None = None, torch: bool = False) -> str:
    inner = f'<skipped type="pytest.skip" message="{skipped}">x</skipped>' if skipped else ""
    if torch:
        inner += '<properties><property name="torch" value="1"/></properties>'
    return f'<testcase classname="tests.python.{file}" name="{name}">{inner}</testcase>'


def write(folder: Path, **steps: list[str]) -> Path:
    for step, cases in steps.items():
        file = folder / f"{step.replace('_', '-')}.xml"
        file.write_text(f"<testsuites><testsuite>{''.join(cases)}</testsuite></testsuites>")
    return folder


def report(
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    expected: dict[str, object] | None = None,
    failed: tuple[str, ...] = (),
    of: tuple[str, ...] = (),
    **changes,
) -> tuple[int, str]:
    """Exit status and output; of a step that is not given no counts are expected."""
    counts = {}
    for step in ("ctest", "pytest", "ctest-slow", "fuzz"):
        junit = folder / f"{step}.xml"
        cases = list(sum_results.cases_of(junit)) if junit.exists() else []
        counts[step] = {group: {} for group in sum_results.groups_of(cases)}
    counts |= expected or {}
    file = folder / "expected.json"
    file.write_text(json.dumps(counts))
    status = sum_results.report(folder, list(failed), list(of), file, machine(**changes))
    return status, capsys.readouterr().out


def test_results_are_summed(tmp_path, capsys):
    failing = ['<testcase name="C.c"><failure message="no"/></testcase>',
               '<testcase name="D.d"><error message="no"/></testcase>']  # fmt: skip
    skip = gtest("Golden.WriteWhenAsked", "set ALLSPARK_WRITE_GOLDEN to write the golden files")
    write(tmp_path, ctest=[gtest("A.a"), *failing, skip], pytest=[pytest_case("test_a", "test_b")])
    status, out = report(tmp_path, capsys, failed=("ctest",))
    assert out.splitlines()[-1] == "2 passed, 2 failed, 1 skipped"
    assert status == 1


def test_a_failed_step_counts_once(tmp_path, capsys):
    write(tmp_path, ctest=[gtest("A.a")], pytest=[pytest_case("test_a", "test_b")])
    status, out = report(tmp_path, capsys, failed=("lint", "ctest"))
    assert "failed step: lint" in out
    assert out.splitlines()[-1] == "2 passed, 2 failed, 0 skipped"
    assert status == 1
    assert report(tmp_path, capsys)[0] == 0


def test_no_test_at_all_is_a_failure(tmp_path, capsys):
    status, out = report(tmp_path, capsys)
    assert out.splitlines()[-1] == "0 passed, 0 failed, 0 skipped"
    assert status == 1


# --- skips ---

SHARED = "no shared data at /x/shared/data (set ALLSPARK_SHARED_DATA)"


@pytest.mark.parametrize(
    ("case", "changes", "message"),
    [
        (gtest("A.a", "for a reason of its own"), {}, "ctest: A.a: for a reason of its own"),
        (gtest("A.a", ""), {}, "ctest: A.a: no reason"),
        (gtest("KernelTableTest.TheEmulationIsAmongTheTestedTables", "no SIMDe (x)"), {},
         "no SIMDe"),
        (gtest("ThreadPoolTest.A", "one core only"), {}, "one core only"),
        (pytest_case("test_a", "test_b", SHARED), {}, "test_a.py::test_b: no shared data at"),
        (pytest_case("test_a", "test_b", "got empty parameter set for (x)"), {}, "empty parameter"),
        (pytest_case("test_lora_peft", "t", "the package peft, an oracle, is not installed"), {},
         "peft"),
        (pytest_case("test_ui_browser", "t", "no chromium here"), {}, "no chromium"),
        (pytest_case("test_fast_llm", "t", "the oracle fast-llm is not installed"),
         {"needs_oracles": True}, "the oracle fast-llm"),
        ('<testcase classname="tests.python.test_a" name="t"><skipped type="pytest.xfail" '
         'message=""/></testcase>', {"has_shared_data": False}, "test_a.py::t: no reason"),
        ('<testcase name="A.a" status="disabled"/>', {}, "ctest: A.a: no reason"),
        ('<testcase name="A.a" status="notrun"><skipped message="Unable to find executable"/>'
         "</testcase>", {}, "Unable to find executable"),
        ('<testcase classname="" name="tests.python.test_a"><skipped message="collection skipped">'
         "('/x/test_a.py', 9, \"Skipped: could not import 'allspark._allspark': no\")</skipped>"
         "</testcase>", {"has_shared_data": False}, "test_a.py: could not import 'allspark"),
    ],
)  # fmt: skip
def test_a_skip_that_is_not_allowed_fails(tmp_path, capsys, case, changes, message):
    write(tmp_path, ctest=[gtest("Z.z"), case])
    status, out = report(tmp_path, capsys, **changes)
    assert message in out
    assert out.splitlines()[-1] == "1 passed, 1 failed, 0 skipped"
    assert status == 1


@pytest.mark.parametrize(
    ("case", "step", "changes", "not_covered"),
    [
        (pytest_case("test_a", "test_b", SHARED), "pytest", {"has_shared_data": False},
         "../shared/data"),
        (pytest_case("test_ui_browser", "t", "no selenium here"), "pytest", {"has_browser": False},
         "the server's page in a browser"),
        (pytest_case("test_fast_llm", "t", "the oracle fast-llm is not installed"), "pytest",
         {}, "FastLLM"),
        (gtest("ThreadPoolTest.A", "one core only"), "ctest", {"num_cores": 1}, "several cores"),
        (gtest("KernelTableTest.TheEmulationIsAmongTheTestedTables", "no SIMDe (x)"), "ctest",
         {"flags": {"sse4_2"}}, "kernel table amx: not at all"),
        (gtest("KernelTableTest.TheEmulationIsAmongTheTestedTables", "no SIMDe (x)"), "ctest_asan",
         {}, "kernel table amx: not at all"),
        (gtest("BfcRegionTest.A", "a sanitizer owns malloc"), "ctest_tsan", {}, "GPUs"),
        (gtest("TokenMaskMemoryFaultTest.A", "a sanitizer owns malloc"), "ctest_asan", {}, "GPUs"),
        (gtest("sim.UnloadTest.A", "a sanitizer keeps memory"), "ctest_asan", {}, "GPUs"),
        (gtest("ModelWriter.AFullFileSystemIsAStatus", "mounting a small tmpfs needs privileges"),
         "ctest", {"can_mount": False}, "a full file system"),
        ('<testcase name="ctest-aarch64"><skipped message="there is no cross compiler, x"/>'
         "</testcase>", "ctest_aarch64", {"is_debian": False}, "64-bit Arm in an emulator"),
    ],
)  # fmt: skip
def test_a_skip_that_is_allowed_is_named(tmp_path, capsys, case, step, changes, not_covered):
    write(tmp_path, **{step: [case]}, fuzz=[gtest("a_fuzz")])
    expected = {"ctest-aarch64": {"A": {"tests": 5}}}
    status, out = report(tmp_path, capsys, expected, **changes)
    assert out.splitlines()[-1] == "1 passed, 0 failed, 1 skipped"
    assert not_covered in out.partition("not covered here:")[2]
    assert status == 0


# --- counts ---


def tables(suite: str, *names: str) -> list[str]:
    return [gtest(f"Tables/{suite}.{test}/{name}  # GetParam() = 0x5") for test in ("A", "B")
            for name in names]  # fmt: skip


EMULATED = [f"{table}_emulated" for table in allowed_skips.EMULATED_TABLES]
TWO_OF_EACH = dict.fromkeys(allowed_skips.EMULATED_TABLES, 2)
SUITES = {
    "Plain": {"tests": 2},
    "Tables/Kernels": {"of_each_table": 2, "of_emulated": TWO_OF_EACH},
    "Tables/Native": {"of_each_table": 2},
}


def ctest_run(native=("reference", "avx2"), emulated=tuple(EMULATED)) -> list[str]:
    return [gtest("Plain.a"), gtest("Plain.b"), *tables("Kernels", *native, *emulated),
            *tables("Native", *native)]  # fmt: skip


def test_update_writes_what_is_expected(tmp_path, capsys):
    pytests = [
        pytest_case("test_a", "test_a[x]"),
        pytest_case("test_a.TestK", "test_b", torch=True),
        pytest_case("folder.test_b", "test_c[a.b::c]"),
    ]
    write(tmp_path, ctest=ctest_run(), pytest=pytests, ctest_asan=[gtest("A.a")])
    file = tmp_path / "expected.json"
    file.write_text(json.dumps({"fuzz": {"a_fuzz": {"tests": 1}}, "ctest": {"Gone": {"tests": 3}}}))
    assert sum_results.update(tmp_path, file) == 0
    expected = json.loads(file.read_text())
    assert expected == {
        "ctest": SUITES,
        "fuzz": {"a_fuzz": {"tests": 1}},
        "pytest": {"folder/test_b.py": {"tests": 1}, "test_a.py": {"tests": 1, "torch": 1}},
    }
    (tmp_path / "ctest-asan.xml").unlink()
    status, out = report(tmp_path, capsys, expected, of=("default",))
    assert status == 0, out
    # The same on a processor with everything, where only the kernels' tests have emulated tables
    # ...
    native = ("reference", *allowed_skips.X86_TABLES)
    write(tmp_path, ctest=[*ctest_run(native)])
    assert report(tmp_path, capsys, expected, flags=AMX)[0] == 0
    # ... and where a suite emulates what the processor lacks.
    write(tmp_path, ctest=[*ctest_run(native, emulated=())])
    assert report(tmp_path, capsys, expected, flags=AMX)[0] == 0
    # What such a machine does not emulate it does not forget.
    (tmp_path / "pytest.xml").unlink()
    assert sum_results.update(tmp_path, file) == 0
    assert json.loads(file.read_text())["ctest"] == SUITES
    # Without torch, as with --fast.
    write(tmp_path, pytest_fast=[pytests[0], pytests[2]])
    assert report(tmp_path, capsys, expected, of=("fast",), flags=AMX)[0] == 0


@pytest.mark.parametrize(
    ("cases", "flags", "message"),
    [
        (ctest_run()[1:], AVX2, "ctest: Plain has 1 tests, of 2 that are expected"),
        (ctest_run()[2:], AVX2, "ctest: Plain has 0 tests"),
        (ctest_run(native=("reference",)), AVX2, "Native has 0 tests with the kernel table avx2"),
        (ctest_run(), AMX, "Native has 0 tests with the kernel table amx, of 2"),
        (ctest_run(emulated=EMULATED[:-1]), AVX2, "has 0 tests with the kernel table amx, em"),
        (ctest_run(emulated=EMULATED[1:]), AVX2, "has 0 tests with the kernel table avx2_vnni, em"),
    ],
)  # fmt: skip
def test_fewer_tests_fail(tmp_path, capsys, cases, flags, message):
    write(tmp_path, ctest=cases)
    status, out = report(tmp_path, capsys, {"ctest": SUITES}, flags=flags)
    assert status == 1
    assert message in out


def test_sanitizers_and_emulators_are_held_to_what_they_run(tmp_path, capsys):
    arm = tuple(allowed_skips.ARM_TABLES)
    write(tmp_path, ctest_tsan=ctest_run(emulated=()), ctest_aarch64=ctest_run(arm, emulated=()))
    expected = {"ctest": SUITES, "ctest-aarch64": SUITES}
    assert report(tmp_path, capsys, expected)[0] == 0
    write(tmp_path, ctest_aarch64=ctest_run(arm[:-1], emulated=()))
    assert "with the kernel table neon_i8mm" in report(tmp_path, capsys, expected)[1]


def test_files_that_lost_tests_fail(tmp_path, capsys):
    expected = {"pytest": {"test_a.py": {"tests": 2, "torch": 1}, "test_b.py": {"tests": 1}}}
    write(tmp_path, pytest=[pytest_case("test_a", "a"), pytest_case("test_a", "b")])
    status, out = report(tmp_path, capsys, expected)
    assert "test_a.py has 0 tests with the marker torch, of 1" in out
    assert "test_b.py has 0 tests, of 1" in out
    assert out.splitlines()[-1] == "2 passed, 2 failed, 0 skipped"


def test_a_file_that_nothing_is_expected_of_fails(tmp_path, capsys):
    write(tmp_path, pytest=[pytest_case("test_a", "a"), pytest_case("test_b", "a")])
    status, out = report(tmp_path, capsys, {"pytest": {"test_a.py": {"tests": 1}}})
    assert status == 1
    assert "pytest: test_b.py is not expected (sum_results.py --update)" in out


def test_a_file_that_may_be_skipped_may_lack_its_tests(tmp_path, capsys):
    skipped = ('<testcase classname="" name="tests.python.test_lora_peft"><skipped message='
               "\"collection skipped\">('/x', 9, 'Skipped: the package peft, an oracle, is not "
               "installed')</skipped></testcase>")  # fmt: skip
    write(tmp_path, pytest=[skipped, pytest_case("test_a", "a")])
    expected = {"pytest": {"test_lora_peft.py": {"tests": 9}, "test_a.py": {"tests": 1}}}
    assert report(tmp_path, capsys, expected, has_peft=False)[0] == 0
    file = tmp_path / "kept.json"
    file.write_text(json.dumps(expected))
    sum_results.update(tmp_path, file)
    assert json.loads(file.read_text())["pytest"]["test_lora_peft.py"] == {"tests": 9}


def test_many_more_tests_than_expected_are_said(tmp_path, capsys):
    write(tmp_path, ctest=[gtest(f"A.a{i}") for i in range(20)])
    status, out = report(tmp_path, capsys, {"ctest": {"A": {"tests": 9}}})
    assert status == 0
    assert "note: ctest: A has 20" in out


def test_steps_without_results_fail(tmp_path, capsys):
    write(tmp_path, ctest=[gtest("A.a")])
    status, out = report(tmp_path, capsys, of=("default",))
    assert status == 1
    assert "pytest: no results" in out
    write(tmp_path, other=[gtest("A.a")])
    assert "other: no counts are expected" in report(tmp_path, capsys)[1]


# --- the tree itself ---


def test_the_steps_are_those_of_the_test_script():
    script = (ROOT / "scripts" / "test.sh").read_text(encoding="utf-8")
    runners = r"run_ctest|run_batches|run_pytest\w*|fuzz_targets"
    steps = set(re.findall(rf"\bstep ([\w-]+) (?:{runners})\b", script))
    assert steps == {step for part in sum_results.STEPS.values() for step in part}
    expected = json.loads(sum_results.EXPECTED.read_text(encoding="utf-8"))
    assert set(expected) == steps - set(sum_results.SAME_TESTS)
    assert all(groups for groups in expected.values())
    assert "no-tests=ignore" not in script
    # Documents rely on these, which are no tests.
    assert re.search(r"^  step promises .*benchmarks/promises\.py", script, re.MULTILINE)
    assert re.search(r"^ +step model-table .*model_table\.py --check", script, re.MULTILINE)
    assert 'sum_results.py "$results" "${failed_steps[@]}" --of' in script


def test_the_command_line(tmp_path):
    write(tmp_path, ctest=[gtest("A.a")])
    command = [sys.executable, str(ROOT / "scripts" / "sum_results.py"), str(tmp_path)]
    file = tmp_path / "expected.json"
    for arguments in (["--update"], ["lint"], ["--of", "fuzz"], []):
        done = subprocess.run([*command, *arguments, "--expected", str(file)],
                              capture_output=True, text=True)  # fmt: skip
        assert done.returncode == (0 if arguments in (["--update"], []) else 1), done.stderr
    assert done.stdout.splitlines()[-1] == "1 passed, 0 failed, 0 skipped"
