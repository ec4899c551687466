"""DeepSeek-MoE: Llama with many small experts, of which some are everybody's. GLM-4.5 has them,
too, chosen in groups by sigmoids with a bias.
"""

from __future__ import annotations

from typing import Any

from ..config import ModelConfig
from ..rope import partial_rotary_dim
from ..spec import Architecture, Weight, register
from . import llama
from .common import require, weights
from .experts import expert_weights, with_experts

MLP = llama.NAMES["layer"] + "mlp."
EXPERTS = expert_weights(MLP, "gate", shared="shared_experts")


def _experts(fields: dict[str, Any], config: ModelConfig, **more: Any) -> dict[str, Any]:
    if config.get("n_routed_experts") is None:
        return fields
    first = config.integer("first_k_dense_replace", 0, minimum=0)
    frequency = config.integer("moe_layer_freq", 1)
    inner = config.integer("moe_intermediate_size")
    return with_experts(
        fields,
        [layer for layer in range(fields["num_layers"]) if layer < first or layer % frequency],
        num_experts=config.integer("n_routed_experts"),
        experts_per_token=config.integer("num_experts_per_tok"),
        expert_intermediate_size=inner,
        shared_intermediate_size=inner * config.integer("n_shared_experts", 0, minimum=0),
        **more,
    )


def deepseek(config: ModelConfig) -> dict[str, Any]:
    require(config, scoring_func="softmax")
    normalize = config.flag("norm_topk_prob", False)
    return _experts(llama.decoder(config), config, normalize_expert_weights=normalize)


def glm4_moe(config: ModelConfig) -> dict[str, Any]:
    fields = llama.decoder(config)
    fields |= {
        "o_bias": False,
        "qk_norm": config.flag("use_qk_norm", False),
        "rotary_dim": partial_rotary_dim(config, fields["head_dim"], 0.5),
    }
    return _experts(
        fields,
        config,
        router_score="ROUTER_SIGMOID",
        router_bias=True,
        normalize_expert_weights=config.flag("norm_topk_prob", True),
        expert_weight_scale=config.number("routed_scaling_factor", 1.0),
        expert_groups=config.integer("n_group", 1),
        used_expert_groups=config.integer("topk_group", 1),
    )


register(Architecture("DeepseekForCausalLM", deepseek, llama.WEIGHTS + EXPERTS, llama.IGNORED))
register(
    Architecture(
        "Glm4MoeForCausalLM",
        glm4_moe,
        weights(**llama.NAMES, **llama.QK_NORM)
        + EXPERTS
        + (Weight("layers.{i}.router_bias", (f"{MLP}gate.e_score_correction_bias",)),),
        # The layer behind the last, of the 4.5 models, guesses tokens ahead.
        (*llama.IGNORED, r"model\.layers\.(46|92)\..*"),
    )
)
