"""Forced outputs: requests whose output is given, so that it is scored token by token.

A request that scores its prompt computes all of it, because the prefix cache has no logits. A
request that generates computes only what the cache lacks. Its token mask leaves one token each
time, and the log-probabilities are those of the model's own logits. The bits are the same either
way, since the logits of a token depend on the tokens before it alone.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence

import numpy as np
from allspark import exit_gate
from allspark._allspark import AsStatus, MaskQueue, QueuedMask
from allspark.eval.in_flight import Started, for_adapter
from allspark.generation_config import GenerationConfigAdapter
from allspark.pipeline.served_model import ServedModel
from allspark.result_queue import ResultQueue

_BITS = 32


class ForcedOutputs:
    """Starts such requests of one model, and answers for their masks on a thread of its own."""

    def __init__(self, model: ServedModel, adapter: str | None = None):
        self._model = model
        self._adapter = adapter
        self._num_words = -(-model.engine.get_as_model_info(model.name).vocab_size // _BITS)
        self._queue = MaskQueue()
        # What each request still has to choose, the next one last.
        self._outputs: dict[QueuedMask, list[int]] = {}
        self._thread = threading.Thread(
            target=_serve,
            args=(self._queue, self._outputs, self._num_words),
            name="allspark-forced",
            daemon=True,
        )
        self._thread.start()
        weakref.finalize(self, self._queue.close)

    def start(self, prompt: Sequence[int], output: Sequence[int]) -> Started:
        """As Engine.start_request_ids; the request gives `output` with its log-probabilities."""
        engine = self._model.engine
        fields = for_adapter(
            self._adapter,
            do_sample=False,
            ignore_eos=True,
            max_length=self._model.session_len,
            max_new_tokens=len(output),
            logprobs=True,
            logprobs_mode="raw",
            top_logprobs=1,
        )
        config = GenerationConfigAdapter.parse(fields)
        mask = QueuedMask(self._queue, [])
        self._outputs[mask] = list(reversed(output))
        status, handles, natives = engine._native.start_request(
            self._model.name, np.array(prompt, np.int64), config.native, mask, None
        )
        if not handles:
            self._outputs.pop(mask, None)
            return engine._result(status), None, None
        return AsStatus.ALLSPARK_SUCCESS, handles[0], ResultQueue(natives[0])

    def close(self) -> None:
        """Ends the thread; requests that still run end with an error."""
        self._queue.close()
        if not exit_gate.is_exiting():
            self._thread.join(timeout=5)


def _serve(queue: MaskQueue, outputs: dict[QueuedMask, list[int]], num_words: int) -> None:
    while work := queue.take():
        for mask, token in work:
            left = outputs.get(mask)
            if token is None:  # the request has ended
                outputs.pop(mask, None)
            elif left:
                row = np.zeros(num_words, np.uint32)
                following = left.pop()
                row[following // _BITS] = 1 << following % _BITS
                mask.publish(row, False)
