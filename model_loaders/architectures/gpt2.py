"""GPT-2: learned positions, and matrices stored with input features as rows."""

from __future__ import annotations

import re
from typing import Any

from ..config import ModelConfig
from ..notices import notice
from ..spec import Architecture, register
from ..storage import OutputsFirst, TensorEntry, Tensors
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


_MATRIX = re.compile(rf"transformer\.h\.\d+\.({'|'.join(_MATRICES.values())})\.weight")


def view(tensors: Tensors, spec: Any) -> Tensors:
    """Recognises matrices stored as nn.Linear has them, not as transformers' Conv1D. The shapes of
    all but attn.c_proj show it; that one is square, and is stored as the others are.
    """
    shapes = {
        "attn.c_attn": (3 * spec.hidden_size, spec.hidden_size),
        "mlp.c_fc": (spec.intermediate_size, spec.hidden_size),
        "mlp.c_proj": (spec.hidden_size, spec.intermediate_size),
    }
    matrices = {}
    for name, entry in tensors.items():
        if found := _MATRIX.fullmatch(name):
            if entry.shape != shapes.get(found[1], entry.shape) or type(entry) is not TensorEntry:
                return tensors  # Other entry types know their own layout.
            matrices[name] = OutputsFirst(**vars(entry))
    if matrices:
        entry = matrices[min(matrices)]  # The order of tensors in files varies.
        notice(
            f"{entry.where} is {list(entry.shape)}, the transpose of what transformers' GPT-2 has; "
            "all matrices are taken as those of nn.Linear"
        )
    return {**tensors, **matrices}


IGNORED = (r"transformer\.h\.\d+\.attn\.(masked_)?bias",)
register(
    Architecture(
        "GPT2LMHeadModel", gpt2, WEIGHTS, IGNORED, standard, prefix="transformer.", view=view
    ),
    "gpt2",
)
