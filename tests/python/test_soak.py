"""The soak of the SDK: random requests of every kind from threads and from an event loop at once,
with a KV pool too small for them, stops and releases at random moments, steps that throw, and masks
that come late, never, or with an error. Every request must end with the result that it has alone in
a fresh engine, or the beginning of that, and leave nothing behind. Each end, kind of request, field
and fault must occur, or the soak fails.

ALLSPARK_SOAK_SECONDS is the time in each cache mode (60), ALLSPARK_SOAK_SEED the seed.
"""

from __future__ import annotations

import asyncio
import os
import random
import threading
import time
from collections import Counter
from dataclasses import dataclass
from typing import Any

import pytest
from allspark import AsCacheMode, AsStatus, Engine, HuggingFaceModel, TargetDevice, guided
from allspark._allspark import testing
from allspark.pipeline.engine_config import PREFILL_POLICIES
from test_mixed_batch import random_config

OK = AsStatus.ALLSPARK_SUCCESS
SECONDS = float(os.environ.get("ALLSPARK_SOAK_SECONDS", "60"))
ROUND = 40  # requests
MOST_ROUNDS = 60  # if something has not occurred yet when the time is over
THREADS, TASKS = 4, 8
MAX_LENGTH, SPAN = 256, 16
MASK_TIMEOUT_MS = 300

BEGINNINGS = [
    "",
    "You answer in one short sentence. ",
    "A ResultQueue gives the tokens of one request, in the order in which they were chosen. " * 3,
    "one two three one two three one two three one two three ",
]
ENDS = ["What is a ResultQueue?", "Name a colour.", "Why?", "Count to ten: 1, 2,", "Hello"]
FORMATS: list[dict[str, Any]] = [
    {"type": "json_object"},
    {"type": "json_schema", "json_schema": {"name": "a", "schema": {
        "type": "object", "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "yz"]}},
        "required": ["a", "b"], "additionalProperties": False}}},
    {"type": "regex", "regex": "[a-z]{2,40}( [0-9]+){1,5}"},
    {"type": "choice", "choice": ["red", "green", "dark blue"]},
]  # fmt: skip
# The text of a stop string is drawn from these; the first ones occur often.
STOP_WORDS = ["e", "the", ". ", "ing", "queue", "\n", "zzz"]


def by_fields(rng: random.Random, length: int) -> dict[str, Any]:
    return random_config(rng, length)


def by_text(rng: random.Random, length: int) -> dict[str, Any]:
    return {
        "do_sample": rng.random() < 0.7, "temperature": rng.uniform(0.5, 2), "top_k": 0,
        "stop_words": rng.sample(STOP_WORDS, rng.randint(0, 3)),
        "include_stop_str_in_output": rng.random() < 0.5,
        "logprobs": rng.random() < 0.3, "priority": rng.randint(-1, 1),
    }  # fmt: skip


def by_format(rng: random.Random, length: int) -> dict[str, Any]:
    text = by_text(rng, length) if rng.random() < 0.3 else {"temperature": rng.uniform(0.5, 2)}
    return {**text, "response_format": rng.choice(FORMATS)}


def sequences(rng: random.Random, length: int) -> dict[str, Any]:
    return {"n": rng.randint(2, 4), "temperature": rng.uniform(0.5, 2)}


KINDS = {by_fields: 4, by_text: 3, by_format: 3, sequences: 1}
ENDS_OF_REQUESTS = ["stop", "length", "cancelled", "deadline", "interrupted", "error", "denied"]
FAULTS = ["a step threw", "a mask came late", "a mask never came", "masks failed"]


def everything() -> set[str]:
    """All that must occur, by the names that Soak.met counts."""
    rng = random.Random(0)
    fields = {name for _ in range(1000) for name in random_config(rng, 30)} - {"max_length"}
    return {
        *(f"end: {end}" for end in ENDS_OF_REQUESTS),
        *(f"fault: {fault}" for fault in FAULTS),
        *(f"kind: {kind.__name__}" for kind in KINDS),
        *(f"format: {one['type']}" for one in FORMATS),
        *(f"field: {field}" for field in fields),
        "preemption", "stopped by the caller", "released early",
    }  # fmt: skip


