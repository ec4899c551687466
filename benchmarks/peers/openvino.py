"""OpenVINO GenAI with its continuous batching; models by optimum-intel."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from peers.base import BF16, TORCH, Engine, Precision, run_command
from peers.worker import InProcess, Request, Timeline, main

_INT4 = ("int4", "--sym", "--group-size", "64", "--ratio", "1.0")


class OpenVino(Engine):
    name = "openvino"
    # 4-bit weights have a 16-bit scale for 64 of them; lm_head stays in 8 bits. The 16-bit model
    # computes in bfloat16 if the processor has it.
    precisions = {
        "int8": Precision(8, 8, "int8_gop_s", {"weight_format": ("int8",)}),
        "int4": Precision(4.25, 8, "int8_gop_s", {"weight_format": _INT4}),
        "bf16": Precision(BF16.body_bits, BF16.head_bits, BF16.rate, {"weight_format": ("fp16",)}),
    }
    packages = ((TORCH,), (TORCH, "openvino-genai", "optimum-intel", "nncf"))
    unwanted = ("torchvision",)

    def prepare(self, checkpoint: Path, precision: str, model: Path) -> None:
        weight_format = self.precisions[precision].options["weight_format"]
        command = [self.home / "venv" / "bin" / "optimum-cli", "export", "openvino"]
        task = ("--task", "text-generation-with-past", "--weight-format", *weight_format)
        run_command([*command, "--model", checkpoint, *task, model])


class Pipeline(InProcess):
    def __init__(self, job: dict[str, Any]) -> None:
        import openvino_genai

        self._genai = openvino_genai
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.max_num_batched_tokens = 512
        scheduler.max_num_seqs = max(64, job["max_batch"])
        scheduler.dynamic_split_fuse = True
        scheduler.enable_prefix_caching = True
        scheduler.cache_size = 2  # GB
        options = {"INFERENCE_NUM_THREADS": job["threads"]}
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(
            job["model"], scheduler, "CPU", options
        )
        self._next_id = 0

    def serve(self, requests: list[Request]) -> list[Timeline]:
        running = [(Timeline(), self._start(request)) for request in requests]
        while self._pipeline.has_non_finished_requests():
            self._pipeline.step()
            for timeline, handle in running:
                if handle.can_read():
                    (output,) = handle.read().values()
                    timeline.add(len(output.generated_ids))
        return [timeline for timeline, _ in running]

    def _start(self, request: Request) -> Any:
        import numpy as np
        import openvino

        config = self._genai.GenerationConfig()
        config.max_new_tokens = request["num_output"]
        config.ignore_eos = True
        config.do_sample = False
        ids = openvino.Tensor(np.array([request["ids"]], dtype=np.int64))
        self._next_id += 1
        return self._pipeline.add_request(self._next_id, ids, config)


if __name__ == "__main__":
    main(Pipeline)
