"""docs/security.md names bounds and tests: both exist, and the bounds are those of the code. Some
cases of each hostile family run here; all of them are slow tests.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("allspark._allspark")

from allspark import generation_config, text_options
from allspark.model_loader import files, lora, pickle_file, re2_patterns, tokenizer_expressions
from allspark.model_loader.architectures import common
from allspark.model_loader.gguf import file as gguf_file
from allspark.model_loader.gguf import source as gguf_source
from allspark.model_loader.gguf import tokenizer as gguf_tokenizer

ROOT = Path(__file__).resolve().parents[2]
HOSTILE = ROOT / "tests" / "hostile"
sys.path.append(str(HOSTILE))

from families import NUM_CASES  # noqa: E402

TEXT = (ROOT / "docs" / "security.md").read_text()


def test_every_test_that_is_named_exists():
    names = set(re.findall(r"`(\w+\.(?:py|cc))`", TEXT))
    assert len(names) > 20
    there = {path.name for path in (ROOT / "tests").rglob("*") if path.suffix in (".py", ".cc")}
    assert not names - there


def header(name: str, file: str = "include/allspark/config.h") -> int:
    text = (ROOT / "csrc" / file).read_text()
    found = re.search(rf"\b{name} = (\d+);", text)
    assert found is not None, name
    return int(found[1])


@pytest.mark.parametrize(
    "bound",
    [
        f"`token_mask_timeout_ms`, {header('token_mask_timeout_ms'):,} |",
        f"| {text_options.MAX_WORDS:,} strings and {text_options.MAX_WORD_CHARACTERS:,} characters",
        f"| {header('kMaxWords'):,} sequences and {header('kMaxWordIds'):,} ids",
        f"| `n`, `best_of` | {generation_config.MAX_N} |",
        f"cache; {files.MAX_COMPANION_BYTES >> 20} MiB, counted while reading",
        f"heads up to {common._MAX_HEADS:,}",
        f"| {pickle_file.MAX_PICKLE_BYTES >> 20} MiB and {pickle_file.MAX_OPERATIONS:,} operations",
        f"| rank of an adapter | {lora._MAX_RANK:,} |",
        f"| rank of an adapter | {header('kMaxLoraRank', 'weights/lora_format.h'):,} |",
        f"| {gguf_file._MAX_HEADER_BYTES >> 20} MiB; {gguf_file._MAX_RECORDS:,} keys and as many "
        f"tensors; {gguf_file._MAX_ELEMENTS:,} elements of arrays; {gguf_source._MAX_FACTORS:,} f",
        f"| {gguf_tokenizer._MAX_PIECE} characters, {gguf_tokenizer._MAX_MERGES} merges each",
        f"time is linear; {re2_patterns.MAX_PATTERNS:,} patterns",
        f"or {tokenizer_expressions.MAX_SECONDS} s of a trial",
        f"makes {sum(NUM_CASES.values()):,} cases",
    ],
)
def test_bounds_are_those_of_the_code(bound):
    assert bound in TEXT


def run_cases(family: str, *arguments: str) -> None:
    command = [sys.executable, str(HOSTILE / "run.py"), family, *arguments]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize("family", NUM_CASES)
def test_some_hostile_cases(family):
    run_cases(family, "--cases", "8")


@pytest.mark.slow
@pytest.mark.timeout(3600)  # thousands of processes; each has a limit of its own
@pytest.mark.parametrize("family", NUM_CASES)
def test_all_hostile_cases(family):
    run_cases(family)
