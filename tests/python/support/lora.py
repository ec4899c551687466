"""LoRA adapters for tests, written by hand in PEFT's layout, and a plain reader of NAME.aslora."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np
from support.checkpoints import CONFIG, llama_tensors, safetensors_bytes

PREFIX = "base_model.model."
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")
LINEAR = ATTENTION + MLP
ADAPTER_CONFIG = {
    "peft_type": "LORA",
    "task_type": "CAUSAL_LM",
    "base_model_name_or_path": "base",
    "r": 4,
    "lora_alpha": 8,
    "lora_dropout": 0.05,
    "target_modules": list(LINEAR),
    "bias": "none",
    "fan_in_fan_out": False,
    "inference_mode": True,
    "init_lora_weights": True,
    "rank_pattern": {},
    "alpha_pattern": {},
    "use_rslora": False,
    "use_dora": False,
    "modules_to_save": None,
    "layers_to_transform": None,
}


def base_shapes(config=CONFIG):
    """[out, in] of the matrices of a Llama checkpoint; of the embedding, [vocab, hidden]."""
    shapes = {name: array.shape for name, array in llama_tensors(config).items()}
    shapes["lm_head.weight"] = shapes["model.embed_tokens.weight"]
    return {
        name.removesuffix(".weight"): shape for name, shape in shapes.items() if len(shape) == 2
    }


def modules_named(names, config=CONFIG):
    return [name for name in base_shapes(config) if name.rsplit(".", 1)[-1] in names]


def adapter_tensors(modules=None, rank=4, config=CONFIG, seed=1, prefix=PREFIX, scale=1.0):
    """lora_A and lora_B of each module under PEFT's keys; ``rank`` may be a dict by module."""
    rng = np.random.default_rng(seed)
    shapes = base_shapes(config)
    tensors = {}
    for module in modules_named(LINEAR, config) if modules is None else modules:
        rows, cols = shapes[module]
        r = rank[module] if isinstance(rank, dict) else rank
        kinds = ("lora_A.weight", "lora_B.weight")
        if module.endswith("embed_tokens"):
            rows, cols = cols, rows
            kinds = ("lora_embedding_A", "lora_embedding_B")
        for kind, shape in zip(kinds, ((r, cols), (rows, r)), strict=True):
            values = rng.standard_normal(shape, np.float32) * (scale / np.sqrt(shape[1]))
            tensors[f"{prefix}{module}.{kind}"] = values.astype(np.float32)
    return tensors


def write_adapter(directory: Path, tensors=None, **fields):
    """An adapter's directory; ``fields`` change its configuration, an Ellipsis removes one."""
    directory.mkdir(parents=True, exist_ok=True)
    config = {k: v for k, v in {**ADAPTER_CONFIG, **fields}.items() if v is not ...}
    (directory / "adapter_config.json").write_text(json.dumps(config))
    data = safetensors_bytes(adapter_tensors() if tensors is None else tensors)
    (directory / "adapter_model.safetensors").write_bytes(data)
    return directory


def deltas(tensors, scale, prefix=PREFIX):
    """What an adapter adds to the weight of each module, in double precision."""
    result = {}
    for key, a in tensors.items():
        for kind in ("lora_A", "lora_embedding_A"):
            if f".{kind}" in key:
                b = tensors[key.replace("_A", "_B")].astype(np.float64)
                delta = scale * (b @ a.astype(np.float64))
                module = key.removeprefix(prefix).split(f".{kind}")[0]
                result[module] = delta.T if "embedding" in kind else delta
    return result


def read_aslora(path: Path):
    """[(tensor, row_begin, a, b)] of a file, read according to csrc/weights/README.md."""
    from allspark.model_loader.spec import message_class

    data = Path(path).read_bytes()
    magic, version, flags, size, index_at, index_bytes = struct.unpack_from("<8sIIQQQ", data)
    assert (magic, version, flags) == (b"ASLORA\0\0", 1, 0)
    assert size == len(data) == index_at + index_bytes
    position, pairs = 64, []

    def matrix(rows, cols):
        nonlocal position
        array = np.frombuffer(data, "<f4", rows * cols, position).reshape(rows, cols)
        position += -(-array.nbytes // 64) * 64
        return array

    for record in message_class("LoraIndex").FromString(data[index_at:]).records:
        shape = (record.rank, record.cols)
        a = matrix(*(shape[::-1] if record.tensor == "embedding" else shape))
        pairs.append((record.tensor, record.row_begin, a, matrix(record.rows, record.rank)))
    assert position == index_at
    return pairs
