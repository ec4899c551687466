"""Engine: installs and runs models, starts requests; the Python face of allspark/engine.h.

Calls that the DashInfer interface documents as returning AsStatus return it and never raise for
the same failure; `Engine.last_error()` has the message. Arguments of a wrong Python type raise
TypeError.
"""

from __future__ import annotations

import enum
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from allspark._allspark import (
    AsCacheMode,
    AsEngineStat,
    AsModelConfig,
    AsStatus,
    GenerateConfig,
    GenerateRequestStatus,
    ModelImage,
    ModelState,
    NativeEngine,
    NativeResultQueue,
    QueuedMask,
    RequestHandle,
    Status,
)
from allspark.bad_words import to_token_sequences
from allspark.generation_config import (
    ASGenerationConfigBuilder,
    GenerationConfigAdapter,
    RequestConfig,
)
from allspark.result_queue import ResultQueue
from allspark.runtime_config import AsModelRuntimeConfigBuilder, TargetDevice
from allspark.text_queue import TextQueue

if TYPE_CHECKING:
    from allspark.guided import GuidedDecoding
    from allspark.model_loader import LLM
    from allspark.prompts import PromptScore

__all__ = [
    "AsCacheMode",
    "AsModelConfig",
    "AsModelRuntimeConfigBuilder",
    "AsStatus",
    "Engine",
    "GenerateRequestStatus",
    "ModelState",
    "RequestStatInfo",
    "ResultQueue",
    "RoPEScaleMethod",
    "TargetDevice",
]

Handles: TypeAlias = "RequestHandle | Sequence[Handles]"
Started: TypeAlias = "tuple[AsStatus, Any, Any]"


class RoPEScaleMethod(enum.IntEnum):
    """Ways to stretch rotary position embeddings (values of the DashInfer interface)."""

    NO_SCALE = 0
    YaRN = 3
    NTK = 4


class RequestStatInfo:
    """The dict of `ResultQueue.RequestStatInfo()` with attributes; ms, tokens, tokens/s."""

    class Key(str, enum.Enum):
        KEY_REQUEST_TIME_TS = "arrival_time"
        KEY_FIRST_TOKEN_TIME_TS = "first_token_time"
        KEY_LAST_TOKEN_TIME_TS = "last_token_time"
        KEY_TTFT_MS = "time_to_first_token"
        KEY_SCHEDULE_TIME_MS = "time_in_queue"
        KEY_TOTAL_TIME_MS = "finished_time"
        KEY_INPUT_LEN = "context_token_length"
        KEY_OUTPUT_LEN = "generated_token_length"
        KEY_INPUT_CACHE_LEN = "context_cached_length"
        KEY_CONTEXT_TPS = "context_tps"
        KEY_GENERATE_TPS = "generate_tps"
        KEY_DRAFT_LEN = "draft_token_length"
        KEY_ACCEPTED_DRAFT_LEN = "accepted_draft_token_length"

    def __init__(self, info: dict[str, int]):
        self.info = dict(info)
        self.arrival_time = info["arrival_time"]
        self.first_token_time = info["first_token_time"]
        self.last_token_time = info["last_token_time"]
        self.time_to_first_token = info["time_to_first_token"]
        self.time_in_queue = info["time_in_queue"]
        self.finish_time = info["finished_time"]
        self.context_token_length = info["context_token_length"]
        self.generated_token_length = info["generated_token_length"]
        self.context_cached_length = info["context_cached_length"]
        self.context_tps = info["context_tps"]
        self.generate_tps = info["generate_tps"]
        self.draft_token_length = info["draft_token_length"]
        self.accepted_draft_token_length = info["accepted_draft_token_length"]

    def __repr__(self) -> str:
        return f"RequestStatInfo({self.info})"


def to_id_array(input_ids: Any) -> np.ndarray:
    """A list, NumPy array or torch tensor of integers, 1-D or [1, n], as contiguous int64 [n]."""
    if hasattr(input_ids, "detach"):  # a torch tensor, wherever it lives
        input_ids = input_ids.detach().cpu().numpy()
    array = np.asarray(input_ids)
    if array.size == 0:
        array = array.reshape(-1).astype(np.int64)  # an empty list has no integer type of its own
    if array.dtype.kind not in "iu":
        raise TypeError(f"input_ids has elements of type {array.dtype}; they must be integers")
    if array.ndim == 2 and array.shape[0] == 1:
        array = array[0]
    if array.ndim != 1:
        raise TypeError(f"input_ids has shape {list(array.shape)}; it must be [n] or [1, n]")
    if array.dtype == np.uint64 and array.size and array.max() > np.iinfo(np.int64).max:
        raise ValueError(f"input_ids holds {array.max()}; token ids are below 2^31")
    return np.ascontiguousarray(array, dtype=np.int64)


