"""EngineTarget: a model in this process."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

from allspark._allspark import AsStatus
from allspark.bench.load import Now
from allspark.bench.outcome import Outcome, RequestFailed
from allspark.bench.workload import Prompt, Request
from allspark.pipeline.served_model import ServedModel


class EngineTarget:
    """Prompts are token ids (see `encoded`). Outputs are greedy and have exactly the length that is
    asked for: no token ends them.

    Args:
        adapter: one that is loaded; None: the base model.
    """

    def __init__(self, model: ServedModel, adapter: str | None = None):
        self._model = model
        self._adapter = adapter

    async def serve(self, request: Request, outcome: Outcome, now: Now) -> None:
        """See Target. A chunk is what the engine gave at a time."""
        model = self._model
        status, handle, queue = model.engine.start_request_ids(
            model.name, None, request.prompt, self._fields(request)
        )
        if status != AsStatus.ALLSPARK_SUCCESS:
            raise RequestFailed(model.engine.last_error())
        outcome.prompt_tokens, outcome.output_tokens = len(request.prompt), 0
        try:
            async for elements in queue:
                outcome.times.append(now())
                outcome.output_tokens += len(elements.ids_from_generate)
            if queue.finish_reason != "length":
                raise RequestFailed(f"{queue.finish_reason}: {queue.error or 'no reason is given'}")
        finally:
            model.engine.release_request(model.name, handle)

    async def close(self) -> None:
        """Nothing: the model is the caller's."""

    def _fields(self, request: Request) -> dict[str, Any]:
        fields = {
            "do_sample": False,
            "early_stopping": False,
            "ignore_eos": True,
            "max_length": self._model.session_len,
            "max_new_tokens": request.num_output,
            "prompt_lookup_num_tokens": self._model.config.prompt_lookup_num_tokens,
        }
        return fields if self._adapter is None else {**fields, "lora_name": self._adapter}


def encoded(requests: Iterable[Request], model: ServedModel) -> list[Request]:
    """The same requests with token ids as prompts. A text is encoded as it is, a conversation goes
    through the chat template."""
    return [dataclasses.replace(each, prompt=_ids(each.prompt, model)) for each in requests]


def _ids(prompt: Prompt, model: ServedModel) -> list[int]:
    tokenizer, template = model.tokenizer, model.template
    if isinstance(prompt, str):
        return list(tokenizer.encode(prompt))
    if any(isinstance(each, dict) for each in prompt):
        return template.encode(tokenizer, template.render(prompt))  # type: ignore[arg-type]
    return prompt  # type: ignore[return-value]
