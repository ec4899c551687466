"""One measurement of this engine in this process: a job on stdin, its result on stdout.

Each measurement has its own process. So it does not inherit memory, caches or threads of another,
and the peak memory is its own.
"""

from __future__ import annotations

import json
import select
import shutil
import statistics
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from allspark import AsStatus, DashInferModel, Engine, HuggingFaceModel, TargetDevice
from allspark.runtime_config import get_cache_mode_from_str
from peers.worker import InProcess, Request, Timeline, check, peak_rss_mb, run_job

MODEL = "bench"
Job = Mapping[str, Any]
# Tokens that the stream of the `gap` workload decodes alone before the long prompt arrives.
_ALONE = 32


def about(engine: Engine, model: str = MODEL) -> dict[str, str]:
    """The engine's version and the kernel table it uses; only an installed model knows the
    latter."""
    isa = engine.get_as_engine_stat(model).kernel_table
    return {"version": engine.get_version_full(), "isa": isa}


class Running(InProcess):
    """A started model."""

    def __init__(self, job: Job) -> None:
        self.engine = Engine()
        loader = DashInferModel(job["model"], MODEL).load_model().read_model_config()
        builder = loader.create_reference_runtime_config_builder(
            MODEL, TargetDevice.CPU,
            max_batch=job["max_batch"], max_context_length=job["max_length"],
        )  # fmt: skip
        builder.num_threads(job["threads"]).max_prefill_length(job["chunk"])
        builder.prefill_policy(job.get("prefill_policy", "balanced"))
        builder.kv_cache_mode(get_cache_mode_from_str(job["cache_mode"]))
        self.expect(self.engine.install_model(builder.build()), "install_model")
        self.expect(self.engine.start_model(MODEL), "start_model")

    def expect(self, status: AsStatus, what: str) -> None:
        if status != AsStatus.ALLSPARK_SUCCESS:
            raise RuntimeError(f"{what}: {status.name}: {self.engine.last_error()}")

    def start(self, request: Request) -> tuple[Any, Any]:
        """Starts a request; returns its handle and queue."""
        config = {
            "do_sample": False,
            "early_stopping": False,
            "eos_token_id": -1,
            "max_new_tokens": request["num_output"],
        }
        status, handle, queue = self.engine.start_request_ids(MODEL, None, request["ids"], config)
        self.expect(status, "start_request_ids")
        return handle, queue

    def serve(self, requests: list[Request]) -> list[Timeline]:
        """Reads all queues like a server: in one thread, which the engine's descriptor wakes per
        step. Raises RuntimeError where a request did not give all its tokens."""
        open_streams: dict[int, tuple[Timeline, Any]] = {}
        timelines = []
        for request in requests:
            timeline = Timeline()
            handle, queue = self.start(request)
            open_streams[handle.id] = (timeline, queue)
            timelines.append(timeline)
        while open_streams:
            select.select([self.engine], [], [])
            for handle in self.engine.drain_completions():
                if handle.id not in open_streams:
                    continue
                timeline, queue = open_streams[handle.id]
                # Read before draining: tokens that come after this are drained in one more turn.
                ended = queue.finished
                elements = queue.GetNoWait()
                if elements is not None:
                    timeline.add(len(elements.ids_from_generate))
                if ended:
                    del open_streams[handle.id]
        for timeline, request in zip(timelines, requests, strict=True):
            check(timeline, request)
        return timelines

    def close(self) -> None:
        self.expect(self.engine.stop_model(MODEL), "stop_model")
        self.expect(self.engine.release_model(MODEL), "release_model")


class Stream:
    """A running request, with a thread that notes when its tokens arrive."""

    def __init__(
        self, running: Running, request: Request, wanted: Callable[[int], None] | None = None
    ) -> None:
        self.timeline = Timeline()
        self.handle, self.queue = running.start(request)
        self._wanted = wanted
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        for elements in self.queue:
            self.timeline.add(len(elements.ids_from_generate))
            if self._wanted is not None:
                self._wanted(sum(self.timeline.counts))

    def join(self) -> Timeline:
        self._thread.join()
        return self.timeline


