"""What the server costs beside the engine: a thousand streams of the demo model over HTTP.

The processor time of all threads of the server but the engine's, against that of a bare uvloop
protocol which writes as many frames of the same size, at the same pace, to as many clients.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import json
import re
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import uvloop
from bench_engine import Recorder, about_engine, add_recording
from servers import DEMO, own_server, process
from verdicts import page

HERE = Path(__file__).resolve().parent
_ENGINE_THREADS = re.compile(r"as-pool-|allspark-step")
_BARE = "bare uvloop protocol"
_OURS = "allspark serve"


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", type=Path, default=DEMO)
    parser.add_argument("--streams", type=int, default=1000)
    parser.add_argument("--output", type=int, default=256, help="tokens of each stream")
    add_recording(parser, rounds=5)
    return parser.parse_args()


class Client(asyncio.Protocol):
    """Sends one request and counts what comes."""

    def __init__(self, request: bytes, done: asyncio.Future[None]):
        self.num_frames = 0
        self.num_bytes = 0
        self._request = request
        self._done = done
        self._tail = b""

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self.num_bytes += len(data)
        self.num_frames += data.count(b"data: ")
        if b"[DONE]" in data[-64:]:
            self._transport.close()
            self._done.set_result(None)

    def connection_lost(self, error: Exception | None) -> None:
        if not self._done.done():
            self._done.set_exception(ConnectionError(f"a stream was cut off: {error}"))


async def read_streams(port: int, requests: list[bytes]) -> tuple[int, int, float]:
    """Frames, bytes and seconds of all streams together."""
    loop = asyncio.get_running_loop()
    begin = time.perf_counter()
    clients, ends = [], []
    for request in requests:
        end = loop.create_future()
        _, client = await loop.create_connection(
            functools.partial(Client, request, end), "127.0.0.1", port
        )
        clients.append(client)
        ends.append(end)
    await asyncio.gather(*ends)
    seconds = time.perf_counter() - begin
    return sum(c.num_frames for c in clients), sum(c.num_bytes for c in clients), seconds


def post(path: str, body: Mapping[str, Any]) -> bytes:
    data = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(data)}\r\n\r\n"
    )
    return head.encode() + data


def thread_seconds(pid: int) -> dict[str, float]:
    """The processor time of a process: of the engine's threads, and of all others."""
    found = {"engine": 0.0, "other": 0.0}
    for task in Path(f"/proc/{pid}/task").iterdir():
        name = (task / "comm").read_text()
        nanoseconds = int((task / "schedstat").read_text().split()[0])
        found["engine" if _ENGINE_THREADS.match(name) else "other"] += nanoseconds / 1e9
    return found


class Bench:
    def __init__(self, options: argparse.Namespace):
        self.options = options
        body = {
            "model": "demo",
            "messages": [{"role": "user", "content": "Count from one."}],
            "max_tokens": options.output,
            "ignore_eos": True,
            "stream": True,
        }
        self._requests = [
            post("/v1/chat/completions", {**body, "seed": seed}) for seed in range(options.streams)
        ]
        self._frames = self._bytes = 0
        self._seconds = 0.0

    def serve(self) -> dict[str, float]:
        streams = str(self.options.streams)
        with own_server(f"{self.options.model}=demo", "--max-batch-size", streams) as (pid, port):
            asyncio.run(read_streams(port, self._requests[:8]))  # what is imported at first use
            values = self._measure(pid, port)
        self._frames, self._bytes = int(values["frames"]), int(values["bytes"])
        self._seconds = values["seconds"]
        return values

    def bare(self) -> dict[str, float]:
        """As the last measurement of the server: the same frames in the same time."""
        streams = self.options.streams
        per_stream = self._frames // streams
        frame_bytes = self._bytes // self._frames
        pace = self._seconds / per_stream
        command = [
            sys.executable, str(HERE / "bare_streams.py"),
            str(streams), str(per_stream), str(frame_bytes), str(pace),
        ]  # fmt: skip
        with process(command) as (pid, port):
            return self._measure(pid, port)

    def _measure(self, pid: int, port: int) -> dict[str, float]:
        before = thread_seconds(pid)
        frames, size, seconds = asyncio.run(read_streams(port, self._requests))
        after = thread_seconds(pid)
        other = after["other"] - before["other"]
        return {
            "frames": frames,
            "bytes": size,
            "seconds": seconds,
            "engine_s": after["engine"] - before["engine"],
            "other_s": other,
            "us_per_frame": 1e6 * other / frames,
        }


def main() -> None:
    options = parse_arguments()
    uvloop.install()
    bench = Bench(options)
    recorder = Recorder("http_streams", options, about_engine(options.work_dir))
    for number in range(options.rounds + 1):  # round 0 warms up
        recorder.measure(number, {"server": _OURS}, bench.serve)
        recorder.measure(number, {"server": _BARE}, bench.bare)
    print("\n".join(page(recorder.finish())))


if __name__ == "__main__":
    main()
