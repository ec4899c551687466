"""Servers that say their port when they are up: this engine's, and what it is compared with."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

DEMO = Path(__file__).resolve().parents[1] / "examples" / "demo_model"


@contextmanager
def process(command: list[str]) -> Iterator[tuple[int, int]]:
    """Runs a server that prints its port; its pid and the port."""
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert server.stderr is not None
    try:
        for line in server.stderr:
            if found := re.search(r" on \S+:(\d+)", line):
                yield server.pid, int(found[1])
                break
        else:
            raise RuntimeError(f"{command[2]} ended with status {server.wait()}")
    finally:
        server.terminate()
        server.wait()


def own_server(model: str, *flags: str) -> AbstractContextManager[tuple[int, int]]:
    """`allspark serve` at a free port."""
    command = [sys.executable, "-m", "allspark.cli", "serve", model]
    local = ["--server-name", "127.0.0.1", "--server-port", "0"]
    return process([*command, *local, *flags])
