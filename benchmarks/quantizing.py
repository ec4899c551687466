"""What quantising with calibration takes: this engine's `awq+gptq` against llm-compressor's GPTQ,
to 4 bits in groups of 64, on the same tokens of a checkpoint of random weights.

llm-compressor loads the checkpoint in float32, in another run in bfloat16. Time and memory are
those of whole processes. `half of the layers`: this engine's memory must not grow with them.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
from allspark import HuggingFaceModel
from allspark.eval.files import to_texts
from allspark.quantize.calibration import read_ids
from bench_engine import Recorder, about_engine, make_parser
from checkpoints import SHAPES, Shape, ensure_checkpoint
from machine import Others
from peers.base import TORCH, Engine, run_command
from tables import HALF, OWN, PEERS
from verdicts import page
from workloads import shared_data

_ORACLES = Path(__file__).resolve().parents[1] / "tests" / "python" / "oracles"
# Runs a module or a script, and says what that took. The peak is that of this program alone:
# getrusage counts the memory of the process that started it, too.
_WATCHED = """
import json, runpy, sys, time
begin, (program, *sys.argv[1:]) = time.perf_counter(), sys.argv[1:]
sys.argv[0] = program
run = runpy.run_path if program.endswith(".py") else runpy.run_module
try:
    run(program, run_name="__main__")
except SystemExit as end:
    if end.code:
        raise
(peak,) = (line for line in open("/proc/self/status") if line.startswith("VmHWM:"))
values = {"s": time.perf_counter() - begin, "peak_mb": int(peak.split()[1]) * 1024 / 1e6}
print("\\n" + json.dumps(values))
"""


class LlmCompressor(Engine):
    name = "llm-compressor"
    packages = ((TORCH,), ("llmcompressor==0.14.0.1",))


def parse_arguments() -> argparse.Namespace:
    parser = make_parser(__doc__, rounds=1)
    parser.add_argument("--layers", type=int, default=0, help="0: those of the shape")
    parser.add_argument("--samples", type=int, default=128, help="sequences of calibration text")
    parser.add_argument("--length", type=int, default=512, help="tokens of each")
    text = shared_data() / "text" / "wikitext2_valid.txt"
    parser.add_argument("--text", type=Path, default=text)
    parser.add_argument("--own", action="store_true", help="without the peer")
    return parser.parse_args()


class Bench:
    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._folder: Path = options.work_dir / f"quantizing-{options.shape}"
        shape = SHAPES[options.shape]
        shape = replace(shape, num_layers=options.layers or shape.num_layers)
        half = replace(shape, num_layers=shape.num_layers // 2)
        shapes = {OWN: shape, HALF: half}
        self._checkpoints = {name: self._written(each) for name, each in shapes.items()}
        self._threads = options.threads or len(os.sched_getaffinity(0))
        if not options.own:
            self._peer = LlmCompressor(options.work_dir / "peers" / LlmCompressor.name)
            self._peer.install()
            loader = HuggingFaceModel(str(self._checkpoints[OWN]), "ids")
            texts = to_texts([options.text])
            ids = read_ids(loader, texts, options.samples, options.length)
            np.save(self._folder / "ids.npy", ids)

    def _written(self, shape: Shape) -> Path:
        return ensure_checkpoint(shape, self._folder / f"{shape.num_layers}-layers")

    def own(self, name: str) -> dict[str, float]:
        options = self._options
        return self._run(
            Path(sys.executable), "allspark.cli", "quantize", self._checkpoints[name],
            "--output", self._folder / "out", "--calib", options.text,
            "--calib-samples", options.samples, "--calib-seqlen", options.length,
            "--threads", self._threads,
        )  # fmt: skip

    def peer(self, dtype: str) -> dict[str, float]:
        return self._run(
            self._peer.python, _ORACLES / "gptq_of_ids.py", self._checkpoints[OWN],
            self._folder / "ids.npy", self._folder / "out", dtype,
        )  # fmt: skip

    def _run(self, python: Path, *command: object) -> dict[str, float]:
        shutil.rmtree(self._folder / "out", ignore_errors=True)
        environment = {**os.environ, "OMP_NUM_THREADS": str(self._threads)}
        said = run_command([python, "-c", _WATCHED, *map(str, command)], 4 * 3600, env=environment)
        values: dict[str, float] = json.loads(said.splitlines()[-1])
        return values


def main() -> None:
    options = parse_arguments()
    bench = Bench(options)
    recorder = Recorder("quantizing", options, about_engine(options.work_dir))
    for number in range(1, options.rounds + 1):
        runs = {name: functools.partial(bench.own, name) for name in (OWN, HALF)}
        if not options.own:
            runs |= {name: functools.partial(bench.peer, dtype) for name, dtype in PEERS.items()}
        for name, run in runs.items():
            recorder.measure(number, {"program": name}, run, Others)
    print("\n".join(page(recorder.finish())))


if __name__ == "__main__":
    main()
