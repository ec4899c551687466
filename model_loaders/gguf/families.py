"""What the architectures of GGUF files are to the declarations in ``architectures/``: a
configuration in transformers' names made of the file's metadata, and names and rows of tensors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..config import ModelConfig
from ..derived import derive
from ..errors import CheckpointError, UnsupportedModelError
from ..rope import DEFAULT_THETA
from ..storage import TensorEntry, as_float32
from .blocks import tensor_entry
from .file import GgufFile, GgufTensor

_WHOLE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
# Norms after attention and MLP.
_POST_NORMS = {
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_FUSED_GATE = {"ffn_up": "mlp.gate_up_proj"}
# Factors of frequencies, which are read with the metadata.
_FREQUENCIES = "rope_freqs.weight"
_LONG, _SHORT = "rope_factors_long.weight", "rope_factors_short.weight"
# Keys that say nothing a decoder needs.
_IDLE = ("tensor_data_layout", "rope.scaling.finetuned", "vocab_size", "attention.scale_type")


class Source:
    """The metadata of a model under its architecture's prefix, and which of it has been asked for;
    the rest is what this loader does not know.
    """

    def __init__(self, file: GgufFile) -> None:
        self.file = file
        self.path = file.paths[0]
        self.config = ModelConfig(file.metadata, str(self.path))
        self.kind = self.config.text("general.architecture")
        self._asked = {self._key(key) for key in _IDLE}

    def _key(self, key: str) -> str:
        return f"{self.kind}.{key}"

    def _ask(self, key: str) -> str:
        self._asked.add(self._key(key))
        return self._key(key)

    def integer(self, key: str, *default: Any) -> int:
        return self.config.integer(self._ask(key), *default)

    def number(self, key: str, *default: Any) -> float:
        return self.config.number(self._ask(key), *default)

    def text(self, key: str, *default: Any) -> str:
        return self.config.text(self._ask(key), *default)

    def has(self, key: str) -> bool:
        return self._key(key) in self.config

    def ignore(self, key: str) -> None:
        self._ask(key)

    def require(self, key: str, *values: Any) -> None:
        """Refuses another value than ``values`` where the key is there."""
        if self.config.get(self._ask(key), values[0]) not in values:
            raise self.config.refuse(self._key(key), ", ".join(map(str, values)))

    def check_all_asked(self) -> None:
        for key, value in self.config.items():
            if key.startswith(self._key("")) and key not in self._asked:
                raise UnsupportedModelError(
                    f"{self.path}: the key {key!r} ({str(value)[:80]}) is not known for this "
                    "architecture"
                )

    def tensor(self, name: str) -> GgufTensor | None:
        return self.file.tensors.get(name)

    def factors(self, name: str) -> list[float] | None:
        tensor = self.tensor(name)
        if tensor is None:
            return None
        entry = tensor_entry(tensor)
        with entry.open() as array:
            return [float(value) for value in as_float32(array, entry.dtype).ravel()]


Fields = Callable[[Source, dict[str, Any]], dict[str, Any]]


@dataclass(frozen=True)
class Family:
    """``names`` differ from ``_LAYER``; ``fields`` gives what the configuration has beyond what all
    have. ``pairs``: llama.cpp has the rows of queries and keys that are turned together side by
    side, transformers half a head apart. ``norms_with_one``: it adds one to the norms.
    """

    architecture: str
    names: Mapping[str, str] = field(default_factory=dict)
    fields: Fields = lambda source, config: {}
    pairs: bool = False
    norms_with_one: bool = False
    whole: Mapping[str, str] = field(default_factory=lambda: _WHOLE)
    layer: str = "model.layers."


def _biased(source: Source, module: str) -> bool:
    return source.tensor(f"blk.0.{module}.bias") is not None


def _llama(source: Source, config: dict[str, Any]) -> dict[str, Any]:
    for key in ("expert_count", "expert_used_count"):
        source.require(key, 0)
    qkv, o, mlp = (_biased(source, name) for name in ("attn_q", "attn_output", "ffn_up"))
    fields = {"attention_bias": o, "mlp_bias": mlp}
    if source.has("attention.sliding_window"):
        window = source.integer("attention.sliding_window")
        return {**fields, "architectures": ["MistralForCausalLM"], "sliding_window": window}
    if qkv != o:
        bias = {"qkv_bias": qkv, "bias": o}
        return {**fields, **bias, "architectures": ["InternLM3ForCausalLM"]}
    return fields


def _baichuan(source: Source, config: dict[str, Any]) -> dict[str, Any]:
    if config["num_hidden_layers"] == 40:
        raise UnsupportedModelError(
            f"{source.path}: {source.kind}.block_count is 40: Baichuan 13B, whose ALiBi is not "
            "supported"
        )
    return {}


def _qwen3(source: Source, config: dict[str, Any]) -> dict[str, Any]:
    return {"attention_bias": _biased(source, "attn_q")}


def _gemma(source: Source, config: dict[str, Any]) -> dict[str, Any]:
    return {"hidden_act": "gelu_pytorch_tanh"}


# The only models whose scores have another scale than their heads' size, by their layers.
_SCALED_BY_HIDDEN_SIZE = {"gemma2": 46, "gemma3": 62}


def _gemma2(source: Source, config: dict[str, Any]) -> dict[str, Any]:
    scalar = config["head_dim"]
    if config["num_hidden_layers"] == _SCALED_BY_HIDDEN_SIZE[source.kind]:
        scalar = config["hidden_size"] // config["num_attention_heads"]
    fields = {"query_pre_attn_scalar": scalar}
    for key in ("attn_logit_softcapping", "final_logit_softcapping"):
        if source.has(key):
            fields[key] = source.number(key)
    if source.has("attention.sliding_window"):
        fields["sliding_window"] = source.integer("attention.sliding_window")
    return {**_gemma(source, config), **fields}


def _gemma3(source: Source, config: dict[str, Any]) -> dict[str, Any]:
    return {
        **_gemma2(source, config),
        "sliding_window_pattern": source.integer("attention.sliding_window_pattern", 6),
        "rope_local_base_freq": source.number("rope.freq_base_swa", DEFAULT_THETA),
    }


def _phi3(source: Source, config: dict[str, Any]) -> dict[str, Any]:
    window = source.integer("attention.sliding_window", 0, 0)
    return {"sliding_window": window or None}


def _glm(source: Source, config: dict[str, Any]) -> dict[str, Any]:
    return {"attention_bias": _biased(source, "attn_q")}


_CHATGLM_WHOLE = {
    "token_embd": "transformer.embedding.word_embeddings",
    "output_norm": "transformer.encoder.final_layernorm",
    "output": "transformer.output_layer",
}
_CHATGLM = {
    "attn_qkv": "self_attention.query_key_value",
    "attn_output": "self_attention.dense",
    "ffn_up": "mlp.dense_h_to_4h",
    "ffn_down": "mlp.dense_4h_to_h",
}


def _chatglm(source: Source, config: dict[str, Any]) -> dict[str, Any]:
    return {
        "multi_query_attention": True,
        "add_qkv_bias": _biased(source, "attn_qkv"),
        "rope_ratio": config["rope_theta"] / DEFAULT_THETA,
    }


_QWEN_WHOLE = {
    "token_embd": "transformer.wte",
    "output_norm": "transformer.ln_f",
    "output": "lm_head",
}
_QWEN = {
    "attn_norm": "ln_1",
    "attn_qkv": "attn.c_attn",
    "attn_output": "attn.c_proj",
    "ffn_norm": "ln_2",
    "ffn_gate": "mlp.w2",
    "ffn_up": "mlp.w1",
    "ffn_down": "mlp.c_proj",
}


def _granite(source: Source, config: dict[str, Any]) -> dict[str, Any]:
    return {
        "attention_bias": _biased(source, "attn_q"),
        "attention_multiplier": source.number("attention.scale", config["head_dim"] ** -0.5),
        "embedding_multiplier": source.number("embedding_scale", 1.0),
        "residual_multiplier": source.number("residual_scale", 1.0),
        "logits_scaling": source.number("logit_scale", 1.0),
    }


def _minicpm(source: Source, config: dict[str, Any]) -> dict[str, Any]:
    """Older files leave out what all of these models have."""
    if source.has("embedding_scale"):
        return _granite(source, config)
    return {
        **_granite(source, config),
        "embedding_multiplier": 12.0,
        "residual_multiplier": 1.4 / math.sqrt(config["num_hidden_layers"]),
        "logits_scaling": config["hidden_size"] / 256,
    }


FAMILIES = {
    "llama": Family("LlamaForCausalLM", fields=_llama, pairs=True),
    "internlm2": Family("LlamaForCausalLM", fields=_llama, pairs=True),
    "baichuan": Family("LlamaForCausalLM", fields=_baichuan, pairs=True),
    "qwen": Family("QWenLMHeadModel", _QWEN, whole=_QWEN_WHOLE, layer="transformer.h."),
    "qwen2": Family("Qwen2ForCausalLM"),
    "qwen3": Family("Qwen3ForCausalLM", fields=_qwen3),
    "gemma": Family("GemmaForCausalLM", fields=_gemma, norms_with_one=True),
    "gemma2": Family(
        "Gemma2ForCausalLM",
        {**_POST_NORMS, "ffn_norm": "pre_feedforward_layernorm"},
        _gemma2,
        norms_with_one=True,
    ),
    "gemma3": Family(
        "Gemma3ForCausalLM",
        {**_POST_NORMS, "ffn_norm": "pre_feedforward_layernorm"},
        _gemma3,
        norms_with_one=True,
    ),
    "phi3": Family("Phi3ForCausalLM", _FUSED_GATE, _phi3),
    "chatglm": Family(
        "ChatGLMModel",
        _CHATGLM,
        _chatglm,
        whole=_CHATGLM_WHOLE,
        layer="transformer.encoder.layers.",
    ),
    "glm4": Family(
        "Glm4ForCausalLM",
        {
            **_FUSED_GATE,
            "post_attention_norm": "post_self_attn_layernorm",
            "post_ffw_norm": "post_mlp_layernorm",
        },
        _glm,
    ),
    "granite": Family("GraniteForCausalLM", fields=_granite, pairs=True),
    "minicpm": Family("GraniteForCausalLM", fields=_minicpm, pairs=True),
    "olmo2": Family("Olmo2ForCausalLM", _POST_NORMS),
}


def find_family(source: Source) -> Family:
    if source.config.get("general.type", "model") != "model":
        raise source.config.refuse("general.type", "model")
    if source.kind not in FAMILIES:
        raise source.config.refuse("general.architecture", ", ".join(FAMILIES))
    return FAMILIES[source.kind]


def model_config(family: Family, source: Source) -> ModelConfig:
    """``config.json`` as transformers would have it. Errors name the file and the key."""
    embedding = source.tensor("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise CheckpointError(f"{source.path}: tensor 'token_embd.weight' is missing or no matrix")
    hidden, heads = source.integer("embedding_length"), source.integer("attention.head_count")
    head_dim = source.integer("attention.key_length", hidden // heads)
    source.require("attention.value_length", head_dim)
    source.require("attention.causal", True)
    rotary_dim = source.integer("rope.dimension_count", head_dim)
    config = {
        "architectures": [family.architecture],
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": source.integer("feed_forward_length"),
        "num_hidden_layers": source.integer("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": source.integer("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "vocab_size": embedding.shape[0],
        "rms_norm_eps": source.number("attention.layer_norm_rms_epsilon"),
        "rope_theta": source.number("rope.freq_base", DEFAULT_THETA),
        "max_position_embeddings": source.integer("context_length"),
        "tie_word_embeddings": source.tensor("output.weight") is None,
        **_token_ids(source),
    }
    if rotary_dim != head_dim:
        config["partial_rotary_factor"] = rotary_dim / head_dim
    config["rope_scaling"] = _rope_scaling(source, config["rope_theta"])
    config |= family.fields(source, config)
    source.check_all_asked()
    return ModelConfig(config, str(source.path))


def _token_ids(source: Source) -> dict[str, Any]:
    ids = {}
    for name, kinds in (("bos", ("bos",)), ("eos", ("eos", "eot", "eom"))):
        found = {
            source.config.integer(key, minimum=0): None
            for key in (f"tokenizer.ggml.{kind}_token_id" for kind in kinds)
            if key in source.config
        }
        if found:
            ids[f"{name}_token_id"] = list(found) if len(found) > 1 else next(iter(found))
    return ids


def _rope_scaling(source: Source, theta: float) -> dict[str, Any] | None:
    kind = source.text("rope.scaling.type", "none")
    source.require("rope.scaling.yarn_log_multiplier", 0.0)
    fields: dict[str, Any] = {"rope_theta": theta}
    if source.has("rope.scaling.original_context_length"):
        length = source.integer("rope.scaling.original_context_length")
        fields["original_max_position_embeddings"] = length
    short = source.factors(_FREQUENCIES) or source.factors(_SHORT)
    if short is not None:
        source.require("rope.scaling.type", "none", "llama3", "longrope")
        source.ignore("rope.scaling.factor")  # It is in the factors.
        return {
            **fields,
            "rope_type": "longrope",
            "short_factor": short,
            "long_factor": source.factors(_LONG) or short,
            "attention_factor": source.number("rope.scaling.attn_factor", 1.0),
        }
    if kind == "none":
        return None
    source.require("rope.scaling.type", "linear", "yarn")
    return {**fields, "rope_type": kind, "factor": source.number("rope.scaling.factor")}


def model_tensors(family: Family, source: Source, config: ModelConfig) -> dict[str, TensorEntry]:
    """The tensors under the names of the family's declaration; unknown ones under their own."""
    heads = {
        "attn_q": config["num_attention_heads"],
        "attn_k": config["num_key_value_heads"],
    }
    tensors = {}
    for own, tensor in source.file.tensors.items():
        if own in (_FREQUENCIES, _LONG, _SHORT):
            continue
        name, module = _name(family, own)
        order = None
        if family.pairs and module in heads:
            order = _from_pairs(tensor, heads[module])
        entry = tensor_entry(tensor, order)
        if family.norms_with_one and module.endswith("norm"):
            # The declaration adds it again: the bits are those of the sum.
            entry = derive(_less_one(entry.dtype), "float32", entry.shape, entry)
        if name in tensors:
            raise CheckpointError(f"{entry.where}: {name!r} is also there under another name")
        tensors[name] = entry
    return tensors


def _name(family: Family, own: str) -> tuple[str, str]:
    module, _, kind = own.rpartition(".")
    if module in family.whole:
        return f"{family.whole[module]}.{kind}", module
    parts = module.split(".")
    names = {**_LAYER, **family.names}
    if len(parts) == 3 and parts[0] == "blk" and parts[2] in names:
        return f"{family.layer}{parts[1]}.{names[parts[2]]}.{kind}", parts[2]
    return own, module


def _from_pairs(tensor: GgufTensor, heads: int) -> NDArray[np.intp]:
    rows = tensor.shape[0]
    if rows % (2 * heads):
        raise CheckpointError(
            f"{tensor.raw.where} has {rows} rows, expected a multiple of 2 x {heads}"
        )
    return np.arange(rows, dtype=np.intp).reshape(heads, -1, 2).swapaxes(1, 2).ravel()


def _less_one(dtype: str) -> Callable[[NDArray[Any]], NDArray[Any]]:
    return lambda norm: as_float32(norm, dtype) - np.float32(1)
