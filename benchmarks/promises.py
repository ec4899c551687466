#!/usr/bin/env python3
"""Checks what the engine promises about time and memory: PASS or FAIL for each promise.

usage: python benchmarks/promises.py [--shape 0.5B] [--work-dir DIR]

The promises are docs/promises.md. Limits are shares of something else that is measured, or sizes
that the engine states itself, so that they hold on any machine. A model of random values in a real
model's shape is written to the work directory (1 GB of checkpoint and as much of each serialised
form for 0.5B) and removed at the end. Every measurement is a process of its own.
"""

from __future__ import annotations

import argparse
import functools
import json
import mmap
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from checkpoints import SHAPES, Shape, ensure_checkpoint

MIB = 1 << 20
MODEL = "promise"
# The limits are made from these (docs/promises.md says why).
IMPORT_SHARE = 1 / 3
INSTALLED_BYTES = 10_000_000
QUANTISER_BYTES = 5 * MIB
START_FACTOR = 2.0
OTHER_BYTES = 16 * MIB
IDLE_S = 3.0
IDLE_CPU_S = 0.001
HEAVY = ("torch", "transformers", "modelscope")
_ROUNDS = 7
_SAMPLE_S = 0.005


@dataclass(frozen=True)
class Measured:
    """A figure and its upper limit."""

    value: float
    limit: float
    unit: str = "MB"

    @property
    def holds(self) -> bool:
        return self.value <= self.limit

    def __str__(self) -> str:
        scale, digits = (1e6, 1) if self.unit == "MB" else (1.0, 3)
        value, limit = (f"{number / scale:,.{digits}f}" for number in (self.value, self.limit))
        return f"{value} of at most {limit} {self.unit}".rstrip()


@dataclass(frozen=True)
class Work:
    """What all measurements share: the shape, its checkpoint, and where to write."""

    shape: Shape
    directory: Path

    @property
    def checkpoint(self) -> Path:
        return self.directory / "checkpoint"

    @property
    def model(self) -> Path:
        return self.directory / "files"

    @property
    def tensor_bytes(self) -> int:
        """Bytes of the largest tensor in the checkpoint, in bfloat16."""
        return 2 * max(int(np.prod(dims)) for dims in self.shape.tensors().values())

    def model_bytes(self) -> int:
        return sum(path.stat().st_size for path in self.model.glob(f"{MODEL}.as*"))


# --- Runs in a process of its own: prints one JSON object.


def memory(field: str = "RssAnon") -> int:
    """Bytes of this process, from /proc/self/status."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return 1024 * int(line.split()[1])
    raise RuntimeError(f"/proc/self/status has no {field}")


def convert(source: str, target: str, options: str) -> dict[str, Any]:
    from allspark import Engine, HuggingFaceModel

    loader = HuggingFaceModel(source, MODEL, user_set_data_type="bfloat16").load_model()
    engine = Engine()
    before = {"anonymous": memory(), "resident": memory("VmRSS")}
    if target:
        loader.serialize_to_path(engine, target, **json.loads(options))
    else:
        loader.serialize_to_memory(engine, **json.loads(options))
    return {"before": before, "peak_resident": memory("VmHWM"), "heavy": heavy()}


def serve(model: str) -> dict[str, Any]:
    """All states of a serialised model: start, requests that fill its batch, idleness, unload."""
    os.environ["ALLSPARK_DISABLE_WARMUP"] = "1"
    from allspark import DashInferModel, Engine, TargetDevice

    loader = DashInferModel(model, MODEL).load_model().read_model_config()
    engine = Engine()

    def expect(status: Any) -> None:
        if int(status) != 0:
            raise RuntimeError(engine.last_error())

    builder = loader.create_reference_runtime_config_builder(
        MODEL, TargetDevice.CPU, max_batch=8, max_context_length=1024
    )
    touch_s = start_s = float("inf")
    config = builder.build()
    for i in range(_ROUNDS):
        touch_s = min(touch_s, seconds_to_touch(Path(model)))
        before = {name: memory(name) for name in ("RssAnon", "RssFile")}
        begin = time.perf_counter()
        expect(engine.install_model(config))
        expect(engine.start_model(MODEL))
        start_s = min(start_s, time.perf_counter() - begin)
        started = memory()
        if i < _ROUNDS - 1:
            expect(engine.stop_model(MODEL))
            expect(engine.release_model(MODEL))
        if i == 0:
            begun, first = before, started
    info = engine.get_as_model_info(MODEL)
    requests = []
    for i in range(8):
        fields = {"do_sample": False, "eos_token_id": -1, "max_new_tokens": 24}
        ids = np.random.default_rng(i).integers(3, info.vocab_size, 1000)
        status, handle, queue = engine.start_request_ids(MODEL, None, ids, fields)
        expect(status)
        requests.append((handle, queue))
    for handle, queue in requests:
        expect(engine.sync_request(MODEL, handle))
        assert len(queue.GetNoWait().ids_from_generate) == 24
        expect(engine.release_request(MODEL, handle))
    served = {name: memory(name) for name in ("RssAnon", "RssFile")}
    idle = idleness()
    expect(engine.unload_device_mem(MODEL))
    unloaded = {name: memory(name) for name in ("RssAnon", "RssFile")}
    expect(engine.load_device_mem(MODEL))
    expect(engine.stop_model(MODEL))
    expect(engine.release_model(MODEL))
    return {
        "touch_s": touch_s,
        "start_s": start_s,
        "before": begun,
        "started": first,
        "served": served,
        "unloaded": unloaded,
        "pool_bytes": info.kv_pool_bytes,
        "work_bytes": info.work_bytes,
        "weight_bytes": info.weight_bytes,
        "idle": idle,
        "heavy": heavy(),
    }


def heavy() -> int:
    """How many modules that it should not need this process has imported."""
    return sum(name in sys.modules for name in HEAVY)


def seconds_to_touch(model: Path) -> float:
    """Seconds to map a model's files and read each byte once, from the page cache."""
    begin = time.perf_counter()
    for path in model.glob(f"{MODEL}.as*"):
        with open(path, "rb", buffering=0) as file:
            flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
            mmap.mmap(file.fileno(), 0, flags=flags, prot=mmap.PROT_READ).close()
            while file.read(MIB):
                pass
    return time.perf_counter() - begin


