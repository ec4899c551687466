"""Checkpoints whose modules are quantised in several ways: which settings each module has, and that
its numbers are read by them.
"""

from __future__ import annotations

import numpy as np
import pytest
import test_float4_checkpoints as float4
from allspark.model_loader import HuggingFaceModel
from allspark.model_loader.config import ModelConfig
from allspark.model_loader.quantized.targets import Targets
from support.checkpoints import llama_tensors, write_checkpoint
from support.model_file import dequantise, e4m3, parts_of, read_tensors
from support.quantized import GROUPED, awq, draw, gptq, packed, signed
from support.read_back import serialized, weights_of

pytest.importorskip("allspark._allspark")

ATTENTION, MLP = "self_attn", "mlp"
Q = "model.layers.0.self_attn.q_proj."


def write(directory, kinds, section, edit=None):
    """A checkpoint; ``kinds`` are (a part of a name, a function that makes a module's tensors and
    weight of its shape and a generator). The first that fits counts; None: floats. Returns all
    weights.
    """
    rng = np.random.default_rng(3)
    tensors, weights = {}, {}
    for name, values in llama_tensors(GROUPED).items():
        make = next((make for part, make in kinds if part in name), None)
        if make is None or "_proj" not in name:
            tensors[name] = weights[name] = values * np.float32(1 if "norm" in name else 0.125)
            continue
        parts, weight = make(values.shape, rng)
        weights[name] = weight.astype(np.float32)
        tensors.update({name.removesuffix("weight") + part: v for part, v in parts.items()})
    if edit is not None:
        edit(tensors)
    write_checkpoint(directory, tensors, {**GROUPED, "quantization_config": section})
    return weights


def integers(pack, bits, size, symmetric=False, **options):
    def make(shape, rng):
        q = draw(rng, shape, bits, size, symmetric)
        return pack(q, **options), q.weight()

    return make


def nvfp4(shape, rng):
    parts, _, weight = float4.quantized("nvfp4", shape, rng)
    return parts, weight


def float8(shape, rng):
    codes = rng.integers(0, 120, shape, np.uint8)
    scales = rng.uniform(1e-3, 2e-3, (shape[0], 1)).astype(np.float32)
    numbers = e4m3(codes.astype(np.int64)).astype(np.float32)
    return {"weight": codes, "weight_scale": scales}, numbers * scales


def check_read(directory, weights):
    found = weights_of(directory)
    assert found.keys() == weights.keys()
    for name, values in weights.items():
        np.testing.assert_array_equal(found[name], values, err_msg=name)


def formats(graph):
    return {
        q.tensor: (q.bits, q.group_size, q.asymmetric, q.quantize_activations)
        for q in read_tensors(graph)[0].spec.weight_quant
    }


# compressed-tensors.


def group(targets, layout=None, activations=None, **weights):
    return {
        "targets": targets, "format": layout, "input_activations": activations,
        "output_activations": None, "weights": weights,
    }  # fmt: skip


def mixed(*groups, ignore=("lm_head",)):
    return {
        "quant_method": "compressed-tensors", "format": "mixed-precision", "ignore": ignore,
        "config_groups": {f"group_{i}": own for i, own in enumerate(groups)},
    }  # fmt: skip


INT8 = {"num_bits": 8, "type": "int", "strategy": "channel"}
INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": False}
FLOAT8 = {"num_bits": 8, "type": "float", "strategy": "channel"}
NVFP4 = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
PER_TOKEN = {"num_bits": 8, "type": "int", "dynamic": True, "strategy": "token"}
W8A8 = group(["re:.*self_attn.*"], "int-quantized", PER_TOKEN, **INT8)
W4A16 = group(["Linear"], "pack-quantized", **INT4)
SIGNED8, PACKED4 = integers(signed, 8, -1, True), integers(packed, 4, 32)


