"""Scores and embeddings of many inputs at once, by requests that generate nothing.

Engine.score, get_ppl and embed use this. To do the same without waiting, call start_request_ids
with `prompt_only` and the outputs wanted for the prompt.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from allspark import exit_gate
from allspark._allspark import AsStatus, GeneratedElements
from allspark.error_text import wrong_type
from allspark.errors import AllSparkError
from allspark.input_ids import BYTES, to_id_array
from allspark.statuses import to_exception
from allspark.unicode_text import check_unicode

if TYPE_CHECKING:
    from allspark.engine import Engine
    from allspark.model_loader import LLM


@dataclass(frozen=True)
class PromptScore:
    """How likely a model finds a text."""

    ids: list[int]
    # Of each id but the first, given the ids before it; natural logarithms.
    logprobs: list[float]
    # For each of these ids, the likeliest (id, log-probability), where they were requested.
    top_logprobs: list[list[tuple[int, float]]]

    @property
    def cross_entropy(self) -> float:
        """The mean of -logprobs."""
        return -math.fsum(self.logprobs) / len(self.logprobs)

    @property
    def perplexity(self) -> float:
        """exp(cross_entropy); inf beyond what a float holds."""
        try:
            return math.exp(self.cross_entropy)
        except OverflowError:
            return math.inf


def to_prompts(inputs: Any, model: LLM | None) -> list[np.ndarray]:
    """One input or many, each a text or ids in any form that start_request_ids takes."""
    if inputs is None or isinstance(inputs, BYTES):
        raise wrong_type("inputs", inputs, "a text, ids, or a sequence of them")
    if isinstance(inputs, str):
        inputs = [inputs]
    elif isinstance(inputs, Sequence):
        if inputs and not any(_is_input(item) for item in inputs):
            inputs = [inputs]
    elif getattr(inputs, "ndim", 1) != 2:  # A matrix has one input per row.
        inputs = [inputs]
    prompts = []
    for index, item in enumerate(inputs):
        try:
            if isinstance(item, str):
                if model is None:
                    raise ValueError("a text needs a tokenizer, and model is None")
                check_unicode(item)
                with exit_gate.passing():
                    item = model.get_tokenizer().encode(item)
            prompts.append(to_id_array(item))
        except (TypeError, ValueError) as error:
            raise type(error)(f"inputs[{index}]: {error}") from None
    return prompts


def _is_input(item: Any) -> bool:
    return isinstance(item, (str, Sequence)) or getattr(item, "ndim", 0) > 0


def run(
    engine: Engine, model_name: str, prompts: Sequence[np.ndarray], config: dict[str, Any]
) -> Iterator[GeneratedElements]:
    """The result of each prompt, in order. As many as the model accepts are started at once.

    Raises:
        ValueError: an input or a field is refused. OutOfMemoryError, AllSparkError: the rest.
    """
    config = {**config, "prompt_only": True}
    started: deque = deque()  # (index, handle, queue)

    def finish() -> GeneratedElements:
        index, handle, queue = started[0]
        elements = queue.Get()
        reason = queue.finish_reason
        engine.release_request(model_name, handle)
        started.popleft()
        if elements is None or reason != "length":
            raise AllSparkError(f"inputs[{index}] ended with '{reason}': {queue.error or ''}")
        return elements

    try:
        for index, ids in enumerate(prompts):
            while True:
                status, handle, queue = engine.start_request_ids(model_name, None, ids, config)
                if status != AsStatus.ALLSPARK_REQUEST_DENIED or not started:
                    break
                yield finish()  # Too many wait: make room for one.
            if status != AsStatus.ALLSPARK_SUCCESS:
                raise to_exception(status, f"inputs[{index}]: {engine.last_error()}")
            started.append((index, handle, queue))
        while started:
            yield finish()
    finally:
        for _, handle, _ in started:
            engine.release_request(model_name, handle)


def score(
    engine: Engine, model_name: str, model: LLM | None, inputs: Any, top_logprobs: int
) -> list[PromptScore]:
    """Engine.score."""
    prompts = to_prompts(inputs, model)
    for index, ids in enumerate(prompts):
        if len(ids) < 2:
            raise ValueError(
                f"inputs[{index}] has {len(ids)} tokens; a score needs 2, of which the second is "
                "predicted from the first"
            )
    config = {"prompt_logprobs": True, "top_logprobs": top_logprobs}
    return [
        PromptScore(
            ids.tolist(), elements.prompt_token_logprobs_list, elements.prompt_log_probs_list
        )
        for ids, elements in zip(prompts, run(engine, model_name, prompts, config), strict=True)
    ]


def embed(
    engine: Engine,
    model_name: str,
    model: LLM | None,
    inputs: Any,
    pooling: str,
    normalize: bool,
) -> np.ndarray:
    """Engine.embed."""
    if not pooling:
        raise ValueError('pooling is ""; it must be "mean" or "last"')
    config = {"pooling": pooling, "normalize": normalize}
    rows = [
        elements.tensors_from_model_inference[0]["embedding"]
        for elements in run(engine, model_name, to_prompts(inputs, model), config)
    ]
    return np.stack(rows) if rows else np.empty((0, 0), np.float32)
