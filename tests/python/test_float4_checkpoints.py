"""Checkpoints in MXFP4 and NVFP4 of compressed-tensors: codes and scales are kept."""

from __future__ import annotations

import numpy as np
import pytest
from allspark.model_loader import HuggingFaceModel
from support.checkpoints import Octets, llama_tensors, write_checkpoint
from support.model_file import dequantise, e4m3, floats, parts_of, read_tensors
from support.quantized import GROUPED
from support.read_back import serialized, weights_of

Q = "model.layers.0.self_attn.q_proj."
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
TARGETS = [f"layers.{i}.{name}" for i in range(2) for name in ("qkv", "o", "gate_up", "down")]


def settings(kind, **weights):
    """quantization_config, with the activations that quantisers write."""
    size = {"mxfp4": 32, "nvfp4": 16}[kind]
    strategy = "group" if kind == "mxfp4" else "tensor_group"
    numbers = {"num_bits": 4, "type": "float", "strategy": strategy, "group_size": size}
    group = {
        "targets": ["Linear"],
        "weights": {**numbers, **weights},
        "input_activations": {**numbers, "dynamic": "local" if kind == "nvfp4" else True},
    }
    return {
        "quant_method": "compressed-tensors", "format": f"{kind}-pack-quantized",
        "ignore": ["lm_head"], "config_groups": {"group_0": group},
    }  # fmt: skip


