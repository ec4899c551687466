"""The forms of SmolLM2 that documents have figures of, by the rows of their tables."""

from __future__ import annotations

from typing import Any

_UINT4 = {"weight_format": "uint4", "group_size": 64}
_INT4 = {"weight_format": "int4", "group_size": 32}
_A8W8 = {"weight_format": "int8", "group_size": 0, "compute_method": "activate_quant"}
_FEW = {"calib_samples": 10}  # of 512 tokens

# What differs from the defaults, in the engine's config and in its precision A8W8.
OPENED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "bfloat16": ({}, {}),
    "int8, A16": ({"precision": "A16W8"}, {}),
    "int8, A8, one scale per token": ({"precision": "A8W8"}, {"activation_group_size": 0}),
    "int8, A8": ({"precision": "A8W8"}, {}),
    "KV cache of 8 bits": ({"kv_cache_bits": 8}, {}),
    "KV cache of 8 bits for keys, 4 bits for values": ({"kv_cache_bits": 6}, {}),
    "KV cache of 4 bits": ({"kv_cache_bits": 4}, {}),
}
# Settings of quantize_model.
QUANTISED: dict[str, dict[str, Any]] = {
    "uint4, groups of 64: `rtn`": {**_UINT4, "method": "rtn"},
    "`awq`": {**_UINT4, **_FEW, "method": "awq"},
    "`gptq`": {**_UINT4, **_FEW, "method": "gptq"},
    "`awq+gptq`": {**_UINT4, **_FEW, "method": "awq+gptq"},
    "`awq+gptq`, 128 sequences": {**_UINT4, "method": "awq+gptq"},
    "`awq+gptq`, 5.3 bits": {**_UINT4, **_FEW, "method": "awq+gptq", "target_bits": 5.3},
    "int4, groups of 32: `rtn`": {**_INT4, "method": "rtn"},
    "int4, `awq+gptq`": {**_INT4, **_FEW, "method": "awq+gptq"},
    "int8, A8, one scale per token: `rtn`": {**_A8W8, "method": "rtn", "activation_group_size": 0},
    "int8, A8: `rtn`, smoothed": {**_A8W8, **_FEW, "method": "rtn", "smooth": 0.5},
}
