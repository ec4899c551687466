"""The common part of all workers: read a job, serve its requests, print the times.

A worker runs in the engine's own environment, so this file needs only the standard library. It
notes when tokens came and computes nothing: report.py makes figures from the times, in the same way
for every engine.
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
    """One request: when it was started, and when how many tokens came."""

    def __init__(self) -> None:
        self.begin = time.perf_counter()
        self.times: list[float] = []
        self.counts: list[int] = []

    def add(self, num_tokens: int, moment: float | None = None) -> None:
        """Notes tokens that came at `moment`; None: now."""
        if num_tokens > 0:
            self.times.append(time.perf_counter() if moment is None else moment)
            self.counts.append(num_tokens)


class Server(Protocol):
    """An engine with its model, ready."""

    remarks: list[str]  # What the report must say about how it was run.

    def serve(self, requests: list[Request]) -> list[Timeline]:
        """Starts all at once, greedy and without EOS; returns when the last has ended."""

    def cpu_seconds(self) -> float:
        """Processor time used since the start."""

    def later_s(self, request: Request) -> float | None:
        """How much later than its engine a client has the first token of a request that comes
        alone; None if it does not say."""

    def close(self) -> None: ...


class InProcess:
    """The common part of servers that compute in the worker's own process."""

    remarks: list[str] = []

    def cpu_seconds(self) -> float:
        return time.process_time()

    def later_s(self, request: Request) -> float | None:
        return None

    def close(self) -> None:
        pass


def peak_rss_mb() -> float:
    """The peak of this process or, if larger, of the largest child that has ended."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    return max(_own_peak_kib(), children) * 1024 / 1e6


def _own_peak_kib() -> int:
    """Of this program alone: getrusage counts the memory of the process that started it, too."""
    with open("/proc/self/status") as status:
        for line in status:
            if line.startswith("VmHWM:"):
                return int(line.split()[1])
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def check(timeline: Timeline, request: Request) -> None:
    got, wanted = sum(timeline.counts), request["num_output"]
    if got != wanted:
        raise RuntimeError(f"a request gave {got} of {wanted} tokens")


def measure(server: Server, job: dict[str, Any]) -> dict[str, Any]:
    """Serves the job's waves, after uncounted warm-up requests: of every size among them, and as
    many at once."""
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
    later_s = server.later_s(job["waves"][0][0])
    return {
        **({} if later_s is None else {"ttft_later_s": later_s}),
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
        server.close()  # Before reading the memory: a child counts only once it has ended.
    remarks = {"remarks": server.remarks}
    return {"load_s": load_s, "rss_mb": peak_rss_mb(), **remarks, **result}


def main(load: Callable[[dict[str, Any]], Server]) -> None:
    """Reads the job from stdin; the answer is the last line of stdout."""
    try:
        result = run_job(load, json.load(sys.stdin))
    except EngineError as error:
        sys.exit(str(error))  # Only the reason, which the report shows.
    print("\n" + json.dumps(result), flush=True)
    # Some engines hang or crash at interpreter exit; the result is already printed.
    os._exit(0)