def test_each_module_has_the_scheme_of_its_group(tmp_path):
    weights = write(tmp_path, [(ATTENTION, SIGNED8), (MLP, PACKED4)], mixed(W4A16, W8A8))
    check_read(tmp_path, weights)
    found = formats(serialized(tmp_path, tmp_path / "out"))
    for layer in ("layers.0.", "layers.1."):
        assert found[layer + "qkv"] == found[layer + "o"] == (8, 0, False, True)
        assert found[layer + "gate_up"] == found[layer + "down"] == (4, 32, True, False)


def test_parity_with_the_dequantised_model(tmp_path):
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from support.read_back import check_logits

    kinds = [("down_proj", float8), (MLP, nvfp4), ("o_proj", SIGNED8), (ATTENTION, PACKED4)]
    weights = write(
        tmp_path, kinds,
        mixed(
            group(["re:.*down_proj"], "float-quantized", **FLOAT8),
            group([r"re:.*mlp\.(gate|up)_proj$"], "nvfp4-pack-quantized", **NVFP4),
            group([f"model.layers.{i}.self_attn.o_proj" for i in (0, 1)], "int-quantized", **INT8),
            group(["Linear"], "pack-quantized", **INT4),
        ),
    )  # fmt: skip
    check_read(tmp_path, weights)
    graph = serialized(tmp_path, tmp_path / "out")
    file, stored = read_tensors(graph)
    assert len(file.spec.weight_quant) == 8
    for quant in file.spec.weight_quant:
        exact = np.concatenate([weights[name] for name in parts_of(quant.tensor)])
        error = np.abs(dequantise(stored, quant)[0] - exact)
        # Scales of float8 and NVFP4 are rounded to float16.
        is_rounded = bool(quant.float8 or quant.table)
        assert (error <= is_rounded * float4.rounding(exact)).all()
    check_logits(GROUPED, weights, graph)


def test_parts_of_a_weight_in_two_formats(tmp_path):
    """Keys in 8 bits, queries and values in 4: one weight, in 8 bits, of the same numbers."""
    keys = group(["re:.*k_proj"], "pack-quantized", **{**INT8, "strategy": "group"}, group_size=32)
    others = group(["Linear"], "pack-quantized", **{**INT4, "symmetric": True})
    kinds = [("k_proj", integers(packed, 8, 32, True)), ("", integers(packed, 4, 32, True))]
    weights = write(tmp_path, kinds, mixed(keys, others))
    check_read(tmp_path, weights)
    graph = serialized(tmp_path, tmp_path / "out")
    file, tensors = read_tensors(graph)
    quant = next(quant for quant in file.spec.weight_quant if quant.tensor == "layers.0.qkv")
    assert (quant.bits, quant.group_size) == (8, 32)
    exact = np.concatenate([weights[name] for name in parts_of("layers.0.qkv")])
    np.testing.assert_array_equal(dequantise(tensors, quant)[0], exact)


def test_a_group_s_own_format(tmp_path):
    """One group alone, whose format is not that of the checkpoint."""
    section = mixed(group(["Linear"], "pack-quantized", **INT4))
    check_read(tmp_path, write(tmp_path, [("", PACKED4)], section))
    section["format"] = "int-quantized"
    check_read(tmp_path, write(tmp_path, [("", PACKED4)], section))


def test_a_group_without_a_format_has_the_checkpoint_s(tmp_path):
    section = {**mixed(W4A16, {**W8A8, "format": None}), "format": "int-quantized"}
    check_read(tmp_path, write(tmp_path, [(ATTENTION, SIGNED8), (MLP, PACKED4)], section))


TARGETS = {
    "Linear": 1, "Embedding": 2, "re:.*up_proj": 3, "re:.*mlp": 4, "model.layers.0.mlp.up_proj": 5,
    r"re:model\.layers\.1\.mlp\.gate": 6, "re:z": 7,
}  # fmt: skip


