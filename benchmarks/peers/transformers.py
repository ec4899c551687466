"""Hugging Face transformers with torch: one batch padded to its longest prompt, no scheduling."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from peers.base import BF16, TORCH, Engine
from peers.worker import InProcess, Request, Timeline, main


class Transformers(Engine):
    name = "transformers"
    precisions = {"bf16": BF16}
    packages = ((TORCH,), (TORCH, "transformers"))

    def prepare(self, checkpoint: Path, precision: str, model: Path) -> None:
        shutil.copytree(checkpoint, model, dirs_exist_ok=True)


class Model(InProcess):
    def __init__(self, job: dict[str, Any]) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(job["threads"])
        self._torch = torch
        self._model = AutoModelForCausalLM.from_pretrained(job["model"], dtype=torch.bfloat16)

    def serve(self, requests: list[Request]) -> list[Timeline]:
        timelines = [Timeline() for _ in requests]
        longest = max(len(request["ids"]) for request in requests)
        padding = [longest - len(request["ids"]) for request in requests]
        ids = [[0] * pad + request["ids"] for pad, request in zip(padding, requests, strict=True)]
        mask = [[0] * pad + [1] * (longest - pad) for pad in padding]

        def note(input_ids: Any, scores: Any, **_: Any) -> Any:
            # All go on until the longest request ends; tokens beyond a request's own number do not
            # count.
            step = input_ids.shape[1] - longest
            for timeline, request in zip(timelines, requests, strict=True):
                timeline.add(int(step <= request["num_output"]))
            return self._torch.zeros(len(requests), dtype=self._torch.bool)

        self._model.generate(
            self._torch.tensor(ids), attention_mask=self._torch.tensor(mask),
            max_new_tokens=max(request["num_output"] for request in requests),
            do_sample=False, eos_token_id=-1, pad_token_id=0, stopping_criteria=[note],
        )  # fmt: skip
        return timelines


if __name__ == "__main__":
    main(Model)
