"""What the tests of benchmarks/ have in common: scripts that run, and records."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"


def run_compare(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(BENCHMARKS / "compare.py"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True)


# Speed is not tested here, so other processes may take any share of the cores.
ON_A_BUSY_MACHINE = ("--most-others", "100")


def small_run(tmp_path: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Compares engines on a tiny model, in one round; the arguments come last."""
    options = ("--divisor", 16, "--rounds", 1, "--no-limits", "--shapes", "tiny", "--threads", 1,
               "--engines", "allspark/bf16", "--work-dir", tmp_path / "work",
               "--output-dir", tmp_path / "results", "--name", "t",
               *ON_A_BUSY_MACHINE)  # fmt: skip
    return run_compare(*options, *arguments)


def report_of(tmp_path: Path) -> dict[str, Any]:
    result: dict[str, Any] = json.loads((tmp_path / "results" / "t.json").read_text())
    return result


def values_of(record: dict[str, Any], **of: object) -> list[dict[str, float]]:
    """The values of the measurements that have these entries, by round."""
    return [
        each["values"]
        for each in record["measurements"]
        if "values" in each and of.items() <= each["of"].items()
    ]


def failures_of(record: dict[str, Any]) -> list[str]:
    return [
        f"{each['of']['workload']}, {each['of']['engine']}: {each['failed']}"
        for each in record["measurements"]
        if "failed" in each
    ]


def run_script(tmp_path: Path, name: str, *arguments: object) -> tuple[str, list[dict[str, Any]]]:
    """What a script prints in one round, and its measurements."""
    kept = tmp_path / "kept.json"
    command = [sys.executable, BENCHMARKS / f"{name}.py", "--rounds", 1, "--work-dir", tmp_path,
               "--json", kept, *ON_A_BUSY_MACHINE, *arguments]  # fmt: skip
    result = subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=280)
    assert result.returncode == 0, result.stderr
    record = json.loads(kept.read_text())
    assert record["benchmark"] == name and record["complete"]
    return result.stdout, record["measurements"]


def check_kept(tmp_path: Path, benchmark: str, of: dict[str, object], *metrics: str) -> None:
    """Checks the common form: what was measured where, by which command, and every value."""
    record = json.loads((tmp_path / "kept.json").read_text())
    assert record["command"].startswith(f"python benchmarks/{benchmark}.py ")
    assert str(tmp_path) not in json.dumps(record)
    assert {"kind", "cpu", "cores", "memory_gib", "version", "isa"} == set(record["machine"])
    assert {"date", "commit", "modified", "settings"} <= set(record)
    found = values_of(record, **of)
    assert len(found) == record["settings"]["rounds"] == 1
    assert set(metrics) <= set(found[0]) and all(found[0][key] > 0 for key in metrics)


def a_record(
    samples: dict[str, dict[str, list[float]]], *others: dict[str, Any], ours: str = "allspark bf16"
) -> dict[str, Any]:
    """A record of the shape `tiny`: by engine and metric "workload.figure", the values of the
    rounds. `others`: measurements without values."""
    by_row: dict[tuple[int, str, str], dict[str, float]] = {}
    for engine, metrics in samples.items():
        for metric, values in metrics.items():
            workload, _, name = metric.partition(".")
            for number, value in enumerate(values, 1):
                by_row.setdefault((number, workload, engine), {})[name] = value
    measurements = [
        {"round": number, "of": of_tiny(workload, engine), "values": values, "took_s": 1.0}
        for (number, workload, engine), values in by_row.items()
    ]
    machine = {"kind": "zen9-avx2", "cpu": "a CPU", "cores": 2, "memory_gib": 8.0,
               "version": "1/(GitSha1:01234567)", "isa": "avx2"}  # fmt: skip
    slot = {"read_gb_s": 40.0, "fma_gflop_s": 400.0, "bf16_gflop_s": None, "int8_gop_s": 900.0,
            "load_average": 1.0}  # fmt: skip
    engines = [*samples, *(each["of"]["engine"] for each in others)]
    return {
        "benchmark": "engines", "name": "recorded", "date": "2025-01-01", "machine": machine,
        "commit": "01234567", "modified": False, "complete": True,
        "command": "python benchmarks/compare.py",
        "settings": {"rounds": 2, "threads": 2, "chunk": 0, "divisor": 1, "note": "a note",
                     "workloads": ["single", "b8"]},
        "measurements": [*measurements, *others], "limits": [slot], "ours": [ours], "skipped": [],
        "contestants": {"tiny": list(dict.fromkeys(engines))},
    }  # fmt: skip


def of_tiny(workload: str, engine: str) -> dict[str, str]:
    return {"shape": "tiny", "workload": workload, "engine": engine}


RECORDED = {
    "allspark bf16": {"single.decode_tok_s": [40.0, 44.0], "single.ttft_ms": [100.0],
                      "single.decode_tok_s_limit": [0.8], "single.core_share": [0.95]},
    "fast int4": {"single.decode_tok_s": [84.0], "single.ttft_ms": [200.0],
                  "single.core_share": [0.9]},
    "slow bf16": {"single.decode_tok_s": [21.0], "single.ttft_ms": [150.0]},
}  # fmt: skip


class Busy:
    """A machine on which others take the next of `shares` in each measurement."""

    shares: list[float]

    def __init__(self, in_process: bool = False) -> None:
        self.in_process = in_process

    def share(self) -> float:
        return self.shares.pop(0)


def quick_server(worker: Any, note: Callable[[list[dict[str, Any]]], None]) -> type:
    """A server of peers.worker that has all tokens at once; `note` is called with the requests."""

    class Server(worker.InProcess):
        def __init__(self, job: dict[str, Any]) -> None:
            pass

        def serve(self, requests: list[dict[str, Any]]) -> list[Any]:
            note(requests)
            timelines = [worker.Timeline() for _ in requests]
            for timeline, request in zip(timelines, requests, strict=True):
                timeline.add(request["num_output"])
            return timelines

    return Server
