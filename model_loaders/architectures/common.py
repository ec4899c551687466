"""Fields of DecoderSpec that decoders share, read by the names that transformers gives them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..config import ModelConfig
from ..errors import UnsupportedModelError
from ..spec import Weight

# No decoder has more layers. Rules are expanded for every layer, so this is checked before.
_MAX_LAYERS = 4096
# The engine's own bound; ALiBi computes a number for each head.
_MAX_HEADS = 1 << 16

_WHOLE_MODEL = ("embedding", "position_embedding", "embedding_norm", "final_norm", "lm_head")
NORMS = (
    "attention_norm",
    "attention_post_norm",
    "mlp_norm",
    "mlp_post_norm",
    "q_norm",
    "k_norm",
    "final_norm",
)
_BIASED = ("qkv", "o", "gate_up", "up", "down", "lm_head", "embedding_norm", *NORMS)

_ACTIVATIONS = {
    "silu": "SILU",
    "swish": "SILU",
    "gelu": "GELU_ERF",
    "gelu_fast": "GELU_TANH",
    "gelu_new": "GELU_TANH",
    "gelu_pytorch_tanh": "GELU_TANH",
    "relu": "RELU",
}


def weights(layer: str, **modules: str) -> tuple[Weight, ...]:
    """The rules of a decoder, from the names of its modules by the decoder's tensors. Several
    names, separated by spaces, are stacked. Names of a layer's modules are appended to ``layer``,
    which contains ``{i}``.

    Matrices and norms also get rules for their biases, which have no effect if a spec has none.
    """
    rules = []
    for tensor, names in modules.items():
        prefix, where = ("", "") if tensor in _WHOLE_MODEL else ("layers.{i}.", layer)
        sources = [where + name for name in names.split()]
        for kind in ("weight", "bias") if tensor in _BIASED else ("weight",):
            target = prefix + tensor + ("_bias" if kind == "bias" else "")
            tied = tensor == "lm_head" and kind == "weight"
            rules.append(Weight(target, tuple(f"{name}.{kind}" for name in sources), tied))
    return tuple(rules)


def changed(rules: tuple[Weight, ...], *tensors: str, **changes: Any) -> tuple[Weight, ...]:
    """``rules``, with ``changes`` made to those for ``tensors`` and their biases."""
    names = {*tensors, *(f"{tensor}_bias" for tensor in tensors)}
    return tuple(
        replace(rule, **changes) if rule.target.split(".")[-1] in names else rule for rule in rules
    )


def by_groups(spec: Any) -> NDArray[np.intp]:
    """From rows stored group by group (a group's queries, its key, its value) to all queries, then
    all keys, then all values.
    """
    queries = spec.num_heads // spec.num_kv_heads
    shape = (spec.num_kv_heads, queries + 2, spec.head_dim)
    rows = np.arange(np.prod(shape), dtype=np.intp).reshape(shape)
    return np.concatenate([part.ravel() for part in np.split(rows, [queries, queries + 1], 1)])


def renamed(config: ModelConfig, **names: str) -> ModelConfig:
    """``config`` with standard names for fields of other names; standard names present win."""
    return config.with_names(
        **{name: own for name, own in names.items() if config.get(name) is None}
    )


def older_names(config: ModelConfig, default_act: str, **names: str) -> ModelConfig:
    """``config`` with standard names for the older names of GPT-2's time and for ``names``, and
    with defaults for fields that were left out then.
    """
    older = {
        "hidden_size": "n_embd",
        "num_hidden_layers": "n_layer",
        "num_attention_heads": "n_head",
        "layer_norm_eps": "layer_norm_epsilon",
    }
    config = renamed(config, **{**older, **names})
    return config.with_fields(
        hidden_act=config.text("hidden_act", default_act),
        intermediate_size=config.integer("intermediate_size", 4 * config.integer("hidden_size")),
        max_position_embeddings=config.integer("max_position_embeddings", 2048),
        tie_word_embeddings=config.flag("tie_word_embeddings", True),
    )


def with_defaults(config: ModelConfig, **fields: Any) -> ModelConfig:
    """``config`` with ``fields`` where it lacks them: the defaults of transformers' class. A null
    is no lack.
    """
    return config.with_fields(
        **{name: value for name, value in fields.items() if name not in config}
    )


def require(config: ModelConfig, **fields: Any) -> None:
    """Refuses a configuration where one of ``fields`` is present with another value."""
    for name, value in fields.items():
        if config.get(name) not in (None, value):
            raise config.refuse(name, value)


def optional_number(config: ModelConfig, name: str) -> float:
    """A number above 0, or 0 where the field is absent or null."""
    return 0.0 if config.get(name) is None else config.number(name)


def sizes(config: ModelConfig) -> dict[str, Any]:
    """Sizes, norm and tying. Where ``head_dim`` or ``num_key_value_heads`` is absent, it is
    computed from the other sizes.
    """
    hidden = config.integer("hidden_size")
    heads = config.integer("num_attention_heads", maximum=_MAX_HEADS)
    kv_heads = config.integer("num_key_value_heads", heads)
    if heads % kv_heads:
        raise config.error(
            "num_attention_heads",
            f"is {heads}, not a multiple of {config.own_name('num_key_value_heads')}, {kv_heads}",
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


def layer_norm_decoder(config: ModelConfig, bias: bool = True) -> dict[str, Any]:
    """A decoder with LayerNorm and an MLP without a gate; ``bias``: its matrices have biases."""
    return {
        **sizes(config),
        "norm_kind": "LAYER_NORM",
        "norm_bias": True,
        "norm_eps": config.number("layer_norm_eps", 1e-5),
        "activation": activation(config),
        "ungated_mlp": True,
        "qkv_bias": bias,
        "o_bias": bias,
        "mlp_bias": bias,
    }


def activation(config: ModelConfig) -> str:
    name = config.text("hidden_act", "silu")
    if name not in _ACTIVATIONS:
        raise UnsupportedModelError(
            f"{config.source}: hidden_act is {name!r}, supported are {', '.join(_ACTIVATIONS)}"
        )
    return _ACTIVATIONS[name]


def layer_windows(config: ModelConfig, always: bool = False, pattern: int = 0) -> list[int]:
    """The attention window of each layer in tokens, 0 for full attention; empty if all are full.

    ``always``: ``sliding_window`` holds for every layer. Otherwise it holds if
    ``use_sliding_window`` is true, for the layers from ``max_window_layers`` on. The last of every
    ``pattern`` layers has no window. If ``layer_types`` is given, it decides instead.
    """
    window = config.integer("sliding_window", 0, minimum=0)
    layers = config.integer("num_hidden_layers", maximum=_MAX_LAYERS)
    if not always and not config.flag("use_sliding_window", False):
        window = 0
    types = config.get("layer_types")
    if types is None:
        first = 0 if always else config.integer("max_window_layers", 28, minimum=0)
        types = [
            "sliding_attention"
            if window and i >= first and (not pattern or (i + 1) % pattern)
            else "full_attention"
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
