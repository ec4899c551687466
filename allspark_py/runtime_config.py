"""AsModelRuntimeConfigBuilder: builds the runtime config (AsModelConfig) of a model."""

from __future__ import annotations

import copy
import enum
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from allspark._allspark import AsCacheMode, AsModelConfig


class TargetDevice(enum.Enum):
    """Where a model runs. CPU_NUMA: on the CPU, with each thread's part of weights and KV cache on
    its own NUMA node."""

    CUDA = "CUDA"
    CPU = "CPU"
    CPU_NUMA = "CPU_NUMA"


def get_cache_mode_from_str(name: str) -> AsCacheMode:
    """The enum's value of that name: 'AsCacheDefault', 'AsCacheQuantI8', 'AsCacheQuantU4' or
    'AsCacheQuantK8V4'."""
    try:
        return AsCacheMode[name]
    except KeyError:
        names = ", ".join(mode.name for mode in AsCacheMode)
        raise ValueError(f"kv_cache_mode is {name!r}; it must be one of {names}") from None


def _to_int(name: str, value: int | str) -> int:
    """Numbers may be given as text, as in DashInfer."""
    if isinstance(value, str):
        try:
            return int(value)
        except ValueError:
            raise ValueError(f"{name} is {value!r}; it must be an integer") from None
    return value


def to_device(device: TargetDevice | str) -> TargetDevice:
    """A device by name, in upper or lower case."""
    if isinstance(device, TargetDevice):
        return device
    try:
        return TargetDevice[device.upper()]
    except (KeyError, AttributeError):
        names = ", ".join(d.name for d in TargetDevice)
        raise ValueError(f"target_device is {device!r}; it must be one of {names}") from None


