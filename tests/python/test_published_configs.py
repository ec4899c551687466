"""Configurations as their makers publish them, at full size: fields that no small random model has,
older names, nulls. If a configuration is understood, the required tensors are exactly those of the
published model, so their elements add up to its number of parameters.

``published_configs.json`` has the part of each ``config.json`` that describes the model, and the
number of parameters in the makers' files. Both were first written from memory (LongRoPE's factors
are ones; InternLM 7B's parameters are added up by hand; GLM-4.5's count includes the bias of its
router, but not the multi-token prediction layer). ``source`` says what each configuration was then
compared with, field by field: a public copy, as REPOSITORY@COMMIT:PATH, or nothing ("unverified").
If the copy is not the file itself, ``source_has`` says what it is: mostly the chat version of the
model or another model of the same shape, or a list of sizes only. ``differs`` has the fields in
which the copy differs, with the copy's values. The copies are not the makers', so either side may
be wrong in such a field; none of these fields changes a tensor. Three numbers of parameters were
compared with a source: InternLM3's with the sizes in its index, Baichuan 7B's and 13B's with their
maker's table.

Names of tensors are compared with those of a checkpoint's index, listed in ``tensors`` (names whose
place in the index was read; all of InternLM3's), and with llama.cpp's tables of names for every
architecture, which give the role of each. Rope and activations were part of the comparison; their
meaning is tested by test_architectures.py.
"""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest
from allspark.model_loader.config import ModelConfig
from allspark.model_loader.convert import describe_decoder
from allspark.model_loader.errors import UnsupportedModelError
from allspark.model_loader.quantized import checkpoint_format
from allspark.model_loader.spec import expand, find_architecture, registered
from allspark.model_loader.storage import ELEMENT_TYPES, MappedFile, TensorEntry

required_tensors = pytest.importorskip("allspark._allspark").required_tensors

PUBLISHED = json.loads((Path(__file__).parent / "published_configs.json").read_text("utf-8"))
# Architectures of other entries under transformers' own names.
UNPUBLISHED = {"ChatGLMForConditionalGeneration", "GlmForCausalLM", "MptForCausalLM"}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_configuration_asks_for_the_models_parameters(name):
    config = ModelConfig(PUBLISHED[name]["config"], f"{name}/config.json")
    described = describe_decoder(config)
    tensors = required_tensors(described.spec("bfloat16").SerializeToString())
    elements = {tensor[0]: math.prod(tensor[3]) for tensor in tensors}
    weights = [n for tensor, n in elements.items() if tensor not in described.computed]
    assert sum(weights) == PUBLISHED[name]["parameters"]


def test_every_architecture_is_there():
    there = {name for entry in PUBLISHED.values() for name in entry["config"]["architectures"]}
    assert there | UNPUBLISHED >= set(registered())


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_configuration_says_what_it_was_compared_with(name):
    entry = PUBLISHED[name]
    if entry["source"] == "unverified":
        assert entry.keys() <= {"parameters", "source", "tensors", "config"}
    else:
        assert re.fullmatch(r"[\w.-]+/[\w.-]+@[0-9a-f]{40}:\S+", entry["source"])
    for field, value in entry.get("differs", {}).items():
        section, _, key = field.rpartition(".")
        config = entry["config"][section] if section else entry["config"]
        assert config[key] != value


@pytest.mark.parametrize("name", [name for name in PUBLISHED if "tensors" in PUBLISHED[name]])
def test_tensors_are_named_as_the_index_of_the_checkpoint_names_them(name):
    config = ModelConfig(PUBLISHED[name]["config"], f"{name}/config.json")
    described = describe_decoder(config)
    architecture, spec = described.architecture, described.spec("bfloat16")
    tensors = required_tensors(spec.SerializeToString())
    required = {tensor[0] for tensor in tensors} - described.computed.keys()
    there = PUBLISHED[name]["tensors"]
    layers = {n.replace("{i}", str(i)) for n in there["layer"] for i in range(spec.num_layers)}
    others = set(there["others"])
    asked = {}
    for rule in expand(architecture.weights, spec.num_layers, spec.num_experts):
        if rule.target in required:
            asked.setdefault(rule.target, []).append(set(rule.sources))
    for target, sources in asked.items():
        if target.startswith("layers."):  # Names outside layers are not all listed.
            assert any(names <= layers for names in sources), target
    known = set().union(*(names for sources in asked.values() for names in sources))
    ignored = [re.compile(pattern) for pattern in architecture.ignored]
    for tensor in layers | others:
        assert tensor in known or any(p.fullmatch(tensor) for p in ignored), tensor


