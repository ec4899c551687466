"""How soon the server answers, and what memory it takes beside the engine.

`server`: from starting `allspark serve` until it has answered a request for a few tokens; its
resident memory is then read. `engine alone`: the same of engine_start.py, a process that gives the
same model with the same settings token ids, and imports nothing but the package.
"""

from __future__ import annotations

import argparse
import http.client
import json
import re
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from bench_engine import Recorder, about_engine, add_recording
from peers.process_tree import end_with_parent
from servers import DEMO, own_server
from verdicts import page

_BATCH = 64
_OUTPUT = 8
_ENGINE = Path(__file__).with_name("engine_start.py")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", type=Path, default=DEMO, help="a folder in Hugging Face layout")
    add_recording(parser, rounds=5)
    return parser.parse_args()


def resident_mb(pid: int) -> float:
    """The resident memory of a process."""
    status = Path(f"/proc/{pid}/status").read_text()
    (found,) = re.findall(r"VmRSS:\s+(\d+) kB", status)
    return 1024 * int(found) / 1e6


def ask(port: int) -> None:
    """Raises RuntimeError where the server does not answer a request."""
    body: dict[str, Any] = {
        "model": "bench", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": _OUTPUT,
    }  # fmt: skip
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    headers = {"Content-Type": "application/json"}
    connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
    answer = connection.getresponse()
    text = answer.read()
    connection.close()
    if answer.status != 200:
        raise RuntimeError(f"the server answers {answer.status}: {text[:200]!r}")


def server(model: Path) -> dict[str, float]:
    begin = time.perf_counter()
    with own_server(f"{model}=bench", "--max-batch-size", str(_BATCH)) as (pid, port):
        up_s = time.perf_counter() - begin
        ask(port)
        start_s = time.perf_counter() - begin
        return {"up_s": up_s, "start_s": start_s, "rss_mb": resident_mb(pid)}


def engine(model: Path) -> dict[str, float]:
    command = [sys.executable, str(_ENGINE), str(model), str(_BATCH), str(_OUTPUT)]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    begin = time.perf_counter()
    with subprocess.Popen(command, **pipes, preexec_fn=end_with_parent) as process:
        up_s, start_s = (said(process.stdout, word) - begin for word in ("up", "answered"))
        return {"up_s": up_s, "start_s": start_s, "rss_mb": resident_mb(process.pid)}


def said(lines: Iterable[str] | None, word: str) -> float:
    """When the process said this word. Raises RuntimeError if it ended before."""
    for line in lines or ():
        if line.rstrip() == word:
            return time.perf_counter()
    raise RuntimeError(f"{_ENGINE.name} ended before it was {word}")


def main() -> None:
    options = parse_arguments()
    recorder = Recorder("server_start", options, about_engine(options.work_dir))
    for number in range(options.rounds + 1):  # round 0 warms the page cache
        for name, measure in (("engine alone", engine), ("server", server)):
            recorder.measure(number, {"process": name}, lambda f=measure: f(options.model))  # type: ignore[misc]
    print("\n".join(page(recorder.finish())))


if __name__ == "__main__":
    main()
