"""Checkpoints in FP8: the codes are kept, or, in blocks that the engine does not have, dequantised
while they are read; and all can be quantised again.
"""

from __future__ import annotations

import numpy as np
import pytest
from allspark.model_loader import HuggingFaceModel
from support.checkpoints import llama_tensors, write_checkpoint
from support.model_file import dequantise, floats, parts_of, read_tensors
from support.quantized import GROUPED
from support.read_back import serialized, weights_of

Q = "model.layers.0.self_attn.q_proj."


def config_group(**weights):
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {"g": {"weights": {"type": "float", "num_bits": 8, **weights},
                                "input_activations": {"type": "float", "num_bits": 8}}},
    }  # fmt: skip


# Name -> (quantization_config, the scales' name, rows and columns per scale; 0: all).
ROWS = {
    "blocks": (
        {"quant_method": "fp8", "weight_block_size": [48, 40]}, "weight_scale_inv", (48, 40),
    ),
    "blocks-32": (
        {"quant_method": "fp8", "weight_block_size": [24, 32]}, "weight_scale_inv", (24, 32),
    ),
    "blocks-48": (
        {"quant_method": "fp8", "weight_block_size": [32, 48]}, "weight_scale_inv", (32, 48),
    ),
    "blocks-64": (
        {"quant_method": "fp8", "weight_block_size": [64, 64]}, "weight_scale_inv", (64, 64),
    ),
    "blocks-128": (
        {"quant_method": "fp8", "weight_block_size": [128, 128]}, "weight_scale_inv", (128, 128),
    ),
    "tensor": ({"quant_method": "fp8", "activation_scheme": "static"}, "weight_scale", (0, 0)),
    "tensor-inv": (
        {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None},
        "weight_scale_inv", (0, 0),
    ),
    "compressed-tensor": (config_group(strategy="tensor"), "weight_scale", (0, 0)),
    "compressed-channel": (config_group(strategy="channel"), "weight_scale", (1, 0)),
    "compressed-blocks": (
        config_group(strategy="block", block_structure=[32, 32]), "weight_scale", (32, 32),
    ),
    "compressed-groups": (config_group(strategy="group", group_size=16), "weight_scale", (1, 16)),
}  # fmt: skip
# The group sizes of those that are kept: of 64 input features, and of the 96 of "down". A block as
# wide as the weight is one group.
KEPT = {
    "blocks-32": (32, 32), "blocks-48": (16, 16), "blocks-64": (0, 32), "blocks-128": (0, 0),
    "tensor": (0, 0), "tensor-inv": (0, 0), "compressed-tensor": (0, 0),
    "compressed-channel": (0, 0),
    "compressed-blocks": (32, 32), "compressed-groups": (16, 16),
}  # fmt: skip
# The checkpoint's parts of a weight have other blocks than the weight, so their rows cross.
TARGETS = [f"layers.{i}.{name}" for i in range(2) for name in ("qkv", "o", "gate_up", "down")]


