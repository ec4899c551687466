"""How soon the server answers, and what memory it takes beside the engine.

`server`: from starting `allspark serve` until it has answered a request for a few tokens; its
resident memory is then read. `engine`: the same model with the same settings in a process that has
the engine alone, and gives it token ids.
"""

from __future__ import annotations

import argparse
import http.client
import json
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from bench_engine import Recorder, about_engine, add_recording
from servers import DEMO, own_server
from verdicts import page

_BATCH = 64
_OUTPUT = 8


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", type=Path, default=DEMO, help="a folder in Hugging Face layout")
    parser.add_argument("--rounds", type=int, default=5, help="medians are shown")
    parser.add_argument("--work-dir", type=Path, default=Path("/tmp/allspark-bench"))
    parser.add_argument("--engine", action="store_true", help=argparse.SUPPRESS)
    add_recording(parser)
    return parser.parse_args()


def resident_mb(pid: int | str) -> float:
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
    command = [sys.executable, __file__, "--engine", "--model", str(model)]
    result = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True)
    found: dict[str, float] = json.loads(result.stdout.splitlines()[-1])
    return found


def run_engine(model: Path) -> None:
    """Prints what `engine` measures, of this process."""
    begin = time.perf_counter()
    from allspark import AsStatus, Engine, HuggingFaceModel, TargetDevice

    core = Engine()
    loader = HuggingFaceModel(str(model), "bench").load_model().read_model_config()
    loader.serialize_to_memory(core).free_model()
    builder = loader.create_reference_runtime_config_builder(
        "bench", TargetDevice.CPU, max_batch=_BATCH
    )
    builder.max_length(loader.get_model_context_length())
    for status in (core.install_model(builder.build()), core.start_model("bench")):
        if status != AsStatus.ALLSPARK_SUCCESS:
            raise RuntimeError(core.last_error())
    up_s = time.perf_counter() - begin
    config = {"max_new_tokens": _OUTPUT, "do_sample": False}
    _, handle, _ = core.start_request_ids("bench", None, [3] * 16, config)
    core.sync_request("bench", handle)
    start_s = time.perf_counter() - begin
    memory = resident_mb("self")
    print(json.dumps({"up_s": up_s, "start_s": start_s, "rss_mb": memory}))
    core.stop_model("bench")


def main() -> None:
    options = parse_arguments()
    if options.engine:
        run_engine(options.model)
        return
    recorder = Recorder("server_start", options, about_engine(options.work_dir))
    for number in range(options.rounds + 1):  # round 0 warms the page cache
        for name, measure in (("engine", engine), ("server", server)):
            recorder.measure(number, {"process": name}, lambda f=measure: f(options.model))  # type: ignore[misc]
    print("\n".join(page(recorder.finish())))


if __name__ == "__main__":
    main()
