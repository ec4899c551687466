"""Engine: installs, runs and queries models. With its bases RequestCalls and LoraCalls it is the
Python side of engine.h.

Calls that the DashInfer interface documents as returning AsStatus return it and never raise for
the same failure; `Engine.last_error()` has the message. Arguments of a wrong Python type raise
TypeError.
"""

from __future__ import annotations

import enum
import os
from typing import TYPE_CHECKING, Any

import numpy as np
from allspark._allspark import (
    AsCacheMode,
    AsEngineStat,
    AsModelConfig,
    AsModelInfo,
    AsStatus,
    GenerateRequestStatus,
    ModelImage,
    ModelState,
    NativeEngine,
    RequestHandle,
)
from allspark.input_ids import to_id_array
from allspark.lora_calls import LoraCalls
from allspark.request_calls import RequestCalls
from allspark.request_stat import RequestStatInfo
from allspark.result_queue import ResultQueue
from allspark.runtime_config import AsModelRuntimeConfigBuilder, TargetDevice

if TYPE_CHECKING:
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


class Engine(RequestCalls, LoraCalls):
    """One engine with any number of uniquely named models. Thread-safe."""

    # -- models ----------------------------------------------------------------------------

    def register_image(self, model_name: str, image: ModelImage) -> AsStatus:
        """Makes a model that was serialised to memory known as `model_name`; loaders call this."""
        return self._result(self._native.register_image(model_name, image))

    def install_model(self, as_model_config_struct: AsModelConfig) -> AsStatus:
        """Opens and verifies the model that the runtime config names; its state is Initial.

        Fails where the name is taken, a file is damaged, or the KV pool could not hold one
        request of engine_max_length.
        """
        if isinstance(as_model_config_struct, AsModelRuntimeConfigBuilder):
            as_model_config_struct = as_model_config_struct.build()
        status = self._result(self._native.install_model(as_model_config_struct))
        if status == AsStatus.ALLSPARK_SUCCESS:
            self._note_lora_folder(as_model_config_struct)
        return status

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
        status = self._result(self._native.release_model(model_name))
        if status == AsStatus.ALLSPARK_SUCCESS:
            self._forget_loras(model_name)
        return status

    def unload_device_mem(self, model_name: str) -> AsStatus:
        """Frees the KV pool, scratch memory and mapped weights of a running model, after its step.

        Requests that run or arrive wait for `load_device_mem` and then go on unchanged. The prefix
        cache is lost; weights in a memory image and LoRA adapters stay.
        """
        return self._result(self._native.unload_device_mem(model_name))

    def load_device_mem(self, model_name: str) -> AsStatus:
        """Allocates the memory again and warms up; where that fails, the model stays unloaded."""
        return self._result(self._native.load_device_mem(model_name))

    def get_model_state(self, model_name: str) -> ModelState:
        """The state of an installed model. Raises KeyError for a name that is not installed."""
        return self._native.model_state(model_name)

    def list_models(self) -> list[str]:
        """Names of the installed models, in the order of installation."""
        return self._native.list_models()

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
        return self._result(self._native.write_trace(model_name, os.fspath(path)))

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
