#!/usr/bin/env python3
"""Writes the table of docs/models.md that says in which forms each family is served: a cell is
ticked if the last full test run has tests of the family's rows, and all of them passed.

usage: scripts/model_table.py [--check] [JUNIT]
  --check  changes nothing; fails if the table differs from the run, and names the cells
  JUNIT    the run's results; default build/test-results/pytest.xml, where scripts/test.sh puts
           them

A test that failed, was skipped or did not run ticks nothing.
"""

from __future__ import annotations

import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TESTS = ROOT / "tests" / "python"
DOCUMENT = ROOT / "docs" / "models.md"
RESULTS = ROOT / "build" / "test-results" / "pytest.xml"
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


def outcomes(junit: Path) -> dict[str, bool]:
    """Whether each test of a run passed, by names as in COLUMNS."""
    passed: dict[str, bool] = {}
    for case in ElementTree.parse(junit).iter("testcase"):
        name = f"{case.get('classname', '').rpartition('.')[2]}.py::{case.get('name')}"
        # If a test passed and its teardown failed, pytest writes a second entry.
        wrong = any(case.find(what) is not None for what in ("failure", "error", "skipped"))
        passed[name] = passed.get(name, True) and not wrong
    return passed


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


def table(passed: dict[str, bool]) -> list[list[str]]:
    """The table's lines, its head first. ``passed`` comes from ``outcomes``."""
    lines = [["architecture", *COLUMNS]]
    for name, rows in sorted(rows_of_architectures().items()):
        cells = []
        for test in COLUMNS.values():
            names = (test.replace("ROW", row) for row in rows)
            found = [passed[name] for name in names if name in passed]
            cells.append("✓" if found and all(found) else "–")
        lines.append([f"`{name}`", *cells])
    return lines


def as_text(lines: list[list[str]]) -> str:
    lines = [lines[0], ["---", *(":-:" for _ in COLUMNS)], *lines[1:]]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def differences(text: str, lines: list[list[str]]) -> list[str]:
    """The cells of the table in ``text`` that differ from the run."""
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| `")]
    documented = {name: cells for name, *cells in rows}
    made = {name: cells for name, *cells in lines[1:]}
    found = [f"{name} is not in {DOCUMENT.name}" for name in made if name not in documented]
    found += [f"{name} is not in the tests" for name in documented if name not in made]
    for name in documented.keys() & made.keys():
        for column, ours, run in zip(COLUMNS, documented[name], made[name], strict=False):
            if ours != run:
                found.append(f"{name}, {column}: {DOCUMENT.name} says {ours}, the run {run}")
    return sorted(found)


def main() -> None:
    arguments = sys.argv[1:]
    check = arguments[:1] == ["--check"]
    paths = arguments[1:] if check else arguments
    if len(paths) > 1 or any(path.startswith("-") for path in paths):
        sys.exit(__doc__)
    junit = Path(paths[0]) if paths else RESULTS
    if not junit.is_file():
        sys.exit(f"model_table.py: {junit} is absent: run scripts/test.sh first")
    text = DOCUMENT.read_text()
    if text.count(BEGIN) != 1 or text.count(END) != 1:
        sys.exit(f"model_table.py: {DOCUMENT} lacks {BEGIN!r} or {END!r}, or has it twice")
    before, _, rest = text.partition(BEGIN)
    old, _, after = rest.partition(END)
    lines = table(outcomes(junit))
    new = f"\n\n{as_text(lines)}\n\n"
    if not check:
        DOCUMENT.write_text(f"{before}{BEGIN}{new}{END}{after}")
    elif old != new:
        found = "\n  ".join(differences(old, lines) or ["headings or spaces differ"])
        sys.exit(f"model_table.py: {DOCUMENT} is not what {junit} says:\n  {found}")


if __name__ == "__main__":
    main()