def idleness() -> dict[str, float]:
    """How often, and how long, the threads of this process other than this one ran for IDLE_S."""

    def read() -> tuple[int, float]:
        switches = 0
        for task in Path("/proc/self/task").iterdir():
            if task.name == str(os.getpid()):
                continue
            for line in (task / "status").read_text().splitlines():
                if "ctxt_switches" in line:
                    switches += int(line.split()[1])
        return switches, time.process_time() - time.thread_time()

    time.sleep(0.2)  # Work that the last request left.
    switches, seconds = read()
    time.sleep(IDLE_S)
    later = read()
    return {"switches": later[0] - switches, "cpu_s": later[1] - seconds}


def installed() -> dict[str, Any]:
    import allspark

    root = Path(allspark.__file__).parent
    files = [path for path in root.rglob("*") if path.is_file() and path.suffix != ".pyc"]
    return {"bytes": sum(path.stat().st_size for path in files)}


TASKS: dict[str, Callable[..., dict[str, Any]]] = {
    task.__name__: task for task in (convert, serve, installed)
}


# --- Starts these processes, and compares.


@functools.cache  # A measurement that several promises use is done once.
def in_process(task: str, *arguments: str) -> tuple[dict[str, Any], int]:
    """The task's result, and the peak of its process's anonymous memory."""
    command = [sys.executable, __file__, "--task", task, *arguments]
    environment = {**os.environ, "TQDM_DISABLE": "1"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    status, peak = Path(f"/proc/{process.pid}/status"), 0
    while process.poll() is None:
        for line in status.read_text().splitlines():
            if line.startswith("RssAnon:"):
                peak = max(peak, 1024 * int(line.split()[1]))
        time.sleep(_SAMPLE_S)
    assert process.stdout is not None
    output = process.stdout.read()
    if process.returncode != 0:
        sys.exit(f"promises.py: {task} failed")
    return json.loads(output.splitlines()[-1]), peak


def seconds_of(code: str) -> float:
    begin = time.perf_counter()
    subprocess.run([sys.executable, "-c", code], check=True)
    return time.perf_counter() - begin


def imports(work: Work) -> list[Measured]:
    """Interleaved, the minimum of each: other work on the machine can only add time."""
    codes = ("pass", "import allspark", "import numpy")
    times = [[seconds_of(code) for code in codes] for _ in range(_ROUNDS)]
    nothing, ours, numpy = (min(column) for column in zip(*times, strict=True))
    return [Measured((ours - nothing) / (numpy - nothing), IMPORT_SHARE, "of importing NumPy")]


def size(work: Work) -> list[Measured]:
    return [Measured(in_process("installed")[0]["bytes"], INSTALLED_BYTES)]


def converted(work: Work) -> list[tuple[dict[str, Any], int]]:
    """Converts to files, to files in int8, and to memory."""
    targets = [(work.model, {}), (work.directory / "int8", {"enable_quant": True}), ("", {})]
    return [
        in_process("convert", str(work.checkpoint), str(to), json.dumps(how)) for to, how in targets
    ]


def conversion(work: Work) -> list[Measured]:
    results, conversions = [], converted(work)
    # Converting to files needs no anonymous memory for weights: a tensor's pages are the
    # checkpoint's file pages, and only one tensor's pages are resident at a time.
    beside = (0, QUANTISER_BYTES, work.model_bytes())
    for (result, anonymous), more in zip(conversions, beside, strict=True):
        before, most = result["before"], OTHER_BYTES + more
        resident = result["peak_resident"] - before["resident"]
        results += [
            Measured(anonymous - before["anonymous"], most),
            Measured(resident, most + work.tensor_bytes),
        ]
    return results


def served(work: Work) -> dict[str, Any]:
    return in_process("serve", str(work.model))[0]


def without_torch(work: Work) -> list[Measured]:
    results = [result for result, _ in converted(work)] + [served(work)]
    return [Measured(sum(result["heavy"] for result in results), 0, "modules")]


def start(work: Work) -> list[Measured]:
    result = served(work)
    taken = result["started"] - result["before"]["RssAnon"]
    return [
        Measured(result["start_s"] / result["touch_s"], START_FACTOR, "times that"),
        Measured(taken, result["work_bytes"] + OTHER_BYTES),
    ]


def serving(work: Work) -> list[Measured]:
    result = served(work)
    grown = {name: result["served"][name] - bytes_ for name, bytes_ in result["before"].items()}
    return [
        Measured(grown["RssAnon"], result["pool_bytes"] + result["work_bytes"] + OTHER_BYTES),
        Measured(grown["RssFile"], result["weight_bytes"] + OTHER_BYTES),
    ]


def given_back(work: Work) -> list[Measured]:
    result = served(work)
    left = sum(result["unloaded"].values()) - sum(result["before"].values())
    return [Measured(left, OTHER_BYTES)]


def idle(work: Work) -> list[Measured]:
    result = served(work)["idle"]
    return [
        Measured(result["switches"], 0, "wake-ups"),
        Measured(result["cpu_s"], IDLE_CPU_S, "s"),
    ]


@dataclass(frozen=True)
class Promise:
    """A row of docs/promises.md. ``figures`` are the names of what ``measure`` returns, in
    order."""

    what: str
    limit: str
    measure: Callable[[Work], list[Measured]]
    figures: tuple[str, ...] = ("",)


PROMISES = (
    Promise("`import allspark`", "a third of importing NumPy", imports),
    Promise(
        "the installed package, without its dependencies",
        f"{INSTALLED_BYTES // 1_000_000} MB",
        size,
    ),
    Promise(
        "converting a checkpoint",
        "to files: 16 MiB of anonymous memory, 5 more to quantise; resident one tensor more, "
        "the largest; in memory: the model on top",
        conversion,
        ("files, anonymous", "files, resident", "int8 files, anonymous", "int8 files, resident",
         "in memory, anonymous", "in memory, resident"),
    ),
    Promise(
        "converting, starting and serving requests by ids",
        "neither torch nor transformers is imported",
        without_torch,
    ),
    Promise(
        "starting a serialised model, without the warm-up",
        "twice the time of mapping its files and reading them once; of memory `work_bytes` "
        "and 16 MiB",
        start,
        ("time", "anonymous"),
    ),
    Promise(
        "serving",
        "`kv_pool_bytes`, `work_bytes` and 16 MiB; of mapped files `weight_bytes` and 16 MiB",
        serving,
        ("anonymous", "mapped"),
    ),
    Promise("a model after `unload_device_mem`", "16 MiB", given_back),
    Promise(
        "an idle engine with a model that runs",
        f"no wake-up, and {1000 * IDLE_CPU_S:g} ms of a processor, in {IDLE_S:g} s",
        idle,
        ("wake-ups", "time"),
    ),
)  # fmt: skip


def table() -> str:
    """The rows of docs/promises.md."""
    return "\n".join(f"| {promise.what} | {promise.limit} |" for promise in PROMISES)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--shape", default="0.5B", choices=SHAPES)
    parser.add_argument("--work-dir", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--task", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.task:
        task, *arguments = options.task
        print(json.dumps(TASKS[task](*arguments)))
        return 0
    root = Path(tempfile.mkdtemp(dir=options.work_dir))
    failed = 0
    try:
        work = Work(SHAPES[options.shape], root)
        ensure_checkpoint(work.shape, work.checkpoint)
        for name in ("files", "int8"):
            (root / name).mkdir()
        for promise in PROMISES:
            for figure, measured in zip(promise.figures, promise.measure(work), strict=True):
                verdict = "PASS" if measured.holds else "FAIL"
                name = f"{promise.what}: {figure}" if figure else promise.what
                print(f"{verdict}  {name}: {measured}", flush=True)
                failed += not measured.holds
    finally:
        shutil.rmtree(root)
    print(f"{failed} of the promises FAILED" if failed else "all promises hold")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