class Engine:
    """One engine with any number of uniquely named models. Thread-safe."""

    def __init__(self) -> None:
        self._native = NativeEngine()
        self._errors = threading.local()
        self._guided: GuidedDecoding | None = None
        self._guided_lock = threading.Lock()

    # -- models ----------------------------------------------------------------------------

    def register_image(self, model_name: str, image: ModelImage) -> AsStatus:
        """Makes a model serialised in memory known under `model_name`; loaders call this."""
        return self._result(self._native.register_image(model_name, image))

    def install_model(self, as_model_config_struct: AsModelConfig) -> AsStatus:
        """Opens and verifies the model that the runtime config names; its state is Initial.

        Fails where the name is taken, a file is damaged, or the KV pool could not hold one
        request of engine_max_length.
        """
        if isinstance(as_model_config_struct, AsModelRuntimeConfigBuilder):
            as_model_config_struct = as_model_config_struct.build()
        return self._result(self._native.install_model(as_model_config_struct))

    build_model_from_config_struct = install_model

    def start_model(self, model_name: str) -> AsStatus:
        """Initial or Stop -> Running: takes memory, starts the step thread, warms up."""
        return self._result(self._native.start_model(model_name))

    def stop_model(
        self, model_name: str, drain: bool = False, timeout_ms: int | None = None
    ) -> AsStatus:
        """Running -> Stop; returns when the step thread has ended.

        Args:
            drain: False ends running requests with the reason 'cancelled'; True lets them finish
                and denies new ones.
            timeout_ms: a drain that takes longer turns into a cancel. None: no limit.
        """
        return self._result(
            self._native.stop_model(model_name, drain, -1 if timeout_ms is None else timeout_ms)
        )

    def release_model(self, model_name: str) -> AsStatus:
        """Initial or Stop -> Released: everything is freed and the name can be used again."""
        return self._result(self._native.release_model(model_name))

    def get_model_state(self, model_name: str) -> ModelState:
        """The state of an installed model. Raises KeyError for a name that is not installed."""
        return self._native.model_state(model_name)

    def list_models(self) -> list[str]:
        """Names of the installed models, in the order of installation."""
        return self._native.list_models()

    # -- requests --------------------------------------------------------------------------

    def start_request_ids(
        self,
        model_name: str,
        model: LLM | None,
        input_ids: Any,
        generate_config_builder: ASGenerationConfigBuilder | dict[str, Any] | None = None,
    ) -> Started:
        """Starts a request on token ids and returns at once.

        Args:
            model_name: an installed, running model.
            model: the loader; its tokenizer is needed for a `response_format` and for what is about
                text, else it may be None.
            input_ids: list, NumPy array or torch tensor of any integer type, shape [n] or [1, n].
            generate_config_builder: a builder, its dict, or None for the defaults.

        Returns:
            (status, handle, queue); handle and queue are None unless the status is
            ALLSPARK_SUCCESS. With stop_words or another field about text the queue is a TextQueue;
            with n or num_return_sequences above 1 there are lists of as many handles and queues,
            empty on failure.
        """
        ids = to_id_array(input_ids)
        try:
            config = GenerationConfigAdapter.parse(generate_config_builder)
            if config.text is not None and model is None:
                raise ValueError(f"model is None; {config.text} needs the loader's tokenizer")
            if config.bad_words:
                self._bar_words(model, config)
            masks = [self._token_mask(model, config) for _ in range(config.n)]
        except (TypeError, ValueError) as error:
            return self._fail(AsStatus.ALLSPARK_PARAM_ERROR, str(error)), None, None

        def start(sequence: tuple[GenerateConfig, QueuedMask | None]) -> Started:
            native_config, mask = sequence
            status, handles, natives = self._native.start_request(
                model_name, ids, native_config, mask
            )
            queues = [
                self._wrap_queue(native, model_name, handle, model, config, len(ids))
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
            for mask in filter(None, masks):  # those that were never handed over too
                self._guided_decoding().forget(mask)
        return result

    @staticmethod
    def _bar_words(model: LLM | None, config: RequestConfig) -> None:
        """Adds what the tokenizer makes of the config's bad_words to its bad_words_ids."""
        if model is None:
            raise ValueError(f"model is None; bad_words {list(config.bad_words)} needs a tokenizer")
        sequences = to_token_sequences(model.get_tokenizer(), config.bad_words)
        config.native.bad_words_ids = [*config.native.bad_words_ids, *sequences]

    def start_request(
        self,
        model_name: str,
        inputs: dict[str, Any],
        generate_config: ASGenerationConfigBuilder | dict[str, Any] | None = None,
    ) -> Started:
        """The raw form: `inputs["input_ids"]` as for start_request_ids, or a DLPack capsule."""
        input_ids = inputs["input_ids"]
        if type(input_ids).__name__ == "PyCapsule":
            input_ids = np.from_dlpack(_DLPackCapsule(input_ids))
        return self.start_request_ids(model_name, None, input_ids, generate_config)

    def start_request_text(
        self,
        model_name: str,
        model: LLM,
        input_str_or_array: str | Sequence[str],
        generate_config_builder: ASGenerationConfigBuilder | dict[str, Any] | None = None,
    ) -> Started:
        """Tokenises text with the loader's tokenizer and starts a request, or one per string.

        No chat template is applied. A list of strings starts as one batch and returns
        (status, [handle], [queue]): all of them start, or none does and the status is that of the
        first failure. sync_request, stop_request and release_request take such a list.
        """
        if isinstance(input_str_or_array, str):
            ids = model.get_tokenizer().encode(input_str_or_array)
            return self.start_request_ids(model_name, model, ids, generate_config_builder)
        for index, text in enumerate(input_str_or_array):
            if not isinstance(text, str):
                raise TypeError(f"input {index} is a {type(text).__name__}; it must be a str")

        def start(text: str) -> Started:
            ids = model.get_tokenizer().encode(text)
            return self.start_request_ids(model_name, model, ids, generate_config_builder)

        return self._start_all(model_name, "input", start, input_str_or_array)

    def stop_request(self, model_name: str, request_handle: Handles) -> AsStatus:
        """Ends a request after the running step at the latest; stopping twice is fine."""
        return self._each(self._native.stop_request, model_name, request_handle)

    def release_request(self, model_name: str, request_handle: Handles) -> AsStatus:
        """Stops the request if it runs and frees all of it; its queue stays readable."""
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

    # -- whole prompts -----------------------------------------------------------------------

    def score(
        self, model_name: str, model: LLM | None, inputs: Any, top_logprobs: int = 0
    ) -> list[PromptScore]:
        """How likely the model finds each input, of up to engine_max_length tokens; waits for all.

        Args:
            inputs: a text or ids in a form that start_request_ids takes, or a sequence of them.
                Texts need the loader as `model`.
            top_logprobs: so many likeliest tokens beside each, at most 20.

        Raises:
            ValueError: an input is refused. AllSparkError: it was stopped, or a step failed.
        """
        from allspark.prompts import score

        return score(self, model_name, model, inputs, top_logprobs)

    def get_ppl(self, model_name: str, model: LLM | None, inputs: Any) -> list[float]:
        """The mean cross entropy of each input, as LMDeploy's call of this name gives it: its exp
        is the perplexity. Inputs and exceptions as in score; they may differ in length."""
        return [score.cross_entropy for score in self.score(model_name, model, inputs)]

    def embed(
        self,
        model_name: str,
        model: LLM | None,
        inputs: Any,
        pooling: str = "mean",
        normalize: bool = True,
    ) -> np.ndarray:
        """Embeddings [number of inputs, hidden_size], float32: the "mean" of each input's last
        hidden states or the "last" of them, of length 1 unless `normalize` is False. Inputs and
        exceptions as in score."""
        from allspark.prompts import embed

        return embed(self, model_name, model, inputs, pooling, normalize)

    # -- prefix cache ------------------------------------------------------------------------

    def find_prefix(self, model_name: str, input_ids: Any) -> int:
        """How many tokens at the beginning of `input_ids` the model's prefix cache holds now.

        This and the calls below raise KeyError for an unknown name, ValueError for ids that are
        not in the vocabulary, and AllSparkError where the model does not run or was installed
        without a prefix cache.
        """
        return self._native.find_prefix(model_name, to_id_array(input_ids))

    def pin_prefix(self, model_name: str, input_ids: Any) -> int:
        """Keeps what the cache holds of `input_ids`, from the beginning, whatever else comes.

        It is kept until `unpin_prefix`, as often as it was pinned. Nothing is computed: run a
        request with these ids first.

        Returns:
            How many tokens are pinned: whole KV blocks, 0 where the cache holds none.

        Raises:
            OutOfMemoryError: no room would be left for a request of engine_max_length.
        """
        return self._native.pin_prefix(model_name, to_id_array(input_ids))

    def unpin_prefix(self, model_name: str, input_ids: Any) -> int:
        """Undoes one `pin_prefix`; returns how many tokens it had pinned, 0: none."""
        return self._native.unpin_prefix(model_name, to_id_array(input_ids))

    def clear_prefix_cache(self, model_name: str) -> int:
        """Forgets all that no running request uses, pinned or not; returns how many tokens."""
        return self._native.clear_prefix_cache(model_name)

    # -- completion signal -------------------------------------------------------------------

    def fileno(self) -> int:
        """A descriptor that is readable while changed queues wait to be drained; poll it with
        select, epoll or an event loop's add_reader."""
        return self._native.completions.fileno()

    def drain_completions(self) -> list[RequestHandle]:
        """Handles of the requests that got tokens or a terminal status since the last call."""
        return [RequestHandle(request_id) for request_id in self._native.completions.drain()]

    # -- information -------------------------------------------------------------------------

    def get_as_engine_stat(self, model_name: str) -> AsEngineStat:
        """A snapshot of the model's counters. Raises KeyError for an unknown name."""
        return self._native.engine_stat(model_name)

    def get_version_full(self) -> str:
        """'M.m.p/(GitSha1:xxxxxxxx)'."""
        return NativeEngine.version()

    def last_error(self) -> str:
        """The message of this thread's last failed call on this engine; '' if none failed."""
        return getattr(self._errors, "message", "")

    def __repr__(self) -> str:
        return f"Engine(version={self.get_version_full()}, models={self.list_models()})"

    # -- helpers -----------------------------------------------------------------------------

    def _token_mask(self, model: LLM | None, config: RequestConfig) -> QueuedMask | None:
        if config.response_format is None:
            return None
        if model is None:
            raise ValueError(
                "response_format needs the tokenizer; give start_request_ids the loader as model"
            )
        return self._guided_decoding().mask(
            config.response_format, model.get_tokenizer(), config.native
        )

    def _guided_decoding(self) -> GuidedDecoding:
        from allspark.guided import GuidedDecoding

        with self._guided_lock:
            if self._guided is None:
                self._guided = GuidedDecoding()
                # After the engine has ended its requests: masks that fail would be their reason.
                weakref.finalize(self._native, self._guided.close)
            return self._guided

    def _fail(self, status: AsStatus, message: str) -> AsStatus:
        self._errors.message = message
        return status

    def _result(self, status: Status) -> AsStatus:
        if status.ok:
            return AsStatus.ALLSPARK_SUCCESS
        return self._fail(status.as_status, status.message)

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
        prompt_length: int,
    ) -> ResultQueue:
        if config.text is None or model is None:
            return ResultQueue(native)
        minimum = max(config.native.min_new_tokens, config.native.min_length - prompt_length)
        return TextQueue(
            native,
            model.get_tokenizer(),
            config.text,
            stop=_WeakStop(self, model_name, handle),
            end_ids=config.end_ids(),
            min_tokens=minimum,
        )

    def _each(self, call: Any, model_name: str, handles: Handles) -> AsStatus:
        """Applies a call to one handle or to all of a list; the first failure is returned."""
        if isinstance(handles, RequestHandle):
            return self._result(call(model_name, handles))
        result = AsStatus.ALLSPARK_SUCCESS
        for handle in handles:
            status = self._each(call, model_name, handle)
            if result == AsStatus.ALLSPARK_SUCCESS:
                result = status
        return result


class _WeakStop:
    """Stops a request; does not keep the engine alive, which its queues outlive."""

    def __init__(self, engine: Engine, model_name: str, handle: RequestHandle):
        self._engine = weakref.ref(engine)
        self._arguments = (model_name, handle)

    def __call__(self) -> None:
        engine = self._engine()
        if engine is not None:
            engine._native.stop_request(*self._arguments)


class _DLPackCapsule:
    """Gives a bare DLPack capsule the protocol that NumPy asks for."""

    def __init__(self, capsule: Any):
        self._capsule = capsule

    def __dlpack__(self, **_: Any) -> Any:
        return self._capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return (1, 0)  # kDLCPU
