"""onnxruntime-genai: one batch padded to its longest prompt; models by its own builder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from peers.base import TORCH, Engine, Precision, run_command
from peers.worker import InProcess, Request, Timeline, main


class OnnxRuntimeGenai(Engine):
    name = "onnxruntime-genai"
    # Blocks of 32 weights with a 32-bit scale, also in lm_head. Products in 8 bits.
    precisions = {"int4": Precision(5, 5, "int8_gop_s")}
    packages = ((TORCH,), (TORCH, "onnxruntime-genai", "onnx-ir", "transformers"))

    def prepare(self, checkpoint: Path, precision: str, model: Path) -> None:
        builder = [self.python, "-m", "onnxruntime_genai.models.builder", "-e", "cpu"]
        accuracy = ["--extra_options", "int4_accuracy_level=4"]
        run_command([*builder, "-i", checkpoint, "-o", model, "-p", precision, *accuracy])


class Model(InProcess):
    def __init__(self, job: dict[str, Any]) -> None:
        import onnxruntime_genai

        self._genai = onnxruntime_genai
        config = onnxruntime_genai.Config(job["model"])
        threads = {"intra_op_num_threads": job["threads"]}
        self._overlay(config, {"model": {"decoder": {"session_options": threads}}})
        self._model = onnxruntime_genai.Model(config)

    @staticmethod
    def _overlay(config: Any, values: dict[str, Any]) -> None:
        import json

        config.overlay(json.dumps(values))

    def serve(self, requests: list[Request]) -> list[Timeline]:
        import numpy as np

        longest = max(len(request["ids"]) for request in requests)
        steps = max(request["num_output"] for request in requests)
        params = self._genai.GeneratorParams(self._model)
        params.set_search_options(
            batch_size=len(requests), min_length=longest + steps, max_length=longest + steps,
            do_sample=False,
        )  # fmt: skip
        timelines = [Timeline() for _ in requests]
        generator = self._genai.Generator(self._model, params)
        # Padding is computed like any token, because a mask cannot be given.
        rows = [[0] * (longest - len(request["ids"])) + request["ids"] for request in requests]
        generator.append_tokens(np.array(rows, dtype=np.int32))
        for step in range(steps):
            generator.generate_next_token()
            for timeline, request in zip(timelines, requests, strict=True):
                timeline.add(int(step < request["num_output"]))
        return timelines


if __name__ == "__main__":
    main(Model)