class AsModelRuntimeConfigBuilder:
    """Fluent builder of AsModelConfig; every setter returns the builder."""

    def __init__(self) -> None:
        self._config = AsModelConfig()

    def _set(self, name: str, value: Any) -> AsModelRuntimeConfigBuilder:
        setattr(self._config, name, value)
        return self

    def model_name(self, name: str) -> AsModelRuntimeConfigBuilder:
        """The name by which the engine knows the model; unique in an engine."""
        return self._set("model_name", name)

    def model_dir(self, model_dir: str, file_name_prefix: str) -> AsModelRuntimeConfigBuilder:
        """Serialised files <model_dir>/<file_name_prefix>.asgraph and .asparam."""
        prefix = os.path.join(os.fspath(model_dir), file_name_prefix)
        return self.model_file_path(prefix + ".asgraph", prefix + ".asparam")

    def model_file_path(
        self, model_file_name: str, weight_file_path: str
    ) -> AsModelRuntimeConfigBuilder:
        """The two serialised files by their full paths."""
        self._set("model_path", os.fspath(model_file_name))
        return self._set("weights_path", os.fspath(weight_file_path))

    def compute_unit(
        self,
        target_device: TargetDevice | str,
        device_id_array: Sequence[int] | None = None,
        compute_thread_in_device: int = 0,
    ) -> AsModelRuntimeConfigBuilder:
        """Device, its ids (default [0], the only one of the CPU; of CPU_NUMA all nodes) and the
        number of compute threads (0: one per core)."""
        device = to_device(target_device)
        if device_id_array is not None and not isinstance(device_id_array, Iterable):
            raise TypeError(
                f"device_id_array is {device_id_array!r}; it must be a list of ids, such as [0]"
            )
        default = () if device is TargetDevice.CPU_NUMA else (0,)
        ids = ",".join(str(i) for i in device_id_array or default)
        self._set("compute_unit", f"{device.value}:{ids}" if ids else device.value)
        return self._set("num_threads", compute_thread_in_device)

    def set_compute_unit_from_str(self, text: str) -> AsModelRuntimeConfigBuilder:
        """A compute unit in its text form, such as 'CPU:0', 'CPU_NUMA' or 'CUDA:0,1'."""
        self.parse_device_type(text)
        return self._set("compute_unit", text)

    @staticmethod
    def parse_device_type(compute_unit: str) -> tuple[str, list[int]]:
        """'CUDA:0,1' as ('CUDA', [0, 1]), and 'CPU_NUMA', which is all nodes, as
        ('CPU_NUMA', [])."""
        if compute_unit == TargetDevice.CPU_NUMA.value:
            return compute_unit, []
        kind, _, ids = compute_unit.partition(":")
        kinds = [device.value for device in TargetDevice]
        if kind in kinds and all(part.isdigit() for part in ids.split(",")):
            return kind, [int(part) for part in ids.split(",")]
        raise ValueError(
            f"compute_unit is {compute_unit!r}; it must be like 'CPU:0', 'CPU_NUMA' or 'CUDA:0,1'"
        )

    def max_length(self, num_tokens: int | str) -> AsModelRuntimeConfigBuilder:
        """Limit of prompt and output tokens of one request together. Default 2048."""
        return self._set("engine_max_length", _to_int("max_length", num_tokens))

    def max_batch(self, num_requests: int | str) -> AsModelRuntimeConfigBuilder:
        """Limit of requests computed in one step. Default 32."""
        return self._set("engine_max_batch", _to_int("max_batch", num_requests))

    def max_prefill_length(self, num_tokens: int) -> AsModelRuntimeConfigBuilder:
        """The prefill chunk: limit of prompt tokens in one step. Default 0: 512."""
        return self._set("engine_max_prefill_length", num_tokens)

    def prefill_policy(self, policy: str) -> AsModelRuntimeConfigBuilder:
        """What a step computes where prompts wait and others decode: 'balanced' (the default),
        'throughput', 'first_token' or 'smooth' (docs/configuration.md)."""
        return self._set("prefill_policy", policy)

    def max_waiting_requests(self, num_requests: int) -> AsModelRuntimeConfigBuilder:
        """Limit of requests that wait beyond the running batch. Default 0: no limit."""
        return self._set("max_waiting_requests", num_requests)

    def queue_full_policy(self, policy: str) -> AsModelRuntimeConfigBuilder:
        """What a start does when that many wait: 'refuse' (the default), or 'block' until there is
        room."""
        return self._set("queue_full_policy", policy)

    def max_output_tensor_bytes(self, num_bytes: int) -> AsModelRuntimeConfigBuilder:
        """Limit of the output tensors of all waiting and running requests together, in bytes; a
        request that would exceed it is denied. Default 0: an eighth of the memory of the machine
        or the cgroup."""
        return self._set("max_output_tensor_bytes", num_bytes)

    def token_mask_timeout_ms(self, timeout_ms: int) -> AsModelRuntimeConfigBuilder:
        """How long a guided request waits for a mask at most; others go on. Default 10000."""
        return self._set("token_mask_timeout_ms", timeout_ms)

    def num_threads(self, num_threads: int) -> AsModelRuntimeConfigBuilder:
        """Compute threads. Default 0: one per core this process may run on."""
        return self._set("num_threads", num_threads)

    def matmul_precision(self, precision: str) -> AsModelRuntimeConfigBuilder:
        """'float32' or 'bfloat16' refuses a model serialised for another. Default '': any."""
        return self._set("matmul_precision", precision)

    def prefill_cache(self, enable: bool = True) -> AsModelRuntimeConfigBuilder:
        """The prompt prefix cache. Default on."""
        return self._set("enable_prefix_cache", enable)

    def prefix_cache_ttl(self, ttl: int = 300) -> AsModelRuntimeConfigBuilder:
        """How many seconds an unused prefix stays cached. Default 300."""
        return self._set("prefix_cache_ttl", ttl)

    def kv_cache_mode(self, mode: AsCacheMode | str) -> AsModelRuntimeConfigBuilder:
        """How the KV cache stores values: an AsCacheMode or its name. Default AsCacheDefault: the
        compute type."""
        if isinstance(mode, str):
            mode = get_cache_mode_from_str(mode)
        return self._set("cache_mode", mode)

    def kv_cache_span_size(self, num_tokens: int) -> AsModelRuntimeConfigBuilder:
        """Tokens per KV block: 16, 32, 64 or 128. Default 32."""
        return self._set("cache_span_size", num_tokens)

    def set_span_init_size(self, num_blocks: int) -> AsModelRuntimeConfigBuilder:
        """KV blocks in the pool. Default 0: sized from max_batch, max_length and memory."""
        return self._set("cache_span_num_init", num_blocks)

    def interrupt_on_cache_exhaustion(self, enable: bool = True) -> AsModelRuntimeConfigBuilder:
        """When KV blocks run out: True ends the youngest request of the lowest priority as
        GenerateInterrupted; False preempts it and later continues it with the same tokens. Default
        False."""
        return self._set("interrupt_on_cache_exhaustion", enable)

    def max_draft_rows(self, num_tokens: int) -> AsModelRuntimeConfigBuilder:
        """With speculative decoding (prompt_lookup_num_tokens, draft_model): the limit of decoded
        and draft tokens in one step. Default 64; 0: no draft tokens."""
        return self._set("max_draft_rows", num_tokens)

    def draft_model(self, model: str, num_tokens: int = 5) -> AsModelRuntimeConfigBuilder:
        """A smaller model of the same vocabulary that proposes draft tokens, at most `num_tokens`
        for a request in one step: the path of its .asgraph, or the name of a model serialised to
        memory. Default '': none."""
        return self._set("draft_model", model)._set("num_draft_tokens", num_tokens)

    def rope_scaling_factor(self, factor: float) -> AsModelRuntimeConfigBuilder:
        """For requests longer than the model was trained for: a factor of 1 or more changes the
        rope frequencies of every request by dynamic NTK scaling for max_length tokens. Default 0:
        the model's own frequencies."""
        return self._set("rope_scaling_factor", factor)

    def use_logn_attn(self, enable: bool = True) -> AsModelRuntimeConfigBuilder:
        """Beyond the length that the model was trained for, queries are scaled by the logarithm of
        their position, to the base of that length. Default off."""
        return self._set("use_logn_attn", enable)

    def trace_path(self, path: str) -> AsModelRuntimeConfigBuilder:
        """The file in which stop_model writes a trace of the last steps and requests, for Perfetto
        or chrome://tracing. Default '': no trace is kept."""
        return self._set("trace_path", os.fspath(path))

    def op_profiling(self, enable: bool = True) -> AsModelRuntimeConfigBuilder:
        """Measures each operation of a step, for get_op_profiling_info. Default off."""
        return self._set("op_profiling", enable)

    def lora_max_rank(self, rank: int | str) -> AsModelRuntimeConfigBuilder:
        """Limit of an adapter's rank. Default 64."""
        return self._set("lora_max_rank", _to_int("lora_max_rank", rank))

    def lora_max_num(self, number: int | str) -> AsModelRuntimeConfigBuilder:
        """Limit of adapters loaded at once. Default 5."""
        return self._set("lora_max_num", _to_int("lora_max_num", number))

    def enable_sparsity_matmul(self, enable: bool = False) -> AsModelRuntimeConfigBuilder:
        """2:4 sparse weights exist only on some GPUs; this build refuses True."""
        if enable:
            raise NotImplementedError(
                "enable_sparsity_matmul is True; this build has no sparse kernels"
            )
        return self

    def from_dict(self, fields: Mapping[str, Any]) -> AsModelRuntimeConfigBuilder:
        """Sets everything from a dict, which must have model_name, compute_unit {device_type,
        device_ids, compute_thread_in_device}, engine_max_length and engine_max_batch."""
        rest = dict(fields)
        for key in ("model_name", "compute_unit", "engine_max_length", "engine_max_batch"):
            if key not in rest:
                raise ValueError(f"the runtime config lacks the key {key!r}")
        self.model_name(rest.pop("model_name"))
        unit = rest.pop("compute_unit")
        if not isinstance(unit, Mapping) or "device_type" not in unit:
            raise ValueError(f"compute_unit is {unit!r}; it must be a dict with 'device_type'")
        self.compute_unit(
            unit["device_type"],
            unit.get("device_ids"),
            unit.get("compute_thread_in_device", 0),
        )
        return self.update_from_dict(rest)

    def update_from_dict(self, fields: Mapping[str, Any]) -> AsModelRuntimeConfigBuilder:
        """Sets fields by name: DashInfer's keys, or any attribute of AsModelConfig."""
        for key, value in fields.items():
            if key == "kv_cache_mode":
                self.kv_cache_mode(value)
            elif key == "kv_cache_span_size":
                self.kv_cache_span_size(value)
            elif key == "enable_sparsity_matmul":
                self.enable_sparsity_matmul(value)
            elif key in self._config.to_dict():
                self._set(key, value)
            else:
                names = ", ".join(self._config.to_dict())
                raise ValueError(
                    f"unknown key {key!r}; the keys are kv_cache_mode, kv_cache_span_size, {names}"
                )
        return self

    def build(self) -> AsModelConfig:
        """A copy of the config as it stands; the builder can be changed and built again."""
        return copy.copy(self._config)