# llama.cpp's name of the architecture that the converter maps it to, if not its own in upper case.
LLAMA_CPP = {
    "BaiChuanForCausalLM": "BAICHUAN",
    "ChatGLMForConditionalGeneration": "CHATGLM",
    "ChatGLMModel": "CHATGLM",
    "DeepseekV2ForCausalLM": "DEEPSEEK2",
    "DeepseekV3ForCausalLM": "DEEPSEEK2",
    "GPT2LMHeadModel": "GPT2",
    "Glm4MoeForCausalLM": "GLM4_MOE",
    "GlmForCausalLM": "CHATGLM",
    "InternLM3ForCausalLM": "LLAMA",
    "InternLMForCausalLM": "LLAMA",
    "MistralForCausalLM": "LLAMA",
    "MixtralForCausalLM": "LLAMA",
    "PhiForCausalLM": "PHI2",
    "QWenLMHeadModel": "QWEN",
    "Qwen2MoeForCausalLM": "QWEN2MOE",
}
# The roles that llama.cpp may give a tensor of the decoder. Norms between attention and MLP have
# several names there, by family.
ROLES = {
    "embedding": ["token_embd"],
    "position_embedding": ["position_embd"],
    "final_norm": ["output_norm"],
    "lm_head": ["output"],
    "attention_norm": ["attn_norm", "attn_norm_2"],
    "attention_post_norm": ["post_attention_norm"],
    "mlp_norm": ["ffn_norm", "attn_norm", "attn_output_norm", "post_attention_norm"],
    "mlp_post_norm": ["post_ffw_norm"],
    "qkv": ["attn_q attn_k attn_v", "attn_qkv"],
    "q_norm": ["attn_q_norm"],
    "k_norm": ["attn_k_norm"],
    "q_latent_norm": ["attn_q_a_norm"],
    "kv_latent_norm": ["attn_kv_a_norm"],
    "latents": ["attn_kv_a_mqa", "attn_q_a attn_kv_a_mqa"],
    "q": ["attn_q", "attn_q_b"],
    "o": ["attn_output"],
    "gate_up": ["ffn_gate ffn_up", "ffn_up"],  # If gate and up are one matrix, it is called "up".
    "up": ["ffn_up"],
    "down": ["ffn_down"],
    "router": ["ffn_gate_inp", "ffn_gate_inp ffn_gate_inp_shexp"],
    "shared_gate_up": ["ffn_gate_shexp ffn_up_shexp"],
    "shared_down": ["ffn_down_shexp"],
    "experts_down": ["ffn_down_exps"],
}
# Tensors that its converter splits, stacks or renames before it looks into its tables, or that our
# own view changes (kv_b_proj is split in two).
NOT_IN_ITS_TABLES = (
    r".*\.self_attn\.W_pack\.\w+",
    r".*\.attention\.wqkv\.\w+",
    r".*\.self_attn\.kv_b_proj\.(keys|values)\.weight",
    r".*\.mlp\.gate\.e_score_correction_bias",
    r".*\.experts\..*",
    r"transformer\.word_embeddings_layernorm\.\w+",
    r"transformer\.h\.0\.post_attention_layernorm\.\w+",
)
# Heads of models for which llama.cpp knows only tied ones, and dense layers of models for which it
# knows none.
NOT_IN_THESE = {
    "Gemma2ForCausalLM": ("lm_head",),
    "GemmaForCausalLM": ("lm_head",),
    "Qwen2MoeForCausalLM": ("gate_up", "down"),
    "Qwen3MoeForCausalLM": ("gate_up", "down"),
}


