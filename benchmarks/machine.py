"""The machine that a run measures on: what it is, what it can do at most, who may use it."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import resource
import shutil
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from peers.base import run_command

HERE = Path(__file__).resolve().parent
LIMITS = {
    "read_gb_s": "read bandwidth, GB/s",
    "fma_gflop_s": "float32 multiply-adds, GFLOP/s",
    "bf16_gflop_s": "bfloat16 dot products, GFLOP/s",
    "int8_gop_s": "int8 dot products, GOP/s",
}
Limits = Mapping[str, float | None]


def describe() -> dict[str, Any]:
    cpu = "unknown CPU"
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            cpu = line.partition(":")[2].strip()
            break
    pages, page_bytes = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    cores = len(os.sched_getaffinity(0))
    return {"cpu": cpu, "cores": cores, "memory_gib": pages * page_bytes / 2**30}


@contextlib.contextmanager
def exclusive(path: Path | None) -> Iterator[None]:
    """Holds the lock file `path` alone, so that runs and builds that honour it do not overlap."""
    if path is None:
        yield
        return
    with open(path, "a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


class Others:
    """How much of the machine others take, this process's children not counted, while one runs."""

    def __init__(self) -> None:
        self._begin = self._read()

    @staticmethod
    def _read() -> tuple[float, float, float]:
        fields = Path("/proc/stat").read_text().splitlines()[0].split()[1:9]
        user, nice, system, _, _, irq, soft_irq, steal = map(int, fields)
        busy = (user + nice + system + irq + soft_irq + steal) / os.sysconf("SC_CLK_TCK")
        children = resource.getrusage(resource.RUSAGE_CHILDREN)
        return time.monotonic(), busy, children.ru_utime + children.ru_stime

    def share(self) -> float:
        """Of all cores since the start; call it when the children have ended."""
        wall, busy, children = (
            end - begin for end, begin in zip(self._read(), self._begin, strict=True)
        )
        return max(0.0, busy - children) / (wall * (os.cpu_count() or 1))


def compile_limits(work_dir: Path) -> Path | None:
    compiler = shutil.which(os.environ.get("CXX", "c++"))
    if compiler is None:
        print("no C++ compiler: the machine's limits are not measured", file=sys.stderr)
        return None
    work_dir.mkdir(parents=True, exist_ok=True)
    program = work_dir / "limits"
    flags = ["-std=c++17", "-O3", "-march=native", "-pthread"]
    run_command([compiler, *flags, HERE / "limits.cc", "-o", program])
    return program


def measure_limits(program: Path | None, threads: int) -> dict[str, float | None]:
    slot: dict[str, float | None] = dict.fromkeys(LIMITS)
    if program is not None:
        rates = json.loads(run_command([program, str(threads), "1024"]))
        slot.update({key: rates["threads"][-1][key] for key in LIMITS})
    slot["load_average"] = os.getloadavg()[0]
    return slot


def between(before: Limits, after: Limits) -> dict[str, float | None]:
    """The mean of two slots. A dot product that the processor has no instruction for counts as
    float32 multiply-adds, which then do its work."""
    mean: dict[str, float | None] = {}
    for key in LIMITS:
        first, second = before[key], after[key]
        mean[key] = None if first is None or second is None else (first + second) / 2
    for key in ("bf16_gflop_s", "int8_gop_s"):
        mean[key] = mean[key] or mean["fma_gflop_s"]
    return mean
