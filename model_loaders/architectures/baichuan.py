"""Baichuan and Baichuan2 of 7 billion parameters: Llama with q, k and v in one matrix. The larger
ones have ALiBi instead of a rotary embedding, which is not served.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..config import ModelConfig
from ..errors import UnsupportedModelError
from ..spec import Architecture, register
from . import llama
from .common import changed, weights

# The configurations of the models with ALiBi do not name this field.
_ROTARY_FIELD = "max_position_embeddings"
_ALIBI_HIDDEN_SIZE = 5120


def decoder(config: ModelConfig) -> dict[str, Any]:
    if config.get(_ROTARY_FIELD) is None or config.get("hidden_size") == _ALIBI_HIDDEN_SIZE:
        raise UnsupportedModelError(
            f"{config.source}: hidden_size is {config.get('hidden_size')!r} and {_ROTARY_FIELD} is "
            f"{config.get(_ROTARY_FIELD)!r}: Baichuan 13B, whose ALiBi is not supported"
        )
    return llama.decoder(config)


def unit_rows(values: NDArray[Any]) -> NDArray[Any]:
    """Baichuan2's head divides its rows by their lengths whenever it is used."""
    lengths = np.sqrt(np.einsum("rk,rk->r", values, values, dtype=np.float64))
    divided: NDArray[Any] = values / np.maximum(lengths, 1e-12)[:, None].astype(np.float32)
    return divided


WEIGHTS = weights(**{**llama.NAMES, "qkv": "self_attn.W_pack"})
WEIGHTS2 = changed(WEIGHTS, "lm_head", transform=unit_rows)

register(Architecture("BaiChuanForCausalLM", decoder, WEIGHTS, llama.IGNORED))
register(Architecture("BaichuanForCausalLM", decoder, WEIGHTS2, llama.IGNORED))
