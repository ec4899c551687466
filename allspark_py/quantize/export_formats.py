"""The formats that a quantised checkpoint can have: the tensors of a module, and
`quantization_config`. model_loaders/quantized has the readers, which say how integers are packed.

Scales are values of bfloat16, and stored in a type that holds them exactly. In compressed-tensors
that is the type of the checkpoint, since readers multiply in the scales' type; and float32 where
float16 does not hold one. Readers of GPTQ and AWQ expect float16, which holds such a value unless
it is tiny (below 2^-17, about) or huge; a module with such a scale stores bfloat16.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from allspark.model_loader.convert import package_version
from allspark.model_loader.storage import round_float32
from allspark.quantize.arrays import Bytes, Floats
from allspark.quantize.export_files import Output, stored_as
from allspark.quantize.grid import WeightFormat
from numpy.typing import NDArray

Words = NDArray[np.int32]

# The order in which AWQ packs eight output features into a word, lowest bits first.
_AWQ_FEATURES = (0, 2, 4, 6, 1, 3, 5, 7)


@dataclass(frozen=True)
class Scheme:
    """What all quantised weights of a checkpoint have in common."""

    format: WeightFormat
    quantize_activations: bool = False


@dataclass(frozen=True)
class ModuleWeight:
    """The quantised weight of one module. Functions read its arrays, in the checkpoint's order."""

    shape: tuple[int, int]  # [out_features, in_features]
    dtype: str  # that the weight has in the checkpoint
    values: Callable[[], Bytes]  # [out_features, in_features]
    scales: Callable[[], Floats]  # [out_features, groups]
    zeros: Callable[[], Bytes]  # as scales, also where all are the middle


@dataclass(frozen=True)
class SaveFormat:
    """`problem`: why a scheme cannot be stored; None: it can. `row_multiple`: of what a module's
    output features must be a multiple, as zero points of several features share a word."""

    problem: Callable[[Scheme], str | None]
    row_multiple: Callable[[Scheme], int]
    tensors: Callable[[str, ModuleWeight, Scheme], list[Output]]
    # quantization_config, from the modules that are not quantised
    config: Callable[[Scheme, Sequence[str]], dict[str, Any]]


def pack(fields: Bytes, bits: int) -> Words:
    """Packs the last axis into words, the first field lowest: [.., n] to [.., n * bits / 32]."""
    octets: NDArray[Any] = np.ascontiguousarray(fields)
    if bits == 4:
        octets = octets[..., ::2] | octets[..., 1::2] << 4
    words: Words = np.ascontiguousarray(octets).view("<i4")
    return words


def _signed(stored: Bytes) -> NDArray[np.int8]:
    """Of 8 bits, around 0 instead of 128."""
    return (stored ^ np.uint8(128)).view(np.int8)


def _scales(name: str, scales: Callable[[], Floats], *dtypes: str) -> Output:
    """The tensor of scales, in the first of these types that holds them exactly."""
    found = scales()
    dtype = next(dtype for dtype in dtypes if (round_float32(found, dtype) == found).all())
    return Output(name, dtype, found.shape, lambda: stored_as(scales(), dtype))


# compressed-tensors.


def _compressed_problem(scheme: Scheme) -> str | None:
    if scheme.quantize_activations and scheme.format.bits != 8:
        return (
            f"weights have {scheme.format.bits} bits and compute_method is 'activate_quant', which "
            "it has for int8 and uint8 alone"
        )
    return None


