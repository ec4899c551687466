"""The GitHub workflow: its commands exist, its Pythons are supported, its time limits suffice."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

yaml = pytest.importorskip("yaml")

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))
import sum_results  # noqa: E402

WORKFLOW = ROOT / ".github" / "workflows" / "test.yml"
SIX_HOURS = 360


def jobs() -> Iterator[tuple[str, dict[str, Any]]]:
    """(name, job) of every job, one for each combination of its matrix, expressions resolved."""
    text = WORKFLOW.read_text(encoding="utf-8")
    for name, job in yaml.safe_load(text)["jobs"].items():
        strategy = job.pop("strategy", {"matrix": {"include": [{}]}})
        assert list(strategy["matrix"]) == ["include"]
        for values in strategy["matrix"]["include"]:
            yield name, resolve(job, values)


def resolve(node: Any, values: dict[str, Any]) -> Any:
    if isinstance(node, dict):
        return {key: resolve(value, values) for key, value in node.items()}
    if isinstance(node, list):
        return [resolve(value, values) for value in node]
    if isinstance(node, str):
        return re.sub(r"\$\{\{ matrix\.(\w+) \}\}", lambda found: str(values[found[1]]), node)
    return node


JOBS = list(jobs())


def commands(name: str) -> list[list[str]]:
    return [step["run"].split() for job_name, job in JOBS if job_name == name
            for step in job["steps"] if "run" in step]  # fmt: skip


def test_nothing_is_left_to_resolve():
    assert "${{" not in str(JOBS)


def test_every_job_has_its_time():
    for name, job in JOBS:
        assert 0 < int(job["timeout-minutes"]) < SIX_HOURS, name


def test_uploads_of_one_run_have_different_names():
    names = [step["with"]["name"] for _, job in JOBS for step in job["steps"]
             if step.get("uses", "").startswith("actions/upload-artifact")]  # fmt: skip
    assert len(names) == len(set(names)) == len(JOBS)


def test_every_command_is_a_script_with_options_that_it_has():
    for name in ("test", "clang", "nightly"):
        for script, *arguments in commands(name):
            path = ROOT / script
            assert path.is_file() and path.stat().st_mode & 0o111, script
            # An unknown argument makes it exit before it does anything.
            command = [path, *arguments, "no-such-part"]
            done = subprocess.run(command, capture_output=True, text=True)
            assert done.returncode == 2
            assert "unknown argument no-such-part" in done.stderr, (arguments, done.stderr)


def test_a_push_sees_both_compilers_both_processors_and_the_oldest_python():
    pushed = [job for name, job in JOBS if name in ("test", "clang")]
    assert all(job["if"] == "github.event_name != 'schedule'" for job in pushed)
    runners = [job["runs-on"] for name, job in JOBS if name == "test"]
    assert {"ubuntu-24.04", "ubuntu-24.04-arm"} == set(runners)
    assert commands("clang") == [["scripts/test.sh", "--slow", "clang"]]
    versions = {tuple(map(int, step["with"]["python-version"].split(".")))
                for job in pushed for step in job["steps"]
                if step.get("uses", "").startswith("actions/setup-python")}  # fmt: skip
    pyproject = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    oldest = re.search(r'requires-python = ">=(\d+)\.(\d+)"', pyproject)
    assert oldest and min(versions) == (int(oldest[1]), int(oldest[2]))
    assert (3, 13) in versions
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert f"Python {oldest[1]}.{oldest[2]} or later" in readme


def test_the_night_has_every_part():
    parts = {arguments[-1] for arguments in commands("nightly")}
    # CI has an Arm processor, not an emulator.
    assert parts == set(sum_results.STEPS) - {"default", "fast", "aarch64"}
    on_arm = [job for name, job in JOBS if name == "nightly" and "arm" in job["runs-on"]]
    assert on_arm and "--slow tests" in str(on_arm)
