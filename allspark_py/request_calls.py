"""Engine's calls for requests: start, stop, release and wait for them."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from allspark import exit_gate
from allspark._allspark import (
    AsStatus,
    GenerateConfig,
    NativeResultQueue,
    QueuedMask,
    RequestHandle,
)
from allspark.bad_words import to_token_sequences
from allspark.engine_calls import EngineCalls, Handles
from allspark.generation_config import (
    ASGenerationConfigBuilder,
    GenerationConfigAdapter,
    RequestConfig,
)
from allspark.input_ids import BYTES, DLPackCapsule, shown, to_id_array, wrong_type
from allspark.ordered_starts import OrderedStarts
from allspark.result_queue import ResultQueue
from allspark.text_queue import TextQueue

if TYPE_CHECKING:
    from allspark.guided import GuidedDecoding
    from allspark.model_loader import LLM

Started: TypeAlias = "tuple[AsStatus, Any, Any]"


class RequestCalls(EngineCalls):
    """The part of Engine that handles requests."""

    _queue_type = ResultQueue
    _text_queue_type = TextQueue

    def __init__(self) -> None:
        super().__init__()
        self._guided: GuidedDecoding | None = None
        self._guided_lock = threading.Lock()
        self._starts = OrderedStarts()

    def start_request_ids(
        self,
        model_name: str,
        model: LLM | None,
        input_ids: Any,
        generate_config_builder: ASGenerationConfigBuilder | dict[str, Any] | None = None,
    ) -> Started:
        """Starts a request on token ids and returns at once. Where too many requests wait and the
        model's queue_full_policy is "block", it returns once there is room.

        Args:
            model_name: an installed, running model.
            model: the loader. Its tokenizer is needed for a `response_format` and for fields about
                text; otherwise it may be None.
            input_ids: list, NumPy array or torch tensor of any integer type, shape [n] or [1, n].
            generate_config_builder: a builder, its dict, or None for the defaults.

        Returns:
            (status, handle, queue); handle and queue are None unless the status is
            ALLSPARK_SUCCESS. With stop_words or another field about text the queue is a TextQueue.
            With n or num_return_sequences above 1 there are lists of that many handles and queues,
            empty on failure.
        """
        try:
            ids = to_id_array(input_ids)
        except ValueError as error:
            return self._fail(AsStatus.ALLSPARK_PARAM_ERROR, str(error)), None, None
        try:
            config = GenerationConfigAdapter.parse(generate_config_builder)
            if config.text is not None and model is None:
                text = shown(config.text)
                raise ValueError(f"model is None; {text} needs the loader's tokenizer")
            if config.bad_words:
                self._bar_words(model, config)
            generated = config.generated(ids)
            masks = [self._token_mask(model, config, generated) for _ in range(config.n)]
        except (TypeError, ValueError) as error:
            return self._fail(AsStatus.ALLSPARK_PARAM_ERROR, str(error)), None, None

        def start(sequence: tuple[GenerateConfig, QueuedMask | None]) -> Started:
            native_config, mask = sequence
            status, handles, natives = self._native.start_request(
                model_name, ids, native_config, mask, getattr(self._thread, "gives_up", None)
            )
            queues = [
                self._wrap_queue(native, model_name, handle, model, config, ids)
                for handle, native in zip(handles, natives, strict=True)
            ]
            if config.native.num_return_sequences > 1:
                return self._result(status), handles, queues
            if not handles:
                return self._result(status), None, None
            return self._result(status), handles[0], queues[0]

        sequences = list(zip(config.sequences(), masks, strict=True))
        if config.n == 1:
            result = start(sequences[0])
        else:
            result = self._start_all(model_name, "sequence", start, sequences)
        if result[0] != AsStatus.ALLSPARK_SUCCESS:
            for mask in filter(None, masks):  # also the masks that were never passed to the engine
                self._guided_decoding().forget(mask)
        return result

    @staticmethod
    def _bar_words(model: LLM | None, config: RequestConfig) -> None:
        """Adds the tokenizer's ids of the config's bad_words to its bad_words_ids."""
        if model is None:
            words = shown(list(config.bad_words))
            raise ValueError(f"model is None; bad_words {words} needs a tokenizer")
        sequences = to_token_sequences(model.get_tokenizer(), config.bad_words)
        config.native.bad_words_ids = [*config.native.bad_words_ids, *sequences]

    def start_request(
        self,
        model_name: str,
        inputs: dict[str, Any],
        generate_config: ASGenerationConfigBuilder | dict[str, Any] | None = None,
    ) -> Started:
        """The raw form: `inputs["input_ids"]` as for start_request_ids, or a DLPack capsule."""
        if not isinstance(inputs, Mapping):
            raise wrong_type("inputs", inputs, "a dict with the key 'input_ids'")
        if "input_ids" not in inputs:
            raise ValueError(f"inputs has the keys {sorted(inputs)}; it must have 'input_ids'")
        input_ids = inputs["input_ids"]
        if type(input_ids).__name__ == "PyCapsule":
            input_ids = np.from_dlpack(DLPackCapsule(input_ids))
        return self.start_request_ids(model_name, None, input_ids, generate_config)

    def start_request_text(
        self,
        model_name: str,
        model: LLM,
        input_str_or_array: str | Sequence[str],
        generate_config_builder: ASGenerationConfigBuilder | dict[str, Any] | None = None,
    ) -> Started:
        """Tokenises text with the loader's tokenizer and starts a request, or one per string.

        No chat template is applied. A list of strings starts as one batch and returns (status,
        [handle], [queue]): either all of them start, or none does and the status is that of the
        first failure. sync_request, stop_request and release_request accept such a list.
        """
        name, texts = "input_str_or_array", input_str_or_array
        if not isinstance(texts, Iterable) or isinstance(texts, (Mapping, *BYTES)):
            raise wrong_type(name, texts, "a str or a list of str")
        if model is None:
            raise wrong_type("model", model, "the loader, whose tokenizer reads the text")

        def start(text: str) -> Started:
            ids = model.get_tokenizer().encode(text)
            return self.start_request_ids(model_name, model, ids, generate_config_builder)

        if isinstance(texts, str):
            return start(texts)
        texts = list(texts)
        for index, text in enumerate(texts):
            if not isinstance(text, str):
                raise wrong_type(f"{name}[{index}]", text, "a str")
        return self._start_all(model_name, "input", start, texts)

    async def start_request_ids_async(
        self,
        model_name: str,
        model: LLM | None,
        input_ids: Any,
        generate_config_builder: ASGenerationConfigBuilder | dict[str, Any] | None = None,
    ) -> Started:
        """start_request_ids for asyncio: a start that waits for room does not block the loop.

        Requests of one model start in the order of these calls, those with a `response_format`
        once it is compiled. Cancelling the call withdraws it.
        """
        await _compile_grammar(model, generate_config_builder)
        return await self._start_async(
            self.start_request_ids, model_name, model, input_ids, generate_config_builder
        )

    async def start_request_text_async(
        self,
        model_name: str,
        model: LLM,
        input_str_or_array: str | Sequence[str],
        generate_config_builder: ASGenerationConfigBuilder | dict[str, Any] | None = None,
    ) -> Started:
        """start_request_text for asyncio; tokenising does not block the loop either."""
        await _compile_grammar(model, generate_config_builder)
        return await self._start_async(
            self.start_request_text, model_name, model, input_str_or_array, generate_config_builder
        )

    async def start_prepared_async(
        self,
        model_name: str,
        model: LLM | None,
        prepare: Callable[[], tuple[Any, dict[str, Any]]],
    ) -> Started:
        """start_request_ids_async with what `prepare` returns, ids and config without a
        `response_format`. It is called on the thread on which the model's requests start: that
        saves a short prompt another thread, and a long one holds up the starts behind it.

        Raises:
            Exception: what `prepare` raises; nothing is started then.
        """

        def start(name: str) -> Started:
            return self.start_request_ids(name, model, *prepare())

        return await self._start_async(start, model_name)

    def stop_request(self, model_name: str, request_handle: Handles) -> AsStatus:
        """Ends a request after the running step at the latest; a second call has no effect."""
        return self._each(self._native.stop_request, model_name, request_handle)

    def release_request(self, model_name: str, request_handle: Handles) -> AsStatus:
        """Stops the request if it runs and frees its memory; its queue stays readable."""
        return self._each(self._native.release_request, model_name, request_handle)

    def sync_request(
        self, model_name: str, request_handle: Handles | None = None, timeout_ms: int | None = None
    ) -> AsStatus:
        """Blocks until the request has ended; None waits for every request of the model.

        Args:
            timeout_ms: give up after this long with ALLSPARK_RUNTIME_ERROR. None: no limit.
        """
        timeout = -1 if timeout_ms is None else timeout_ms
        if request_handle is None:
            return self._result(self._native.sync_all_requests(model_name, timeout))
        return self._each(
            lambda name, handle: self._native.sync_request(name, handle, timeout),
            model_name,
            request_handle,
        )

    async def _start_async(
        self, start: Callable[..., Started], model_name: str, *arguments: Any
    ) -> Started:
        if not self._native.check_process().ok:  # a fork, which lacks the threads of the starts
            return start(model_name, *arguments)

        def run(gives_up: Callable[[], bool]) -> tuple[Started, str]:
            self._thread.gives_up = gives_up
            try:
                return start(model_name, *arguments), self.last_error()
            finally:
                self._thread.gives_up = None

        def undo(outcome: tuple[Started, str]) -> None:
            status, handle, _ = outcome[0]
            if status == AsStatus.ALLSPARK_SUCCESS:
                self.release_request(model_name, handle)

        started, message = await self._starts.run(model_name, run, undo)
        if started[0] != AsStatus.ALLSPARK_SUCCESS:
            self._fail(started[0], message)
        return started

    def _token_mask(
        self, model: LLM | None, config: RequestConfig, generated: Sequence[int]
    ) -> QueuedMask | None:
        if config.response_format is None:
            return None
        if model is None:
            raise ValueError(
                "response_format needs the tokenizer; give start_request_ids the loader as model"
            )
        with exit_gate.passing():
            return self._guided_decoding().mask(
                config.response_format, model.get_tokenizer(), config.native, generated
            )

    def _guided_decoding(self) -> GuidedDecoding:
        from allspark.guided import GuidedDecoding

        with self._guided_lock:
            if self._guided is None:
                self._guided = GuidedDecoding()
                # Only after the engine ended its requests; otherwise they would end by failing
                # masks.
                weakref.finalize(self._native, self._guided.close)
            return self._guided

    def _start_all(
        self,
        model_name: str,
        noun: str,
        start: Callable[[Any], Started],
        items: Sequence[Any],
    ) -> tuple[AsStatus, list, list]:
        """Calls start(item) for each; all of them start, or none does."""
        handles: list[Any] = []
        queues: list[Any] = []
        for index, item in enumerate(items):
            status, handle, queue = start(item)
            if status != AsStatus.ALLSPARK_SUCCESS:
                message = self.last_error()
                self.release_request(model_name, handles)
                return self._fail(status, f"{noun} {index}: {message}"), [], []
            handles.append(handle)
            queues.append(queue)
        return AsStatus.ALLSPARK_SUCCESS, handles, queues

    def _wrap_queue(
        self,
        native: NativeResultQueue,
        model_name: str,
        handle: RequestHandle,
        model: LLM | None,
        config: RequestConfig,
        ids: np.ndarray,
    ) -> ResultQueue:
        if config.text is None or model is None:
            return self._queue_type(native)
        generated = config.generated(ids)
        shortest = config.native.min_length - (len(ids) - len(generated))
        return self._text_queue_type(
            native,
            model.get_tokenizer(),
            config.text,
            stop=_WeakStop(self, model_name, handle),
            end_ids=config.end_ids(),
            min_tokens=max(config.native.min_new_tokens, shortest),
            generated=generated,
        )


async def _compile_grammar(
    model: LLM | None, config: ASGenerationConfigBuilder | dict[str, Any] | None
) -> None:
    """Compiles what a guided request needs beside the starts of its model, which would all wait."""
    if isinstance(config, ASGenerationConfigBuilder):
        config = config.build()
    response_format = config.get("response_format") if isinstance(config, Mapping) else None
    if model is None or response_format is None:
        return

    def compile_it() -> None:
        # An error is the start's to report.
        with exit_gate.passing(), contextlib.suppress(TypeError, ValueError):
            from allspark.grammar_compiler import Compiler

            Compiler.of(model.get_tokenizer()).prepare(response_format)

    await asyncio.to_thread(compile_it)


class _WeakStop:
    """Stops a request without keeping the engine alive, since queues outlive the engine."""

    def __init__(self, engine: EngineCalls, model_name: str, handle: RequestHandle):
        self._engine = weakref.ref(engine)
        self._arguments = (model_name, handle)

    def __call__(self) -> None:
        engine = self._engine()
        if engine is not None:
            engine._native.stop_request(*self._arguments)
