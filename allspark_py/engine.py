"""Engine: installs, runs and queries models; the Python side of engine.h.

Calls that the DashInfer interface documents as returning AsStatus return it and never raise for
the same failure; `Engine.last_error()` has the message. Arguments of a wrong Python type raise
TypeError.
"""

from __future__ import annotations

import enum
import operator
import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from allspark import exit_gate
from allspark._allspark import (
    AsCacheMode,
    AsEngineStat,
    AsModelConfig,
    AsModelInfo,
    AsStatus,
    GenerateRequestStatus,
    LoraImage,
    ModelImage,
    ModelState,
    NativeEngine,
    RequestHandle,
)
from allspark.generation_config import ASGenerationConfigBuilder
from allspark.input_ids import input_ids_of, to_id_array
from allspark.lora_sources import LoraSources, to_status
from allspark.request_starts import RequestStarts, Started, compile_grammar
from allspark.request_stat import RequestStatInfo
from allspark.result_queue import ResultQueue
from allspark.runtime_config import AsModelRuntimeConfigBuilder, TargetDevice
from allspark.statuses import Handles, Statuses, flattened
from allspark.text_queue import TextQueue

if TYPE_CHECKING:
    from allspark import LoraAdapter
    from allspark.model_loader import LLM
    from allspark.scoring import PromptScore

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


class RoPEScaleMethod(enum.IntEnum):
    """Ways to stretch rotary position embeddings (values of the DashInfer interface)."""

    NO_SCALE = 0
    YaRN = 3
    NTK = 4


def _to_native_timeout(timeout_ms: int | None) -> int:
    """-1 for None, no limit. Raises ValueError for a negative number."""
    if timeout_ms is None:
        return -1
    timeout = operator.index(timeout_ms)
    if timeout < 0:
        raise ValueError(f"timeout_ms is {timeout}; it must be at least 0")
    return timeout


