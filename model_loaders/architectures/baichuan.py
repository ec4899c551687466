"""Baichuan and Baichuan2: Llama with q, k and v in one matrix; the larger models (13B) have ALiBi
instead of a rotary embedding.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..config import ModelConfig
from ..spec import Architecture, register
from . import llama
from .alibi import alibi_slopes
from .common import changed, renamed, weights

# The configurations of the models with ALiBi do not have this field.
_ROTARY_FIELD = "max_position_embeddings"
_ALIBI_HIDDEN_SIZE = 5120
# Baichuan 13B has the class name of Baichuan2, but the head and vocabulary of Baichuan.
_VOCAB_SIZE1 = 64000


def standard(config: ModelConfig) -> ModelConfig:
    alibi = config.get(_ROTARY_FIELD) is None or config.get("hidden_size") == _ALIBI_HIDDEN_SIZE
    config = renamed(config, max_position_embeddings="model_max_length").with_fields(alibi=alibi)
    if config.get("vocab_size") != _VOCAB_SIZE1:
        return config
    return config.with_fields(architectures=["BaiChuanForCausalLM"])


def decoder(config: ModelConfig) -> dict[str, Any]:
    fields = llama.decoder(config)
    if not config.flag("alibi"):
        return fields
    return {**fields, "rotary_dim": 0, "alibi_slopes": alibi_slopes(fields["num_heads"])}


def unit_rows(values: NDArray[Any]) -> NDArray[Any]:
    """Baichuan2's lm_head normalises its rows to length 1 at each use."""
    lengths = np.sqrt(np.einsum("rk,rk->r", values, values, dtype=np.float64))
    divided: NDArray[Any] = values / np.maximum(lengths, 1e-12)[:, None].astype(np.float32)
    return divided


WEIGHTS = weights(**{**llama.NAMES, "qkv": "self_attn.W_pack"})
WEIGHTS2 = changed(WEIGHTS, "lm_head", transform=unit_rows)

register(Architecture("BaiChuanForCausalLM", decoder, WEIGHTS, llama.IGNORED, standard), "baichuan")
register(
    Architecture("BaichuanForCausalLM", decoder, WEIGHTS2, llama.IGNORED, standard), "baichuan"
)
