"""Every family in every form of weights and cache that it can have: one row of ROWS
(test_architectures.py) for each declaration, whatever its names, orders and fused matrices.

Weights are first rounded to the grid of a format, so that quantising does not change them: logits
must then be those of the same checkpoint in floats, within rounding. docs/models.md has a table of
what is tested here (scripts/model_table.py).
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support.checkpoints import safetensors_bytes
from support.parity import FLOAT32_FACTOR, reference_for
from support.quantized import Quantized, awq, gptq

torch = pytest.importorskip("torch")
native = pytest.importorskip("allspark._allspark")
pytestmark = pytest.mark.torch

import test_architectures as parity  # noqa: E402
from allspark import AsCacheMode  # noqa: E402
from allspark.engine import Engine  # noqa: E402
from allspark.model_loader import HuggingFaceModel  # noqa: E402
from safetensors.numpy import load  # noqa: E402
from test_architectures import ROWS, forward, prompt_ids  # noqa: E402


def representatives():
    """The first row of each declaration: of each class, or of each way to save a class."""
    first = {}
    for row, (prefix, _, *family) in ROWS.items():
        first.setdefault((prefix, *family), row)
    return list(first.values())


FAMILIES = representatives()
GROUP = 32
# Name -> (bits, input features per scale, settings of a checkpoint that has the integers).
GPTQ = {"quant_method": "gptq", "sym": True, "desc_act": False}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True}
FORMS = {
    "int8": (8, None, None),
    "int4": (4, GROUP, None),
    "gptq": (4, GROUP, {**GPTQ, "bits": 4, "group_size": GROUP}),
    "gptq-int8": (8, None, {**GPTQ, "bits": 8, "group_size": -1}),
    "gptq-act-order": (4, GROUP, {**GPTQ, "bits": 4, "group_size": GROUP, "desc_act": True}),
    "awq": (4, GROUP, AWQ),
}
PACKED = {"gptq": gptq, "gptq-int8": gptq, "gptq-act-order": gptq, "awq": awq}


# Quantisers leave routers in floats.
ROUTERS = ("gate", "router", "shared_expert_gate", "layer")


def on_grid(weight, bits, group, symmetric):
    """``weight`` rounded to integers times powers of two. In a symmetric format the largest integer
    of each scale is the format's maximum, so that a quantiser chooses that power of two as scale.
    Zero points differ from row to row.
    """
    rows, cols = weight.shape
    middle = 1 << (bits - 1)
    most = middle - 1 if symmetric else middle - 3
    groups = weight.reshape(rows, -1, group or cols)
    largest = np.abs(groups).max(-1, keepdims=True)
    scale = 2.0 ** np.round(np.log2(np.maximum(largest, 1e-6) / most))
    integers = np.clip(np.round(groups / scale), -most, most)
    np.put_along_axis(integers, np.abs(groups).argmax(-1)[..., None], most, -1)
    zeros = np.full(scale.shape, middle)
    if not symmetric:
        zeros += np.arange(rows)[:, None, None] % 5 - 2
    return Quantized(
        (integers + zeros).reshape(rows, cols).astype(np.uint8),
        zeros[..., 0].astype(np.uint8),
        scale[..., 0].astype(np.float16),
        bits,
        group or cols,
    )


def matrices(tensors):
    """The layers' weights that take part in matrix products."""
    return [
        name
        for name, values in tensors.items()
        if values.ndim >= 2
        and any(part.isdigit() for part in name.split("."))
        and name.split(".")[-2] not in ROUTERS
    ]


# The families' names of the inner size. It must be a multiple of the group size and of a word's
# fields.
INNER = ("ffn_hidden_size", "n_inner")


@pytest.fixture
def model(request, monkeypatch):
    monkeypatch.setitem(parity.BASE, "intermediate_size", 192)
    prefix, fields, *family = ROWS[request.param]
    sizes = {name: 192 for name in INNER if name in fields}
    monkeypatch.setitem(ROWS, request.param, (prefix, {**fields, **sizes}, *family))
    return parity.build(request.param)


def by_outputs(values, name, config):
    """A matrix as stored in the checkpoint, or several of them, transposed if it stores them so."""
    if config.get("model_type") == "gpt2":
        return values.T
    if name.endswith(".w2"):  # In DBRX each expert has its own rows.
        experts = config["ffn_config"]["moe_num_experts"]
        return values.reshape(experts, -1, values.shape[-1]).swapaxes(1, 2)
    return values


