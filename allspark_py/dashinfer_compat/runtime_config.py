"""The runtime config with the fields, keywords and values of DashInfer's."""

from __future__ import annotations

import copy
import enum
import os
from collections.abc import Mapping, Sequence
from typing import Any

import allspark.runtime_config
from allspark._allspark import AsModelConfig as NativeModelConfig
from allspark.dashinfer_compat.keywords import keywords
from allspark.dashinfer_compat.not_served import warn
from allspark.runtime_config import TargetDevice, to_device


class AsMHAPrefill(enum.IntEnum):
    AsPrefillDefault = 0
    AsPrefillFlashV2 = 10
    AsPrefillXformer = 11


class AsEvictionStrategy(enum.IntEnum):
    MaxLength = 0
    Random = 1


class AsSchedulingStrategy(enum.IntEnum):
    ContextPriority = 0
    Balance = 1


_BOOLS = frozenset(name for name, kind, *_ in NativeModelConfig.fields() if kind == "a bool")
# The order in which DashInfer's constructor takes them.
_POSITIONS = (
    "model_name", "model_path", "weights_path", "compute_unit", "engine_max_length",
    "engine_max_batch", "engine_max_prefill_length", "swap_threshold", "text_graph", "num_threads",
    "matmul_precision", "lora_names", "cache_span_size", "cache_span_num_init",
    "cache_span_num_grow", "enable_prefix_cache", "prefix_cache_ttl", "prefill_mode", "cache_mode",
    "eviction_strategy", "scheduling_strategy", "enable_sparsity_matmul",
)  # fmt: skip
# Fields that the engine does not use, with the values that change nothing.
_UNUSED: dict[str, Any] = {
    "swap_threshold": -1,
    "text_graph": False,
    "lora_names": [],
    "cache_span_num_grow": 0,
    "prefill_mode": AsMHAPrefill.AsPrefillDefault,
    "eviction_strategy": AsEvictionStrategy.MaxLength,
    "scheduling_strategy": AsSchedulingStrategy.ContextPriority,
    "enable_sparsity_matmul": False,
}
# Values of matmul_precision: the model's own type is at least as exact as each of them.
_PRECISIONS = ("highest", "high", "medium", "medium_bf16", "medium_fp16")


def to_bool(value: Any) -> Any:
    """0 and 1 as bools; anything else unchanged."""
    return bool(value) if type(value) is int and value in (0, 1) else value


def _to_cpu_unit(compute_unit: Any) -> Any:
    """Turns units of several NUMA nodes into all of them, and other CPU units into "CPU:0"; warns
    where the unit named something else."""
    if not isinstance(compute_unit, str):
        return compute_unit
    kind, _, ids = compute_unit.partition(":")
    if kind != "CPU_NUMA" and (kind != "CPU" or ids == "0"):
        return compute_unit
    unit = "CPU_NUMA" if kind == "CPU_NUMA" or "," in ids else "CPU:0"
    if unit != compute_unit:
        warn(
            f"compute_unit is {compute_unit!r}; nodes are not chosen, it runs as {unit} on every "
            "core that the process may run on (num_threads says how many of them)"
        )
    return unit


class AsModelConfig(NativeModelConfig):
    """AsModelConfig with all of DashInfer's fields, also by position. A field that asks for a
    feature which does not exist here gives a warning that it changes nothing."""

    def __init__(self, *args: Any, **fields: Any):
        super().__init__()
        if len(args) > len(_POSITIONS):
            raise TypeError(f"AsModelConfig takes {len(_POSITIONS)} arguments, {len(args)} given")
        if os.environ.get("AS_PROFILE", "").upper() in ("ON", "1"):
            self.op_profiling = True
        for name, value in (*zip(_POSITIONS, args, strict=False), *fields.items()):
            setattr(self, name, value)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _UNUSED:
            if value != _UNUSED[name]:
                warn(f"{name} is {value!r}, which changes nothing here; its default is "
                      f"{_UNUSED[name]!r}")  # fmt: skip
            self.__dict__[name] = value
            return
        if not hasattr(NativeModelConfig, name):
            raise AttributeError(f"AsModelConfig has no field {name!r}")
        if name == "compute_unit":
            value = _to_cpu_unit(value)
        elif name == "matmul_precision" and value in _PRECISIONS:
            if value.startswith("medium"):
                warn(f"matmul_precision is {value!r}, which changes nothing here; the model "
                      "computes in the type it was serialised for")  # fmt: skip
            value = ""
        elif name in _BOOLS:
            value = to_bool(value)
        super().__setattr__(name, value)

    def __getattr__(self, name: str) -> Any:
        try:
            return copy.copy(_UNUSED[name])
        except KeyError:
            raise AttributeError(f"AsModelConfig has no field {name!r}") from None

    def __copy__(self) -> AsModelConfig:
        copied = AsModelConfig(**self.to_dict())
        copied.__dict__.update(self.__dict__)
        return copied


@keywords(
    {
        "model_name": {"model_name": "name"},
        "max_length": {"length": "num_tokens"},
        "max_batch": {"batch": "num_requests"},
        "max_prefill_length": {"length": "num_tokens"},
        "lora_max_num": {"num": "number"},
        "kv_cache_mode": {"cache_mode": "mode"},
        "kv_cache_span_size": {"span_size": "num_tokens"},
        "set_compute_unit_from_str": {"compute_unit": "text"},
        "set_span_init_size": {"span_init_size": "num_blocks"},
        "from_dict": {"rfield": "fields"},
        "update_from_dict": {"rfield": "fields"},
    }
)
class AsModelRuntimeConfigBuilder(allspark.runtime_config.AsModelRuntimeConfigBuilder):
    """The builder with DashInfer's keywords."""

    def __init__(self) -> None:
        super().__init__()
        self._config = AsModelConfig()

    def compute_unit(
        self,
        target_device: TargetDevice | str,
        device_id_array: Sequence[int] | None = None,
        compute_thread_in_device: int = 0,
    ) -> AsModelRuntimeConfigBuilder:
        """As allspark's; CPU_NUMA and several ids of the CPU run on all NUMA nodes, another id
        as CPU:0, with a warning."""
        device = to_device(target_device)
        ids = ",".join(str(i) for i in device_id_array or [0])
        self._set("compute_unit", f"{device.value}:{ids}")
        self._set("num_threads", compute_thread_in_device)
        return self

    def update_from_dict(self, fields: Mapping[str, Any]) -> AsModelRuntimeConfigBuilder:
        """As allspark's, but accepts the fields that change nothing."""
        rest = dict(fields)
        rest.pop("cuda_mem", None)
        for name in _UNUSED.keys() & rest.keys() - {"enable_sparsity_matmul"}:
            value = rest.pop(name)
            if name == "eviction_strategy" and isinstance(value, str):
                value = AsEvictionStrategy[value]
            self._set(name, value)
        super().update_from_dict(rest)
        return self
