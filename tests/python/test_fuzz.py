"""A short run of the Python targets of tests/fuzz. scripts/test.sh --slow fuzz runs them for
longer.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

pytest.importorskip("allspark._allspark")
pytest.importorskip("gguf")
pytest.importorskip("transformers")

TARGETS = {
    "safetensors", "gguf", "gguf_tokenizer", "pickle", "config", "quantization", "chat_template",
    "guided_format",
}  # fmt: skip


def run(repo_root, *arguments, code=None):
    """Runs the script in a process of its own, which limits its memory."""
    folder = repo_root / "tests" / "fuzz"
    program = [str(folder / "run.py")] if code is None else ["-c", code]
    return subprocess.run(
        [sys.executable, *program, *arguments], cwd=folder, capture_output=True, text=True
    )


def faults(result):
    """{target: number of its faults}"""
    lines = [line for line in result.stdout.splitlines() if line.endswith(" faults")]
    return {line.split(":")[0]: int(line.split()[-2]) for line in lines}


@pytest.mark.parametrize("arguments", [["--replay"], ["--runs", "200", "--seed", "1"]], ids=str)
def test_seeds_cases_and_changed_seeds(repo_root, arguments):
    result = run(repo_root, *arguments)
    assert faults(result) == dict.fromkeys(TARGETS, 0), result.stderr
    assert result.returncode == 0


# What a target may not do, and the expected message.
FAULTY = {
    "raise KeyError('a')": "KeyError: 'a'",
    "raise errors.CheckpointError('')": "allspark.model_loader.errors.CheckpointError",
    "bytearray(16 << 30)": "MemoryError",
    "while True: pass": "it took 0.2 s of processor time",
    "open('/proc/self/nothing')": "FileNotFoundError",
}
PROGRAM = """
import pathlib, sys
sys.path.insert(0, ".")
import parsers, run
from parsers import errors

def target(name, body):
    def faulty(data):
        if data != b"seed":
            exec(body)
    return parsers.Target(
        name, lambda: [b"seed"], faulty, lambda rng, seeds: b"changed", parsers.LOADERS)

run.CASES, run.MOST_SECONDS = pathlib.Path(sys.argv[1]), 0.2
run.TARGETS.clear()
for number, body in enumerate(%r):
    run.TARGETS[f"faulty{number}"] = target(f"faulty{number}", body)
sys.exit(run.main(sys.argv[2:]))
"""


def test_a_fault_is_found_kept_and_found_again(repo_root, tmp_path):
    for arguments in (["--runs", "2"], ["--replay"]):
        result = run(repo_root, str(tmp_path), *arguments, code=PROGRAM % list(FAULTY))
        assert result.returncode == 1
        assert faults(result) == {f"faulty{number}": 1 for number in range(len(FAULTY))}
        parts = result.stderr.split("FAULT in ")[1:]
        for number, (part, message) in enumerate(zip(parts, FAULTY.values(), strict=True)):
            (case,) = (tmp_path / f"faulty{number}").iterdir()
            assert case.read_bytes() == b"changed"
            assert part.startswith(f"faulty{number}: ") and case.name in part and message in part


def test_a_refused_seed_is_a_fault(repo_root, tmp_path):
    program = PROGRAM.replace('data != b"seed"', 'data == b"seed"')
    result = run(repo_root, str(tmp_path), "--replay", code=program % ["raise KeyError"])
    assert result.returncode == 1 and "seed 0 is refused" in result.stderr
