"""The C++ scheduler against the model of its policy in scheduler_oracle.py.

The checked-in trace is always compared. If the C++ tests are built (or ALLSPARK_TEST_SCHEDULER
names the executable), a larger trace is written and compared too.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from itertools import islice
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = ROOT / "tests" / "cpp" / "scheduler" / "golden_trace.txt"


def load_oracle():  # noqa: ANN201 - a module
    path = Path(__file__).with_name("scheduler_oracle.py")
    spec = importlib.util.spec_from_file_location("scheduler_oracle", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["scheduler_oracle"] = module  # dataclasses look up their module there
    spec.loader.exec_module(module)
    return module


oracle = load_oracle()


def differences(path: Path) -> list[str]:
    with path.open() as trace:
        return list(islice(oracle.replay(trace), 5))


def test_golden_trace_is_what_the_model_does() -> None:
    text = GOLDEN.read_text()
    # The trace must contain the cases that it is for.
    assert text.count("script ") >= 20 and "remove" in text and "*" in text
    assert any(" preempted 0 " not in line for line in text.splitlines() if "state" in line)
    assert differences(GOLDEN) == []


def test_model_notices_a_changed_plan(tmp_path: Path) -> None:
    lines = GOLDEN.read_text().splitlines()
    plans = [i for i, line in enumerate(lines) if line.startswith("plan ")]
    lines[plans[20]] = lines[plans[20]].replace("+", "+1", 1)
    changed = tmp_path / "changed.txt"
    changed.write_text("\n".join(lines) + "\n")
    assert len(differences(changed)) == 1


def find_executable() -> Path | None:
    named = os.environ.get("ALLSPARK_TEST_SCHEDULER")
    if named:
        return Path(named)
    built = sorted(ROOT.glob("build/*/test_scheduler"), key=lambda path: path.stat().st_mtime)
    return built[-1] if built else None


def test_many_scripts_match_the_model(tmp_path: Path) -> None:
    executable = find_executable()
    if executable is None:
        pytest.skip("test_scheduler is not built; set ALLSPARK_TEST_SCHEDULER to its path")
    trace = tmp_path / "trace.txt"
    subprocess.run(
        [executable, "--gtest_filter=SchedulerTrace.WritesTheTraceAskedFor"],
        env={**os.environ, "ALLSPARK_SCHEDULER_TRACE": str(trace)},
        check=True,
        capture_output=True,
        timeout=120,
    )
    assert trace.stat().st_size > 500_000, "the trace is too short to say much"
    assert differences(trace) == []
