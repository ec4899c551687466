"""Checkpoints for tests, written by hand: no torch, and the test controls every byte."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path

import numpy as np
import pytest

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_act": "silu",
    "hidden_size": 16,
    "intermediate_size": 24,
    "max_position_embeddings": 64,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "vocab_size": 40,
}

_SAFETENSORS_NAMES = {
    "<f4": "F32",
    "<f2": "F16",
    "<u2": "BF16",
    "<f8": "F64",
    "<i8": "I64",
    "<i4": "I32",
    "|i1": "I8",
    "|u1": "F8_E4M3",
}


class Octets(np.ndarray):
    """uint8 that is stored as such; other arrays of uint8 are codes of float8."""


def shared_data_path() -> Path:
    """Where real checkpoints, tokenizers and texts are, if they are here."""
    default = Path(__file__).resolve().parents[4] / "shared" / "data"
    return Path(os.environ.get("ALLSPARK_SHARED_DATA", default))


def shared_data() -> Path:
    """That folder; without it the test is skipped, with a message."""
    folder = shared_data_path()
    if not folder.is_dir():
        pytest.skip(f"no shared data at {folder} (set ALLSPARK_SHARED_DATA)")
    return folder


def llama_tensors(config=CONFIG, dtype="<f4", seed=0, biases=False):
    """Random tensors with the names of a Hugging Face Llama checkpoint."""
    rng = np.random.default_rng(seed)
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    head = config.get("head_dim") or hidden // config["num_attention_heads"]
    q_size, kv_size = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    shapes = {"model.embed_tokens.weight": (config["vocab_size"], hidden)}
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}."
        projections = {
            "self_attn.q_proj": (q_size, hidden),
            "self_attn.k_proj": (kv_size, hidden),
            "self_attn.v_proj": (kv_size, hidden),
            "self_attn.o_proj": (hidden, q_size),
            "mlp.gate_proj": (inner, hidden),
            "mlp.up_proj": (inner, hidden),
            "mlp.down_proj": (hidden, inner),
        }
        for name, shape in projections.items():
            shapes[f"{layer}{name}.weight"] = shape
            if biases:
                shapes[f"{layer}{name}.bias"] = shape[:1]
        for name in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"{layer}{name}.weight"] = (hidden,)
    shapes["model.norm.weight"] = (hidden,)
    if not config.get("tie_word_embeddings"):
        shapes["lm_head.weight"] = (config["vocab_size"], hidden)
    tensors = {}
    for name, shape in shapes.items():
        values = rng.standard_normal(shape, np.float32)
        if dtype == "<u2":
            tensors[name] = (values.view(np.uint32) >> 16).astype("<u2")
        else:
            tensors[name] = values.astype(dtype)
    return tensors


def safetensors_bytes(tensors, edit_header=None, tail=b""):
    """A safetensors file; ``edit_header`` may change the header's dict before it is written."""
    header, data = {"__metadata__": {"format": "pt"}}, b""
    for name, array in tensors.items():
        raw = np.ascontiguousarray(array).tobytes()
        dtype = _SAFETENSORS_NAMES[array.dtype.newbyteorder("<").str]
        header[name] = {
            "dtype": "U8" if isinstance(array, Octets) else dtype,
            "shape": list(array.shape),
            "data_offsets": [len(data), len(data) + len(raw)],
        }
        data += raw
    if edit_header is not None:
        edit_header(header)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + data + tail


def write_checkpoint(directory: Path, tensors=None, config=CONFIG, shards=0):
    """A checkpoint directory; ``shards`` > 0 splits the tensors over that many files."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    tensors = llama_tensors(config) if tensors is None else tensors
    if not shards:
        (directory / "model.safetensors").write_bytes(safetensors_bytes(tensors))
        return directory
    weight_map = {}
    for number in range(shards):
        name = f"model-{number + 1:05d}-of-{shards:05d}.safetensors"
        part = dict(list(tensors.items())[number::shards])
        (directory / name).write_bytes(safetensors_bytes(part))
        weight_map.update(dict.fromkeys(part, name))
    index = {"metadata": {}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return directory