@pytest.mark.parametrize("name", registered())
def test_tensors_are_for_what_llama_cpp_says(name):
    """Compares with the table of names by which llama.cpp's converter recognises tensors."""
    gguf = pytest.importorskip("gguf")
    kind = LLAMA_CPP.get(name, name.removesuffix("ForCausalLM").upper())
    names = gguf.get_tensor_name_map(getattr(gguf.MODEL_ARCH, kind), 1)
    checked = 0
    for rule in expand(find_architecture(name).weights, 1, 1):
        target = rule.target.removeprefix("layers.0.").removesuffix("_bias")
        theirs = []
        for source in rule.sources:
            # Its converter drops ChatGLM's prefix.
            source = source.removeprefix("transformer.") if kind == "CHATGLM" else source
            found = names.get_name(source, try_suffixes=(".weight", ".bias"))
            theirs.append(found and re.sub(r"^blk\.0\.|\.(weight|bias)$", "", found))
        if None in theirs:
            excused = any(re.fullmatch(p, rule.sources[0]) for p in NOT_IN_ITS_TABLES)
            assert excused or target in NOT_IN_THESE.get(name, ()), rule.sources
        else:
            checked += 1
            assert " ".join(theirs) in ROLES[target], (target, rule.sources, theirs)
    assert checked >= 8


def compressed(fmt, weights, activations=None):
    """As llm-compressor writes it."""
    scheme = {
        "actorder": None,
        "block_structure": None,
        "dynamic": False,
        "group_size": None,
        "num_bits": 8,
        "observer": "minmax",
        "observer_kwargs": {},
        "strategy": "channel",
        "symmetric": True,
        "type": "int",
    }
    group = {
        "input_activations": None if activations is None else {**scheme, **activations},
        "output_activations": None,
        "targets": ["Linear"],
        "weights": {**scheme, **weights},
    }
    return {
        "config_groups": {"group_0": group},
        "format": fmt,
        "global_compression_ratio": 1.5,
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
    }


FLOAT4 = {"num_bits": 4, "type": "float", "group_size": 16, "strategy": "tensor_group"}
PER_TOKEN = {"dynamic": True, "strategy": "token", "observer": None}
QUANTIZED = {
    "AutoAWQ": (
        {
            "backend": "autoawq",
            "bits": 4,
            "do_fuse": False,
            "exllama_config": None,
            "fuse_max_seq_len": None,
            "group_size": 128,
            "modules_to_fuse": None,
            "modules_to_not_convert": None,
            "quant_method": "awq",
            "version": "gemm",
            "zero_point": True,
        },
        {"group_size": 128},
    ),
    "AutoGPTQ": (
        {
            "bits": 4,
            "checkpoint_format": "gptq",
            "damp_percent": 0.01,
            "desc_act": False,
            "group_size": 128,
            "model_file_base_name": None,
            "model_name_or_path": None,
            "quant_method": "gptq",
            "static_groups": False,
            "sym": True,
            "true_sequential": True,
        },
        {"bits": 4, "group_size": 128, "symmetric": True},
    ),
    "GPTQModel": (
        {
            "bits": 4,
            "checkpoint_format": "gptq_v2",
            "desc_act": False,
            "dynamic": None,
            "group_size": 128,
            "lm_head": False,
            "meta": {"mse": 0.0, "quantizer": ["gptqmodel:1.4.0"], "static_groups": False},
            "pack_dtype": "int32",
            "quant_method": "gptq",
            "sym": True,
        },
        {"bits": 4, "zero_offset": 0},
    ),
    "FP8 in blocks": (
        {
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "modules_to_not_convert": ["lm_head", "model.layers.0.mlp.gate"],
            "quant_method": "fp8",
            "weight_block_size": [128, 128],
        },
        {"block": (128, 128)},
    ),
}

