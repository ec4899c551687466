"""What the benchmarks share that run this engine alone, in their own process."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from allspark import AsStatus, Engine, HuggingFaceModel, ResultQueue
from allspark.runtime_config import AsModelRuntimeConfigBuilder, get_cache_mode_from_str
from checkpoints import SHAPES
from ours import PRECISIONS

MODEL = "bench"


def make_parser(doc: str | None, rounds: int, precisions: bool = False) -> argparse.ArgumentParser:
    """The arguments that all have; ``doc``: the script's own."""
    parser = argparse.ArgumentParser(description=doc.partition("\n")[0] if doc else None)
    parser.add_argument("--shape", default="0.5B", choices=SHAPES)
    if precisions:
        parser.add_argument("--precision", default="bf16", choices=PRECISIONS)
    parser.add_argument("--rounds", type=int, default=rounds, help="medians are shown")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--work-dir", type=Path, default=Path("/tmp/allspark-bench"))
    return parser


class BenchEngine:
    """An engine whose failures are exceptions."""

    def __init__(self) -> None:
        self.engine = Engine()

    def serialize(
        self, directory: Path, name: str = MODEL, precision: str = "bf16"
    ) -> HuggingFaceModel:
        """A checkpoint as an image in memory."""
        quantisation = PRECISIONS[precision].options
        loader = HuggingFaceModel(str(directory), name, user_set_data_type="bfloat16")
        loader.load_model().serialize_to_memory(
            self.engine,
            enable_quant=bool(quantisation), customized_quant_config=quantisation or None,
        ).free_model()  # fmt: skip
        return loader

    def start(
        self, builder: AsModelRuntimeConfigBuilder, threads: int, precision: str = "bf16"
    ) -> None:
        """Installs and starts the builder's model, whose cache is of this precision."""
        builder.num_threads(threads)
        builder.kv_cache_mode(get_cache_mode_from_str(PRECISIONS[precision].cache_mode))
        config = builder.build()
        self.expect(self.engine.install_model(config))
        self.expect(self.engine.start_model(config.model_name))

    def start_requests(
        self, prompts: Sequence[list[int]], configs: Iterable[Mapping[str, Any]]
    ) -> list[ResultQueue]:
        """The queues of one request for each prompt, once all have their first token."""
        queues = []
        for ids, config in zip(prompts, configs, strict=True):
            status, _, queue = self.engine.start_request_ids(MODEL, None, ids, dict(config))
            self.expect(status)
            queues.append(queue)
        for queue in queues:
            queue.Get()
        return queues

    def expect(self, status: AsStatus) -> None:
        if status != AsStatus.ALLSPARK_SUCCESS:
            raise RuntimeError(f"{status.name}: {self.engine.last_error()}")