class Engine:
    """One engine with any number of uniquely named models. Thread-safe."""

    _queue_types = (ResultQueue, TextQueue)

    def __init__(self) -> None:
        self._native = NativeEngine()
        self._statuses = Statuses()
        self._requests = RequestStarts(self._native, self._statuses, self._queue_types)
        self._loras = LoraSources()

    def last_error(self) -> str:
        """The message of this thread's last failed call on this engine; '' if none failed."""
        return self._statuses.last_error()

    # -- models ----------------------------------------------------------------------------

    def register_image(self, model_name: str, image: ModelImage) -> AsStatus:
        """Makes a model that was serialised to memory known as `model_name`; loaders call this."""
        return self._statuses.of(self._native.register_image(model_name, image))

    def install_model(self, as_model_config_struct: AsModelConfig) -> AsStatus:
        """Opens and verifies the model that the runtime config names; its state is Initial.

        Fails where the name is taken, a file is damaged, or the KV pool could not hold one
        request of engine_max_length.
        """
        if isinstance(as_model_config_struct, AsModelRuntimeConfigBuilder):
            as_model_config_struct = as_model_config_struct.build()
        status = self._statuses.of(self._native.install_model(as_model_config_struct))
        if status == AsStatus.ALLSPARK_SUCCESS:
            self._loras.note_folder(as_model_config_struct)
        return status

    build_model_from_config_struct = install_model

    def start_model(self, model_name: str) -> AsStatus:
        """Initial or Stop -> Running: takes memory, starts the step thread, warms up."""
        return self._statuses.of(self._native.start_model(model_name))

    def stop_model(
        self, model_name: str, drain: bool = False, timeout_ms: int | None = None
    ) -> AsStatus:
        """Running -> Stop; returns when the step thread has ended.

        Args:
            drain: False ends running requests with the reason 'cancelled'; True lets them finish
                and denies new ones.
            timeout_ms: a drain that takes longer turns into a cancel, as does one at Ctrl-C. None:
                no limit.
        """
        try:
            timeout = _to_native_timeout(timeout_ms)
        except ValueError as error:
            return self._statuses.fail(AsStatus.ALLSPARK_PARAM_ERROR, str(error))
        return self._statuses.of(self._native.stop_model(model_name, drain, timeout))

    def release_model(self, model_name: str) -> AsStatus:
        """Initial or Stop -> Released: everything is freed and the name can be used again."""
        status = self._statuses.of(self._native.release_model(model_name))
        if status == AsStatus.ALLSPARK_SUCCESS:
            self._loras.forget(model_name)
            self._requests.end_thread(model_name)
        return status

    def unload_device_mem(self, model_name: str) -> AsStatus:
        """Frees the KV pool, scratch memory and mapped weights of a running model, after its step.

        Requests that run or arrive wait for `load_device_mem` and then go on unchanged. The prefix
        cache is lost; weights in a memory image and LoRA adapters stay.
        """
        return self._statuses.of(self._native.unload_device_mem(model_name))

    def load_device_mem(self, model_name: str) -> AsStatus:
        """Allocates the memory again and warms up; where that fails, the model stays unloaded."""
        return self._statuses.of(self._native.load_device_mem(model_name))

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
        return self._requests.start(model_name, model, input_ids, generate_config_builder)

    def start_request(
        self,
        model_name: str,
        inputs: dict[str, Any],
        generate_config: ASGenerationConfigBuilder | dict[str, Any] | None = None,
    ) -> Started:
        """The raw form: `inputs["input_ids"]` as for start_request_ids, or a DLPack capsule."""
        return self.start_request_ids(model_name, None, input_ids_of(inputs), generate_config)

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

        def start(text: str) -> Started:
            with exit_gate.passing():
                ids = model.get_tokenizer().encode(text)
            return self.start_request_ids(model_name, model, ids, generate_config_builder)

        return self._requests.start_texts(model_name, model, input_str_or_array, start)

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
        compiled = await compile_grammar(model, generate_config_builder)
        return await self._requests.start_async(
            self.start_request_ids,
            model_name,
            model,
            input_ids,
            generate_config_builder,
            compiled=compiled,
        )

    async def start_request_text_async(
        self,
        model_name: str,
        model: LLM,
        input_str_or_array: str | Sequence[str],
        generate_config_builder: ASGenerationConfigBuilder | dict[str, Any] | None = None,
    ) -> Started:
        """start_request_text for asyncio; tokenising does not block the loop either."""
        compiled = await compile_grammar(model, generate_config_builder)
        return await self._requests.start_async(
            self.start_request_text,
            model_name,
            model,
            input_str_or_array,
            generate_config_builder,
            compiled=compiled,
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
            with exit_gate.passing():
                ids, config = prepare()
            return self.start_request_ids(name, model, ids, config)

        return await self._requests.start_async(start, model_name)

    def stop_request(self, model_name: str, request_handle: Handles) -> AsStatus:
        """Ends a request after the running step at the latest; a second call has no effect."""
        return self._statuses.of_each(self._native.stop_request, model_name, request_handle)

    def release_request(self, model_name: str, request_handle: Handles) -> AsStatus:
        """Stops the request if it runs and frees its memory; its queue stays readable."""
        return self._requests.release(model_name, request_handle)

    def sync_request(
        self, model_name: str, request_handle: Handles | None = None, timeout_ms: int | None = None
    ) -> AsStatus:
        """Blocks until the request has ended; None waits for every request of the model.

        Args:
            timeout_ms: give up after this long with ALLSPARK_RUNTIME_ERROR. None: no limit.
        """
        try:
            timeout = _to_native_timeout(timeout_ms)
        except ValueError as error:
            return self._statuses.fail(AsStatus.ALLSPARK_PARAM_ERROR, str(error))
        if request_handle is None:
            return self._statuses.of(self._native.sync_all_requests(model_name, timeout))
        handles = flattened(request_handle)
        return self._statuses.of(self._native.sync_requests(model_name, handles, timeout))

    # -- LoRA adapters ---------------------------------------------------------------------

    def register_lora(self, model_name: str, lora_name: str, image: LoraImage) -> AsStatus:
        """Makes an adapter serialised in memory known to load_lora; loaders call this."""
        self._loras.add(model_name, lora_name, image)
        return AsStatus.ALLSPARK_SUCCESS

    def load_lora(
        self,
        model_name: str,
        lora_name: str,
        lora: str | os.PathLike[str] | LoraAdapter | LoraImage | None = None,
    ) -> AsStatus:
        """Loads an adapter into an installed model; requests choose it by `lora_name`.

        Args:
            lora: a file `.aslora`; a directory in PEFT's layout; a `model_loader.LoraAdapter`; or
                an image of one. None: the adapter that was serialised with the model, in memory or
                as <lora_name>.aslora beside its .asparam.
        """
        try:
            source = self._loras.find(model_name, lora_name, lora, self._native.model_spec)
        except (OSError, RuntimeError, ValueError, KeyError, NotImplementedError) as error:
            return self._statuses.fail(*to_status(error))
        return self._statuses.of(self._native.load_lora(model_name, lora_name, source))

    def unload_lora(self, model_name: str, lora_name: str) -> AsStatus:
        """Frees an adapter; ALLSPARK_LORA_IN_USE while a request uses it."""
        return self._statuses.of(self._native.unload_lora(model_name, lora_name))

    def list_loras(self, model_name: str) -> list[str]:
        """The adapters that are loaded. Raises KeyError for a model that is not installed."""
        return self._native.list_loras(model_name)

    # -- whole prompts -----------------------------------------------------------------------

    def score(
        self, model_name: str, model: LLM | None, inputs: Any, top_logprobs: int = 0
    ) -> list[PromptScore]:
        """How likely the model finds each input of up to engine_max_length tokens; waits for all.

        Args:
            inputs: a text, or ids in a form that start_request_ids takes, or a sequence of these.
                Texts need the loader as `model`.
            top_logprobs: also return this many of the likeliest tokens at each position, at most
                20.

        Raises:
            ValueError: an input is refused. AllSparkError: it was stopped, or a step failed.
        """
        from allspark.scoring import score

        return score(self, model_name, model, inputs, top_logprobs)

    def get_ppl(self, model_name: str, model: LLM | None, inputs: Any) -> list[float]:
        """The mean cross entropy of each input, as LMDeploy's get_ppl returns it; its exp is the
        perplexity. Inputs may differ in length. Inputs and exceptions are those of score."""
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
        hidden states or the "last" of them, scaled to length 1 unless `normalize` is False. Inputs
        and exceptions are those of score."""
        from allspark.scoring import embed

        return embed(self, model_name, model, inputs, pooling, normalize)

    # -- prefix cache ------------------------------------------------------------------------

    def find_prefix(self, model_name: str, input_ids: Any, lora_name: str = "") -> int:
        """How many tokens at the beginning of `input_ids` the model's prefix cache holds now.

        This and the calls below raise KeyError for an unknown name, ValueError for ids that are
        not in the vocabulary, and AllSparkError where the model does not run or was installed
        without a prefix cache.
        """
        return self._native.find_prefix(model_name, to_id_array(input_ids), lora_name)

    def pin_prefix(self, model_name: str, input_ids: Any, lora_name: str = "") -> int:
        """Keeps the blocks that the cache holds of `input_ids`, from the first token on.

        They are kept until `unpin_prefix` was called as often as `pin_prefix`. Nothing is computed:
        run a request with these ids first.

        Returns:
            How many tokens are pinned: whole KV blocks, 0 if the cache holds none.

        Raises:
            OutOfMemoryError: there would be no room for a request of engine_max_length.
        """
        return self._native.pin_prefix(model_name, to_id_array(input_ids), lora_name)

    def unpin_prefix(self, model_name: str, input_ids: Any, lora_name: str = "") -> int:
        """Undoes one `pin_prefix`; returns how many tokens it had pinned, or 0."""
        return self._native.unpin_prefix(model_name, to_id_array(input_ids), lora_name)

    def clear_prefix_cache(self, model_name: str) -> int:
        """Drops all blocks that no running request uses, pinned or not; returns how many tokens."""
        return self._native.clear_prefix_cache(model_name)

    # -- completion signal -------------------------------------------------------------------

    def fileno(self) -> int:
        """A descriptor that is readable while changed queues wait to be drained; use it with
        select, epoll or an event loop's add_reader."""
        return self._native.completions.fileno()

    def drain_completions(self) -> list[RequestHandle]:
        """Handles of the requests that got tokens or a terminal status since the last call."""
        return [RequestHandle(request_id) for request_id in self._native.completions.drain()]

    # -- information -------------------------------------------------------------------------

    def get_as_model_info(self, model_name: str) -> AsModelInfo:
        """Sizes and memory of an installed model, also before start_model. Raises KeyError for an
        unknown name."""
        return self._native.model_info(model_name)

    def get_model_info(self, model_name: str) -> str:
        """get_as_model_info as text, "name=value, name=value"."""
        return str(self.get_as_model_info(model_name))

    def get_as_engine_stat(self, model_name: str) -> AsEngineStat:
        """A snapshot of the model's counters. Raises KeyError for an unknown name."""
        return self._native.engine_stat(model_name)

    def write_trace(self, model_name: str, path: str) -> AsStatus:
        """Writes what the model's trace holds so far to a file that Perfetto opens.

        `stop_model` writes it to the runtime config's trace_path; without that no trace is kept.
        """
        return self._statuses.of(self._native.write_trace(model_name, os.fspath(path)))

    def get_op_profiling_info(self, model_name: str) -> str:
        """Where the time of the model's steps went since it was installed. The table has a line for
        each operation, the longest first: calls, milliseconds and share, GB/s of weights and KV
        cache read, and 10^9 multiplications and additions a second.

        Needs `op_profiling` in the runtime config; raises AllSparkError without it. Raises KeyError
        for an unknown name.
        """
        return self._native.op_profiling_info(model_name)

    def metrics_text(self) -> str:
        """The metrics of all models in Prometheus' text format, for a /metrics page of type
        "text/plain; version=0.0.4". `allspark.metrics` has a collector for prometheus_client."""
        return self._native.metrics_text()

    def get_version_full(self) -> str:
        """'M.m.p/(GitSha1:xxxxxxxx)'."""
        return NativeEngine.version()

    def __repr__(self) -> str:
        return f"Engine(version={self.get_version_full()}, models={self.list_models()})"
