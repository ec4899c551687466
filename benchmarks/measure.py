"""One measurement in this process, as JSON on the last line of stdout. run.py starts it.

usage: measure.py '{"task": "requests", ...}'

A process for each measurement, so that none finds memory, caches or threads of another, and the
peak memory is its own.
"""

from __future__ import annotations

import json
import resource
import statistics
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from allspark import (
    AsStatus,
    DashInferModel,
    Engine,
    HuggingFaceModel,
    RequestHandle,
    ResultQueue,
    TargetDevice,
)
from checkpoints import SHAPES
from workloads import Request, make_workload

MODEL = "bench"
# Tokens the stream of the `gap` workload decodes alone before the long prompt arrives.
_ALONE = 32


class Stream:
    """A running request; a thread of its own notes when its tokens arrive."""

    def __init__(self, engine: Engine, request: Request, wanted: Callable[[int], None]) -> None:
        self.begin = time.perf_counter()
        self.times: list[float] = []
        self.counts: list[int] = []
        self.handle, self.queue = _start_request(engine, request)
        self._wanted = wanted
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        total = 0
        for elements in self.queue:
            self.times.append(time.perf_counter())
            self.counts.append(len(elements.ids_from_generate))
            total += self.counts[-1]
            self._wanted(total)

    def join(self) -> None:
        self._thread.join()

    @property
    def num_tokens(self) -> int:
        return sum(self.counts)


def _start_request(engine: Engine, request: Request) -> tuple[RequestHandle, ResultQueue]:
    config = {
        "do_sample": False,
        "early_stopping": False,
        "eos_token_id": -1,
        "max_new_tokens": request.num_output,
    }
    status, handle, queue = engine.start_request_ids(MODEL, None, request.ids, config)
    if handle is None or queue is None:
        raise RuntimeError(f"start_request_ids: {status.name}: {engine.last_error()}")
    return handle, queue


def _ignore(total: int) -> None:
    del total


def _check(stream: Stream, request: Request) -> None:
    if stream.num_tokens != request.num_output or stream.queue.finish_reason != "length":
        raise RuntimeError(
            f"a request gave {stream.num_tokens} of {request.num_output} tokens and ended with "
            f"{stream.queue.finish_reason!r}: {stream.queue.error}"
        )


def _expect(engine: Engine, status: AsStatus, what: str) -> None:
    if status != AsStatus.ALLSPARK_SUCCESS:
        raise RuntimeError(f"{what}: {status.name}: {engine.last_error()}")


def _peak_rss_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6


def _start(job: dict[str, Any], max_batch: int, max_length: int) -> tuple[Engine, float, float]:
    """A running model; seconds of install_model and of start_model."""
    engine = Engine()
    loader = DashInferModel(job["native_dir"], MODEL).load_model().read_model_config()
    builder = loader.create_reference_runtime_config_builder(
        MODEL, TargetDevice.CPU, max_batch=max_batch, max_context_length=max_length
    )
    builder.num_threads(job["threads"]).max_prefill_length(job["chunk"])
    begin = time.perf_counter()
    _expect(engine, engine.install_model(builder.build()), "install_model")
    installed = time.perf_counter()
    _expect(engine, engine.start_model(MODEL), "start_model")
    return engine, installed - begin, time.perf_counter() - installed


def _stop(engine: Engine) -> None:
    _expect(engine, engine.stop_model(MODEL), "stop_model")
    _expect(engine, engine.release_model(MODEL), "release_model")


def _warm(engine: Engine) -> None:
    request = Request([3] * 40, 8)
    stream = Stream(engine, request, _ignore)
    stream.join()
    _check(stream, request)


def convert(job: dict[str, Any]) -> dict[str, float]:
    """Checkpoint to native files. Both sides are in the page cache; nothing is synced to disk."""
    for path in Path(job["native_dir"]).glob("*"):
        path.unlink()
    begin = time.perf_counter()
    engine = Engine()
    loader = HuggingFaceModel(job["checkpoint"], MODEL, user_set_data_type=job["data_type"])
    loader.load_model().serialize_to_path(engine, job["native_dir"]).free_model()
    return {"convert_s": time.perf_counter() - begin, "convert_rss_mb": _peak_rss_mb()}


def start(job: dict[str, Any]) -> dict[str, float]:
    """Opening the native files, with the page cache warm and the warm-up off."""
    for path in Path(job["native_dir"]).glob("*"):
        with open(path, "rb", buffering=0) as file:
            while file.read(1 << 24):
                pass
    engine, install_s, start_s = _start(job, 32, job["max_length"])
    rss = _peak_rss_mb()
    _stop(engine)
    return {"start_s": install_s + start_s, "start_rss_mb": rss}


def warm_up(job: dict[str, Any]) -> dict[str, float]:
    """The same with the warm-up on; run.py takes the difference."""
    engine, install_s, start_s = _start(job, 32, job["max_length"])
    _stop(engine)
    return {"start_warm_s": install_s + start_s}


