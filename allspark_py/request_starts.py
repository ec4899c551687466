"""RequestStarts: starts the requests of an engine, and makes the queues that they get."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from allspark import exit_gate
from allspark._allspark import (
    AsStatus,
    GenerateConfig,
    NativeEngine,
    NativeResultQueue,
    QueuedMask,
    RequestHandle,
)
from allspark.bad_words import to_token_sequences
from allspark.detokenizer import open_decoding
from allspark.error_text import shown, wrong_type
from allspark.generation_config import ASGenerationConfigBuilder, RequestConfig
from allspark.input_ids import BYTES, to_id_array
from allspark.ordered_starts import OrderedStarts
from allspark.own_threads import schema_threads
from allspark.result_queue import ResultQueue
from allspark.statuses import Handles, Statuses
from allspark.text_queue import TextQueue
from allspark.unicode_text import check_unicode

if TYPE_CHECKING:
    import llguidance
    from allspark.guided import GuidedDecoding
    from allspark.model_loader import LLM

Started: TypeAlias = "tuple[AsStatus, Any, Any]"


class Compiled(NamedTuple):
    """What came of compiling a response_format ahead of the start that needs it."""

    response_format: Any
    matcher: llguidance.LLMatcher | None = None  # None: plain text, or none was compiled
    error: str | None = None


class RequestStarts:
    """The starts of one engine's requests. Thread-safe."""

    def __init__(
        self,
        native: NativeEngine,
        statuses: Statuses,
        queue_types: tuple[type[ResultQueue], type[TextQueue]],
    ) -> None:
        self._native = native
        self._statuses = statuses
        self._queue_type, self._text_queue_type = queue_types
        self._guided: GuidedDecoding | None = None
        self._guided_lock = threading.Lock()
        self._starts = OrderedStarts(lambda name: name in native.list_models())
        # Of a start on the model's own thread: `gives_up` is called while it waits for room, and
        # `compiled` is what was done for it before.
        self._thread = threading.local()

    def start(
        self, model_name: str, model: LLM | None, input_ids: Any, generate_config: Any
    ) -> Started:
        """Engine.start_request_ids."""
        process = self._native.check_process()
        if not process.ok:  # a fork, whose copies of locks may be held for ever
            return self._statuses.of(process), None, None
        try:
            ids = to_id_array(input_ids)
        except ValueError as error:
            return self._statuses.fail(AsStatus.ALLSPARK_PARAM_ERROR, str(error)), None, None
        try:
            config = RequestConfig.parse(generate_config)
            tokenizer = self._text_tokenizer(model, config)
            if config.bad_words:
                self._bar_words(model, config)
            generated = config.generated(ids)
            masks = self._token_masks(model, config, generated)
        except (TypeError, ValueError) as error:
            return self._statuses.fail(AsStatus.ALLSPARK_PARAM_ERROR, str(error)), None, None

        def wrap(handle: RequestHandle, native: NativeResultQueue) -> ResultQueue:
            if config.text is None:
                return self._queue_type(native)
            shortest = config.native.min_length - (len(ids) - len(generated))
            return self._text_queue_type(
                native,
                tokenizer,
                config.text,
                stop=_weak_stop(self._native, model_name, handle),
                end_ids=config.end_ids(),
                min_tokens=max(config.native.min_new_tokens, shortest),
                generated=generated,
            )

        def start(sequence: tuple[GenerateConfig, QueuedMask | None]) -> Started:
            native_config, mask = sequence
            status, handles, natives = self._native.start_request(
                model_name, ids, native_config, mask, getattr(self._thread, "gives_up", None)
            )
            try:
                queues = [wrap(*each) for each in zip(handles, natives, strict=True)]
            except BaseException:  # such as Ctrl-C; nobody would know of the request
                self.release(model_name, handles)
                raise
            if config.native.num_return_sequences > 1:
                return self._statuses.of(status), handles, queues
            if not handles:
                return self._statuses.of(status), None, None
            return self._statuses.of(status), handles[0], queues[0]

        sequences = list(zip(config.sequences(), masks, strict=True))
        has_started = False
        try:
            if config.n == 1:
                result = start(sequences[0])
            else:
                result = self._start_all(model_name, "sequence", start, sequences)
            has_started = result[0] == AsStatus.ALLSPARK_SUCCESS
        finally:
            if not has_started:  # also the masks that were never passed to the engine
                for mask in filter(None, masks):
                    self._guided_decoding().forget(mask)
        return result

    @staticmethod
    def _text_tokenizer(model: LLM | None, config: RequestConfig) -> Any:
        """The tokenizer of the config's fields about text; None where it has none."""
        if config.text is None:
            return None
        if model is None:
            text = shown(config.text)
            raise ValueError(f"model is None; {text} needs the loader's tokenizer")
        tokenizer = model.get_tokenizer()
        # What may fail or take long at first does so before there is a request.
        open_decoding(tokenizer, config.text.skip_special_tokens)
        return tokenizer

    @staticmethod
    def _bar_words(model: LLM | None, config: RequestConfig) -> None:
        """Adds the tokenizer's ids of the config's bad_words to its bad_words_ids."""
        if model is None:
            words = shown(list(config.bad_words))
            raise ValueError(f"model is None; bad_words {words} needs a tokenizer")
        sequences = to_token_sequences(model.get_tokenizer(), config.bad_words)
        config.native.bad_words_ids = [*config.native.bad_words_ids, *sequences]

    def start_texts(
        self, model_name: str, model: LLM | None, texts: Any, start: Callable[[str], Started]
    ) -> Started:
        """Calls start(text) for one text or for all of a list, of which all start or none does."""
        name = "input_str_or_array"
        if not isinstance(texts, Iterable) or isinstance(texts, (Mapping, *BYTES)):
            raise wrong_type(name, texts, "a str or a list of str")
        if model is None:
            raise wrong_type("model", model, "the loader, whose tokenizer reads the text")

        def start_one(text: str) -> Started:
            try:
                check_unicode(text)
            except ValueError as error:
                return self._statuses.fail(AsStatus.ALLSPARK_PARAM_ERROR, str(error)), None, None
            return start(text)

        if isinstance(texts, str):
            return start_one(texts)
        texts = list(texts)
        for index, text in enumerate(texts):
            if not isinstance(text, str):
                raise wrong_type(f"{name}[{index}]", text, "a str")
        return self._start_all(model_name, "input", start_one, texts)

    async def start_async(
        self,
        start: Callable[..., Started],
        model_name: str,
        *arguments: Any,
        compiled: Compiled | None = None,
    ) -> Started:
        """Calls start(model_name, ...) on the thread on which the model's requests start. It is
        refused at once where no such model is installed. `compiled`: what compile_grammar
        returned."""
        if not self._native.check_process().ok:  # a fork, which lacks the threads of the starts
            return start(model_name, *arguments)

        def run(gives_up: Callable[[], bool]) -> tuple[Started, str]:
            self._thread.gives_up, self._thread.compiled = gives_up, compiled
            try:
                return start(model_name, *arguments), self._statuses.last_error()
            finally:
                self._thread.gives_up = self._thread.compiled = None

        def undo(outcome: tuple[Started, str]) -> None:
            status, handle, _ = outcome[0]
            if status == AsStatus.ALLSPARK_SUCCESS:
                self.release(model_name, handle)

        started, message = await self._starts.run(model_name, run, undo)
        if started[0] != AsStatus.ALLSPARK_SUCCESS:
            self._statuses.fail(started[0], message)
        return started

    def end_thread(self, model_name: str) -> None:
        """The model was released: nothing more starts on the thread of its starts."""
        self._starts.end(model_name)

    def release(self, model_name: str, handles: Handles) -> AsStatus:
        """Engine.release_request."""
        return self._statuses.of_each(self._native.release_request, model_name, handles)

    def _token_masks(
        self, model: LLM | None, config: RequestConfig, generated: Sequence[int]
    ) -> list[QueuedMask | None]:
        """One for each of the config's sequences; None where any token may follow."""
        if config.response_format is None:
            return [None] * config.n
        if model is None:
            raise ValueError(
                "response_format needs the tokenizer; give start_request_ids the loader as model"
            )
        compiled: Compiled | None = getattr(self._thread, "compiled", None)
        if compiled is None or compiled.response_format is not config.response_format:
            compiled = Compiled(config.response_format)
        if compiled.error is not None:
            raise ValueError(compiled.error)
        with exit_gate.passing():
            return self._guided_decoding().masks(
                config.response_format,
                model.get_tokenizer(),
                config.native,
                generated,
                config.n,
                compiled.matcher,
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
        self, model_name: str, noun: str, start: Callable[[Any], Started], items: Sequence[Any]
    ) -> tuple[AsStatus, list, list]:
        """Calls start(item) for each; all of them start, or none does."""
        handles: list[Any] = []
        queues: list[Any] = []
        for index, item in enumerate(items):
            try:
                status, handle, queue = start(item)
            except BaseException:  # such as Ctrl-C while it waits for room
                self.release(model_name, handles)
                raise
            if status != AsStatus.ALLSPARK_SUCCESS:
                message = self._statuses.last_error()
                self.release(model_name, handles)
                return self._statuses.fail(status, f"{noun} {index}: {message}"), [], []
            handles.append(handle)
            queues.append(queue)
        return AsStatus.ALLSPARK_SUCCESS, handles, queues


async def compile_grammar(
    model: LLM | None, config: ASGenerationConfigBuilder | dict[str, Any] | None
) -> Compiled | None:
    """Compiles what a guided request needs beside the starts of its model, which would all wait.
    None: it needs nothing, or its start is refused."""
    if isinstance(config, ASGenerationConfigBuilder):
        config = config.build()
    response_format = config.get("response_format") if isinstance(config, Mapping) else None
    if model is None or response_format is None:
        return None

    def compile_it() -> Compiled:
        from allspark.grammar_compiler import Compiler

        try:
            with exit_gate.passing():
                matcher = Compiler.of(model.get_tokenizer()).prepare(response_format)
        except (TypeError, ValueError) as error:  # the start's to report
            return Compiled(response_format, error=str(error))
        return Compiled(response_format, matcher)

    return await schema_threads.run(compile_it)


def _weak_stop(native: NativeEngine, model_name: str, handle: RequestHandle) -> Callable[[], None]:
    """Ends a request whose output is complete. It does not keep the engine alive, since queues
    outlive the engine."""
    reference = weakref.ref(native)

    def stop() -> None:
        if (engine := reference()) is not None:
            engine.stop_request(model_name, handle, is_complete=True)

    return stop
