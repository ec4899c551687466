"""Configurations as their makers publish them, at full size: fields that no small random model has,
older names, nulls. A configuration that is understood asks for the tensors of the published model,
no more and no fewer, so their elements are its number of parameters.

``published_configs.json`` holds what concerns the model of each ``config.json``, written down, not
copied (LongRoPE's factors are ones), and the parameters that the makers' files have. InternLM 7B's
are added up by hand; GLM-4.5's count the bias of its experts' choice, not the layer that guesses
ahead.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from allspark.model_loader.config import ModelConfig
from allspark.model_loader.convert import decoder_fields, make_spec
from allspark.model_loader.errors import UnsupportedModelError
from allspark.model_loader.quantized import checkpoint_format
from allspark.model_loader.spec import registered

required_tensors = pytest.importorskip("allspark._allspark").required_tensors

PUBLISHED = json.loads((Path(__file__).parent / "published_configs.json").read_text("utf-8"))
# Names of other entries' architectures in transformers' own form.
UNPUBLISHED = {"ChatGLMForConditionalGeneration", "GlmForCausalLM", "MptForCausalLM"}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_configuration_asks_for_the_models_parameters(name):
    config = ModelConfig(PUBLISHED[name]["config"], f"{name}/config.json")
    _, _, computed = decoder_fields(config)
    tensors = required_tensors(make_spec(config, "bfloat16").SerializeToString())
    elements = {tensor[0]: math.prod(tensor[3]) for tensor in tensors}
    assert sum(n for t, n in elements.items() if t not in computed) == PUBLISHED[name]["parameters"]


def test_every_architecture_is_there():
    there = {name for entry in PUBLISHED.values() for name in entry["config"]["architectures"]}
    assert there | UNPUBLISHED >= set(registered())


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
    "w4a16": (
        compressed("pack-quantized", {"num_bits": 4, "group_size": 128, "strategy": "group"}),
        {"bits": 4, "packed": True, "group_size": 128, "quantize_activations": False},
    ),
    "w8a8": (
        compressed("int-quantized", {"observer": "mse"}, PER_TOKEN),
        {"bits": 8, "is_float": False, "quantize_activations": True},
    ),
    "FP8-dynamic": (
        compressed("float-quantized", {"type": "float"}, {**PER_TOKEN, "type": "float"}),
        {"is_float": True, "quantize_activations": False},
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


def quantized(section):
    return ModelConfig({"architectures": ["LlamaForCausalLM"], "quantization_config": section})


@pytest.mark.parametrize("name", QUANTIZED)
def test_a_published_quantisation_is_understood(name):
    section, expected = QUANTIZED[name]
    found = checkpoint_format(quantized(section))
    assert {field: getattr(found, field) for field in expected} == expected


def test_bitsandbytes_is_known_by_its_older_settings():
    section = {"bnb_4bit_compute_dtype": "bfloat16", "load_in_4bit": True}
    with pytest.raises(UnsupportedModelError, match="'bitsandbytes', supported are"):
        checkpoint_format(quantized(section))