@pytest.mark.parametrize(
    ("module", "found"),
    [
        ("model.layers.0.mlp.up_proj", 5),  # a name before expressions
        ("model.layers.1.mlp.up_proj", 4),  # of expressions the first in the alphabet
        ("model.layers.1.mlp.gate_proj", 4),
        ("model.layers.1.mlp.gate", 4),
        ("model.layers.0.self_attn.q_proj", 1),
        ("lm_head", 1),
        ("model.embed_tokens", 2),
        ("transformer.wte", 2),
        ("xz", 1),  # an expression matches the beginning
        ("zx", 7),  # and needs not match the end
    ],
)
def test_targets(module, found):
    assert Targets(ModelConfig({}), "config_groups", TARGETS).find(module) == found


@pytest.mark.parametrize(
    ("section", "message"),
    [
        (mixed(W8A8, group(["re:.*gate_proj"], "pack-quantized", **INT4)),
         "up_proj.weight_scale': no target in config_groups is 'model.layers.0.mlp.up_proj'"),
        (mixed(W8A8, W4A16, ignore=["re:.*layers.1.*q_proj"]),
         "'model.layers.1.self_attn.q_proj.weight' has dtype int8, expected float32"),
        (mixed(W8A8, W4A16, ignore=["re:.*(?!gate)"]), r"ignore has '.*', no regular expression"),
        (mixed(W8A8, W4A16, ignore="lm_head"), "ignore is 'lm_head', expected a list of names"),
        (mixed(W8A8, group(["re:("], "pack-quantized", **INT4)), r"config_groups has '\(', no reg"),
        (mixed(W8A8, group([1], "pack-quantized", **INT4)), r"group_1: targets is \[1\], expected"),
        (mixed(W8A8, group(["Linear"], None, **INT4)), "group_1: format is 'mixed-precision', sup"),
        (mixed(W8A8, group(["Linear"], "pack-quantized", **FLOAT8)), "group_1: weights: type is"),
        (mixed(W8A8, {"targets": ["Linear"], "format": "pack-quantized"}), "'weights' is missing"),
        (mixed(group([f"re:{i}" for i in range(10001)], "pack-quantized", **INT4), W8A8),
         "config_groups has 10002 patterns, expected at most 10000"),
    ],
)  # fmt: skip
def test_groups_that_are_refused_by_name(tmp_path, section, message):
    write(tmp_path, [(ATTENTION, SIGNED8), (MLP, PACKED4)], section)
    with pytest.raises((ValueError, NotImplementedError), match=message):
        serialized(tmp_path, tmp_path / "out")


# GPTQ: "dynamic".

GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True}
EIGHT = {"bits": 8, "group_size": -1, "sym": False}


@pytest.mark.parametrize(
    "dynamic",
    [
        {r"+:model\.layers\.1\.mlp\.down": EIGHT, "-:.*o_proj": {}},
        {r"model\.layers\.1\.mlp\.down": EIGHT, "-:.*o_proj": {}, "+:.*down_proj": {}},
        {r"-:.*self_attn\.o_proj$": {}, r"+:.*\.1\..*down_proj": {**EIGHT, "bits": 8}},
    ],
)
def test_dynamic_settings_of_gptq(tmp_path, dynamic):
    four, eight = integers(gptq, 4, 32, True), integers(gptq, 8, -1)
    kinds = [("o_proj", None), ("1.mlp.down", eight), ("", four)]
    weights = write(tmp_path, kinds, {**GPTQ, "dynamic": dynamic})
    check_read(tmp_path, weights)
    found = formats(serialized(tmp_path, tmp_path / "out"))
    assert found["layers.1.down"] == (8, 0, True, False) and "layers.0.o" not in found
    assert found["layers.0.down"] == found["layers.1.qkv"] == (4, 32, False, False)


