"""What every measured engine does the same way: read a job, serve its requests, print the times.

A worker runs in the engine's own environment, so this file needs the standard library alone. It
notes when tokens came and judges nothing: report.py makes figures of the times, the same way for
every engine.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from collections.abc import Callable
from typing import Any, Protocol

from peers.base import EngineError

# {"ids": [...], "num_output": n}
Request = dict[str, Any]


class Timeline:
    """One request: when it was handed over, and when how many tokens came."""

    def __init__(self) -> None:
        self.begin = time.perf_counter()
        self.times: list[float] = []
        self.counts: list[int] = []

    def add(self, num_tokens: int) -> None:
        if num_tokens > 0:
            self.times.append(time.perf_counter())
            self.counts.append(num_tokens)


class Server(Protocol):
    """An engine with its model, ready."""

    remarks: list[str]  # What the report is to say of how it was run.

    def serve(self, requests: list[Request]) -> list[Timeline]:
        """Hands all over at once, greedy and without ends; returns when the last has ended."""

    def cpu_seconds(self) -> float:
        """Processor time used since the start."""

    def close(self) -> None: ...


class InProcess:
    """What a server has that computes in the worker's own process."""

    remarks: list[str] = []

    def cpu_seconds(self) -> float:
        return time.process_time()

    def close(self) -> None:
        pass


def peak_rss_mb() -> float:
    """Of this process or, where that is more, of the largest child that has ended."""
    users = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    return max(resource.getrusage(user).ru_maxrss for user in users) * 1024 / 1e6


def check(timeline: Timeline, request: Request) -> None:
    got, wanted = sum(timeline.counts), request["num_output"]
    if got != wanted:
        raise RuntimeError(f"a request gave {got} of {wanted} tokens")


def measure(server: Server, job: dict[str, Any]) -> dict[str, Any]:
    """Serves the waves of a job after requests of every size among them, which do not count."""
    server.serve(job["warm_up"])
    cpu_begin, begin = server.cpu_seconds(), time.perf_counter()
    timelines: list[Timeline] = []
    for wave in job["waves"]:
        served = server.serve(wave)
        for timeline, request in zip(served, wave, strict=True):
            check(timeline, request)
        timelines += served
    cpu_s = server.cpu_seconds() - cpu_begin
    seconds = max(timeline.times[-1] for timeline in timelines) - begin
    return {
        "core_share": cpu_s / (seconds * job["threads"]),
        "requests": [
            {
                "begin": timeline.begin - begin,
                "times": [moment - begin for moment in timeline.times],
                "counts": timeline.counts,
            }
            for timeline in timelines
        ],
    }


def run_job(load: Callable[[dict[str, Any]], Server], job: dict[str, Any]) -> dict[str, Any]:
    begin = time.perf_counter()
    server = load(job)
    load_s = time.perf_counter() - begin
    try:
        result = measure(server, job)
    finally:
        server.close()  # Before the memory is read: a child counts once it has ended.
    remarks = {"remarks": server.remarks}
    return {"load_s": load_s, "rss_mb": peak_rss_mb(), **remarks, **result}


def main(load: Callable[[dict[str, Any]], Server]) -> None:
    """The job is on stdin; the answer is the last line of stdout."""
    try:
        result = run_job(load, json.load(sys.stdin))
    except EngineError as error:
        sys.exit(str(error))  # The reason alone, which the report shows.
    print("\n" + json.dumps(result), flush=True)
    # Some engines hang or crash when the interpreter takes them down; what counts is said.
    os._exit(0)
