"""GLM-4.5: Llama with partial rope, and experts chosen in groups, by sigmoids with a bias."""

from __future__ import annotations

from functools import partial
from typing import Any

from ..config import ModelConfig
from ..rope import partial_rotary_dim
from ..spec import Architecture, Weight, register
from . import llama
from .common import weights, with_defaults
from .experts import EXPERT_BIAS, expert_weights, routed_experts


def glm4_moe(config: ModelConfig) -> dict[str, Any]:
    fields = llama.decoder(config)
    fields |= {
        "o_bias": False,
        "qk_norm": config.flag("use_qk_norm", False),
        "rotary_dim": partial_rotary_dim(config, fields["head_dim"], 0.5),
    }
    return routed_experts(fields, config, scaled=True, grouped=True, sigmoids=True)


register(
    Architecture(
        "Glm4MoeForCausalLM",
        glm4_moe,
        weights(**llama.NAMES, **llama.QK_NORM)
        + expert_weights(llama.NAMES["layer"] + "mlp.", "gate", shared="shared_experts")
        + (Weight("layers.{i}.router_bias", (EXPERT_BIAS,)),),
        # The multi-token prediction layer.
        (*llama.IGNORED, r"model\.layers\.(46|92)\..*"),
        partial(with_defaults, rms_norm_eps=1e-5),
    ),
    "glm4_moe",
)