def in_act_order(weight, bits, group):
    """on_grid, with groups of input features that are not contiguous. Modules with the same number
    of inputs share the groups, so those with the same input do.
    """
    cols = weight.shape[1]
    order = np.random.default_rng(cols).permutation(cols)
    grouped = on_grid(weight[:, order], bits, group, True)
    place = np.argsort(order)
    return replace(grouped, values=grouped.values[:, place], groups=place // group)


def moved_onto_grid(values, name, config, form):
    """The matrix ``name`` of a checkpoint, or several of them stacked, and its integers."""
    bits, group, _ = FORMS[form]
    turned = by_outputs(values, name, config)
    rows = turned.reshape(-1, turned.shape[-1])
    if form == "gptq-act-order":
        weight = in_act_order(rows, bits, group)
    else:
        weight = on_grid(rows, bits, group, form != "awq")
    moved = weight.weight().astype(np.float32).reshape(turned.shape)
    if turned.shape != values.shape or turned.strides != values.strides:
        moved = moved.swapaxes(-1, -2)
    return np.ascontiguousarray(moved.reshape(values.shape)), weight


def write(directory, config, tensors):
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "model.safetensors").write_bytes(safetensors_bytes(tensors))
    return directory


def image(directory, **options):
    loader = HuggingFaceModel(str(directory), parity.NAME, user_set_data_type="float32")
    loader.load_model().serialize_to_memory(Engine(), **options)
    return loader


@pytest.mark.parametrize("model", FAMILIES, indirect=True)
@pytest.mark.parametrize("form", FORMS)
def test_weights(tmp_path, model, form):
    bits, group, settings = FORMS[form]
    directory = Path(parity.save(model, tmp_path / "base"))
    config = json.loads((directory / "config.json").read_text())
    plain = dict(load((directory / "model.safetensors").read_bytes()))
    packed = dict(plain)
    for name in matrices(plain):
        # GPTQ and AWQ have no form for these.
        stacked = plain[name].ndim == 3 or not name.endswith(".weight")
        values = plain[name]
        plain[name], weight = moved_onto_grid(values, name, config, form)
        packed[name] = plain[name]
        if settings is not None and not stacked:
            del packed[name]
            for part, values in PACKED[form](weight).items():
                packed[f"{name.removesuffix('weight')}{part}"] = values
    exact = image(write(tmp_path / "plain", config, plain))
    ids = prompt_ids()
    if settings is None:
        loader = image(
            tmp_path / "plain",
            enable_quant=True,
            customized_quant_config={"weight_format": form, "group_size": group or 0},
        )
    else:
        config["quantization_config"] = settings
        write(tmp_path / "packed", config, packed)
        if form == "gptq-act-order" and any("expert" in name for name in packed.keys() - plain):
            with pytest.raises(NotImplementedError, match="expert.* has no groups in act order"):
                image(tmp_path / "packed")
            return
        loader = image(tmp_path / "packed")
    ours = forward(loader, ids)
    np.testing.assert_array_equal(forward(loader, ids, (7,)), ours)
    # Both have the rounding errors of such a network.
    error = np.abs(ours - forward(exact, ids)).max()
    assert error <= 2 * reference_for(model, ids, FLOAT32_FACTOR).bound


# How much errors of a cache may change logits, relative to their length. 8 bits are wrong by up to
# 1/254 of the largest element of a key or value, 4 bits by 1/30 of its range; attention and the
# layers after it may multiply that by five (found: 1.7 and 2.7).
CACHES = {
    "int8": (AsCacheMode.AsCacheQuantI8, 5 / 254),
    "uint4": (AsCacheMode.AsCacheQuantU4, 5 / 30),
}


@pytest.mark.parametrize("model", FAMILIES, indirect=True)
@pytest.mark.parametrize("cache", CACHES)
def test_caches(tmp_path, model, cache):
    mode, most = CACHES[cache]
    loader = image(parity.save(model, tmp_path))
    ids = prompt_ids()
    exact = forward(loader, ids)

    def logits(chunks):
        return native.testing.forward_logits(loader._image, ids, chunks, 2, cache_mode=mode)

    ours = logits([])
    np.testing.assert_array_equal(logits([7]), ours)
    assert 0 < np.linalg.norm(ours - exact) <= most * np.linalg.norm(exact)
