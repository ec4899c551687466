"""Fuzz targets for JSON: configurations, tokenizers, formats of guided output."""

from __future__ import annotations

import copy
import functools
import json
from pathlib import Path
from typing import Any

import numpy as np
from files import gguf_metadata
from target import ROOT, checkpoints, errors, file_with, parsed_object, read_all, scratch

# The vocabulary and the chat template of a GGUF file


def gguf_tokenizer_seeds() -> list[bytes]:
    byte_level = {key: value for key, value in gguf_metadata().items() if "tokenizer" in key}
    pieces = {
        **byte_level,
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": ["<unk>", "<s>", "</s>", "<0x41>", "\u2581", "a", "\u2581a", "b"],
        "tokenizer.ggml.scores": [0.0, 0.0, 0.0, 0.0, -1.0, -2.0, -3.0, -4.0],
        "tokenizer.ggml.token_type": [2, 3, 3, 6, 1, 1, 1, 4],
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.add_bos_token": True,
    }
    return [json.dumps(metadata).encode() for metadata in (byte_level, pieces)]


def run_gguf_tokenizer(data: bytes) -> None:
    from allspark.model_loader.gguf import tokenizer_files

    metadata = parsed_object(data)
    if metadata is not None:
        tokenizer_files(metadata, "model.gguf")


# config.json

# Small numbers of layers and experts, because each one takes work.
_FEW = {
    "num_hidden_layers": 2, "n_layer": 2, "n_layers": 2, "num_layers": 2, "num_experts": 4,
    "num_local_experts": 4, "n_routed_experts": 4, "moe_num_experts": 4, "num_experts_per_tok": 2,
    "moe_top_k": 2, "n_group": 2, "topk_group": 1,
}  # fmt: skip


def _with_few(value: Any) -> Any:
    if isinstance(value, dict):
        return {
            key: min(child, _FEW[key]) if key in _FEW and type(child) is int else _with_few(child)
            for key, child in value.items()
        }
    return value


@functools.cache
def published() -> list[dict[str, Any]]:
    path = ROOT / "tests" / "python" / "published_configs.json"
    return [entry["config"] for entry in json.loads(path.read_text("utf-8")).values()]


def config_seeds() -> list[bytes]:
    configs = []
    for config in published():
        config = _with_few(copy.deepcopy(config))
        types = config.get("layer_types")
        if isinstance(types, list):
            config["layer_types"] = types[:2]
        configs.append(config)
    # Rope in all its forms. Forms that change the context length have other fields.
    for rope in (
        {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
         "original_max_position_embeddings": 32},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
        {"type": "linear", "factor": 2.0},
        {"rope_type": "longrope", "short_factor": [1.0, 1.0], "long_factor": [1.0, 2.0],
         "original_max_position_embeddings": 32},
    ):  # fmt: skip
        configs.append({**checkpoints.CONFIG, "rope_scaling": rope})
    return [json.dumps(config).encode() for config in configs]


def run_config(data: bytes) -> None:
    from allspark.model_loader.checkpoint import Checkpoint
    from allspark.model_loader.config import ModelConfig
    from allspark.model_loader.convert import describe_decoder, make_plan
    from allspark.model_loader.native import required_of

    file_with("config.json", data)
    config = ModelConfig.read(scratch())
    nothing = Checkpoint(scratch(), [], {})
    described = describe_decoder(config)
    try:
        required_of(described.spec("bfloat16"))
    except (ValueError, NotImplementedError):
        return  # The native side's documented errors.
    try:
        make_plan(described, nothing, "bfloat16")
    except errors.UnexplainedTensorError:
        pass  # There are no tensors.


# Quantised checkpoints, and what a caller may request


