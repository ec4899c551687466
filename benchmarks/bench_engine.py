"""Shared code of the benchmarks that run only this engine, in their own process."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import machine
import record
from allspark import AsStatus, Engine, HuggingFaceModel, ResultQueue, TargetDevice
from allspark.runtime_config import AsModelRuntimeConfigBuilder, get_cache_mode_from_str
from checkpoints import SHAPES, WORK_DIR, ensure_checkpoint, ensure_with_tokenizer
from measure import MODEL, about
from ours import PRECISIONS

# Arguments that do not affect what is measured.
_NO_SETTINGS = ("json", "work_dir", "memory_dir", "program", "convert")


def make_parser(doc: str | None, rounds: int, precisions: bool = False) -> argparse.ArgumentParser:
    """The arguments that all benchmarks share; ``doc``: the script's docstring."""
    parser = argparse.ArgumentParser(description=doc.partition("\n")[0] if doc else None)
    parser.add_argument("--shape", default="0.5B", choices=SHAPES)
    if precisions:
        parser.add_argument("--precision", default="bf16", choices=PRECISIONS)
    parser.add_argument("--threads", type=int, default=0)
    add_recording(parser, rounds)
    return parser


def add_recording(parser: argparse.ArgumentParser, rounds: int, work_dir: Path = WORK_DIR) -> None:
    """The arguments of all benchmarks that a Recorder keeps; `rounds`, `work_dir`: defaults."""
    parser.add_argument("--rounds", type=int, default=rounds, help="medians are shown")
    parser.add_argument("--work-dir", type=Path, default=work_dir, help="folder of what it makes")
    parser.add_argument("--json", type=Path, help="keeps every value in this file")
    parser.add_argument("--retries", type=int, default=2, help="of what others disturbed")
    parser.add_argument(
        "--most-others", type=float, default=machine.MOST_OTHERS,
        help="part of the cores that others may take; where they took more, there is no value",
    )  # fmt: skip


class Recorder:
    """Keeps the measurements of a benchmark, in the form of record.py."""

    def __init__(self, benchmark: str, options: argparse.Namespace, about: Mapping[str, str]):
        """`about`: version and isa."""
        settings = {
            key: value.name if isinstance(value, Path) else value
            for key, value in vars(options).items()
            if key not in _NO_SETTINGS
        }
        self.record = record.begin(benchmark, **about, settings=settings)
        self._options = options

    def finish(self) -> record.Record:
        """The record, now marked complete."""
        self.record["complete"] = True
        self._write()
        return self.record

    def _write(self) -> None:
        if self._options.json is not None:
            record.write(self._options.json, self.record)

    def measure(
        self,
        number: int,
        of: Mapping[str, Any],
        function: Callable[[], Mapping[str, float]],
        begin_others: Callable[[], machine.Others] = lambda: machine.Others(in_process=True),
    ) -> None:
        """Calls the function until no other process disturbed it, and keeps what it returns. Round
        0 is a warm-up and is not kept. `begin_others`: begins to watch other processes."""
        measurement = {"round": number, "of": dict(of)}
        for _ in range(self._options.retries + 1 if number else 1):
            others = begin_others()
            values = function()
            share = others.share()
            if share <= self._options.most_others:
                measurement["values"] = dict(values)
                break
            print(f"{dict(of)}: others took {100 * share:.0f} %", file=sys.stderr, flush=True)
        else:
            measurement["disturbed"] = share
        if number > 0:
            self.record["measurements"].append(measurement)
            self._write()


class BenchEngine:
    """An engine whose failures raise exceptions."""

    def __init__(self) -> None:
        self.engine = Engine()

    def serialize(
        self, directory: Path, name: str = MODEL, precision: str = "bf16"
    ) -> HuggingFaceModel:
        """Serialises a checkpoint to an image in memory."""
        quantisation = PRECISIONS[precision].options
        loader = HuggingFaceModel(str(directory), name, user_set_data_type="bfloat16")
        loader.load_model().serialize_to_memory(
            self.engine,
            enable_quant=bool(quantisation), customized_quant_config=quantisation or None,
        ).free_model()  # fmt: skip
        return loader

    def serialize_guided(
        self, shape: str, work_dir: Path, tokenizer: Path | None
    ) -> HuggingFaceModel:
        """Serialises a checkpoint that has the tokenizer in this directory; None: one of bytes."""
        directory = work_dir / f"guided-{shape}"
        return self.serialize(ensure_with_tokenizer(shape, directory, tokenizer))

    def start(
        self, builder: AsModelRuntimeConfigBuilder, threads: int, precision: str = "bf16"
    ) -> None:
        """Installs and starts the builder's model, with a KV cache of this precision."""
        builder.num_threads(threads)
        builder.kv_cache_mode(get_cache_mode_from_str(PRECISIONS[precision].cache_mode))
        config = builder.build()
        self.expect(self.engine.install_model(config))
        self.expect(self.engine.start_model(config.model_name))

    def about(self, name: str = MODEL) -> dict[str, str]:
        return about(self.engine, name)

    def start_requests(
        self, prompts: Sequence[list[int]], configs: Iterable[Mapping[str, Any]]
    ) -> list[ResultQueue]:
        """Starts one request for each prompt; returns the queues once all have their first
        token."""
        queues = []
        for ids, config in zip(prompts, configs, strict=True):
            status, _, queue = self.engine.start_request_ids(MODEL, None, ids, dict(config))
            self.expect(status)
            queues.append(queue)
        for queue in queues:
            queue.Get()
        return queues

    def finish_requests(self, queues: Iterable[ResultQueue], num_output: int) -> None:
        """Returns when all have ended. Raises RuntimeError where one gave fewer tokens: what has
        failed seems fast."""
        self.expect(self.engine.sync_request(MODEL))
        for queue in queues:
            if (got := queue.GeneratedLength()) != num_output:
                raise RuntimeError(f"a request gave {got} of {num_output} tokens: {queue.error}")

    def expect(self, status: AsStatus) -> None:
        if status != AsStatus.ALLSPARK_SUCCESS:
            raise RuntimeError(f"{status.name}: {self.engine.last_error()}")


def about_engine(work_dir: Path) -> dict[str, str]:
    """Version and kernel table, for benchmarks that do not start a model themselves."""
    bench = BenchEngine()
    loader = bench.serialize(ensure_checkpoint("tiny", work_dir / "tiny" / "checkpoint"))
    builder = loader.create_reference_runtime_config_builder(
        MODEL, TargetDevice.CPU, max_batch=1, max_context_length=64
    )
    bench.start(builder, threads=1)
    try:
        return bench.about()
    finally:
        bench.expect(bench.engine.stop_model(MODEL))