# Formats whose settings show in a weight that is made of a module's tensors, here of 8 output and
# 256 input features; with these tensors, and the fields of the weight.
CONVERTED = {
    "w4a16": (
        compressed("pack-quantized", {"num_bits": 4, "group_size": 128, "strategy": "group"}),
        {"weight_packed": ("int32", (8, 32)), "weight_scale": ("float16", (8, 2))},
        {"bits": 4, "group_size": 128, "quantize_activations": False},
    ),
    "w8a8": (
        compressed("int-quantized", {"observer": "mse"}, PER_TOKEN),
        {"weight": ("int8", (8, 256)), "weight_scale": ("bfloat16", (8, 1))},
        {"bits": 8, "group_size": 0, "quantize_activations": True},
    ),
    "w4a8": (
        compressed(
            "int-quantized",
            {"num_bits": 4, "group_size": 128, "strategy": "group"},
            PER_TOKEN,
        ),
        {"weight": ("int8", (8, 256)), "weight_scale": ("bfloat16", (8, 2))},
        {"bits": 4, "group_size": 128, "quantize_activations": True},
    ),
    "FP8-dynamic": (
        compressed("float-quantized", {"type": "float"}, {**PER_TOKEN, "type": "float"}),
        {"weight": ("float8_e4m3", (8, 256)), "weight_scale": ("bfloat16", (8, 1))},
        {"bits": 8, "group_size": 0, "is_float8": True, "quantize_activations": False},
    ),
    "NVFP4": (
        compressed("nvfp4-pack-quantized", FLOAT4, {**FLOAT4, "dynamic": "local"}),
        {
            "weight_packed": ("uint8", (8, 128)),
            "weight_scale": ("float8_e4m3", (8, 16)),
            "weight_global_scale": ("float32", (1,)),
        },
        {"stored_as": "nvfp4", "group_size": 16},
    ),
    "MXFP4": (
        compressed(
            "mxfp4-pack-quantized",
            {**FLOAT4, "group_size": 32, "strategy": "group", "scale_dtype": "torch.uint8"},
        ),
        {"weight_packed": ("uint8", (8, 128)), "weight_scale": ("uint8", (8, 8))},
        {"stored_as": "mxfp4", "group_size": 32},
    ),
    "AutoRound": (
        {
            "autoround_version": "0.5.1",
            "bits": 4,
            "block_name_to_quantize": "model.layers",
            "data_type": "int",
            "extra_config": {"model.layers.0.mlp.gate": {"bits": 16}},
            "group_size": 128,
            "packing_format": "auto_round:auto_gptq",
            "quant_method": "auto-round",
            "sym": True,
        },
        {
            "qweight": ("int32", (32, 8)),
            "qzeros": ("int32", (2, 1)),
            "scales": ("float16", (2, 8)),
        },
        {"bits": 4, "group_size": 128, "zeros": None},
    ),
}


def quantized(section):
    return ModelConfig({"architectures": ["LlamaForCausalLM"], "quantization_config": section})


@pytest.mark.parametrize("name", QUANTIZED)
def test_a_published_quantisation_is_understood(name):
    section, expected = QUANTIZED[name]
    found = checkpoint_format(quantized(section))
    found = getattr(found, "module", found)
    assert {field: getattr(found, field) for field in expected} == expected


@pytest.mark.parametrize("name", CONVERTED)
def test_a_published_quantisation_makes_the_weight_that_it_describes(name, tmp_path):
    section, stored, expected = CONVERTED[name]
    # Values that are finite in all types.
    (tmp_path / "values").write_bytes(b"\x77" * 4096)
    tensors = {}
    for end, (dtype, shape) in stored.items():
        nbytes = math.prod(shape) * ELEMENT_TYPES[dtype].itemsize
        file = MappedFile(tmp_path / "values")
        tensors[f"m.{end}"] = TensorEntry(f"m.{end}", dtype, shape, file, 0, nbytes)
    view = checkpoint_format(quantized(section)).view(tensors)
    assert view.keys() == {"m.weight"} and view["m.weight"].shape == (8, 256)
    assert {field: getattr(view["m.weight"], field) for field in expected} == expected


def test_bitsandbytes_is_known_by_its_older_settings():
    section = {"bnb_4bit_compute_dtype": "bfloat16", "load_in_4bit": True}
    with pytest.raises(UnsupportedModelError, match="'bitsandbytes', supported are"):
        checkpoint_format(quantized(section))
