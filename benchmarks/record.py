"""The form in which every benchmark saves its values, one JSON file for each.

A record says what was measured (machine, commit, command, settings) and holds every single value:

  {"benchmark": "lora", "date": "2026-01-31", "machine": {...}, "command": "python benchmarks/...",
   "settings": {"rounds": 3, ...},
   "measurements": [{"round": 1, "of": {"adapters": "none"}, "values": {"output_tok_s": 478.1}}]}

`of` says what the values of a measurement belong to. Instead of `values` a measurement can have
`disturbed`, the share of the cores that other processes took, `failed`, the reason, or `stopped`,
after how long a peer was ended that took far longer than this engine. report.py and figures.py
compute medians and tables from it.
"""

from __future__ import annotations

import datetime
import json
import os
import re
import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import machine

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results"
# The documents whose figures come from these records (figures.py).
DOCUMENTS = ("README.md", "benchmarks/README.md", "docs/performance.md")

# Options for folders and files, each followed by one.
_OWN_OPTIONS = (
    "--json", "--lock", "--memory-dir", "--name", "--output-dir", "--program", "--work-dir",
)  # fmt: skip

Record = dict[str, Any]
Measurement = dict[str, Any]


def begin(benchmark: str, version: str, isa: str, settings: Mapping[str, Any]) -> Record:
    """A record without measurements. `version`, `isa`: the engine's, and its kernel table."""
    about, commit = machine.describe(), commit_of(version)
    return {
        "benchmark": benchmark,
        "date": datetime.date.today().isoformat(),
        "machine": {"kind": machine.kind(isa), **about, "version": version, "isa": isa},
        "commit": commit,
        "modified": is_modified(commit),
        "command": command(),
        "settings": dict(settings),
        "complete": False,  # Until the last round has ended.
        "measurements": [],
    }


def commit_of(version: str) -> str | None:
    """The commit that the engine was built from; None outside a checkout."""
    found = re.search(r"GitSha1:([0-9a-f]{8,40})", version)
    return found[1] if found else None


def command() -> str:
    """The command of this process, as `command_of` says it."""
    return command_of(sys.argv)


def command_of(script_and_arguments: Sequence[str]) -> str:
    """The command of a benchmark, without options specific to this machine or run."""
    script, *given = script_and_arguments
    words = ["python", f"benchmarks/{Path(script).name}"]
    arguments = iter(given)
    for word in arguments:
        if word in _OWN_OPTIONS:
            next(arguments, None)
        elif word != "--resume" and word.partition("=")[0] not in _OWN_OPTIONS:
            # Where a machine has a folder says nothing to others.
            words.append(re.sub(r"(^|=)\.{0,2}/(?:.*/)?(?=.)", r"\1", word.rstrip("/")))
    return " ".join(words)


def is_modified(commit: str | None) -> bool | None:
    """True if the checkout differs from the engine's commit in files other than the benchmarks and
    the documents that they write; None if that is unknown."""
    if commit is None:
        return None
    difference = ["git", "-C", str(HERE), "diff", "--quiet", commit, "--", ":/"]
    difference += [f":!/{path}" for path in ("benchmarks/results", *DOCUMENTS)]
    try:
        status = subprocess.run(difference, capture_output=True).returncode
    except OSError:
        return None
    return {0: False, 1: True}.get(status)


def write(path: Path, record: Record) -> None:
    """Atomic: if the run is ended during the write, the old file stays."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f"{path.name}.new")
    new.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n")
    os.replace(new, path)


def read(path: Path) -> Record:
    record: Record = json.loads(path.read_text())
    return record


def select(record: Record, **of: object) -> Iterator[Measurement]:
    """The measurements whose `of` has these entries."""
    for measurement in record["measurements"]:
        if all(measurement["of"].get(key) == value for key, value in of.items()):
            yield measurement


def rounds(record: Record) -> int:
    """How many rounds have begun."""
    return max((each["round"] for each in record["measurements"]), default=0)


def values(record: Record, metric: str, **of: object) -> list[float]:
    """The values of the metric, of every round that has it."""
    found = (measurement.get("values", {}) for measurement in select(record, **of))
    return [each[metric] for each in found if metric in each]


def median(record: Record, metric: str, **of: object) -> float | None:
    found = values(record, metric, **of)
    return statistics.median(found) if found else None


def keys(record: Record, name: str) -> list[Any]:
    """The values that `of` has under this name, in the order of the measurements."""
    return list(dict.fromkeys(each["of"][name] for each in record["measurements"]))