def test_names_and_expressions_with_half_a_character(tmp_path):
    section = {**GPTQ, "dynamic": {"-:.*down_proj": {}, "+:.*up_proj": {"bits": 4}}}
    odd = "model.layers.0.\ud800.up_proj"

    def renamed(tensors):
        for name in [name for name in tensors if name.startswith(Q)]:
            tensors[name.replace(Q[:-1], odd)] = tensors.pop(name)

    write(tmp_path, [("down_proj", None), ("", integers(gptq, 4, 32, True))], section, renamed)
    with pytest.raises(ValueError, match=r"no rule explains 'model.layers.0.\\ud800.up_proj"):
        serialized(tmp_path, tmp_path / "out")
    section["dynamic"]["+:\ud800"] = {}
    write(tmp_path, [("down_proj", None), ("", integers(gptq, 4, 32, True))], section)
    with pytest.raises(ValueError, match=r"dynamic has '\\ud800', no regular expression: half"):
        serialized(tmp_path, tmp_path / "out")


def test_a_module_that_dynamic_excludes(tmp_path):
    """The first pattern that matches counts."""
    dynamic = {"-:.*down_proj": {}, "+:.*down_proj": {"bits": 4}}
    write(tmp_path, [("", integers(gptq, 4, 32, True))], {**GPTQ, "dynamic": dynamic})
    with pytest.raises(ValueError, match=r"no rule explains 'model.layers.0.mlp.down_proj.g_idx'"):
        serialized(tmp_path, tmp_path / "out")


# AutoRound.

ROUND = {
    "quant_method": "auto-round", "bits": 4, "group_size": 32, "sym": True, "data_type": "int",
    "autoround_version": "0.15.1", "block_name_to_quantize": "model.layers", "iters": 2,
    "packing_format": "auto_round:auto_gptq",
}  # fmt: skip


def without_g_idx(q, **options):
    return {name: part for name, part in gptq(q, **options).items() if name != "g_idx"}


@pytest.mark.parametrize(
    ("packing", "sym", "make"),
    [
        ("auto_round:auto_gptq", True, integers(without_g_idx, 4, 32, True)),
        ("auto_round:gptq", False, integers(without_g_idx, 4, 32)),
        ("auto_round", False, integers(without_g_idx, 4, 32, offset=0)),
        ("auto_round:gptqmodel", True, integers(gptq, 4, 32, True, offset=0)),
        ("auto_round:auto_awq", False, integers(awq, 4, 32)),
        ("auto_round:awq", True, integers(awq, 4, 32, True)),
    ],
)
def test_layouts_of_auto_round(tmp_path, packing, sym, make):
    weights = write(tmp_path, [("", make)], {**ROUND, "packing_format": packing, "sym": sym})
    check_read(tmp_path, weights)
    asymmetric = not sym or packing.endswith("awq")
    found = formats(serialized(tmp_path, tmp_path / "out"))
    assert set(found.values()) == {(4, 32, asymmetric, False)} and len(found) == 8


def test_extra_settings_of_auto_round(tmp_path):
    four, eight = integers(without_g_idx, 4, 32, True), integers(without_g_idx, 8, 16)
    kinds = [("0.self_attn.o_proj", None), ("down_proj", eight), ("", four)]
    extra = {
        "model.layers.0.self_attn.o_proj": {"bits": 16, "data_type": "float"},
        r".*mlp\.down_proj": {"bits": 8, "group_size": 16, "sym": False, "act_bits": None},
        "model.layers.1.mlp.up_proj": {"group_size": 32},
        "mlp": {},
        ".*down.*": {"bits": 4},  # The one before counts.
    }
    weights = write(tmp_path, kinds, {**ROUND, "extra_config": extra})
    check_read(tmp_path, weights)
    found = formats(serialized(tmp_path, tmp_path / "out"))
    assert "layers.0.o" not in found
    assert found["layers.0.down"] == found["layers.1.down"] == (8, 16, True, False)
    assert found["layers.1.o"] == found["layers.1.gate_up"] == (4, 32, False, False)


