"""Maps architectures of GGUF files to the declarations in ``architectures/``: makes a configuration
with transformers' names from the file's metadata, and maps names and rows of tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..architectures.common import by_groups
from ..config import ModelConfig
from ..derived import derive, row_range
from ..errors import CheckpointError
from ..rope import DEFAULT_THETA
from ..storage import TensorEntry, as_float32
from .blocks import tensor_entry
from .dense import DENSE, GLM
from .experts import EXPERTS, MIXTRAL
from .family import Family
from .file import GgufTensor
from .layer_norm import FALCON_TWO_NORMS, LAYER_NORM, SECOND_NORM
from .names import module_names, name_of
from .source import Source
from .tokenizer import end_tokens

# Factors of the rope frequencies, which are read together with the metadata.
_FREQUENCIES = "rope_freqs.weight"
_LONG, _SHORT = "rope_factors_long.weight", "rope_factors_short.weight"

FAMILIES = {**DENSE, **LAYER_NORM, **EXPERTS}


def find_family(source: Source) -> Family:
    if source.config.get("general.type", "model") != "model":
        raise source.config.refuse("general.type", "model")
    if source.kind not in FAMILIES:
        raise source.config.refuse("general.architecture", ", ".join(FAMILIES))
    if source.kind == "llama" and source.config.get("llama.expert_count"):
        return MIXTRAL
    if source.kind == "falcon" and source.tensor(SECOND_NORM) is not None:
        return FALCON_TWO_NORMS
    if source.kind == "chatglm" and source.tensor("blk.0.attn_q.weight") is not None:
        return GLM
    return FAMILIES[source.kind]


def model_config(family: Family, source: Source) -> ModelConfig:
    """The ``config.json`` that transformers would have. Errors name the file and the key."""
    embedding = source.tensor("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise CheckpointError(f"{source.path}: tensor 'token_embd.weight' is missing or no matrix")
    hidden, heads = source.integer("embedding_length"), source.integer("attention.head_count")
    head_dim = source.integer("attention.key_length", hidden // heads)
    if family.latents:
        head_dim = source.integer("attention.key_length_mla", head_dim)
    else:
        source.require("attention.value_length", head_dim)
    source.require("attention.causal", True)
    rotary_dim = source.integer("rope.dimension_count", head_dim)
    norm = "layer_norm" if family.layer_norm else "layer_norm_rms"
    eps = "layer_norm_eps" if family.layer_norm else "rms_norm_eps"
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
        eps: source.number(f"attention.{norm}_epsilon"),
        "rope_theta": source.number("rope.freq_base", DEFAULT_THETA),
        "max_position_embeddings": source.integer("context_length"),
        "tie_word_embeddings": source.tensor("output.weight") is None,
        **_token_ids(source),
    }
    if rotary_dim != head_dim and not family.latents:
        config["partial_rotary_factor"] = rotary_dim / head_dim
    config["rope_scaling"] = _rope_scaling(source, config["rope_theta"], family.latents)
    config |= family.fields(source, config)
    source.check_all_asked()
    return ModelConfig(config, str(source.path))


def _token_ids(source: Source) -> dict[str, Any]:
    def named(*kinds: str) -> list[int]:
        keys = (f"tokenizer.ggml.{kind}_token_id" for kind in kinds)
        return [source.config.integer(key, minimum=0) for key in keys if key in source.config]

    ids = {"bos": named("bos"), "eos": [*named("eos", "eot", "eom"), *end_tokens(source.config)]}
    return {
        f"{name}_token_id": list(dict.fromkeys(found)) if len(set(found)) > 1 else found[0]
        for name, found in ids.items()
        if found
    }


def _rope_scaling(source: Source, theta: float, latents: bool) -> dict[str, Any] | None:
    kind = source.text("rope.scaling.type", "none")
    fields: dict[str, Any] = {"rope_theta": theta}
    if latents and source.has("rope.scaling.yarn_log_multiplier"):
        # The key is about mscale_all_dim; llama.cpp takes mscale to be the same.
        mscale = 10 * source.number("rope.scaling.yarn_log_multiplier")
        fields |= {"mscale": mscale, "mscale_all_dim": mscale}
    else:
        source.require("rope.scaling.yarn_log_multiplier", 0.0)
    if source.has("rope.scaling.original_context_length"):
        length = source.integer("rope.scaling.original_context_length")
        fields["original_max_position_embeddings"] = length
    short = source.factors(_FREQUENCIES) or source.factors(_SHORT)
    if short is not None:
        source.require("rope.scaling.type", "none", "llama3", "longrope")
        source.ignore("rope.scaling.factor")  # It is part of the factors.
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
    names = module_names(family)
    tensors: dict[str, TensorEntry] = {}
    for own, tensor in source.file.tensors.items():
        if own in (_FREQUENCIES, _LONG, _SHORT):
            continue
        name, module = name_of(names, own)
        for e, part in enumerate(_experts(tensor) if "{e}" in name else [tensor]):
            entry = _entry(family, config, module, part)
            part_name = name.replace("{e}", str(e))
            if part_name in tensors:
                raise CheckpointError(
                    f"{entry.where}: {part_name!r} is also there under another name"
                )
            tensors[part_name] = entry
    return tensors


def _experts(tensor: GgufTensor) -> Iterator[GgufTensor]:
    """The part of each expert in a tensor of all experts."""
    if len(tensor.shape) != 3:
        raise CheckpointError(f"{tensor.raw.where} has {len(tensor.shape)} dimensions, expected 3")
    count, rows = tensor.shape[:2]
    for e in range(count):
        yield GgufTensor(tensor.block, tensor.shape[1:], row_range(tensor.raw, e * rows, rows))


def _entry(family: Family, config: ModelConfig, module: str, tensor: GgufTensor) -> TensorEntry:
    """``tensor`` in transformers' layout."""
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    order = None
    if family.pairs and module in ("attn_q", "attn_k"):
        order = _from_pairs(tensor, heads if module == "attn_q" else kv_heads)
    elif family.by_groups and module == "attn_qkv":
        order = _to_groups(tensor, heads, kv_heads)
    elif module == "ffn_gate_inp_shexp" and len(tensor.shape) == 1:  # one row
        tensor = replace(tensor, shape=(1, *tensor.shape))
    entry = tensor_entry(tensor, order)
    if family.norms_with_one and module.endswith("norm"):
        # The declaration adds the one again, which gives exactly the stored bits.
        return derive(_less_one(entry.dtype), "float32", entry.shape, entry)
    if module in family.transposed and len(entry.shape) == 2 and not entry.has_outputs_first:
        return derive(lambda array: array.T, entry.dtype, entry.shape[::-1], entry)
    return entry


def _from_pairs(tensor: GgufTensor, heads: int) -> NDArray[np.intp]:
    rows = tensor.shape[0]
    if rows % (2 * heads):
        raise CheckpointError(
            f"{tensor.raw.where} has {rows} rows, expected a multiple of 2 x {heads}"
        )
    return np.arange(rows, dtype=np.intp).reshape(heads, -1, 2).swapaxes(1, 2).ravel()


def _to_groups(tensor: GgufTensor, heads: int, kv_heads: int) -> NDArray[np.intp]:
    """The order of rows from all queries, keys and values to those of each group."""
    rows, all_heads = tensor.shape[0], heads + 2 * kv_heads
    if rows % all_heads:
        raise CheckpointError(
            f"{tensor.raw.where} has {rows} rows, expected a multiple of {all_heads}"
        )
    spec = SimpleNamespace(num_heads=heads, num_kv_heads=kv_heads, head_dim=rows // all_heads)
    return np.argsort(by_groups(spec))


def _less_one(dtype: str) -> Callable[[NDArray[Any]], NDArray[Any]]:
    return lambda norm: as_float32(norm, dtype) - np.float32(1)
