"""Writes one of our random-weight checkpoints as a GGUF file, with weights in bfloat16.

usage: gguf_writer.py CHECKPOINT OUT.gguf

llama.cpp's own converter identifies tokenizers by a hash and refuses ours. Needs gguf and numpy.
"""

from __future__ import annotations

import json
import struct
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np

_LAYER = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def target_name(source: str) -> str:
    name, _, kind = source.removeprefix("model.").rpartition(".")
    if name.startswith("layers."):
        _, layer, part = name.split(".", 2)
        return f"blk.{layer}.{_LAYER[part]}.{kind}"
    return {"embed_tokens": "token_embd", "norm": "output_norm"}[name] + f".{kind}"


def interleave(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """Reorders Llama's queries and keys for llama.cpp, which rotates adjacent elements, not
    halves."""
    halves = rows.reshape(num_heads, 2, -1, *rows.shape[1:])
    return halves.swapaxes(1, 2).reshape(rows.shape)


def add_metadata(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)


def add_tokenizer(writer: gguf.GGUFWriter, checkpoint: Path) -> None:
    spec = json.loads((checkpoint / "tokenizer.json").read_text())
    vocab = spec["model"]["vocab"]
    special = {token["id"] for token in spec["added_tokens"]}
    types = (gguf.TokenType.NORMAL, gguf.TokenType.CONTROL)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(sorted(vocab, key=vocab.__getitem__))
    writer.add_token_types([types[token_id in special] for token_id in range(len(vocab))])
    writer.add_token_merges([" ".join(pair) for pair in spec["model"]["merges"]])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    writer.add_add_bos_token(False)


def write(checkpoint: Path, out: Path) -> None:
    config = json.loads((checkpoint / "config.json").read_text())
    is_llama = config["model_type"] == "llama"
    writer = gguf.GGUFWriter(out, config["model_type"])
    add_metadata(writer, config)
    add_tokenizer(writer, checkpoint)
    path = checkpoint / "model.safetensors"
    with open(path, "rb") as file:
        (header_bytes,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(header_bytes))
    data = np.memmap(path, np.uint8, "r", offset=8 + header_bytes)
    header.pop("__metadata__", None)
    for source, entry in header.items():
        first, last = entry["data_offsets"]
        values = data[first:last].view("<u2").reshape(entry["shape"])
        if is_llama and ".self_attn.q_proj" in source:
            values = interleave(values, config["num_attention_heads"])
        if is_llama and ".self_attn.k_proj" in source:
            values = interleave(values, config["num_key_value_heads"])
        if values.ndim == 1:
            # llama.cpp needs vectors in float32; a bfloat16 is the upper half of a float32.
            writer.add_tensor(target_name(source), (values.astype("<u4") << 16).view("<f4"))
        else:
            raw = np.ascontiguousarray(values).view(np.uint8)
            kind = gguf.GGMLQuantizationType.BF16
            writer.add_tensor(target_name(source), raw, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    write(Path(sys.argv[1]), Path(sys.argv[2]))