def write(directory, row, edit=None, **fields):
    """A checkpoint of the row; returns its weights in float32, decoded by torch."""
    torch = pytest.importorskip("torch")
    settings, scale_name, block = ROWS[row]
    rng = np.random.default_rng(5)
    tensors, weights = {}, {}
    for name, values in llama_tensors(GROUPED).items():
        if "_proj" not in name:
            tensors[name] = weights[name] = values
            continue
        # All codes but NaN.
        codes = rng.integers(0, 127, values.shape, np.uint8) | rng.choice([0, 128], values.shape)
        codes = codes.astype(np.uint8)
        height, width = (size or all_ for size, all_ in zip(block, values.shape, strict=True))
        shape = (-(-values.shape[0] // height), -(-values.shape[1] // width))
        scales = rng.uniform(1e-3, 2e-3, shape).astype(np.float32)
        tensors[name] = codes
        tensors[name.removesuffix("weight") + scale_name] = scales if block != (0, 0) else scales[0]
        if row == "tensor":
            tensors[name.removesuffix("weight") + "input_scale"] = np.ones(1, "<f4")
        if row == "tensor-inv":  # as transformers writes it: numbers without a dimension
            tensors[name.removesuffix("weight") + scale_name] = scales[0, 0]
            tensors[name.removesuffix("weight") + "activation_scale"] = np.float32(1)
        factor = np.repeat(np.repeat(scales, height, 0), width, 1)
        factor = factor[: values.shape[0], : values.shape[1]]
        floats = torch.from_numpy(codes).view(torch.float8_e4m3fn).float().numpy()
        weights[name] = floats * factor
    if edit is not None:
        edit(tensors)
    write_checkpoint(directory, tensors, {**GROUPED, "quantization_config": {**settings, **fields}})
    return weights


def convert(directory, out, **options):
    return read_tensors(serialized(directory, out, **options))


def concatenated(weights, target):
    return np.concatenate([weights[name] for name in parts_of(target)])


@pytest.mark.parametrize("row", ROWS)
def test_values_are_those_of_the_checkpoint(tmp_path, row):
    pytest.importorskip("allspark._allspark")
    weights = write(tmp_path, row)
    found = weights_of(tmp_path)
    assert found.keys() == weights.keys()
    for name, values in weights.items():
        np.testing.assert_array_equal(found[name], values, err_msg=name)


@pytest.mark.parametrize("row", KEPT)
@pytest.mark.filterwarnings("error")
def test_codes_are_kept(tmp_path, row):
    pytest.importorskip("allspark._allspark")
    codes = {}
    weights = write(tmp_path, row, codes.update)
    file, tensors = convert(tmp_path, tmp_path / "out")
    assert file.format_version == 6
    quants = {quant.tensor: quant for quant in file.spec.weight_quant}
    assert sorted(quants) == sorted(TARGETS)
    for target, quant in quants.items():
        assert (quant.bits, quant.group_size) == (8, KEPT[row][target.endswith("down")])
        assert quant.float8 and quant.half_scales and not quant.quantize_activations
        np.testing.assert_array_equal(tensors[target], concatenated(codes, target))
        restored, _ = dequantise(tensors, quant)
        expected = concatenated(weights, target)
        # Scales are rounded to float16.
        assert (np.abs(restored - expected) <= 2.0**-11 * 1.001 * np.abs(expected)).all()


def test_parity_with_the_dequantised_model(tmp_path):
    pytest.importorskip("allspark._allspark")
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from support.read_back import check_logits

    weights = write(tmp_path / "in", "blocks-32")
    convert(tmp_path / "in", tmp_path / "out")
    graph = tmp_path / "out" / "m.asgraph"
    check_logits(GROUPED, weights, graph)


def test_blocks_that_the_engine_does_not_have(tmp_path):
    pytest.importorskip("allspark._allspark")
    weights = write(tmp_path, "blocks")
    message = r"14 weights are float8.*become float32: (\d+) bytes instead of"
    with pytest.warns(UserWarning, match=message):
        file, tensors = convert(tmp_path, tmp_path / "out")
    assert not file.spec.weight_quant
    for target in TARGETS:
        np.testing.assert_array_equal(tensors[target], concatenated(weights, target))


def test_a_weight_that_is_float8_in_part(tmp_path):
    """Keys in floats: queries and values, which are one weight with them, become floats."""
    pytest.importorskip("allspark._allspark")
    name = "model.layers.1.self_attn.k_proj.weight"

    def in_floats(tensors):
        del tensors[f"{name}_scale"]
        tensors[name] = np.ones(tensors[name].shape, "<f4")

    weights = {**write(tmp_path, "compressed-channel", in_floats), name: np.ones((32, 64), "<f4")}
    with pytest.warns(UserWarning, match="2 weights are float8, and become float32"):
        file, tensors = convert(tmp_path, tmp_path / "out")
    assert {quant.tensor for quant in file.spec.weight_quant} == {*TARGETS} - {"layers.1.qkv"}
    np.testing.assert_array_equal(tensors["layers.1.qkv"], concatenated(weights, "layers.1.qkv"))


@pytest.mark.parametrize(
    ("factor", "dtype"), [(1, "<f2"), (2.0**-14, "<u2"), (2.0**28, "<u2"), (0, "<f2")]
)
def test_scales_have_the_type_that_is_closer(tmp_path, factor, dtype):
    pytest.importorskip("allspark._allspark")

    def scaled(tensors):
        for name in tensors:
            if name.endswith("weight_scale"):
                tensors[name] = tensors[name] * np.float32(factor)

    write(tmp_path, "compressed-channel", scaled)
    _, tensors = convert(tmp_path, tmp_path / "out")
    scales = tensors["layers.0.o_scale"]
    assert scales.dtype == dtype and (floats(scales) > 0).all() == (factor > 0)


@pytest.mark.parametrize("small", [1e-6, 2e-8])
def test_rows_of_small_weights_are_as_exact_as_bfloat16(tmp_path, small):
    pytest.importorskip("allspark._allspark")

    def shrunk(tensors):
        for name in tensors:
            if name.endswith("weight_scale"):
                tensors[name][5] = small

    write(tmp_path, "compressed-channel", shrunk)
    file, tensors = convert(tmp_path, tmp_path / "out")
    quant = next(quant for quant in file.spec.weight_quant if quant.tensor == "layers.0.o")
    found, _ = dequantise(tensors, quant)
    expected = concatenated(weights_of(tmp_path), quant.tensor)
    assert (np.abs(found - expected) <= 2.0**-8 * 1.001 * np.abs(expected)).all()


@pytest.mark.filterwarnings("error")
def test_they_can_be_quantised(tmp_path):
    pytest.importorskip("allspark._allspark")
    weights = write(tmp_path, "blocks-32")
    anew = {"quant_method": "instant_quant", "compute_method": "activate_quant"}
    file, tensors = convert(
        tmp_path, tmp_path / "out", enable_quant=True, customized_quant_config=anew
    )
    assert len(file.spec.weight_quant) == len(TARGETS)
    for quant in file.spec.weight_quant:
        assert quant.bits == 8 and quant.quantize_activations and not quant.float8
        restored, scale = dequantise(tensors, quant)
        expected = concatenated(weights, quant.tensor)
        assert (np.abs(restored - expected) <= 0.5 * scale).all()


@pytest.mark.parametrize("row", ["blocks-32", "compressed-channel"])
def test_arguments_of_the_caller(tmp_path, row):
    pytest.importorskip("allspark._allspark")
    write(tmp_path, row)

    def found(**options):
        file, _ = convert(tmp_path, tmp_path / "out", enable_quant=True, **options)
        return {(quant.float8, quant.quantize_activations) for quant in file.spec.weight_quant}

    method = {"quant_method": ROWS[row][0]["quant_method"]}
    assert found() == found(weight_only_quant=True) == {(True, False)}
    assert found(customized_quant_config=method) == {(True, False)}
    activated = {**method, "compute_method": "activate_quant"}
    message = "compute_method is 'activate_quant', but 'layers.0.qkv' is float8"
    with pytest.raises(NotImplementedError, match=message):
        found(customized_quant_config=activated)


def test_a_head_in_floats_can_be_quantised_beside(tmp_path):
    pytest.importorskip("allspark._allspark")
    weights = write(tmp_path, "blocks-32")
    method = {"quant_method": "fp8", "lm_head": "int8"}
    file, tensors = convert(
        tmp_path, tmp_path / "out", enable_quant=True, customized_quant_config=method
    )
    quants = {quant.tensor: quant for quant in file.spec.weight_quant}
    head = quants.pop("lm_head")
    assert sorted(quants) == sorted(TARGETS) and all(quant.float8 for quant in quants.values())
    assert (head.bits, head.float8, head.quantize_activations) == (8, False, False)
    restored, scale = dequantise(tensors, head)
    assert (np.abs(restored - weights["lm_head.weight"]) <= 0.5 * scale).all()


def put(part, change):
    def edit(tensors):
        tensors[Q + part] = change(tensors[Q + part])

    return edit


def not_a_number(codes):
    codes = codes.copy()
    codes[3, 5] = 0xFF
    return codes


@pytest.mark.parametrize(
    ("row", "edit", "message"),
    [
        ("blocks", put("weight", not_a_number), "q_proj.weight'.*row 3, column 5 is .*nan"),
        ("tensor", put("weight", not_a_number), "q_proj.weight'.*row 3, column 5 is .*nan"),
        ("tensor", put("weight_scale", lambda a: a * np.nan), "q_proj.weight_scale'.*finite"),
        ("blocks-32", put("weight_scale_inv", lambda a: a * np.inf), "weight_scale_inv'.*finite"),
        ("blocks", put("weight_scale_inv", lambda a: a[:1]), r"scale_inv' has shape \[1, 2\], exp"),
        ("blocks", put("weight", lambda a: a.astype("<f2")), "weight' has dtype float16, expected"),
        ("blocks", lambda t: t.pop(Q + "weight_scale_inv"), "weight' has dtype float8_e4m3, expe"),
        ("blocks", lambda t: t.pop(Q + "weight"), "q_proj.weight' is missing"),
        ("tensor", put("weight_scale", lambda a: np.ones(2, "<f4")), r"has shape \[2\], expected"),
        ("tensor", put("weight_scale", lambda a: a.astype("<i4")), "scale' has dtype int32"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*float8")
def test_damaged_checkpoints_are_refused_by_name(tmp_path, row, edit, message):
    pytest.importorskip("allspark._allspark")
    write(tmp_path, row, edit)
    with pytest.raises(ValueError, match=message):
        convert(tmp_path, tmp_path / "out")


BAD_BLOCKS = [128, [128], [0, 128], [True, 128], ["128", 128], [10**400, 16]]


@pytest.mark.parametrize("block", BAD_BLOCKS)
def test_bad_blocks_are_refused(tmp_path, block):
    write(tmp_path, "blocks", weight_block_size=block)
    with pytest.raises(ValueError, match="weight_block_size is .{,80}, expected"):
        HuggingFaceModel(str(tmp_path), "m").load_model()


@pytest.mark.parametrize("block", [None, *BAD_BLOCKS])
def test_bad_blocks_of_compressed_tensors_are_refused(tmp_path, block):
    write(tmp_path, "compressed-blocks", **config_group(strategy="block", block_structure=block))
    with pytest.raises(ValueError, match="block_structure is .{,80}, expected"):
        HuggingFaceModel(str(tmp_path), "m").load_model()
