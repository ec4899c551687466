"""The benchmark scripts run, and say what they claim to; no timing is asserted."""

from __future__ import annotations

import importlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch):
    """Imports a module of benchmarks/, which is a folder of scripts and no package."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))

    def import_module(name: str) -> ModuleType:
        return importlib.import_module(name)

    return import_module


def run(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(BENCHMARKS / "run.py"), *map(str, arguments)]
    return subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, **environment}
    )


def test_a_tiny_run_measures_everything(tmp_path: Path) -> None:
    result = run(
        "--quick", "--no-limits", "--shapes", "tiny", "--threads", 1, "--name", "t",
        "--work-dir", tmp_path / "work", "--output-dir", tmp_path / "results",
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    report = json.loads((tmp_path / "results" / "t.json").read_text())
    assert report["failures"] == []
    tiny, streams = report["shapes"]["tiny"], report["shapes"]["260K"]
    for key in ("convert.convert_s", "start.start_s", "single.ttft_ms", "p1024.prefill_tok_s",
                "b32.output_tok_s", "mixed.output_tok_s", "gap.gap_prompt_s"):  # fmt: skip
        assert tiny[key]["min"] <= tiny[key]["median"] <= tiny[key]["max"]
        assert tiny[key]["median"] > 0, key
    assert streams["streams.streams_tok_s"]["median"] > 0
    assert report["machine"]["isa"] in ("reference", "avx2", "avx512", "avx512_vnni", "avx512_bf16")
    table = (tmp_path / "results" / "t.md").read_text()
    assert "| b32: output tokens/s |" in table and "Quick look" in table
    assert "not measured" in table  # The limits were left out.


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--shapes", "7B"), "shape is '7B'; it must be one of 0.5B"),
        (("--workloads", "single,x"), "workload is 'x'"),
        (("--rounds", "0"), "--rounds and --threads must be at least 1"),
    ],
)
def test_bad_arguments_are_refused(arguments: tuple[str, ...], message: str) -> None:
    result = run(*arguments)
    assert result.returncode == 2
    assert message in result.stderr


def test_a_failed_measurement_is_named_and_the_rest_goes_on(tmp_path: Path) -> None:
    options = ("--quick", "--no-limits", "--shapes", "tiny", "--threads", 1,
               "--work-dir", tmp_path / "w", "--output-dir", tmp_path)  # fmt: skip
    assert run(*options, "--workloads", "convert").returncode == 0
    (tmp_path / "w" / "tiny-native" / "bench.asparam").write_bytes(b"short")
    result = run(*options, "--workloads", "single,convert", "--name", "damaged")
    report = json.loads((tmp_path / "damaged.json").read_text())
    assert result.returncode == 1
    assert len(report["failures"]) == 1 and "5 bytes" in report["failures"][0]
    assert "Failed: tiny" in (tmp_path / "damaged.md").read_text()
    assert report["shapes"]["tiny"]["convert.convert_s"]["median"] > 0


def test_checkpoints_are_seeded_and_written_once(tmp_path: Path, load) -> None:
    checkpoints = load("checkpoints")
    directory = checkpoints.ensure_checkpoint("tiny", tmp_path / "a")
    other = checkpoints.ensure_checkpoint("tiny", tmp_path / "b")
    weights = directory / "model.safetensors"
    assert weights.read_bytes() == (other / "model.safetensors").read_bytes()
    stamp = weights.stat().st_mtime_ns
    assert checkpoints.ensure_checkpoint("tiny", tmp_path / "a") == directory
    assert weights.stat().st_mtime_ns == stamp
    (directory / "config.json").unlink()  # As after an interrupted writing.
    checkpoints.ensure_checkpoint("tiny", tmp_path / "a")
    assert weights.stat().st_mtime_ns != stamp


def test_a_checkpoint_is_valid_safetensors(tmp_path: Path, load) -> None:
    safetensors = pytest.importorskip("safetensors")
    checkpoints = load("checkpoints")
    shape = checkpoints.SHAPES["tiny"]
    path = checkpoints.ensure_checkpoint("tiny", tmp_path) / "model.safetensors"
    with safetensors.safe_open(str(path), "numpy") as file:
        sizes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    assert sizes == shape.tensors()


def test_sizes_of_the_real_shapes(load) -> None:
    shapes = load("checkpoints").SHAPES
    counts = {
        name: sum(int(np.prod(size)) for size in shapes[name].tensors().values())
        for name in ("0.5B", "1B")
    }
    assert counts == {"0.5B": 494032768, "1B": 1235814400}
    assert round(shapes["0.5B"].bytes_per_decoded_token() / 1e9, 2) == 0.99


def test_workloads_are_the_same_every_time(load) -> None:
    workloads = load("workloads")
    for name in (*workloads.WORKLOADS, "streams"):
        work = workloads.make_workload(name, 512)
        assert work == workloads.make_workload(name, 512)
        assert all(3 <= token < 512 for request in work.requests for token in request.ids)
    assert workloads.make_workload("b32", 512).num_output == 32 * 128
    assert workloads.make_workload("p1024", 512).num_prompt == 1024
    with pytest.raises(ValueError, match="workload is 'x'"):
        workloads.make_workload("x", 512)


def test_fractions_come_from_the_limits(load) -> None:
    report, shape = load("report"), load("checkpoints").SHAPES["0.5B"]
    limits = {"read_gb_s": 2 * shape.bytes_per_decoded_token() / 1e8, "arithmetic_gflop_s": 100.0}
    values = report.derive(shape, "single", 1, {"decode_tok_s": 10.0, "output_tok_s": 9.0}, limits)
    assert values["read_fraction"] == pytest.approx(0.5)
    flops = shape.prefill_flops(1024)
    measured = {"ttft_s": flops / 50e9, "output_tok_s": 50e9 / flops}
    values = report.derive(shape, "p1024", 1, measured, limits)
    assert values["compute_fraction"] == pytest.approx(0.5)
    assert "read_fraction" not in report.derive(shape, "single", 1, {"decode_tok_s": 1.0}, {})


COMPILER = shutil.which(os.environ.get("CXX", "c++"))


@pytest.mark.skipif(COMPILER is None, reason="there is no C++ compiler")
def test_limits_compile_and_print_rates(tmp_path: Path) -> None:
    program = tmp_path / "limits"
    flags = ["-std=c++17", "-O3", "-march=native", "-pthread", "-Wall", "-Wextra", "-Werror"]
    command = [str(COMPILER), *flags, str(BENCHMARKS / "limits.cc"), "-o", str(program)]
    subprocess.run(command, check=True)
    output = subprocess.run([program, "2", "4"], capture_output=True, text=True, check=True).stdout
    rows = json.loads(output)["threads"]
    assert [row["threads"] for row in rows] == [1, 2]
    assert all(row["read_gb_s"] > 0 and row["fma_gflop_s"] > 0 for row in rows)
    assert subprocess.run([program, "0"], capture_output=True).returncode == 2
