"""One measurement of this engine's server in a process of its own, as measure.py measures the
engine."""

from __future__ import annotations

import json
import re
import sys
import urllib.request
from typing import Any

import measure
from allspark.pipeline.served_model import CACHE_MODES
from peers.http_worker import HttpServer
from peers.worker import Request, run_job

_ALONE = 5  # requests
_CACHE_BITS = {mode.name: bits for bits, mode in CACHE_MODES.items()}


def sum_of(text: str, name: str) -> float:
    """The sum of a metric's values over its labels, in Prometheus' text format."""
    return sum(map(float, re.findall(rf"^{name}(?:{{.*}})? (\S+)", text, re.MULTILINE)))


class Server(HttpServer):
    name = "allspark serve"

    def command(self, job: dict[str, Any], port: int) -> list[str]:
        return [
            sys.executable, "-m", "allspark.cli", "serve", f"{job['model']}=bench",
            "--server-name", "127.0.0.1", "--server-port", str(port),
            "--threads", str(job["threads"]), "--max-batch-size", str(job["max_batch"]),
            "--session-len", str(job["max_length"]), "--prefill-chunk", str(job["chunk"]),
            "--kv-cache-bits", str(_CACHE_BITS[job["cache_mode"]]),
        ]  # fmt: skip

    def later_s(self, request: Request) -> float:
        before, clients = self._engine_ttft_s(), 0.0
        for number in range(_ALONE):
            begin = number + 1
            ids = request["ids"][begin:] + request["ids"][:begin]  # Not in the prefix cache.
            (timeline,) = self.serve([{"ids": ids, "num_output": 2}])
            clients += timeline.times[0] - timeline.begin
        return (clients - (self._engine_ttft_s() - before)) / _ALONE

    def _engine_ttft_s(self) -> float:
        """The sum of the times to first token that the engine measured."""
        url = f"http://127.0.0.1:{self._port}/metrics"
        with urllib.request.urlopen(url, timeout=60) as answer:
            return sum_of(answer.read().decode(), "allspark_time_to_first_token_seconds_sum")


if __name__ == "__main__":
    job = json.load(sys.stdin)
    if job["task"] == "requests":
        print("\n" + json.dumps(run_job(Server, job)), flush=True)
    else:
        print(json.dumps(measure.TASKS[job["task"]](job)), flush=True)