def test_names_are_no_expressions(tmp_path):
    """The name of a module of layer 1 stands for no module of layers 10 to 19."""
    extra = {"model.layers.0.mlp.down_proj": {"bits": 8, "group_size": -1}}
    kinds = [("0.mlp.down", integers(without_g_idx, 8, -1, True)),
             ("", integers(without_g_idx, 4, 32, True))]  # fmt: skip
    section = {**ROUND, "extra_config": extra}

    def renamed(tensors):
        for name in [name for name in tensors if "layers.1.mlp.down_proj" in name]:
            tensors["x." + name.replace("layers.1", "layers.0")] = tensors[name]

    weights = write(tmp_path, kinds, section, renamed)
    found = weights_of(tmp_path)
    other = "model.layers.1.mlp.down_proj.weight"
    copied = found["x.model.layers.0.mlp.down_proj.weight"]
    np.testing.assert_array_equal(copied, weights[other])


def test_a_head_of_auto_round(tmp_path):
    """The head is outside of the blocks, so it has all settings of its own."""
    settings = dict.fromkeys(("act_bits", "act_data_type", "super_bits", "rotation_config"))
    extra = {"lm_head": {**settings, "bits": 8, "group_size": 32, "sym": True, "data_type": "int"}}
    q = draw(np.random.default_rng(0), (101, 64), 8, 32, True)
    q.values, q.scales, q.zeros = q.values[:100], q.scales[:100], q.zeros[:100]
    config = {**GROUPED, "vocab_size": 100}
    tensors = llama_tensors(config)
    del tensors["lm_head.weight"]
    tensors.update({f"lm_head.{part}": array for part, array in without_g_idx(q).items()})
    section = {**ROUND, "extra_config": extra}
    write_checkpoint(tmp_path, tensors, {**config, "quantization_config": section})
    np.testing.assert_array_equal(weights_of(tmp_path)["lm_head.weight"], q.weight())
    assert formats(serialized(tmp_path, tmp_path / "out")) == {"lm_head": (8, 32, False, False)}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"bits": 2}, "quantization_config: bits is 2, supported are 4 and 8"),
        ({"bits": 16}, "quantization_config: bits is 16, supported are 4 and 8"),
        ({"packing_format": "auto_round:llm_compressor"}, "packing_format is 'auto_round:llm_comp"),
        ({"packing_format": "auto_round:awq", "bits": 8}, "bits is 8, supported is 4"),
        ({"data_type": "mx_fp"}, "data_type is 'mx_fp', supported: 'int'"),
        ({"act_bits": 8}, "act_bits is 8, supported: 16"),
        ({"rotation_config": {"a": 1}}, "rotation_config is {'a': 1}, supported: null"),
        ({"extra_config": {"lm_head": {"bits": 3}}}, "extra_config: lm_head: bits is 3, supported"),
        ({"extra_config": {"lm_head": 3}}, "extra_config: lm_head is 3, expected an object"),
        ({"extra_config": {"a(?=b)": {"bits": 4}}}, "extra_config has 'a..=b.', no regular expr"),
        ({"group_size": 0}, "group_size is 0, expected -1 or a size"),
    ],
)
def test_bad_settings_of_auto_round_are_refused_by_name(tmp_path, fields, message):
    write(tmp_path, [("", integers(without_g_idx, 4, 32, True))], {**ROUND, **fields})
    with pytest.raises((ValueError, NotImplementedError), match=message):
        HuggingFaceModel(str(tmp_path), "m").load_model()


def test_the_method_can_be_named(tmp_path):
    write(tmp_path, [("", integers(without_g_idx, 4, 32, True))], ROUND)
    config = {"quant_method": "auto-round", "compute_method": "activate_quant"}
    graph = serialized(
        tmp_path, tmp_path / "out", enable_quant=True, customized_quant_config=config
    )
    assert set(formats(graph).values()) == {(4, 32, False, True)}
