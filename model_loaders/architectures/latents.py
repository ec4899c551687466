"""Latent attention: the layout of its weights in checkpoints of DeepSeek-V2 and its successors."""

from __future__ import annotations

import re
from typing import Any

from numpy.typing import NDArray

from ..derived import derive
from ..errors import UnexplainedTensorError
from ..spec import Weight
from ..storage import Tensors
from .llama import NAMES

ATTENTION = NAMES["layer"] + "self_attn."
# For each head, this matrix has the rows of its keys, then those of its values.
KV_UP = re.compile(r"(model\.layers\.\d+\.self_attn\.kv_b_proj\.)weight")


def _kv_rows(spec: Any) -> tuple[int]:
    return (spec.kv_latent + spec.rotary_dim,)


def _latent_rows(spec: Any) -> tuple[int, int]:
    return (spec.q_latent, *_kv_rows(spec))


def _weight(target: str, *modules: str, **options: Any) -> Weight:
    sources = tuple(f"{ATTENTION}{name}.weight" for name in modules)
    return Weight(f"layers.{{i}}.{target}", sources, **options)


LATENT_WEIGHTS = (
    _weight("latents", "q_a_proj", "kv_a_proj_with_mqa", rows=_latent_rows),
    _weight("latents", "kv_a_proj_with_mqa", rows=_kv_rows),
    _weight("q_latent_norm", "q_a_layernorm"),
    _weight("kv_latent_norm", "kv_a_layernorm"),
    _weight("q", "q_b_proj"),
    _weight("q", "q_proj"),
    Weight("layers.{i}.k_up", (f"{ATTENTION}kv_b_proj.keys.weight",)),
    Weight("layers.{i}.v_up", (f"{ATTENTION}kv_b_proj.values.weight",)),
)


def split_latents(tensors: Tensors, spec: Any) -> Tensors:
    """``tensors``, with the matrix from latents to all heads' keys and values split into two. The
    part for keys is transposed, because queries are multiplied by it.
    """
    heads, latent, value = spec.num_heads, spec.kv_latent, spec.value_dim
    key = spec.head_dim - spec.rotary_dim

    def keys(weight: NDArray[Any]) -> NDArray[Any]:
        rows = weight.reshape(heads, key + value, latent)[:, :key]
        return rows.transpose(0, 2, 1).reshape(heads * latent, key)

    def values(weight: NDArray[Any]) -> NDArray[Any]:
        rows = weight.reshape(heads, key + value, latent)[:, key:]
        return rows.reshape(heads * value, latent)

    view = dict(tensors)
    for name, entry in tensors.items():
        match = KV_UP.fullmatch(name)
        if match is None:
            continue
        if entry.shape != (heads * (key + value), latent):
            raise UnexplainedTensorError(
                f"{entry.where} has shape {list(entry.shape)}, expected "
                f"{[heads * (key + value), latent]}"
            )
        del view[name]
        for part, split, shape in (
            ("keys", keys, (heads * latent, key)),
            ("values", values, (heads * value, latent)),
        ):
            view[f"{match[1]}{part}.weight"] = derive(split, entry.dtype, shape, entry)
    return view
