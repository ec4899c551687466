"""One measurement of this engine's server in a process of its own, as measure.py measures the
engine."""

from __future__ import annotations

import json
import sys
from typing import Any

import measure
from peers.http_worker import HttpServer
from peers.worker import run_job


class Server(HttpServer):
    name = "allspark serve"

    def command(self, job: dict[str, Any], port: int) -> list[str]:
        return [
            sys.executable, "-m", "allspark.cli", "serve", f"{job['model']}=bench",
            "--server-name", "127.0.0.1", "--server-port", str(port),
            "--threads", str(job["threads"]), "--max-batch-size", str(job["max_batch"]),
            "--session-len", str(job["max_length"]),
        ]  # fmt: skip


if __name__ == "__main__":
    job = json.load(sys.stdin)
    if job["task"] == "requests":
        print("\n" + json.dumps(run_job(Server, job)), flush=True)
    else:
        print(json.dumps(measure.TASKS[job["task"]](job)), flush=True)
