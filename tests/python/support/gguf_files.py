"""GGUF files for tests, written with llama.cpp's own package: with its names of tensors, and with
the order of rows and the keys that its converter writes.
"""

from __future__ import annotations

import re

import numpy as np
from support.checkpoints import llama_tensors
from support.quantized import GROUPED

NORMS_WITH_ONE = ("gemma", "gemma2", "gemma3")
BY_GROUPS = ("gptneox", "bloom", "falcon")


def in_pairs(rows, heads):
    """Queries and keys as llama.cpp rotates them: adjacent elements instead of halves."""
    halves = rows.reshape(heads, 2, -1, *rows.shape[1:])
    return halves.swapaxes(1, 2).reshape(rows.shape)


# The names of experts' matrices in GGUF files.
EXPERTS = {"gate_proj": "gate", "up_proj": "up", "down_proj": "down",
           "w1": "gate", "w3": "up", "v1": "up", "w2": "down"}  # fmt: skip


def stacked_experts(tensors, config):
    """``tensors`` where one tensor has all experts of a layer, with the names of GGUF files."""
    result, found = {}, {}
    for name, values in tensors.items():
        one = re.fullmatch(r".*\.(\d+)\..*\.experts\.(\d+)\.(\w+)\.weight", name)
        rows = re.fullmatch(r".*\.(\d+)\.ffn\.experts\.mlp\.(\w+)", name)
        if one:
            key = (one[1], EXPERTS[one[3]])
            found.setdefault(key, {})[int(one[2])] = values
        elif rows:  # DBRX's
            experts = config["ffn_config"]["moe_num_experts"]
            parts = values.reshape(experts, -1, values.shape[-1])
            turned = parts.swapaxes(1, 2) if rows[2] == "w2" else parts
            found[rows[1], EXPERTS[rows[2]]] = dict(enumerate(turned))
        else:
            result[name] = values
    for (layer, kind), parts in found.items():
        stack = np.stack([parts[e] for e in range(len(parts))])
        result[f"blk.{layer}.ffn_{kind}_exps.weight"] = stack
    return result


