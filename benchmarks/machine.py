"""The machine that a run measures on: its description, its limits, and what else runs on it."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import resource
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
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
Slot = dict[str, float | None]


# A measurement is discarded if other processes took more than this share of the machine's cores.
MOST_OTHERS = 0.08
# What an engine leaves behind has ended by then; what has not is of others that stay.
_QUIET_WAIT_S = 20.0

# Processors by vendor, family and model in /proc/cpuinfo: (first model, last model, name).
_PROCESSORS = {
    ("AuthenticAMD", 23): ((0, 0x2F, "zen1"), (0x30, 0xFF, "zen2")),
    ("AuthenticAMD", 25): (
        (0, 0x0F, "zen3"), (0x10, 0x1F, "zen4"), (0x20, 0x5F, "zen3"), (0x60, 0xFF, "zen4"),
    ),
    ("AuthenticAMD", 26): ((0, 0xFF, "zen5"),),
    ("GenuineIntel", 6): (
        (63, 63, "haswell"), (79, 79, "broadwell"), (85, 85, "skylake"), (106, 108, "icelake"),
        (143, 143, "sapphirerapids"), (173, 174, "graniterapids"), (207, 207, "emeraldrapids"),
    ),
}  # fmt: skip


def describe() -> dict[str, Any]:
    cpu = _cpu_fields().get("model name", "unknown CPU")
    pages, page_bytes = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    cores = len(os.sched_getaffinity(0))
    return {"cpu": cpu, "cores": cores, "memory_gib": pages * page_bytes / 2**30}


def available_bytes() -> int:
    """Memory that programs can still take, of the machine and of this process's control group."""
    meminfo = Path("/proc/meminfo").read_text()
    found = [int(re.findall(r"MemAvailable: *(\d+) kB", meminfo)[0]) * 1024]
    group = Path("/sys/fs/cgroup")
    with contextlib.suppress(OSError, ValueError):  # There is none, or it has no limit ("max").
        most, used = (int((group / f"memory.{name}").read_text()) for name in ("max", "current"))
        found.append(most - used)
    return min(found)


def kind(isa: str) -> str:
    """The name of a results folder: processor and kernel table, such as `zen5-avx512_bf16`."""
    return f"{_processor(_cpu_fields())}-{isa}"


def _processor(fields: Mapping[str, str]) -> str:
    try:
        family, model = int(fields["cpu family"]), int(fields["model"])
        for first, last, name in _PROCESSORS[fields["vendor_id"], family]:
            if first <= model <= last:
                return name
    except (KeyError, ValueError):
        pass
    name = fields.get("model name", os.uname().machine)
    return re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_")


def _cpu_fields() -> dict[str, str]:
    """The fields of the first core."""
    text = Path("/proc/cpuinfo").read_text().partition("\n\n")[0]
    pairs = (line.partition(":") for line in text.splitlines())
    return {name.strip(): value.strip() for name, _, value in pairs}


@contextlib.contextmanager
def exclusive(path: Path | None) -> Iterator[None]:
    """Holds the lock file `path`, so that runs and builds that use the lock do not overlap."""
    if path is None:
        yield
        return
    with open(path, "a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


class Others:
    """How much of the machine other processes take during a measurement: all but this process's
    children that end and, if `in_process`, this process itself. `cpu_seconds`: of one that stays
    and is none of the others, its processor time so far."""

    def __init__(
        self, in_process: bool = False, cpu_seconds: Callable[[], float] = lambda: 0.0
    ) -> None:
        self._cpu_seconds = cpu_seconds
        self._users = [resource.RUSAGE_CHILDREN]
        if in_process:
            self._users.append(resource.RUSAGE_SELF)
        self._begin = self._read()

    def _read(self) -> tuple[float, float, float]:
        fields = Path("/proc/stat").read_text().splitlines()[0].split()[1:9]
        user, nice, system, _, _, irq, soft_irq, steal = map(int, fields)
        busy = (user + nice + system + irq + soft_irq + steal) / os.sysconf("SC_CLK_TCK")
        own = [resource.getrusage(user) for user in self._users]
        own_s = sum(each.ru_utime + each.ru_stime for each in own)
        return time.monotonic(), busy, own_s + self._cpu_seconds()

    def share(self) -> float:
        """The share of all cores since the start; call it when the children have ended."""
        wall, busy, own = (
            end - begin for end, begin in zip(self._read(), self._begin, strict=True)
        )
        return max(0.0, busy - own) / (wall * (os.cpu_count() or 1))


def wait_until_quiet(most_others: float) -> None:
    """Returns when others took next to nothing for a second, or at the latest after _QUIET_WAIT_S.
    At once where a measurement allows others everything."""
    if most_others >= 1:
        return
    end = time.monotonic() + _QUIET_WAIT_S
    share = 1.0
    while share > most_others / 4 and time.monotonic() < end:
        others = Others()
        time.sleep(1)
        share = others.share()


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


def measure_limits(
    program: Path | None, threads: int, retries: int = 0, most_others: float = MOST_OTHERS
) -> Slot:
    """The rates. A rate is None if there is no program, the processor has no such instruction, or
    other processes disturbed every try."""
    slot: Slot = dict.fromkeys(LIMITS)
    if program is not None:
        for _ in range(retries + 1):
            others = Others()
            output = run_command([program, str(threads), "1024", str(threads)])
            (rates,) = json.loads(output)["threads"]
            slot["others_share"] = share = others.share()
            if share <= most_others:
                slot.update({key: rates[key] for key in LIMITS})
                break
    slot["load_average"] = os.getloadavg()[0]
    return slot


def combine(slots: Sequence[Slot], pick: Callable[[list[float]], float]) -> Slot:
    """Combines several slots into one, rate by rate. Without an instruction for a dot product, or
    where it is slower, float32 multiply-adds do its work, so their rate counts."""
    found: Slot = {}
    for key in LIMITS:
        rates = [rate for slot in slots if (rate := slot.get(key)) is not None]
        found[key] = pick(rates) if rates else None
    for key in ("bf16_gflop_s", "int8_gop_s"):
        rates = [rate for rate in (found[key], found["fma_gflop_s"]) if rate is not None]
        found[key] = max(rates, default=None)
    return found
