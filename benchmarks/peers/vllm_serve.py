"""vLLM's CPU build behind its OpenAI server."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from peers.http_worker import HttpServer
from peers.vllm import Vllm
from peers.worker import main


class VllmServe(Vllm):
    name = "vllm-serve"
    is_server = True

    def __init__(self, home: Path) -> None:
        super().__init__(home.with_name(Vllm.name))  # the same installation


class Server(HttpServer):
    name = "vLLM's server"
    start_s = 280.0  # it compiles

    def command(self, job: dict[str, Any], port: int) -> list[str]:
        return [
            sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", job["model"],
            "--served-model-name", "bench", "--host", "127.0.0.1", "--port", str(port),
            "--dtype", "bfloat16", "--max-model-len", str(job["max_length"]),
            "--max-num-seqs", str(max(64, job["max_batch"])), "--enable-prefix-caching",
        ]  # fmt: skip


if __name__ == "__main__":
    main(Server)
