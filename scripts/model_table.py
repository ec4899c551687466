#!/usr/bin/env python3
"""Writes the table of docs/models.md that says in which forms each family is served: a cell is
ticked where pytest collects a test for a row of the family.

usage: scripts/model_table.py [--check]
  --check  changes nothing; fails where the table is not that of the tests
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TESTS = ROOT / "tests" / "python"
DOCUMENT = ROOT / "docs" / "models.md"
BEGIN, END = "<!-- Made by scripts/model_table.py. -->", "<!-- The end of what it makes. -->"

# Heading -> the test of a cell, with ROW for the row's name.
COLUMNS = {
    "float32": "test_architectures.py::test_float32_logits[ROW]",
    "bfloat16": "test_architectures.py::test_bfloat16_logits[ROW]",
    "int8": "test_model_forms.py::test_weights[int8-ROW]",
    "int4": "test_model_forms.py::test_weights[int4-ROW]",
    "KV int8": "test_model_forms.py::test_caches[int8-ROW]",
    "KV uint4": "test_model_forms.py::test_caches[uint4-ROW]",
    "LoRA": "test_families.py::test_an_adapter_is_what_it_would_be_merged[ROW]",
    "GPTQ": "test_model_forms.py::test_weights[gptq-ROW]",
    "AWQ": "test_model_forms.py::test_weights[awq-ROW]",
    "GGUF": "test_gguf.py::test_same_model_as_from_transformers_layout[ROW]",
}


def collected() -> set[str]:
    """The tests that pytest finds in the files of the columns."""
    files = sorted({test.split("::")[0] for test in COLUMNS.values()})
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider"]
    result = subprocess.run(
        [*command, *(str(TESTS / file) for file in files)], cwd=ROOT, capture_output=True, text=True
    )
    if result.returncode != 0:
        sys.exit(f"model_table.py: the tests cannot be collected:\n{result.stdout}{result.stderr}")
    return {line.rpartition("/")[2] for line in result.stdout.splitlines() if "::" in line}


def rows_of_architectures() -> dict[str, list[str]]:
    """The rows of the parity test by the name that their checkpoints give in config.json."""
    sys.path.insert(0, str(TESTS))
    import test_architectures as parity

    rows: dict[str, list[str]] = {}
    for row in parity.ROWS:
        model = parity.build(row)
        config = {"architectures": [type(model).__name__]}
        if model.family is not None:
            config, _ = model.family(model.config.to_dict(), dict(model.state_dict()))
        rows.setdefault(config["architectures"][0], []).append(row)
    return rows


def table() -> str:
    tests = collected()
    lines = [["architecture", *COLUMNS], ["---", *(":-:" for _ in COLUMNS)]]
    for name, rows in sorted(rows_of_architectures().items()):
        cells = [
            "✓" if any(test.replace("ROW", row) in tests for row in rows) else "–"
            for test in COLUMNS.values()
        ]
        lines.append([f"`{name}`", *cells])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main() -> None:
    if sys.argv[1:] not in ([], ["--check"]):
        sys.exit(__doc__)
    text = DOCUMENT.read_text()
    if text.count(BEGIN) != 1 or text.count(END) != 1:
        sys.exit(f"model_table.py: {DOCUMENT} lacks {BEGIN!r} or {END!r}, or has it twice")
    pattern = re.compile(f"{re.escape(BEGIN)}.*{re.escape(END)}", re.DOTALL)
    made = pattern.sub(lambda _: f"{BEGIN}\n\n{table()}\n\n{END}", text)
    if sys.argv[1:] == ["--check"]:
        if made != text:
            sys.exit(f"model_table.py: {DOCUMENT} is not what the tests say; run {sys.argv[0]}")
        return
    DOCUMENT.write_text(made)


if __name__ == "__main__":
    main()