def ungrouped(values, config):
    """From rows of queries, keys and values by group to all queries, all keys, all values."""
    heads = config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads") or heads
    parts = values.reshape(kv_heads, heads // kv_heads + 2, -1, *values.shape[1:])
    split = np.split(parts, [heads // kv_heads, heads // kv_heads + 1], axis=1)
    return np.concatenate([part.reshape(-1, *values.shape[1:]) for part in split])


def split_latents(values, config):
    """A kv_b_proj as in newer files: {end of the name: values}."""
    heads, latent = config["num_attention_heads"], config["kv_lora_rank"]
    parts = values.reshape(heads, -1, latent)
    keys, values = np.split(parts, [config["qk_nope_head_dim"]], axis=1)
    return {"attn_k_b": keys.swapaxes(1, 2), "attn_v_b": values}


def renamed(arch, tensors, config, pairs=False):
    """{name in a GGUF file: values} for tensors with transformers' names."""
    import gguf

    arch_id = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == arch)
    names = gguf.get_tensor_name_map(arch_id, config["num_hidden_layers"])
    result = {}
    for name, values in stacked_experts(tensors, config).items():
        values = np.asarray(values)
        if name.startswith("blk."):
            result[name] = values
            continue
        if pairs and "q_proj" in name:
            values = in_pairs(values, config["num_attention_heads"])
        if pairs and "k_proj" in name:
            values = in_pairs(values, config["num_key_value_heads"])
        if arch in NORMS_WITH_ONE and name.endswith("norm.weight"):
            values = values + np.float32(1)
        if arch in ("chatglm", "bloom"):  # As llama.cpp's converter does.
            name = name.removeprefix("transformer.")
        if arch in BY_GROUPS and "query_key_value" in name:
            values = ungrouped(values, config)
        if arch == "gpt2" and re.search(r"c_(attn|proj|fc)\.weight", name):
            values = values.T
        if "shared_expert_gate" in name:
            values = values.squeeze()
        if config.get("split_latents") and "kv_b_proj" in name:
            layer = name.split(".")[2]
            for end, part in split_latents(values, config).items():
                result[f"blk.{layer}.{end}.weight"] = part
            continue
        name = name.replace("e_score_correction_bias", "e_score_correction.bias")
        target = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert target is not None, name
        result[target] = values
    return result


def metadata(config, **fields):
    """Keys under the architecture's prefix; ``fields`` may change them; None removes one."""
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    rope = config.get("rope_parameters") or {}
    keys = {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": heads,
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "rope.freq_base": rope.get("rope_theta", config.get("rope_theta", 10000.0)),
        "rope.dimension_count": int(head_dim * rope.get("partial_rotary_factor", 1.0)),
        "vocab_size": config["vocab_size"],
        **{key.replace("__", "."): value for key, value in fields.items()},
    }
    return {key: value for key, value in keys.items() if value is not None}


def add_keys(writer, keys):
    for key, value in keys.items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, value)


def write_gguf(path, arch, tensors, keys, whole=(), shard_tensors=0):
    """``tensors``: {name: float array or (type's name, raw blocks)}. ``keys`` are without the
    prefix, ``whole`` are full keys.
    """
    import gguf

    path.parent.mkdir(parents=True, exist_ok=True)
    writer = gguf.GGUFWriter(path, arch, split_max_tensors=shard_tensors)
    add_keys(writer, {f"{arch}.{key}": value for key, value in keys.items()})
    add_keys(writer, dict(whole))
    for name, values in tensors.items():
        if isinstance(values, tuple):
            kind, raw = values
            writer.add_tensor(name, raw, raw_dtype=gguf.GGMLQuantizationType[kind])
        else:
            writer.add_tensor(name, np.ascontiguousarray(values))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def quantized(values, kind):
    """The argument of ``write_gguf`` for a matrix, and the values that the file then has for it."""
    import gguf

    type_id = gguf.GGMLQuantizationType[kind]
    if kind in ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"):
        raw = gguf.quants.quantize(values, type_id)
    else:
        raw = random_blocks(values, type_id)
    return (kind, raw), gguf.quants.dequantize(raw, type_id)


# The positions of the float16 scales in a block. A second one is for what is added or subtracted.
SCALES = {"Q4_0": (0,), "Q8_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2),
          "Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,),
          "IQ4_NL": (0,), "IQ4_XS": (0,), "IQ2_XS": (0,), "IQ3_XXS": (0,),
          "TQ2_0": (64,)}  # fmt: skip
# The mean of the integers, which the second one is for.
MEANS = {"Q2_K": 1.5, "Q4_K": 7.5, "Q5_K": 15.5}
# Of types with other scales: codes of small ones, and the bytes that hold them.
SCALE_CODES = {"MXFP4": ((120, 124), slice(0, 1)), "NVFP4": ((1, 24), slice(0, 4))}
SPREAD = 2.0**-4  # the standard deviation of weights


def random_blocks(values, type_id):
    """The package has no quantiser for these; random bytes are blocks if their scales are
    numbers."""
    import gguf

    elements, size = gguf.GGML_QUANT_SIZES[type_id]
    *rows, cols = values.shape
    rng = np.random.default_rng(5)
    blocks = rng.integers(0, 256, (*rows, cols // elements, size), np.uint8)
    if type_id.name in SCALE_CODES:
        codes, where = SCALE_CODES[type_id.name]
        blocks[..., where] = rng.integers(*codes, blocks[..., where].shape)
        return blocks.reshape(*rows, -1)
    ratios = rng.uniform(0.5, 1.5, blocks.shape[:-1])

    def scaled(factor):
        for begin, mean in zip(SCALES[type_id.name], (1, MEANS.get(type_id.name)), strict=False):
            halves = (factor * mean * ratios).astype("<f2")
            blocks[..., begin : begin + 2] = halves[..., None].view(np.uint8)
        return blocks.reshape(*rows, -1)

    return scaled(SPREAD / gguf.quants.dequantize(scaled(1.0), type_id).std())


def llama_file(path, kinds, config=GROUPED, **options):
    """A Llama whose matrices have the type that ``kinds`` gives for the first matching pattern ("":
    all others); and the tensors with its values, under transformers' names.
    """
    import gguf

    tensors = llama_tensors(config)
    for name in tensors:
        if name.endswith("_proj.weight") or "embed" in name or "lm_head" in name:
            tensors[name] *= np.float32(0.125)
    stored, exact = {}, {}
    for name, values in tensors.items():
        kind = next(kind for pattern, kind in kinds.items() if pattern in name)
        if values.ndim == 1 or kind == "F32":
            stored[name], exact[name] = values, values
            continue
        stored[name], exact[name] = quantized(values, kind)

    def pairs(name, entry):
        """Blocks lie along rows, so rows can be reordered."""
        heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
        count = next((heads[part] for part in heads if part in name), 0)
        if not count:
            return entry
        if isinstance(entry, tuple):
            return entry[0], in_pairs(entry[1], count)
        return in_pairs(entry, count)

    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config["num_hidden_layers"])
    named = {
        names.get_name(name, try_suffixes=(".weight",)): pairs(name, entry)
        for name, entry in stored.items()
    }
    write_gguf(path, "llama", named, metadata(config), **options)
    return exact, stored
