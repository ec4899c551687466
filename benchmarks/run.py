"""Measures allspark on this machine, beside the machine's own limits.

usage: run.py [--rounds N] [--quick] [--shapes 0.5B,1B] [--workloads single,b32,...] [--name NAME]

Rounds are interleaved (limits, 0.5B, limits, 1B, limits, ... and again), every measurement is a
process of its own, and results/NAME.md and .json get medians with the least and the greatest value.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from checkpoints import SHAPES, ensure_checkpoint
from report import Samples, derive, markdown, summarise
from workloads import WORKLOADS

HERE = Path(__file__).resolve().parent
ENGINE_SHAPE = "260K"
TASKS = ("convert", "start", *WORKLOADS, "streams")
_LIMIT_KEYS = ("read_gb_s", "fma_gflop_s", "bf16_gflop_s", "int8_gop_s")


class MeasurementError(RuntimeError):
    """A measurement that ended without a result."""


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=3, help="rounds; medians are shown")
    parser.add_argument("--quick", action="store_true", help="one round of much shorter requests")
    parser.add_argument("--shapes", default="0.5B,1B", help=f"of {','.join(SHAPES)}")
    parser.add_argument("--workloads", default=",".join(TASKS), help="which measurements")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--chunk", type=int, default=0, help="prefill chunk, 0: the engine's own")
    parser.add_argument("--work-dir", type=Path, default=Path("/tmp/allspark-bench"))
    parser.add_argument("--output-dir", type=Path, default=HERE / "results")
    parser.add_argument("--name", default="latest", help="of the result files")
    parser.add_argument("--note", default="", help="a remark for the report")
    parser.add_argument("--no-limits", action="store_true", help="leave the machine's limits out")
    options = parser.parse_args(arguments)
    options.shapes = options.shapes.split(",")
    options.workloads = options.workloads.split(",")
    for kind, names, known in (
        ("shape", options.shapes, tuple(SHAPES)),
        ("workload", options.workloads, TASKS),
    ):
        for name in names:
            if name not in known:
                parser.error(f"{kind} is {name!r}; it must be one of {', '.join(known)}")
    if options.rounds < 1 or options.threads < 1 or options.chunk < 0:
        parser.error("--rounds and --threads must be at least 1, --chunk at least 0")
    if options.quick:
        options.rounds = 1
    return options


class Bench:
    """One run: starts the processes and keeps what they say."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.divisor = 16 if options.quick else 1
        self.samples: dict[str, Samples] = {}
        self.limits: list[dict[str, float | None]] = []
        self.failures: list[str] = []
        self.machine: dict[str, Any] = {}
        self._limits_program = None if options.no_limits else self._compile_limits()

    def run(self) -> None:
        self.machine = self._describe_machine()
        for round_id in range(self.options.rounds):
            before = self._measure_limits()
            for shape in self._round_shapes():
                print(f"round {round_id + 1}/{self.options.rounds}, {shape}", file=sys.stderr)
                taken = self._measure_shape(shape)
                after = self._measure_limits()
                self._keep(shape, taken, self._between(before, after))
                before = after
                self.write()  # What is there stays if the rest is interrupted.

    def _only_streams(self) -> bool:
        return set(self.options.workloads) == {"streams"}

    def _round_shapes(self) -> list[str]:
        shapes = [] if self._only_streams() else list(self.options.shapes)
        if "streams" in self.options.workloads and ENGINE_SHAPE not in shapes:
            shapes.append(ENGINE_SHAPE)
        return shapes

    def _paths(self, shape: str, purpose: str = "native") -> dict[str, str]:
        native = self.options.work_dir / f"{shape}-{purpose}"
        native.mkdir(parents=True, exist_ok=True)
        checkpoint = ensure_checkpoint(shape, self.options.work_dir)
        return {"shape": shape, "checkpoint": str(checkpoint), "native_dir": str(native)}

    def _job(self, paths: dict[str, str]) -> dict[str, Any]:
        return {
            **paths,
            "threads": self.options.threads,
            "chunk": self.options.chunk,
            "divisor": self.divisor,
            "max_length": 2048,
            "data_type": "bfloat16",
        }

    def _measure(self, task: str, job: dict[str, Any], warm_up: bool = True) -> dict[str, Any]:
        environment = {**os.environ, "ALLSPARK_DISABLE_WARMUP": "0" if warm_up else "1"}
        command = [sys.executable, str(HERE / "measure.py"), json.dumps({**job, "task": task})]
        result = subprocess.run(command, capture_output=True, text=True, env=environment)
        if result.returncode != 0:
            error = (result.stderr.strip() or "no message").splitlines()[-1]
            raise MeasurementError(f"{task} ended with {result.returncode}: {error}")
        values: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
        return values

    def _measure_shape(self, shape: str) -> dict[str, dict[str, float]]:
        """Values by workload; one that fails is noted and left out."""
        job = self._job(self._paths(shape))
        tasks = [task for task in self.options.workloads if task != "streams"]
        if shape not in self.options.shapes:
            tasks = []
        if shape == ENGINE_SHAPE and "streams" in self.options.workloads:
            tasks.append("streams")
        if "convert" not in tasks and not (Path(job["native_dir"]) / "bench.asgraph").is_file():
            tasks.insert(0, "convert")
        taken: dict[str, dict[str, float]] = {}
        for task in tasks:
            try:
                taken[task] = self._measure_task(task, job)
                print(f"  {task}: {taken[task]}", file=sys.stderr)
            except MeasurementError as error:
                print(f"  {task}: {error}", file=sys.stderr)
                self.failures.append(f"{shape} {error}")
        return taken

    def _measure_task(self, task: str, job: dict[str, Any]) -> dict[str, float]:
        if task in ("convert", "gap", "streams"):
            return self._measure(task, job)
        if task == "start":
            values = self._measure("start", job, warm_up=False)
            warm = self._measure("warm_up", job)["start_warm_s"]
            return {**values, "warm_up_s": max(0.0, warm - values["start_s"])}
        return self._measure("requests", {**job, "workload": task})

    def _keep(
        self,
        shape: str,
        taken: dict[str, dict[str, float]],
        limits: dict[str, float | None],
    ) -> None:
        metrics = self.samples.setdefault(shape, {})
        for task, values in taken.items():
            for key, value in derive(SHAPES[shape], task, self.divisor, values, limits).items():
                metrics.setdefault(f"{task}.{key}", []).append(value)

    # The machine.

    def _compile_limits(self) -> Path | None:
        compiler = shutil.which(os.environ.get("CXX", "c++"))
        if compiler is None:
            print("no C++ compiler: the machine's limits are not measured", file=sys.stderr)
            return None
        self.options.work_dir.mkdir(parents=True, exist_ok=True)
        program: Path = self.options.work_dir / "limits"
        flags = ["-std=c++17", "-O3", "-march=native", "-pthread"]
        subprocess.run([compiler, *flags, str(HERE / "limits.cc"), "-o", str(program)], check=True)
        return program

    def _measure_limits(self) -> dict[str, float | None]:
        slot: dict[str, float | None] = dict.fromkeys(_LIMIT_KEYS)
        if self._limits_program is not None:
            mib = "128" if self.options.quick else "1024"
            command = [str(self._limits_program), str(self.options.threads), mib]
            output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
            rows = json.loads(output)["threads"]
            slot |= {key: rows[-1][key] for key in _LIMIT_KEYS}
            slot |= {f"{key}_1_thread": rows[0][key] for key in _LIMIT_KEYS}
        slot["load_average"] = round(os.getloadavg()[0], 1)
        self.limits.append(slot)
        print(f"  limits: {slot}", file=sys.stderr)
        return slot

    def _between(
        self, before: dict[str, float | None], after: dict[str, float | None]
    ) -> dict[str, float | None]:
        """The mean of two slots, with the rate that the kernel table in use can reach."""
        mean: dict[str, float | None] = {}
        for key in _LIMIT_KEYS:
            first, second = before[key], after[key]
            mean[key] = None if first is None or second is None else (first + second) / 2
        has_bf16 = self.machine["isa"].endswith("bf16") and mean["bf16_gflop_s"] is not None
        mean["arithmetic_gflop_s"] = mean["bf16_gflop_s" if has_bf16 else "fma_gflop_s"]
        return mean

    def _describe_machine(self) -> dict[str, Any]:
        # A small model of its own: only an installed one tells which kernels are taken.
        job = self._job(self._paths("tiny", "version"))
        self._measure("convert", job)
        cpu = "unknown CPU"
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                cpu = line.partition(":")[2].strip()
                break
        pages, page_bytes = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
        return {
            "cpu": cpu,
            "cores": len(os.sched_getaffinity(0)),
            "memory_gib": pages * page_bytes / 2**30,
            **self._measure("version", job),
        }

    # Results.

    def result(self) -> dict[str, Any]:
        options = self.options
        return {
            "name": options.name,
            "date": datetime.date.today().isoformat(),
            "machine": self.machine,
            "settings": {
                "rounds": options.rounds,
                "threads": options.threads,
                "chunk": options.chunk,
                "divisor": self.divisor,
                "data_type": "bfloat16",
                "note": options.note,
            },
            "limits": self.limits,
            "shapes": summarise(self.samples),
            "failures": self.failures,
        }

    def write(self) -> None:
        directory: Path = self.options.output_dir
        directory.mkdir(parents=True, exist_ok=True)
        result = self.result()
        text = json.dumps(result, indent=1, ensure_ascii=False) + "\n"
        (directory / f"{self.options.name}.json").write_text(text)
        (directory / f"{self.options.name}.md").write_text(markdown(result))


def main() -> int:
    bench = Bench(parse_arguments())
    bench.run()
    print(markdown(bench.result()))
    return 1 if bench.failures else 0


if __name__ == "__main__":
    sys.exit(main())