def quantized(kind, shape, rng):
    """(the tensors of a random module, its codes, its weight in float64)."""
    rows, cols = shape
    codes = rng.integers(0, 16, shape, np.uint8)
    parts = {"weight_packed": (codes[:, ::2] | codes[:, 1::2] << 4).view(Octets)}
    if kind == "mxfp4":
        exponents = rng.integers(120, 126, (rows, cols // 32), np.uint8)
        parts["weight_scale"] = exponents.view(Octets)
        scales = 2.0 ** (exponents.astype(np.float64) - 127)
    else:
        stored = rng.integers(1, 127, (rows, cols // 16), np.uint8)
        divisor = rng.uniform(3000, 6000, 1).astype(np.float32)
        parts |= {"weight_scale": stored, "weight_global_scale": divisor}
        parts["input_global_scale"] = np.ones(1, np.float32)
        scales = (e4m3(stored.astype(np.int64)).astype(np.float32) / divisor).astype(np.float64)
    return parts, codes, E2M1[codes] * np.repeat(scales, cols // scales.shape[1], axis=1)


def write(directory, kind, edit=None, config=None):
    """A checkpoint; returns its codes by the weights' names, and all weights."""
    rng = np.random.default_rng(9)
    tensors, codes, weights = {}, {}, {}
    for name, values in llama_tensors(GROUPED).items():
        if "_proj" not in name:
            tensors[name] = weights[name] = values
            continue
        parts, codes[name], weight = quantized(kind, values.shape, rng)
        weights[name] = weight.astype(np.float32)
        tensors.update({name.removesuffix("weight") + part: v for part, v in parts.items()})
    if edit is not None:
        edit(tensors)
    section = settings(kind) if config is None else config
    write_checkpoint(directory, tensors, {**GROUPED, "quantization_config": section})
    return codes, weights


def rounding(weights):
    """By how much scales in float16 change ``weights``: the smallest are multiples of 2^-24."""
    return np.abs(weights) * 2.0**-11 * 1.001 + 12 * 2.0**-25


@pytest.mark.parametrize("kind", ["mxfp4", "nvfp4"])
def test_values_are_those_of_the_checkpoint(tmp_path, kind):
    pytest.importorskip("allspark._allspark")
    _, weights = write(tmp_path, kind)
    found = weights_of(tmp_path)
    assert found.keys() == weights.keys()
    for name, values in weights.items():
        np.testing.assert_array_equal(found[name], values, err_msg=name)


@pytest.mark.parametrize("kind", ["mxfp4", "nvfp4"])
@pytest.mark.filterwarnings("error")
def test_codes_are_kept(tmp_path, kind):
    pytest.importorskip("allspark._allspark")
    codes, weights = write(tmp_path, kind)
    file, tensors = read_tensors(serialized(tmp_path, tmp_path / "out"))
    assert file.format_version == (7 if kind == "mxfp4" else 6)
    quants = {quant.tensor: quant for quant in file.spec.weight_quant}
    assert sorted(quants) == sorted(TARGETS)
    for target, quant in quants.items():
        assert (quant.bits, quant.group_size) == (4, 32 if kind == "mxfp4" else 16)
        np.testing.assert_array_equal(np.frombuffer(quant.table, np.int8), 2 * E2M1)
        assert (quant.half_scales, quant.power_scales) == (kind == "nvfp4", kind == "mxfp4")
        assert not quant.quantize_activations
        stored = np.concatenate([codes[name] for name in parts_of(target)])
        np.testing.assert_array_equal(tensors[target], stored)
        expected = np.concatenate([weights[name] for name in parts_of(target)])
        error = np.abs(dequantise(tensors, quant)[0] - expected)
        assert (error <= (0 if kind == "mxfp4" else rounding(expected))).all()


@pytest.mark.parametrize("kind", ["mxfp4", "nvfp4"])
def test_parity_with_the_dequantised_model(tmp_path, kind):
    pytest.importorskip("allspark._allspark")
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from support.read_back import check_logits

    _, weights = write(tmp_path / "in", kind)
    graph = serialized(tmp_path / "in", tmp_path / "out")
    check_logits(GROUPED, weights, graph)


def test_activations_in_int8(tmp_path):
    pytest.importorskip("allspark._allspark")
    write(tmp_path, "nvfp4")
    file, _ = read_tensors(serialized(tmp_path, tmp_path / "out", enable_quant=True))
    assert {quant.quantize_activations for quant in file.spec.weight_quant} == {True}
    assert {bool(quant.table) for quant in file.spec.weight_quant} == {True}


@pytest.mark.parametrize(("divisor", "dtype"), [(2.0**-20, "<u2"), (4000, "<f2"), (2**24, "<u2")])
def test_scales_have_the_type_that_holds_them(tmp_path, divisor, dtype):
    pytest.importorskip("allspark._allspark")

    def divided(tensors):
        for name in tensors:
            if name.endswith("weight_global_scale"):
                tensors[name] = np.full(1, divisor, np.float32)

    _, weights = write(tmp_path, "nvfp4", divided)
    _, tensors = read_tensors(serialized(tmp_path, tmp_path / "out"))
    scales = tensors["layers.0.o_scale"]
    assert scales.dtype == dtype and (floats(scales) > 0).all()


# Damaged checkpoints.


def put(part, change):
    def edit(tensors):
        tensors[Q + part] = change(tensors[Q + part])

    return edit


def with_one(value):
    def change(octets):
        octets = octets.copy()
        octets[3, 1] = value
        return octets

    return change


DAMAGED = {
    "no scales": ("nvfp4", lambda t: t.pop(Q + "weight_scale"), "no rule explains .*q_proj"),
    "no codes": ("mxfp4", lambda t: t.pop(Q + "weight_packed"), "'.*weight_packed' is missing"),
    "no divisor": (
        "nvfp4", lambda t: t.pop(Q + "weight_global_scale"), "'.*weight_global_scale' is missing",
    ),
    "codes of words": (
        "mxfp4", put("weight_packed", lambda a: np.zeros((64, 32), "<i4")), "packed' has dtype in",
    ),
    "scales of words": (
        "mxfp4", put("weight_scale", lambda a: np.zeros((64, 2), "<f4")), "has dtype float32, exp",
    ),
    "scales of nvfp4": (
        "mxfp4", put("weight_scale", lambda a: np.asarray(a)), "dtype float8_e4m3, expected uint8",
    ),
    "scales of mxfp4": (
        "nvfp4", put("weight_scale", lambda a: a.view(Octets)), "dtype uint8, expected float8",
    ),
    "fewer scales": ("mxfp4", put("weight_scale", lambda a: a[:, 1:]), r"\[64, 1\], expected \[6"),
    "a scale that is no number": (
        "nvfp4", put("weight_scale", with_one(0x7F)), r"q_proj.weight_scale'.*finite",
    ),
    "an exponent that is no number": (
        "mxfp4", put("weight_scale", with_one(255)), r"q_proj.weight_scale' holds 255, nan; expec",
    ),
    "a divisor of 0": (
        "nvfp4", put("weight_global_scale", np.zeros_like), "global_scale' is 0.0, expected a fin",
    ),
    "a divisor that is no number": (
        "nvfp4", put("weight_global_scale", lambda a: a * np.nan), "global_scale' is nan, expecte",
    ),
    "two divisors": (
        "nvfp4", put("weight_global_scale", lambda a: np.ones(2, "<f4")), r"has shape \[2\], expec",
    ),
    "a divisor in float16": (
        "nvfp4", put("weight_global_scale", lambda a: a.astype("<f2")), "has dtype float16, expec",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", DAMAGED)
def test_damaged_checkpoints_are_refused_by_name(tmp_path, case):
    pytest.importorskip("allspark._allspark")
    kind, edit, message = DAMAGED[case]
    write(tmp_path, kind, edit)
    with pytest.raises(ValueError, match=message):
        serialized(tmp_path, tmp_path / "out")


@pytest.mark.parametrize(
    ("kind", "weights", "message"),
    [
        ("mxfp4", {"num_bits": 8}, "num_bits is 8, supported in format 'mxfp4-pack-quantized' are"),
        ("mxfp4", {"group_size": 16}, "group_size is 16, supported in format 'mxfp4.* is 32"),
        ("nvfp4", {"group_size": 32}, "group_size is 32, supported in format 'nvfp4.* is 16"),
        ("nvfp4", {"symmetric": False}, "symmetric is False, supported is True"),
        ("nvfp4", {"type": "int"}, "type is 'int' and num_bits is 4, supported in format 'nvfp4"),
    ],
)
def test_bad_settings_are_refused_by_name(tmp_path, kind, weights, message):
    write(tmp_path, kind, config=settings(kind, **weights))
    with pytest.raises(NotImplementedError, match=message):
        HuggingFaceModel(str(tmp_path), "m").load_model()
