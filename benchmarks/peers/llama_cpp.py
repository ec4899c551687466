"""llama.cpp's own server, built for this processor from the sources in llama-cpp-python's sdist."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import tarfile
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from peers.base import Engine, EngineError, Precision, ProgramEnded, last_lines, run_command
from peers.worker import Request, Timeline, main

_SDIST = "llama-cpp-python==0.3.36"
_NAME = "llama-server"
_START_S = 120
_END_S = 5  # From a broken connection to the end of the server's process.
# Signals with which its repacked weights (Q4_0, Q8_0) crash on some processors, e.g. with AMX.
_REPACK_SIGNALS = (signal.SIGSEGV, signal.SIGILL)


class LlamaCpp(Engine):
    name = "llama.cpp"
    # Bits as in its formats. A Q4_0 file stores a tied embedding in more bits: in Q8_0, or in Q6_K
    # if the rows are multiples of 256. Weights of 8 and 4 bits are multiplied by 8-bit activations.
    precisions = {
        "Q4_0": Precision(4.5, 8.5, "int8_gop_s"),
        "Q8_0": Precision(8.5, 8.5, "int8_gop_s"),
        "BF16": Precision(16, 16, "bf16_gflop_s"),
    }
    packages = (("numpy", "gguf", "cmake", "ninja"),)

    def _program(self, name: str) -> Path:
        return self.home / "build" / "bin" / name

    def build(self) -> None:
        source = self.home / "source"
        if not source.is_dir():
            pip = (self.python, "-m", "pip", "download", "-q", "--no-deps", "--no-binary", ":all:")
            run_command([*pip, "--dest", self.home, _SDIST])
            (archive,) = self.home.glob("*.tar.gz")
            with tarfile.open(archive) as file:
                file.extractall(source, filter="data")
        (llama,) = source.glob("*/vendor/llama.cpp")
        # Without its web interface, which the build would download.
        off = ("LLAMA_USE_PREBUILT_UI", "LLAMA_BUILD_UI", "LLAMA_BUILD_TESTS", "LLAMA_OPENSSL")
        flags = ["-DCMAKE_BUILD_TYPE=Release", "-DGGML_NATIVE=ON", *(f"-D{x}=OFF" for x in off)]
        tools = self.home / "venv" / "bin"
        path = {**os.environ, "PATH": f"{tools}:{os.environ['PATH']}"}
        build = self.home / "build"
        run_command([tools / "cmake", "-S", llama, "-B", build, "-G", "Ninja", *flags], env=path)
        targets = ("--target", "llama-server", "llama-quantize")
        parallel = str(len(os.sched_getaffinity(0)))
        run_command([tools / "cmake", "--build", build, "--parallel", parallel, *targets], env=path)

    def prepare(self, checkpoint: Path, precision: str, model: Path) -> None:
        model.mkdir(parents=True, exist_ok=True)
        whole = self.home / f"{checkpoint.parent.name}-bf16.gguf"
        convert = Path(__file__).with_name("gguf_writer.py")
        run_command([self.python, convert, checkpoint, whole])
        quantize = [self._program("llama-quantize"), whole, model / "model.gguf", precision]
        run_command(quantize)
        whole.unlink()

    def environment(self) -> dict[str, str]:
        return {"LLAMA_SERVER": str(self._program("llama-server"))}


class Server:
    def __init__(self, job: dict[str, Any]) -> None:
        self.remarks: list[str] = []
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._port = free.getsockname()[1]
        threads, slots = str(job["threads"]), job["max_batch"]
        # The slots share one context; a slot must hold the longest request.
        slot_tokens = -(-job["max_length"] // 256) * 256
        command = [
            os.environ["LLAMA_SERVER"], "-m", f"{job['model']}/model.gguf",
            "--port", str(self._port), "-t", threads, "-tb", threads, "-np", str(slots),
            "-c", str(slots * slot_tokens), "-b", "2048", "-ub", "512", "-fa", "on",
            "--no-kv-unified", "--cache-ram", "0",
        ]  # fmt: skip
        try:
            self._start(command)
        except ProgramEnded as error:
            if error.signal not in _REPACK_SIGNALS:
                raise
            self._start([*command, "--no-repack"])
            self.remarks.append(f"served with --no-repack; without it, {error}")

    def _start(self, command: list[str]) -> None:
        """Returns when the server has answered a request; otherwise raises EngineError with the
        reason."""
        # To a file: nobody reads while the server runs, and a pipe would fill up.
        self._log = tempfile.TemporaryFile("w+", errors="replace")
        self._process = subprocess.Popen(command, stdout=self._log, stderr=subprocess.STDOUT)
        end = time.monotonic() + _START_S
        try:
            while not self._is_healthy():
                if self._process.poll() is not None:
                    raise self._ended()
                if time.monotonic() > end:
                    said = f"its last lines: {last_lines(self._said())}"
                    raise EngineError(f"{_NAME} did not start within {_START_S} s; {said}")
                time.sleep(0.05)
            # If this processor cannot run a kernel, the server dies here and not in the workload.
            self.serve([{"ids": [3] * 40, "num_output": 2}])
        except EngineError:
            self.close()
            raise

    def _said(self) -> str:
        self._log.seek(0)
        return self._log.read()

    def _ended(self) -> ProgramEnded:
        return ProgramEnded(_NAME, self._process.wait(), self._said())

    def _connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self._port)

    def _is_healthy(self) -> bool:
        connection = self._connect()
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status == 200
        except OSError:
            return False
        finally:
            connection.close()

    def serve(self, requests: list[Request]) -> list[Timeline]:
        timelines = [Timeline() for _ in requests]
        threads = [
            threading.Thread(target=self._stream, args=pair)
            for pair in zip(requests, timelines, strict=True)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        wanted = sum(request["num_output"] for request in requests)
        if sum(sum(timeline.counts) for timeline in timelines) < wanted:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_END_S)
                raise self._ended()
        return timelines

    def _stream(self, request: Request, timeline: Timeline) -> None:
        body = {
            "prompt": request["ids"], "n_predict": request["num_output"], "stream": True,
            "ignore_eos": True, "samplers": ["top_k"], "top_k": 1, "return_tokens": True,
        }  # fmt: skip
        connection = self._connect()
        headers = {"Content-Type": "application/json"}
        # If the server dies, the connection breaks; serve notices it by the missing tokens.
        with contextlib.suppress(OSError, http.client.HTTPException):
            connection.request("POST", "/completion", json.dumps(body), headers)
            for line in connection.getresponse():
                if line.startswith(b"data: "):
                    event = json.loads(line[6:])
                    # Incomplete characters are held back; the last event has the number of tokens.
                    missing = event.get("tokens_predicted", 0) - sum(timeline.counts)
                    timeline.add(missing if event.get("stop") else len(event.get("tokens", ())))
        connection.close()

    def cpu_seconds(self) -> float:
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def close(self) -> None:
        # When asked to end, it sometimes waits forever; it has nothing to save.
        self._process.kill()
        self._process.wait()
        self._log.close()


if __name__ == "__main__":
    main(Server)
