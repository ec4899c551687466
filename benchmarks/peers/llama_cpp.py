"""llama.cpp's own server, built for this processor from the sources in llama-cpp-python's sdist."""

from __future__ import annotations

import os
import signal
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from peers.base import Engine, Precision, ProgramEnded, run_command
from peers.http_worker import HttpServer
from peers.worker import Request, Timeline, main

_SDIST = "llama-cpp-python==0.3.36"
# Signals with which its repacked weights (Q4_0, Q8_0) crash on some processors, e.g. with AMX.
_REPACK_SIGNALS = (signal.SIGSEGV, signal.SIGILL)

# Flags and type of llama-quantize where the type is not the precision. It has MXFP4 for experts
# only, unless every tensor gets one type.
_QUANTIZE = {"MXFP4": (("--pure", "--token-embedding-type", "q8_0"), "MXFP4_MOE")}


class LlamaCpp(Engine):
    name = "llama.cpp"
    # Bits as in its formats. A Q4_0 file stores a tied embedding in more bits: in Q8_0, or in Q6_K
    # if the rows are multiples of 256. Weights of 8 and 4 bits are multiplied by 8-bit activations.
    precisions = {
        "Q4_0": Precision(4.5, 8.5, "int8_gop_s"),
        "Q8_0": Precision(8.5, 8.5, "int8_gop_s"),
        "BF16": Precision(16, 16, "bf16_gflop_s"),
        # The value and down projections of half of the layers are Q6_K, as the head is.
        "Q4_K_M": Precision(4.8, 6.56, "int8_gop_s", only_by_name=True),
        "MXFP4": Precision(4.25, 8.5, "int8_gop_s", only_by_name=True),
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

    def versions(self) -> list[str]:
        return [*super().versions(), *(sources.name for sources in self.home.glob("*.tar.gz"))]

    def prepare(self, checkpoint: Path, precision: str, model: Path) -> None:
        model.mkdir(parents=True, exist_ok=True)
        whole = self.home / f"{checkpoint.parent.name}-bf16.gguf"
        convert = Path(__file__).with_name("gguf_writer.py")
        run_command([self.python, convert, checkpoint, whole])
        flags, kind = _QUANTIZE.get(precision, ((), precision))
        program = self._program("llama-quantize")
        made = model / "unfinished.gguf"  # This engine is given the file as soon as it is there.
        run_command([program, *flags, whole, made, kind])
        made.replace(self.file(model))
        whole.unlink()

    @staticmethod
    def file(model: Path) -> Path:
        return model / "model.gguf"

    def environment(self, job: Mapping[str, Any]) -> dict[str, str]:
        return {"LLAMA_SERVER": str(self._program("llama-server"))}


class Server(HttpServer):
    name = "llama-server"
    path = "/completion"

    def command(self, job: dict[str, Any], port: int) -> list[str]:
        threads, slots = str(job["threads"]), job["max_batch"]
        # The slots share one context; a slot must hold the longest request.
        slot_tokens = -(-job["max_length"] // 256) * 256
        return [
            os.environ["LLAMA_SERVER"], "-m", f"{job['model']}/model.gguf",
            "--port", str(port), "-t", threads, "-tb", threads, "-np", str(slots),
            "-c", str(slots * slot_tokens), "-b", "2048", "-ub", "512", "-fa", "on",
            "--no-kv-unified", "--cache-ram", "0",
        ]  # fmt: skip

    def start(self, command: list[str]) -> None:
        try:
            super().start(command)
        except ProgramEnded as error:
            if error.signal not in _REPACK_SIGNALS:
                raise
            super().start([*command, "--no-repack"])
            self.remarks.append(f"served with --no-repack; without it, {error}")

    def body(self, request: Request) -> dict[str, Any]:
        return {
            "prompt": request["ids"], "n_predict": request["num_output"], "stream": True,
            "ignore_eos": True, "samplers": ["top_k"], "top_k": 1, "return_tokens": True,
        }  # fmt: skip

    def num_tokens(self, event: dict[str, Any], timeline: Timeline) -> int:
        # Incomplete characters are held back; the last event has the number of tokens.
        if event.get("stop"):
            return int(event.get("tokens_predicted", 0)) - sum(timeline.counts)
        return len(event.get("tokens", ()))


if __name__ == "__main__":
    main(Server)
