"""Llama checkpoints as Meta publishes them: ``consolidated.NN.pth``, split over model-parallel
ranks, and ``params.json``.

Tensors get transformers' names, and rows of queries and keys get transformers' order, so that the
declaration of Llama reads them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .checkpoint import Checkpoint
from .config import ModelConfig, read_json_object
from .derived import derive
from .errors import CheckpointError, CheckpointNotFoundError, UnsupportedModelError
from .storage import TensorEntry

PARAMS = "params.json"
_FIRST = "consolidated.00.pth"
_RANK = re.compile(r"consolidated\.(\d\d)\.pth")
_LAYER = re.compile(r"layers\.(\d+)\.(.+)\.weight")

# Name -> (transformers' name, the dimension that is split over ranks; None: not split).
_WHOLE = {"norm": ("model.norm", None), "output": ("lm_head", 0)}
_OF_LAYERS = {
    "attention.wq": ("self_attn.q_proj", 0),
    "attention.wk": ("self_attn.k_proj", 0),
    "attention.wv": ("self_attn.v_proj", 0),
    "attention.wo": ("self_attn.o_proj", 1),
    "feed_forward.w1": ("mlp.gate_proj", 0),
    "feed_forward.w2": ("mlp.down_proj", 1),
    "feed_forward.w3": ("mlp.up_proj", 0),
    "attention_norm": ("input_layernorm", None),
    "ffn_norm": ("post_attention_layernorm", None),
}
_EMBEDDING = "tok_embeddings.weight"
# Frequencies; here they are computed from the configuration.
_UNUSED = "rope.freqs"

# Values that params.json does not have, by the base of the frequencies (Llama 2, CodeLlama, Llama
# 3): the context length, and the ids of beginning and end of text.
_KINDS = {10000.0: (4096, 1, 2), 1000000.0: (16384, 1, 2), 500000.0: (8192, 128000, 128001)}
# Since Llama 3.1 (use_scaled_rope) params.json may leave out the factor. It is 8, but 32 for the
# small models of Llama 3.2, which have a smaller hidden size than all others.
_SCALED_ROPE = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
_SCALED_LENGTH = 16
_WIDE = 4096


def is_meta(directory: Path) -> bool:
    others = ("*.safetensors", "*.bin")
    return (directory / PARAMS).is_file() and not any(
        any(directory.glob(pattern)) for pattern in others
    )


def open_meta(directory: Path) -> tuple[ModelConfig, Checkpoint]:
    """Configuration and tensors under transformers' names. Errors name the file and the tensor or
    field.
    """
    from .pickle_file import read_pickle

    files = sorted(path for path in directory.iterdir() if _RANK.fullmatch(path.name))
    for number, path in enumerate(files):
        if path.name != f"consolidated.{number:02d}.pth":
            raise CheckpointNotFoundError(f"{directory}: consolidated.{number:02d}.pth is missing")
    if not files:
        raise CheckpointNotFoundError(f"{directory}: holds no weights; looked for {_FIRST}")
    ranks = [{entry.name: entry for entry in read_pickle(path)} for path in files]
    for rank, path in zip(ranks, files, strict=True):
        for name, entry in ranks[0].items():
            if name not in rank:
                raise CheckpointError(f"{path}: tensor {name!r} is missing, {_FIRST} has it")
            if (rank[name].dtype, rank[name].shape) != (entry.dtype, entry.shape):
                raise CheckpointError(
                    f"{rank[name].where} is {rank[name].dtype} {list(rank[name].shape)}, but "
                    f"{entry.dtype} {list(entry.shape)} in {_FIRST}"
                )
        for name in rank.keys() - ranks[0].keys():
            raise CheckpointError(f"{rank[name].where} is not in {_FIRST}")
    params = ModelConfig(
        read_json_object(directory / PARAMS, "a Llama's parameters"), str(directory / PARAMS)
    )
    config = _config(params, directory, ranks[0], len(files))
    tensors = {}
    for name in ranks[0]:
        if name != _UNUSED:
            own, entry = _tensor(config, name, [rank[name] for rank in ranks])
            tensors[own] = entry
    return config, Checkpoint(directory, files, tensors)


def _config(
    params: ModelConfig, directory: Path, tensors: Mapping[str, TensorEntry], num_ranks: int
) -> ModelConfig:
    hidden, heads = params.integer("dim"), params.integer("n_heads")
    theta = params.number("rope_theta", 10000.0)
    if theta not in _KINDS:
        raise UnsupportedModelError(
            f"{params.source}: rope_theta is {theta}, supported are {', '.join(map(str, _KINDS))}"
        )
    length, bos, eos = _KINDS[theta]
    scaling = None
    if params.flag("use_scaled_rope", False):
        factor = params.number("rope_scaling_factor", 32.0 if hidden < _WIDE else 8.0)
        scaling = {**_SCALED_ROPE, "factor": factor, "original_max_position_embeddings": length}
        length *= _SCALED_LENGTH
    embedding, gate = (
        _matrix(tensors, name, directory)
        for name in (_EMBEDDING, "layers.0.feed_forward.w1.weight")
    )
    tied = "output.weight" not in tensors
    rows = embedding.shape[0] * (num_ranks if embedding.shape[1] == hidden else 1)
    return ModelConfig(
        {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_act": "silu",
            "hidden_size": hidden,
            "intermediate_size": gate.shape[0] * num_ranks,
            "num_hidden_layers": params.integer("n_layers"),
            "num_attention_heads": heads,
            "num_key_value_heads": params.integer("n_kv_heads", heads),
            "vocab_size": rows,
            "rms_norm_eps": params.number("norm_eps"),
            "rope_theta": theta,
            "rope_scaling": scaling,
            "max_position_embeddings": params.integer("max_seq_len", length),
            "bos_token_id": bos,
            "eos_token_id": eos,
            "tie_word_embeddings": tied,
        },
        str(directory / PARAMS),
    )


def _matrix(tensors: Mapping[str, TensorEntry], name: str, directory: Path) -> TensorEntry:
    if name not in tensors:
        raise CheckpointError(f"{directory / _FIRST}: tensor {name!r} is missing")
    if len(tensors[name].shape) != 2:
        raise CheckpointError(
            f"{tensors[name].where} has shape {list(tensors[name].shape)}, expected two dimensions"
        )
    return tensors[name]


def _tensor(config: ModelConfig, name: str, ranks: list[TensorEntry]) -> tuple[str, TensorEntry]:
    """One tensor, merged from all ranks, by transformers' name; an unknown one by its own."""
    first = ranks[0]
    found = _LAYER.fullmatch(name)
    axis: int | None
    if name == _EMBEDDING:  # Split by features; since Llama 3 by tokens.
        target, axis = "model.embed_tokens", int(first.shape[1] != config["hidden_size"])
    elif found is not None and found[2] in _OF_LAYERS:
        module, axis = _OF_LAYERS[found[2]]
        target = f"model.layers.{found[1]}.{module}"
    elif name.removesuffix(".weight") in _WHOLE:
        target, axis = _WHOLE[name.removesuffix(".weight")]
    else:
        return name, first
    heads = 0
    if target.endswith("q_proj"):
        heads = config["num_attention_heads"]
    elif target.endswith("k_proj"):
        heads = config["num_key_value_heads"]
    shape = list(first.shape)
    if axis is not None and len(shape) != 2:
        raise CheckpointError(f"{first.where} has shape {shape}, expected two dimensions")
    if axis is not None:
        shape[axis] *= len(ranks)
    if heads and shape[0] % (2 * heads):
        raise CheckpointError(
            f"{first.where} has {shape[0]} rows in all ranks, expected a multiple of 2 x {heads}"
        )
    if not heads and (axis is None or len(ranks) == 1):
        return f"{target}.weight", first
    sources = ranks if axis is not None else ranks[:1]
    merge = _merge(axis or 0, heads)
    return f"{target}.weight", derive(merge, first.dtype, tuple(shape), *sources)


def _merge(axis: int, heads: int) -> Callable[..., NDArray[Any]]:
    def compute(*arrays: NDArray[Any]) -> NDArray[Any]:
        whole = arrays[0] if len(arrays) == 1 else np.concatenate(arrays, axis)
        if not heads:
            return whole
        # Rows that are rotated together are adjacent; transformers has them half a head apart.
        pairs = whole.reshape(heads, -1, 2, whole.shape[1])
        return pairs.swapaxes(1, 2).reshape(whole.shape)

    return compute