def _compressed_tensors(module: str, weight: ModuleWeight, scheme: Scheme) -> list[Output]:
    bits = scheme.format.bits
    rows, cols = weight.shape
    groups = cols // (scheme.format.group_size or cols)
    scale = _scales(f"{module}.weight_scale", weight.scales, weight.dtype, "float32")
    if scheme.quantize_activations:  # int-quantized
        outputs = [
            Output(f"{module}.weight", "int8", (rows, cols), lambda: _signed(weight.values())),
            scale,
        ]
        if scheme.format.asymmetric:
            name = f"{module}.weight_zero_point"
            zeros = Output(name, "int8", (rows, groups), lambda: _signed(weight.zeros()))
            outputs.append(zeros)
        return outputs
    lane = 32 // bits

    def packed_zeros() -> Words:
        columns = weight.zeros().T
        columns = np.pad(columns, ((0, 0), (0, -rows % lane)))
        return np.ascontiguousarray(pack(columns, bits).T)

    outputs = [
        Output(
            f"{module}.weight_packed", "int32", (rows, cols // lane),
            lambda: pack(weight.values(), bits),
        ),
        scale,
        Output(f"{module}.weight_shape", "int64", (2,), lambda: np.array((rows, cols), "<i8")),
    ]  # fmt: skip
    if scheme.format.asymmetric:
        shape = (-(-rows // lane), groups)
        outputs.append(Output(f"{module}.weight_zero_point", "int32", shape, packed_zeros))
    return outputs


def _compressed_config(scheme: Scheme, left: Sequence[str]) -> dict[str, Any]:
    size = scheme.format.group_size
    layout = "int-quantized" if scheme.quantize_activations else "pack-quantized"
    weights = {
        "num_bits": scheme.format.bits,
        "type": "int",
        "symmetric": not scheme.format.asymmetric,
        "strategy": "group" if size else "channel",
        "group_size": size or None,
        "dynamic": False,
        "actorder": None,
        "observer": "minmax",
    }
    activations = {
        "num_bits": 8,
        "type": "int",
        "symmetric": True,
        "strategy": "token",
        "group_size": None,
        "dynamic": True,
        "actorder": None,
        "observer": None,
    }
    group = {
        "targets": ["Linear"],
        "format": layout,
        "weights": {name: value for name, value in weights.items() if value is not None},
        "input_activations": activations if scheme.quantize_activations else None,
        "output_activations": None,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": list(left),
        "kv_cache_scheme": None,
    }


# GPTQ and AWQ.
#
# GPTQ's first form stores zero points minus one. Readers disagree on 0 there, and GPTQModel 7 takes
# asymmetric weights in that form from some programs alone; so these get the second form, which
# stores zero points as they are.


def _weight_only(scheme: Scheme, name: str) -> str | None:
    if scheme.quantize_activations:
        return (
            f"compute_method is 'activate_quant', which {name} has no field for; "
            "compressed-tensors has one"
        )
    return None


def _gptq_problem(scheme: Scheme) -> str | None:
    return _weight_only(scheme, "gptq")


def _awq_problem(scheme: Scheme) -> str | None:
    if scheme.format.bits != 4 or not scheme.format.asymmetric:
        kind = "uint" if scheme.format.asymmetric else "int"
        return f"weight_format is '{kind}{scheme.format.bits}'; awq has uint4 alone"
    return _weight_only(scheme, "awq")


def _half_scales(module: str, weight: ModuleWeight) -> Output:
    def scales() -> Floats:
        return np.ascontiguousarray(weight.scales().T)

    return _scales(f"{module}.scales", scales, "float16", "bfloat16", "float32")


def _gptq_tensors(module: str, weight: ModuleWeight, scheme: Scheme) -> list[Output]:
    bits = scheme.format.bits
    rows, cols = weight.shape
    size, lane = scheme.format.group_size or cols, 32 // bits
    groups = cols // size
    offset = 0 if scheme.format.asymmetric else 1
    return [
        Output(
            f"{module}.qweight", "int32", (cols // lane, rows),
            lambda: np.ascontiguousarray(pack(weight.values(), bits).T),
        ),
        Output(
            f"{module}.qzeros", "int32", (groups, rows // lane),
            lambda: pack(weight.zeros().T - np.uint8(offset), bits),
        ),
        _half_scales(module, weight),
        Output(
            f"{module}.g_idx", "int32", (cols,), lambda: (np.arange(cols) // size).astype("<i4")
        ),
    ]  # fmt: skip


def _gptq_config(scheme: Scheme, left: Sequence[str]) -> dict[str, Any]:
    return {
        "quant_method": "gptq",
        "bits": scheme.format.bits,
        "group_size": scheme.format.group_size or -1,
        "desc_act": False,
        "sym": not scheme.format.asymmetric,
        "lm_head": False,
        "checkpoint_format": "gptq_v2" if scheme.format.asymmetric else "gptq",
        "pack_dtype": "int32",
        "dynamic": {f"-:^{re.escape(module)}$": {} for module in left},
        "meta": {"quantizer": [f"allspark:{package_version()}"]},
    }


def _awq_tensors(module: str, weight: ModuleWeight, scheme: Scheme) -> list[Output]:
    rows, cols = weight.shape
    groups = cols // (scheme.format.group_size or cols)

    def packed(fields: Bytes) -> Words:
        """[rows, n] to [n, rows / 8]"""
        words = fields.T.reshape(fields.shape[1], -1, 8)[:, :, _AWQ_FEATURES]
        return pack(words.reshape(fields.shape[1], -1), 4)

    return [
        Output(f"{module}.qweight", "int32", (cols, rows // 8), lambda: packed(weight.values())),
        Output(f"{module}.qzeros", "int32", (groups, rows // 8), lambda: packed(weight.zeros())),
        _half_scales(module, weight),
    ]


def _awq_config(scheme: Scheme, left: Sequence[str]) -> dict[str, Any]:
    return {
        "quant_method": "awq",
        "bits": scheme.format.bits,
        "group_size": scheme.format.group_size or -1,
        "zero_point": True,
        "version": "gemm",
        "modules_to_not_convert": list(left),
    }


def _lane(scheme: Scheme) -> int:
    return 32 // scheme.format.bits


SAVE_FORMATS = {
    "compressed-tensors": SaveFormat(
        _compressed_problem, lambda scheme: 1, _compressed_tensors, _compressed_config
    ),
    "gptq": SaveFormat(_gptq_problem, _lane, _gptq_tensors, _gptq_config),
    "awq": SaveFormat(_awq_problem, _lane, _awq_tensors, _awq_config),
}