def convert(job: Job) -> dict[str, float]:
    """Converts a checkpoint to native files, replacing existing ones, and times a plain copy of the
    checkpoint's weights for comparison. All is in the page cache; nothing is synced to disk."""
    model, quantisation = Path(job["model"]), job["options"]
    model.mkdir(parents=True, exist_ok=True)
    for path in model.glob("*"):
        path.unlink()
    begin = time.perf_counter()
    checkpoint = Path(job["checkpoint"])
    files = [checkpoint] if checkpoint.is_file() else checkpoint.glob("*.safetensors")
    for path in files:
        shutil.copyfile(path, model / path.name)
    copy_s = time.perf_counter() - begin
    for path in model.glob("*"):
        path.unlink()
    begin = time.perf_counter()
    loader = HuggingFaceModel(job["checkpoint"], MODEL, user_set_data_type="bfloat16")
    loader.load_model().serialize_to_path(
        Engine(), str(model),
        enable_quant=bool(quantisation), customized_quant_config=quantisation or None,
    ).free_model()  # fmt: skip
    convert_s = time.perf_counter() - begin
    return {"convert_s": convert_s, "copy_s": copy_s, "convert_rss_mb": peak_rss_mb()}


def start(job: Job) -> dict[str, float]:
    """Opens the native files with a warm page cache; ALLSPARK_DISABLE_WARMUP may skip the
    warm-up."""
    for path in Path(job["model"]).glob("*"):
        with open(path, "rb", buffering=0) as file:
            while file.read(1 << 24):
                pass
    begin = time.perf_counter()
    running = Running(job)
    result = {"start_s": time.perf_counter() - begin, "start_rss_mb": peak_rss_mb()}
    running.close()
    return result


def streams(job: Job) -> dict[str, float]:
    """Many streams of a model with almost no arithmetic: the cost of the engine itself.

    The tokens are read in two ways: only at the end, and by one Python thread as they arrive.
    """
    (wave,) = job["waves"]
    wanted = sum(request["num_output"] for request in wave)
    running = Running(job)
    running.serve(job["warm_up"])
    begin = time.perf_counter()
    started = [running.start(request) for request in wave]
    handles = [handle for handle, _ in started]
    running.expect(running.engine.sync_request(MODEL, handles), "sync_request")
    silent_s = time.perf_counter() - begin
    got = sum(queue.GeneratedLength() for _, queue in started)
    if got != wanted:
        raise RuntimeError(f"{got} tokens came, {wanted} were asked for")
    begin = time.perf_counter()
    running.serve(wave)
    read_s = time.perf_counter() - begin
    running.close()
    return {
        "streams_tok_s": wanted / silent_s,
        "streams_step_us": 1e6 * silent_s / wave[0]["num_output"],
        "streams_read_tok_s": wanted / read_s,
    }


def gap(job: Job) -> dict[str, float]:
    """The longest gap between a stream's tokens while a long prompt is computed beside it."""
    (decoding,), (arriving,) = job["waves"]
    running = Running(job)
    running.serve(job["warm_up"])
    alone = min(_ALONE, decoding["num_output"] // 2)
    reached = threading.Event()
    stream = Stream(running, decoding, lambda total: reached.set() if total >= alone else None)
    reached.wait()
    prompt = Stream(running, arriving).join()
    check(prompt, arriving)
    running.expect(running.engine.stop_request(MODEL, stream.handle), "stop_request")
    times = stream.join().times
    rss = peak_rss_mb()
    running.close()
    end = prompt.times[0]
    gaps = list(zip(times[1:], times[:-1], strict=True))
    before = [new - old for new, old in gaps if new <= prompt.begin]
    during = [new - old for new, old in gaps if new > prompt.begin and old < end]
    result = {"gap_prompt_s": end - prompt.begin, "gap_rss_mb": rss}
    # A stream may end before the prompt is computed, with small models only; then it says nothing.
    if before and times[-1] >= end:
        result["gap_alone_ms"] = 1e3 * statistics.median(before)
        result["gap_max_ms"] = 1e3 * max(during)
        result["gap_median_ms"] = 1e3 * statistics.median(during)
    return result


def version(job: Job) -> dict[str, str]:
    running = Running(job)
    result = about(running.engine)
    running.close()
    return result


TASKS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "requests": lambda job: run_job(Running, job),
    "convert": convert,
    "start": start,
    "gap": gap,
    "streams": streams,
    "version": version,
}


if __name__ == "__main__":
    job = json.load(sys.stdin)
    print(json.dumps(TASKS[job["task"]](job)), flush=True)
