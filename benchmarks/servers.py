"""Servers that say their port when they are up: this engine's, and what it is compared with."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from peers.process_tree import end_with_parent

DEMO = Path(__file__).resolve().parents[1] / "examples" / "demo_model"
_LAST_LINES = 20


@contextmanager
def process(command: list[str]) -> Iterator[tuple[int, int]]:
    """Runs a server that prints its port; its pid and the port."""
    # A benchmark that is killed leaves no server behind.
    server = subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, preexec_fn=end_with_parent
    )
    assert server.stderr is not None
    last: deque[str] = deque(maxlen=_LAST_LINES)
    try:
        for line in server.stderr:
            last.append(line)
            if found := re.search(r" on \S+:(\d+)", line):
                # A pipe that nobody reads would hold up a server with much to say.
                threading.Thread(target=deque, args=(server.stderr, 0), daemon=True).start()
                yield server.pid, int(found[1])
                break
        else:
            status = server.wait()
            raise RuntimeError(f"{command[2]} ended with status {status}:\n{''.join(last)}")
    finally:
        server.terminate()
        server.wait()


def own_server(model: str, *flags: str) -> AbstractContextManager[tuple[int, int]]:
    """`allspark serve` at a free port."""
    command = [sys.executable, "-m", "allspark.cli", "serve", model]
    local = ["--server-name", "127.0.0.1", "--server-port", "0"]
    return process([*command, *local, *flags])
