"""Fields of DecoderSpec that decoders share, read from the names transformers gives them."""

from __future__ import annotations

from typing import Any

from ..config import ModelConfig
from ..errors import UnsupportedModelError

# No decoder is deeper; rules are expanded for every layer, so the number is bounded before.
_MAX_LAYERS = 4096

_ACTIVATIONS = {
    "silu": "SILU",
    "swish": "SILU",
    "gelu": "GELU_ERF",
    "gelu_new": "GELU_TANH",
    "gelu_pytorch_tanh": "GELU_TANH",
    "relu": "RELU",
}


def sizes(config: ModelConfig) -> dict[str, Any]:
    """Sizes, norm and tying. Absent ``head_dim`` and ``num_key_value_heads`` follow from the other
    sizes.
    """
    hidden, heads = config.integer("hidden_size"), config.integer("num_attention_heads")
    kv_heads = config.integer("num_key_value_heads", heads)
    if heads % kv_heads:
        raise config.error(
            "num_attention_heads", f"is {heads}, not a multiple of num_key_value_heads, {kv_heads}"
        )
    if config.get("head_dim") is None and hidden % heads:
        raise config.error(
            "hidden_size", f"is {hidden}, not a multiple of num_attention_heads, {heads}"
        )
    return {
        "vocab_size": config.integer("vocab_size"),
        "hidden_size": hidden,
        "num_layers": config.integer("num_hidden_layers", maximum=_MAX_LAYERS),
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "head_dim": config.integer("head_dim", hidden // heads),
        "intermediate_size": config.integer("intermediate_size"),
        "norm_eps": config.number("rms_norm_eps", 1e-6),
        "tie_embeddings": config.flag("tie_word_embeddings", False),
        "max_position": config.integer("max_position_embeddings"),
    }


def activation(config: ModelConfig) -> str:
    name = config.text("hidden_act", "silu")
    if name not in _ACTIVATIONS:
        raise UnsupportedModelError(
            f"{config.source}: hidden_act is {name!r}, supported are {', '.join(_ACTIVATIONS)}"
        )
    return _ACTIVATIONS[name]


def layer_windows(config: ModelConfig, always: bool = False) -> list[int]:
    """The attention window of each layer in tokens, 0 for full attention; empty where all are full.

    ``always``: a ``sliding_window`` counts for every layer. Otherwise it counts where
    ``use_sliding_window`` says so, for the layers that ``layer_types`` names, or for those from
    ``max_window_layers`` on.
    """
    window = config.integer("sliding_window", 0, minimum=0)
    layers = config.integer("num_hidden_layers", maximum=_MAX_LAYERS)
    if not always and not config.flag("use_sliding_window", False):
        window = 0
    types = config.get("layer_types")
    if types is None:
        first = 0 if always else config.integer("max_window_layers", 28, minimum=0)
        types = [
            "sliding_attention" if window and i >= first else "full_attention"
            for i in range(layers)
        ]
    if not isinstance(types, list) or len(types) != layers:
        raise config.error("layer_types", f"does not list {layers} layers")
    for kind in types:
        if kind not in ("full_attention", "sliding_attention"):
            raise UnsupportedModelError(
                f"{config.source}: layer_types has {kind!r}, supported are full_attention, "
                "sliding_attention"
            )
    if not window or "sliding_attention" not in types:
        return []
    return [window if kind == "sliding_attention" else 0 for kind in types]
