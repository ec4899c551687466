"""GPT-2: learned positions, and matrices that lie with their input features as rows."""

from __future__ import annotations

from typing import Any

from ..config import ModelConfig
from ..spec import Architecture, register
from .common import changed, layer_norm_decoder, older_names, require, weights

_MATRICES = {
    "qkv": "attn.c_attn",
    "o": "attn.c_proj",
    "up": "mlp.c_fc",
    "down": "mlp.c_proj",
}
WEIGHTS = weights(
    layer="transformer.h.{i}.",
    embedding="transformer.wte",
    position_embedding="transformer.wpe",
    attention_norm="ln_1",
    mlp_norm="ln_2",
    final_norm="transformer.ln_f",
    lm_head="lm_head",
    **_MATRICES,
)
WEIGHTS = changed(WEIGHTS, *_MATRICES, transposed=True)


def standard(config: ModelConfig) -> ModelConfig:
    return older_names(
        config,
        "gelu_new",
        max_position_embeddings="n_positions",
        intermediate_size="n_inner",
        hidden_act="activation_function",
    )


def gpt2(config: ModelConfig) -> dict[str, Any]:
    require(
        config,
        add_cross_attention=False,
        scale_attn_by_inverse_layer_idx=False,
        scale_attn_weights=True,
    )
    return {**layer_norm_decoder(config), "learned_positions": True, "rotary_dim": 0}


IGNORED = (r"transformer\.h\.\d+\.attn\.(masked_)?bias",)
register(Architecture("GPT2LMHeadModel", gpt2, WEIGHTS, IGNORED, standard, prefix="transformer."))
