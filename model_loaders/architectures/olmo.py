"""OLMo2: norms after attention and MLP instead of before; q and k are normalised over all heads."""

from __future__ import annotations

from functools import partial
from typing import Any

from ..config import ModelConfig
from ..spec import Architecture, register
from . import llama
from .common import weights, with_defaults

NAMES = {
    **{name: module for name, module in llama.NAMES.items() if not name.endswith("_norm")},
    **llama.QK_NORM,
    "attention_post_norm": "post_attention_layernorm",
    "mlp_post_norm": "post_feedforward_layernorm",
    "final_norm": llama.NAMES["final_norm"],
}


def olmo2(config: ModelConfig) -> dict[str, Any]:
    fields = {"norm_placement": "NORM_AFTER", "qk_norm": True, "qk_norm_whole": True}
    return {**llama.decoder(config), **fields}


STANDARD = partial(with_defaults, rms_norm_eps=1e-5)
register(
    Architecture("Olmo2ForCausalLM", olmo2, weights(**NAMES), llama.IGNORED, STANDARD), "olmo2"
)
