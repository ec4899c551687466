"""Checkpoints in FP8: dequantised while they are read, and quantised again if requested."""

from __future__ import annotations

import numpy as np
import pytest
from allspark.model_loader import HuggingFaceModel
from support.checkpoints import llama_tensors, write_checkpoint
from support.model_file import dequantise, parts_of, read_tensors
from support.quantized import CONFIG

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
    "tensor": ({"quant_method": "fp8", "activation_scheme": "static"}, "weight_scale", (0, 0)),
    "compressed-tensor": (config_group(strategy="tensor"), "weight_scale", (0, 0)),
    "compressed-channel": (config_group(strategy="channel"), "weight_scale", (1, 0)),
    "compressed-blocks": (
        config_group(strategy="block", block_structure=[32, 32]), "weight_scale", (32, 32),
    ),
}  # fmt: skip


def write(directory, row, edit=None, **fields):
    """A checkpoint of the row; returns its weights in float32, decoded by torch."""
    torch = pytest.importorskip("torch")
    settings, scale_name, block = ROWS[row]
    rng = np.random.default_rng(5)
    tensors, weights = {}, {}
    for name, values in llama_tensors(CONFIG).items():
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
        factor = np.repeat(np.repeat(scales, height, 0), width, 1)
        factor = factor[: values.shape[0], : values.shape[1]]
        floats = torch.from_numpy(codes).view(torch.float8_e4m3fn).float().numpy()
        weights[name] = floats * factor
    if edit is not None:
        edit(tensors)
    write_checkpoint(directory, tensors, {**CONFIG, "quantization_config": {**settings, **fields}})
    return weights


def convert(directory, out, **options):
    loader = HuggingFaceModel(str(directory), "m", user_set_data_type="float32").load_model()
    loader.serialize_to_path(None, str(out), **options)
    return read_tensors(out / "m.asgraph")


@pytest.mark.parametrize("row", ROWS)
def test_values_are_those_of_the_checkpoint(tmp_path, row):
    pytest.importorskip("allspark._allspark")
    weights = write(tmp_path, row)
    message = r"14 weights are float8.*become float32: (\d+) bytes instead of"
    with pytest.warns(UserWarning, match=message):
        file, tensors = convert(tmp_path, tmp_path / "out")
    assert not file.spec.weight_quant
    for target in ("layers.0.qkv", "layers.1.gate_up", "layers.1.down"):
        expected = np.concatenate([weights[name] for name in parts_of(target)])
        np.testing.assert_array_equal(tensors[target], expected)


@pytest.mark.filterwarnings("error")
def test_they_can_be_quantised(tmp_path):
    pytest.importorskip("allspark._allspark")
    weights = write(tmp_path, "blocks")
    file, tensors = convert(tmp_path, tmp_path / "out", enable_quant=True)
    for quant in file.spec.weight_quant:
        assert quant.bits == 8 and quant.quantize_activations
        restored, scale = dequantise(tensors, quant)
        expected = np.concatenate([weights[name] for name in parts_of(quant.tensor)])
        assert (np.abs(restored - expected) <= 0.5 * scale).all()


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


def test_there_are_no_integers_to_keep(tmp_path):
    pytest.importorskip("allspark._allspark")
    write(tmp_path, "compressed-channel")
    config = {"quant_method": "compressed-tensors"}
    with pytest.raises(ValueError, match="without integers to keep"):
        convert(tmp_path, tmp_path / "out", enable_quant=True, customized_quant_config=config)