def requests(job: dict[str, Any]) -> dict[str, float]:
    """A workload whose requests arrive at once."""
    shape = SHAPES[job["shape"]]
    work = make_workload(job["workload"], shape.vocab_size, job["divisor"])
    max_batch = max(32, len(work.requests))
    engine, _, _ = _start(job, max_batch, max(work.max_length, job["max_length"]))
    _warm(engine)
    cpu_begin, begin = time.process_time(), time.perf_counter()
    streams = [Stream(engine, request, _ignore) for request in work.requests]
    for stream in streams:
        stream.join()
    cpu_s = time.process_time() - cpu_begin
    seconds = max(stream.times[-1] for stream in streams) - begin
    for stream, request in zip(streams, work.requests, strict=True):
        _check(stream, request)
    rss = _peak_rss_mb()
    _stop(engine)
    first_tokens = [stream.times[0] - stream.begin for stream in streams]
    result = {
        "ttft_s": statistics.median(first_tokens),
        "prefill_tok_s": work.num_prompt / seconds,
        "output_tok_s": work.num_output / seconds,
        "core_share": cpu_s / (seconds * job["threads"]),
        "rss_mb": rss,
    }
    stream = streams[0]
    if len(streams) == 1 and len(stream.times) > 1:
        decoded = stream.num_tokens - stream.counts[0]
        result["decode_tok_s"] = decoded / (stream.times[-1] - stream.times[0])
    return result


def streams(job: dict[str, Any]) -> dict[str, float]:
    """Many streams of a model with next to no arithmetic: what the engine itself costs.

    Read twice: only at the end, and by a Python thread per stream as the tokens come.
    """
    shape = SHAPES[job["shape"]]
    work = make_workload("streams", shape.vocab_size, job["divisor"])
    engine, _, _ = _start(job, len(work.requests), max(work.max_length, job["max_length"]))
    _warm(engine)
    begin = time.perf_counter()
    started = [_start_request(engine, request) for request in work.requests]
    _expect(engine, engine.sync_request(MODEL, [handle for handle, _ in started]), "sync_request")
    silent_s = time.perf_counter() - begin
    lengths = [queue.GeneratedLength() for _, queue in started]
    if sum(lengths) != work.num_output:
        raise RuntimeError(f"{sum(lengths)} tokens came, {work.num_output} were asked for")
    begin = time.perf_counter()
    readers = [Stream(engine, request, _ignore) for request in work.requests]
    for reader in readers:
        reader.join()
    read_s = time.perf_counter() - begin
    _stop(engine)
    return {
        "streams_tok_s": work.num_output / silent_s,
        "streams_step_us": 1e6 * silent_s / work.requests[0].num_output,
        "streams_read_tok_s": work.num_output / read_s,
    }


def gap(job: dict[str, Any]) -> dict[str, float]:
    """The longest wait between tokens of a stream while a long prompt is computed beside it."""
    shape = SHAPES[job["shape"]]
    work = make_workload("gap", shape.vocab_size, job["divisor"])
    running, arriving = work.requests
    engine, _, _ = _start(job, 2, max(work.max_length, job["max_length"]))
    _warm(engine)
    alone = min(_ALONE, running.num_output // 2)
    reached = threading.Event()
    stream = Stream(engine, running, lambda total: reached.set() if total >= alone else None)
    reached.wait()
    prompt = Stream(engine, arriving, _ignore)
    prompt.join()
    _check(prompt, arriving)
    _expect(engine, engine.stop_request(MODEL, stream.handle), "stop_request")
    stream.join()
    rss = _peak_rss_mb()
    _stop(engine)
    end = prompt.times[0]
    gaps = list(zip(stream.times[1:], stream.times[:-1], strict=True))
    before = [new - old for new, old in gaps if new <= prompt.begin]
    during = [new - old for new, old in gaps if new > prompt.begin and old < end]
    result = {"gap_prompt_s": prompt.times[0] - prompt.begin, "gap_rss_mb": rss}
    # A stream that ended before the prompt was computed, as only small models' do, says nothing.
    if before and stream.times[-1] >= end:
        result["gap_alone_ms"] = 1e3 * statistics.median(before)
        result["gap_max_ms"] = 1e3 * max(during)
        result["gap_median_ms"] = 1e3 * statistics.median(during)
    return result


TASKS: dict[str, Callable[[dict[str, Any]], dict[str, float]]] = {
    "convert": convert,
    "start": start,
    "warm_up": warm_up,
    "requests": requests,
    "streams": streams,
    "gap": gap,
}


def version(job: dict[str, Any]) -> dict[str, str]:
    """The engine's version and the kernel table it takes."""
    engine = Engine()
    loader = DashInferModel(job["native_dir"], MODEL).load_model().read_model_config()
    builder = loader.create_reference_runtime_config_builder(MODEL, TargetDevice.CPU)
    status = engine.install_model(builder.build())
    if status != AsStatus.ALLSPARK_SUCCESS:
        raise RuntimeError(engine.last_error())
    isa = engine.get_as_engine_stat(MODEL).kernel_table
    return {"version": engine.get_version_full(), "isa": isa}


def main() -> None:
    job = json.loads(sys.argv[1])
    result = version(job) if job["task"] == "version" else TASKS[job["task"]](job)
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