def quantization_seeds() -> list[bytes]:
    """{"config": quantization_config, "tensors": {name: [dtype, shape]}, "options": ...}."""
    gptq = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True}
    awq = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True,
           "version": "gemm"}  # fmt: skip

    def compressed(layout: str, weights: dict[str, Any], dynamic: bool = False) -> dict[str, Any]:
        group: dict[str, Any] = {"targets": ["Linear"], "weights": weights}
        if dynamic:
            group["input_activations"] = {"num_bits": 8, "type": "int", "dynamic": True}
        return {"quant_method": "compressed-tensors", "format": layout, "ignore": ["lm_head"],
                "config_groups": {"group_0": group}}  # fmt: skip

    def module(**parts: tuple[str, list[int]]) -> dict[str, Any]:
        return {f"model.layers.0.mlp.up_proj.{name}": part for name, part in parts.items()}

    mixed = compressed("mixed-precision", {})
    mixed["config_groups"] = {
        "a": {"targets": ["re:.*up_proj"], "format": "int-quantized",
              "weights": {"num_bits": 4, "strategy": "group", "group_size": 32}},
        "b": {"targets": ["Linear"], "format": "pack-quantized", "weights": {"num_bits": 8}},
    }  # fmt: skip
    scales = ("float16", [2, 32])
    packed = {"qweight": ("int32", [8, 32]), "qzeros": ("int32", [2, 4]), "scales": scales}
    rows = [
        (gptq, module(**packed, g_idx=("int32", [64]))),
        ({**gptq, "sym": False, "checkpoint_format": "gptq_v2"}, module(**packed)),
        ({**gptq, "bits": 8, "sym": False},
         module(qweight=("int32", [16, 32]), qzeros=("int32", [2, 8]), scales=scales)),
        (awq, module(qweight=("int32", [64, 4]), qzeros=("int32", [2, 4]), scales=scales)),
        (compressed("pack-quantized", {"num_bits": 4, "type": "int", "strategy": "group",
                                       "group_size": 32, "symmetric": False}),
         module(weight_packed=("int32", [32, 8]), weight_scale=("float16", [32, 2]),
                weight_zero_point=("int32", [4, 2]), weight_shape=("int64", [2]))),
        (compressed("int-quantized", {"num_bits": 8, "type": "int", "strategy": "channel"}, True),
         module(weight=("int8", [32, 64]), weight_scale=("float32", [32, 1]))),
        (compressed("float-quantized", {"num_bits": 8, "type": "float", "strategy": "block",
                                        "block_structure": [16, 16]}),
         module(weight=("float8_e4m3", [32, 64]), weight_scale=("float32", [2, 4]))),
        ({"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [16, 32]},
         module(weight=("float8_e4m3", [32, 64]), weight_scale_inv=("float32", [2, 2]))),
        ({"quant_method": "fp8"},
         module(weight=("float8_e4m3", [32, 64]), weight_scale=("bfloat16", [1]))),
        (compressed("mxfp4-pack-quantized", {"num_bits": 4, "type": "float", "group_size": 32}),
         module(weight_packed=("uint8", [32, 32]), weight_scale=("uint8", [32, 2]))),
        (mixed, module(weight=("int8", [32, 64]), weight_scale=("float32", [32, 2]))),
        ({**gptq, "dynamic": {"-:.*down": {}, "+:.*up": {"bits": 8, "sym": False}}},
         module(qweight=("int32", [16, 32]), qzeros=("int32", [2, 8]), scales=scales)),
        ({"quant_method": "auto-round", "bits": 4, "group_size": 32, "sym": True,
          "packing_format": "auto_round:auto_gptq", "extra_config": {".*up.*": {"bits": 4}}},
         module(**packed)),
    ]  # fmt: skip
    options = [
        {"quant_method": "instant_quant", "weight_format": "uint4", "group_size": 32,
         "compute_method": "activate_quant", "activate_format": "int8",
         "group_settings": {"up": 64}, "modules_to_not_convert": ["down"], "lm_head": "int8"},
        {"quant_method": "iq", "weight_format": "int8", "lm_head": None, "embedding": "int4"},
        {"quant_method": "gptq", "compute_method": "weight_only"},
        None,
    ]  # fmt: skip
    return [
        json.dumps(
            {"config": config, "tensors": tensors, "options": options[i % len(options)]}
        ).encode()
        for i, (config, tensors) in enumerate(rows)
    ]


# Bytes of the largest tensor; larger ones in a mutated input are left out.
_QUANTIZED_BYTES = 1 << 16


def run_quantization(data: bytes) -> None:
    from allspark.model_loader.config import ModelConfig
    from allspark.model_loader.quantization import MatrixWeight, parse_quantization
    from allspark.model_loader.quantized import checkpoint_format
    from allspark.model_loader.storage import ELEMENT_TYPES, MappedFile, TensorEntry

    fields = parsed_object(data)
    if fields is None:
        return
    options = fields.get("options")
    weights = [MatrixWeight((f"model.layers.0.mlp.{n}_proj", n), 64) for n in ("up", "down")]
    weights += [MatrixWeight((name,), 64) for name in ("lm_head", "embedding")]
    try:
        found = parse_quantization(True, False, options)
        if found is not None:
            found.weight_quants(weights, tied=False)
    except (ValueError, TypeError, NotImplementedError):
        pass  # Documented for arguments of a caller.
    parsed = checkpoint_format(ModelConfig({"quantization_config": fields.get("config")}, "c.json"))
    listed = fields.get("tensors")
    if parsed is None or not isinstance(listed, dict):
        return
    file = MappedFile(_values())
    tensors = {}
    for name, kind in listed.items():
        # The reader of headers lets only valid entries pass; the others are left out here.
        if not isinstance(kind, list) or len(kind) != 2 or kind[0] not in map(str, ELEMENT_TYPES):
            continue
        shape = kind[1]
        if not isinstance(shape, list) or len(shape) > 4:
            continue
        if not all(type(size) is int and 0 <= size <= _QUANTIZED_BYTES for size in shape):
            continue
        nbytes = int(np.prod(shape, dtype=object)) * ELEMENT_TYPES[kind[0]].itemsize
        if nbytes <= _QUANTIZED_BYTES:
            begin = _QUANTIZED_BYTES if name.endswith("qzeros") else 0
            tensors[name] = TensorEntry(name, kind[0], tuple(shape), file, begin, nbytes)
    read_all(parsed.view(tensors).values())


@functools.cache
def _values() -> Path:
    """A file with the data of all tensors: zeros, and for GPTQ zero points in the middle."""
    return file_with("values", bytes(_QUANTIZED_BYTES) + b"\x77" * _QUANTIZED_BYTES)


# A tokenizer's settings and its chat template


@functools.cache
def tokenizer_json() -> bytes:
    """A small tokenizer of bytes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate([*alphabet, "<s>", "</s>"])}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    return tokenizer.to_str().encode()


TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}[{{ m['content'] | trim }}]"
    "{% else %}{{ m['content'] + eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}>{% endif %}"
)


def chat_template_seeds() -> list[bytes]:
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>",
        "model_max_length": 64, "clean_up_tokenization_spaces": False, "chat_template": TEMPLATE,
    }  # fmt: skip
    added = {"7": {"content": "<s>", "special": True, "lstrip": False, "rstrip": False,
                   "normalized": False, "single_word": False}}  # fmt: skip
    tools = {"name": "tool_use", "template": "{{ 1 }}"}
    several = [{"name": "default", "template": TEMPLATE}, tools]
    token = {"__type": "AddedToken", "content": "</s>", "special": True}
    return [
        json.dumps(fields).encode()
        for fields in (
            settings,
            {**settings, "added_tokens_decoder": added},
            {**settings, "chat_template": several},
            {**settings, "eos_token": token, "extra_special_tokens": {"pad": "<s>"}},
        )
    ]


def run_chat_template(data: bytes) -> None:
    from allspark.model_loader.tokenizer import load_tokenizer

    folder = scratch() / "tokenizer"
    folder.mkdir(exist_ok=True)
    (folder / "tokenizer.json").write_bytes(tokenizer_json())
    (folder / "tokenizer_config.json").write_bytes(data)
    tokenizer = load_tokenizer(folder)
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    try:
        tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    except MemoryError:
        raise
    except Exception:
        pass  # The template belongs to the checkpoint, and the library reports its faults.


# Guided formats


def guided_format_seeds() -> list[bytes]:
    schema = {
        "type": "object", "required": ["a"], "additionalProperties": False,
        "properties": {
            "a": {"type": "integer", "minimum": 0}, "b": {"enum": ["x", 1, None]},
            "c": {"type": "array", "items": {"type": "string", "maxLength": 5}, "minItems": 1},
            "d": {"anyOf": [{"const": 1}, {"$ref": "#/$defs/e"}]},
            "f": {"type": "string", "format": "date"}, "g": {"type": "string", "pattern": "^a+$"},
        },
        "$defs": {"e": {"type": ["number", "null"]}},
    }  # fmt: skip
    formats = [
        {"type": "text"},
        {"type": "json_object"},
        {"type": "json_object", "json_schema": schema},
        {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}},
        {"type": "json_schema", "json_schema": json.dumps(schema)},
        {"type": "regex", "regex": "[a-z]{2,4}( [0-9]+)?"},
        {"type": "regex_schema", "regex_schema": "(a|b)*c"},
        {"type": "choice", "choice": ["red", "green", 'dark "blue"']},
        {"type": "grammar", "grammar": 'start: "a" b*\nb: /[0-9]/\n'},
        {"type": "grammar", "grammar": 'root ::= "a" [0-9]+\n'},
        {"type": "structural_tag", "triggers": ["<f"],
         "structures": [{"begin": "<f=a>", "schema": {"type": "object"}, "end": "</f>"}]},
    ]  # fmt: skip
    return [json.dumps(form).encode() for form in formats]


@functools.cache
def compiler() -> Any:
    from allspark.grammar_compiler import Compiler
    from allspark.model_loader.tokenizer import load_tokenizer

    return Compiler.of(load_tokenizer(ROOT / "examples" / "demo_model"))


def run_guided_format(data: bytes) -> None:
    try:
        form = json.loads(data)
    except (ValueError, RecursionError):
        return  # A server's own parser refuses such a text.
    # Drop the cache, so that memory does not grow with the number of inputs.
    compiler().clear()
    matcher = compiler().matcher(form)
    if matcher is not None:
        matcher.compute_bitmask()
