"""DeepSeek-MoE: Llama with many small experts, some of them shared by all tokens. DeepSeek-V2 and
V3 also attend over latents (MLA), and V3 chooses its experts in groups, by sigmoids with a bias.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from ..config import ModelConfig
from ..rope import score_scale
from ..spec import Architecture, Weight, register
from . import llama
from .common import require, weights, with_defaults
from .experts import EXPERT_BIAS, expert_weights, routed_experts
from .latents import LATENT_WEIGHTS, split_latents

EXPERTS = expert_weights(llama.NAMES["layer"] + "mlp.", "gate", shared="shared_experts")
LATENTS = LATENT_WEIGHTS + weights(**{k: v for k, v in llama.NAMES.items() if k != "qkv"}) + EXPERTS


def deepseek(config: ModelConfig) -> dict[str, Any]:
    require(config, scoring_func="softmax")
    normalize = config.flag("norm_topk_prob", False)
    return routed_experts(llama.decoder(config), config, normalize_expert_weights=normalize)


def _panels(config: ModelConfig, name: str) -> int:
    """A size of a head's rows that must be a whole number of panels."""
    if config.integer(name) % 64:
        raise config.refuse(name, "multiples of 64")
    return config.integer(name)


def _latents(config: ModelConfig) -> dict[str, Any]:
    require(config, attention_bias=False)
    rotary_dim = config.integer("qk_rope_head_dim")
    head_dim = config.integer("qk_nope_head_dim") + rotary_dim
    return {
        **llama.decoder(config),
        "num_kv_heads": 1,
        "head_dim": head_dim,
        "rotary_dim": rotary_dim,
        "rope_interleaved": True,
        "attention_scale": score_scale(config, head_dim),
        "kv_latent": _panels(config, "kv_lora_rank"),
        "q_latent": config.integer("q_lora_rank", 0, minimum=0),
        "value_dim": _panels(config, "v_head_dim"),
        "latent_norm_eps": 1e-6,  # not in any configuration
    }


def deepseek_v2(config: ModelConfig) -> dict[str, Any]:
    require(config, scoring_func="softmax", norm_topk_prob=False)
    limited = config.text("topk_method", "greedy") != "greedy"
    if limited:
        require(config, topk_method="group_limited_greedy")
    return routed_experts(_latents(config), config, scaled=True, grouped=limited)


def deepseek_v3(config: ModelConfig) -> dict[str, Any]:
    require(config, scoring_func="sigmoid", topk_method="noaux_tc", rope_interleave=True)
    return routed_experts(_latents(config), config, scaled=True, grouped=True, sigmoids=True)


# The multi-token prediction layer.
AHEAD = r"model\.layers\.61\..*"
register(
    Architecture("DeepseekForCausalLM", deepseek, llama.WEIGHTS + EXPERTS, llama.IGNORED),
    "deepseek",
)
register(
    Architecture("DeepseekV2ForCausalLM", deepseek_v2, LATENTS, llama.IGNORED, view=split_latents),
    "deepseek_v2",
)
register(
    Architecture(
        "DeepseekV3ForCausalLM",
        deepseek_v3,
        LATENTS + (Weight("layers.{i}.router_bias", (EXPERT_BIAS,)),),
        (*llama.IGNORED, AHEAD),
        partial(with_defaults, routed_scaling_factor=2.5, n_group=8, topk_group=4),
        view=split_latents,
    ),
    "deepseek_v3",
)