@dataclass
class Job:
    text: str
    config: dict[str, Any]
    kind: str
    reads: int | None  # it is stopped or released after this many reads; None: never
    releases: bool

    def names(self) -> list[str]:
        """The names under which the job counts."""
        form = self.config.get("response_format")
        forms = [f"format: {form['type']}"] if form else []
        return [f"kind: {self.kind}", *(f"field: {name}" for name in self.config), *forms]

    def may_end(self, reason: str, error: str | None) -> bool:
        """Whether this may have ended it early, by something that does not happen when it runs
        alone."""
        return {
            "cancelled": self.reads is not None,
            # From a fault: MaskFaults, or one of the native side.
            "error": any(text in (error or "") for text in ("injected", "did not come within")),
            "deadline": 0 < self.config.get("timeout_ms", 0) < 1000,
            "interrupted": True,  # see Soak.check
        }.get(reason, False)


class MaskFaults:
    """Replaces the function that answers the masks of guided requests."""

    def __init__(self, answer, seed: int) -> None:
        self.answer, self.rng = answer, random.Random(seed)
        self.injects = False
        self.met: Counter[str] = Counter()

    def __call__(self, executor, compiler, asked) -> None:
        chance = self.rng.random() if self.injects else 1.0
        if chance < 0.004:
            self.met["fault: a mask never came"] += 1
            return
        if chance < 0.01:
            self.met["fault: masks failed"] += 1
            raise RuntimeError("injected")
        if chance < 0.03:
            self.met["fault: a mask came late"] += 1
            time.sleep(0.01)
        self.answer(executor, compiler, asked)


def draw_job(rng: random.Random, tokenizer) -> Job:
    text = rng.choice(BEGINNINGS) + rng.choice(ENDS)
    length = len(tokenizer.encode(text))
    (kind,) = rng.choices(list(KINDS), list(KINDS.values()))
    config = {
        "seed": rng.randrange(10**9), "max_new_tokens": rng.randint(5, 80), **kind(rng, length)
    }  # fmt: skip
    config.pop("max_length", None)  # random_config sets it for another prompt
    if rng.random() < 0.1:
        config["timeout_ms"] = rng.randint(1, 60)
    reads = rng.randint(0, 20) if rng.random() < 0.3 else None
    return Job(text, config, kind.__name__, reads, rng.random() < 0.5)


class Reading:
    """The output of one queue."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.logprobs: list[float] = []
        self.text = ""
        self.tensors: dict[str, bytes] = {}
        self.end: tuple = ()

    def add(self, elements) -> None:
        self.ids += elements.ids_from_generate
        self.logprobs += elements.token_logprobs_list
        self.text += getattr(elements, "text", "")
        for arrays in elements.tensors_from_model_inference:
            for name, array in arrays.items():
                self.tensors[name] = self.tensors.get(name, b"") + array.tobytes()

    def close(self, queue) -> None:
        assert queue.finished, queue
        self.end = (queue.finish_reason, queue.error, queue.sequence_score)

    def check(self, alone: Reading, job: Job, may_be_interrupted: bool) -> None:
        reason, error, _ = self.end
        early = job.may_end(reason, error) and (reason != "interrupted" or may_be_interrupted)
        if not early:
            assert vars(self) == vars(alone)
            return
        # The text may have characters that a stop string or the rest of a character would replace.
        assert self.ids == alone.ids[: len(self.ids)]
        assert self.logprobs == alone.logprobs[: len(self.logprobs)]
        for name, rows in self.tensors.items():
            assert alone.tensors[name].startswith(rows), name


class Soak:
    """`interrupts`: requests end when blocks run out, and starts wait for room. Otherwise requests
    wait for blocks, and starts without room are refused.
    """

    def __init__(
        self, loader: HuggingFaceModel, mode: AsCacheMode, seed: int, masks: MaskFaults,
        interrupts: bool,
    ) -> None:  # fmt: skip
        self.loader, self.mode, self.seed, self.masks = loader, mode, seed, masks
        self.interrupts = interrupts
        self.rng = random.Random(seed)
        self.engine = self.start_engine(
            starts=False, cache_span_num_init=MAX_LENGTH // SPAN + 4,
            interrupt_on_cache_exhaustion=interrupts, token_mask_timeout_ms=MASK_TIMEOUT_MS,
            max_waiting_requests=4, queue_full_policy="block" if interrupts else "refuse",
            prefill_policy=PREFILL_POLICIES[seed % len(PREFILL_POLICIES)],
        )  # fmt: skip
        testing.enable_step_faults(self.engine._native, "m")
        assert self.engine.start_model("m") == OK, self.engine.last_error()
        self.met: Counter[str] = Counter()

    def start_engine(self, starts: bool = True, **settings: Any) -> Engine:
        engine = Engine()
        engine.register_image("m", self.loader._image)
        builder = self.loader.create_reference_runtime_config_builder(
            "m", TargetDevice.CPU, max_batch=8, max_context_length=MAX_LENGTH
        )
        builder.update_from_dict(
            {"kv_cache_mode": self.mode, "cache_span_size": SPAN,
             "engine_max_prefill_length": 64, **settings}
        )  # fmt: skip
        assert engine.install_model(builder.build()) == OK, engine.last_error()
        assert not starts or engine.start_model("m") == OK, engine.last_error()
        return engine

    def started(self, engine: Engine, job: Job, answer: tuple) -> tuple[list, list]:
        """Handles and queues as lists, also for a single one; empty if the request was denied."""
        status, handles, queues = answer
        if status == AsStatus.ALLSPARK_REQUEST_DENIED:
            # A start that waits for room is denied when its time is over.
            assert engine is self.engine
            assert not self.interrupts or job.may_end("deadline", None), engine.last_error()
            return [], []
        assert status == OK, (engine.last_error(), job)
        return (handles, queues) if isinstance(queues, list) else ([handles], [queues])

    def end_early(self, job: Job, handles: list) -> None:
        self.met["released early" if job.releases else "stopped by the caller"] += 1
        call = self.engine.release_request if job.releases else self.engine.stop_request
        assert call("m", handles) == OK

    def close(self, job: Job, handles: list, was_early: bool) -> None:
        if not (was_early and job.releases):
            assert self.engine.release_request("m", handles) == OK
        assert self.engine.release_request("m", handles[0]) != OK

    def serve(self, job: Job, rng: random.Random) -> list[Reading]:
        """Runs a request on a thread, and reads it by all kinds of getters."""
        answer = self.engine.start_request_text("m", self.loader, job.text, job.config)
        handles, queues = self.started(self.engine, job, answer)
        if not queues:
            return []
        readings = [Reading() for _ in queues]
        reads, early = 0, False
        while not all(queue.finished for queue in queues):
            if job.reads is not None and reads >= job.reads and not early:
                early = True
                self.end_early(job, handles)
            reads += 1
            for queue, reading in zip(queues, readings, strict=True):
                elements = rng.choice([queue.GetNoWait, lambda q=queue: q.GetWithTimeout(5)])()
                if elements is not None:
                    reading.add(elements)
        for queue, reading in zip(queues, readings, strict=True):
            for elements in queue:
                reading.add(elements)
            reading.close(queue)
        self.close(job, handles, early)
        return readings

    async def serve_async(self, job: Job) -> list[Reading]:
        answer = await self.engine.start_request_text_async("m", self.loader, job.text, job.config)
        handles, queues = self.started(self.engine, job, answer)
        if not queues:
            return []
        early = False

        async def read(queue, is_first: bool) -> Reading:
            nonlocal early
            reading, reads = Reading(), 0
            if is_first and job.reads == 0:
                early = True
                self.end_early(job, handles)
            async for elements in queue:
                reading.add(elements)
                reads += 1
                if is_first and job.reads is not None and reads >= job.reads and not early:
                    early = True
                    self.end_early(job, handles)
            reading.close(queue)
            return reading

        readings = await asyncio.gather(*(read(q, i == 0) for i, q in enumerate(queues)))
        self.close(job, handles, early)
        return list(readings)

    def round(self, jobs: list[Job]) -> list[list[Reading]]:
        results: list[Any] = [None] * len(jobs)
        left, lock = iter(range(len(jobs))), threading.Lock()
        seeds = [self.rng.random() for _ in range(THREADS)]

        def take() -> int | None:
            with lock:
                return next(left, None)

        def keep(index: int, call) -> None:
            try:
                results[index] = call()
            except BaseException as error:
                results[index] = error

        def thread(seed: float) -> None:
            rng = random.Random(seed)
            while (index := take()) is not None:
                keep(index, lambda i=index: self.serve(jobs[i], rng))

        async def task() -> None:
            while (index := take()) is not None:
                try:
                    results[index] = await self.serve_async(jobs[index])
                except BaseException as error:
                    results[index] = error

        async def all_tasks() -> None:
            await asyncio.gather(*(task() for _ in range(TASKS)))

        threads = [threading.Thread(target=thread, args=(seed,)) for seed in seeds]
        threads.append(threading.Thread(target=lambda: asyncio.run(all_tasks())))
        for one in threads:
            one.start()
        for one in threads:
            one.join()
        for index, result in enumerate(results):
            assert isinstance(result, list), (self.seed, index, jobs[index], result)
        return results

    def alone(self, jobs: list[Job]) -> list[list[Reading]]:
        """One after the other, each in a fresh engine with one thread."""
        outcomes = []
        for job in jobs:
            engine = self.start_engine(num_threads=1, enable_prefix_cache=False)
            config = {**job.config, "timeout_ms": 0}
            answer = engine.start_request_text("m", self.loader, job.text, config)
            _, queues = self.started(engine, job, answer)
            readings = []
            for queue in queues:
                readings.append(Reading())
                for elements in queue:
                    readings[-1].add(elements)
                readings[-1].close(queue)
            outcomes.append(readings)
        return outcomes

    def run_round(self) -> None:
        jobs = [draw_job(self.rng, self.loader.get_tokenizer()) for _ in range(ROUND)]
        self.masks.injects = self.rng.random() < 0.5
        testing.inject_step_fault(self.rng.randint(0, 200))
        together = self.round(jobs)
        testing.inject_step_fault(-1)
        self.masks.injects = False
        served = [index for index, readings in enumerate(together) if readings]
        self.met["end: denied"] += len(jobs) - len(served)
        for index, alone in zip(served, self.alone([jobs[i] for i in served]), strict=True):
            job = jobs[index]
            self.met.update(job.names())
            for got, expected in zip(together[index], alone, strict=True):
                try:
                    may_be = self.interrupts or job.config.get("num_beams", 1) > 1
                    got.check(expected, job, may_be)
                except AssertionError as error:
                    raise AssertionError(f"seed {self.seed}, request {index}: {job}") from error
                self.met[f"end: {got.end[0]}"] += 1
                self.met["fault: a step threw"] += got.end[1] == "injected fault"
        self.met["preemption"] += self.engine.get_as_engine_stat("m").num_preemptions > 0

    def held(self) -> dict[str, int]:
        """Resources that no request may keep."""
        assert self.engine.sync_request("m", timeout_ms=0) == OK
        self.engine.clear_prefix_cache("m")  # answered once the last step is over
        stat = self.engine.get_as_engine_stat("m")
        return {
            "requests": stat.running_request + stat.pending_request,
            "blocks": stat.used_span,
            "device bytes": stat.used_device_memory_pool_size,
            "threads": len(os.listdir("/proc/self/task")),
            "descriptors": len(os.listdir("/proc/self/fd")),
        }

    def wait_until_held(self, expected: dict[str, int]) -> None:
        deadline = time.monotonic() + 10  # threads that end, and queues that are collected
        while (held := self.held()) != expected and time.monotonic() < deadline:
            time.sleep(0.05)
        assert held == expected, f"seed {self.seed}"


@pytest.fixture(scope="module")
def loader(demo_model):
    loader = HuggingFaceModel(str(demo_model), "m").load_model().read_model_config()
    loader.serialize_to_memory(Engine())
    return loader


@pytest.mark.slow
@pytest.mark.timeout(0)
@pytest.mark.parametrize("mode", AsCacheMode, ids=lambda mode: mode.name)
def test_soak(loader, mode, monkeypatch):
    monkeypatch.setenv("ALLSPARK_DISABLE_WARMUP", "1")
    seed = int(os.environ.get("ALLSPARK_SOAK_SEED", str(random.randrange(10**6))))
    print(f"seed {seed}")
    masks = MaskFaults(guided._answer, seed)
    monkeypatch.setattr(guided, "_answer", masks)
    soaks = [Soak(loader, mode, seed, masks, interrupts) for interrupts in (False, True)]
    held = []
    for soak in soaks:
        soak.run_round()
        # Includes what the first guided request and the first event loop allocate.
        held.append(soak.held())
        assert held[-1]["requests"] == held[-1]["blocks"] == 0
    held[0] = soaks[0].held()  # now with the other engine's threads and descriptors

    def missing() -> set[str]:
        return everything() - set(+sum((soak.met for soak in soaks), masks.met))

    end, number = time.monotonic() + SECONDS, 0
    while time.monotonic() < end or (missing() and number < MOST_ROUNDS):
        number += 1
        soaks[number % 2].run_round()
        soaks[number % 2].wait_until_held(held[number % 2])
    print(dict(sum((soak.met for soak in soaks), masks.met)))
    assert not missing(), "the soak never met these"
