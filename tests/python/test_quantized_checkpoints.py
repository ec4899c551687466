"""Checkpoints that are quantised already: their integers are copied into the file bit by bit, the
engine computes with the weights that they stand for, and damaged files are refused.
"""

from __future__ import annotations

import functools
from dataclasses import replace

import numpy as np
import pytest
from allspark.model_loader import HuggingFaceModel
from support.checkpoints import write_checkpoint
from support.model_file import dequantise, parts_of, read_tensors
from support.quantized import GROUPED, awq, gptq, pack, packed, quantized_llama, signed
from support.read_back import serialized

GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
GPTQ_V2 = functools.partial(gptq, offset=0)


def compressed(layout, dynamic=False, **weights):
    """quantization_config of compressed-tensors; bits and group_size are chosen by the tests."""
    group = {"targets": ["Linear"], "weights": {"type": "int", **weights}}
    if dynamic:
        group["input_activations"] = {"num_bits": 8, "type": "int", "dynamic": True}
    return {
        "quant_method": "compressed-tensors", "format": layout, "ignore": ["lm_head"],
        "config_groups": {"group_0": group}, "bits": weights["num_bits"],
        "group_size": weights.get("group_size", -1),
    }  # fmt: skip


PACKED = {"num_bits": 4, "strategy": "group", "group_size": 32}
CHANNEL = {"num_bits": 8, "strategy": "channel"}

ACT_ORDER = {**GPTQ, "desc_act": True}
# Name -> (quantization_config, how a module is packed, whether zero points are in the middle).
ROWS = {
    "gptq-act-order": (ACT_ORDER, gptq, True),
    "gptq-act-order-uint8": ({**ACT_ORDER, "bits": 8, "sym": False}, gptq, False),
    "packed-act-order": (compressed("pack-quantized", **PACKED, actorder="group"), packed, True),
    "gptq-int4": (GPTQ, gptq, True),
    "gptq-uint4": ({**GPTQ, "sym": False}, gptq, False),
    "gptq-int8": ({**GPTQ, "bits": 8, "group_size": -1}, gptq, True),
    "gptq-uint8-v2": (
        {**GPTQ, "bits": 8, "sym": False, "checkpoint_format": "gptq_v2"}, GPTQ_V2, False,
    ),
    "awq": (AWQ, awq, False),
    "awq-channel": ({**AWQ, "group_size": -1}, awq, False),
    "packed-int4": (compressed("pack-quantized", **PACKED), packed, True),
    "packed-uint4": (compressed("pack-quantized", **PACKED, symmetric=False), packed, False),
    "packed-int8": (compressed("pack-quantized", **CHANNEL), packed, True),
    "w8a8": (compressed("int-quantized", dynamic=True, **CHANNEL), signed, True),
    "w8a8-zeros": (
        compressed("int-quantized", dynamic=True, symmetric=False, **CHANNEL), signed, False,
    ),
    "w4a8": (compressed("int-quantized", dynamic=True, **PACKED), signed, True),
    "w4a8-zeros": (
        compressed("int-quantized", dynamic=True, symmetric=False, **PACKED), signed, False,
    ),
}  # fmt: skip


def write(directory, row, edit=None, **fields):
    """A checkpoint of the row; ``edit`` may change its tensors, ``fields`` its configuration."""
    settings, make, symmetric = ROWS[row]
    tensors, quantized, plain = quantized_llama(
        make, settings["bits"], settings["group_size"], symmetric, in_act_order="act-order" in row
    )
    if edit is not None:
        edit(tensors)
    config = {**GROUPED, "quantization_config": {**settings, **fields}}
    write_checkpoint(directory, tensors, config)
    return quantized, plain


@pytest.mark.parametrize("row", ROWS)
def test_integers_scales_and_zero_points_are_those_of_the_checkpoint(tmp_path, row):
    pytest.importorskip("allspark._allspark")
    quantized, _ = write(tmp_path / "in", row)
    file, tensors = read_tensors(serialized(tmp_path / "in", tmp_path / "out"))
    settings, _, symmetric = ROWS[row]
    assert len(file.spec.weight_quant) == 8
    orders = {}
    for quant in file.spec.weight_quant:
        first = quantized[parts_of(quant.tensor)[0]]
        orders[quant.tensor] = np.argsort(first.group_of, kind="stable")
        assert quant.reordered == ("act-order" in row) == (f"{quant.tensor}_order" in tensors)
        if quant.reordered:
            np.testing.assert_array_equal(
                tensors[f"{quant.tensor}_order"], orders[quant.tensor]
            )
    for quant in file.spec.weight_quant:
        layer, _, target = quant.tensor.rpartition(".")
        # Rows of gate and up have the order of down's columns.
        rows = orders[f"{layer}.down"] if target == "gate_up" else slice(None)
        parts = [quantized[name] for name in parts_of(quant.tensor)]
        for i, part in enumerate(parts):
            fields = {name: getattr(part, name)[rows] for name in ("values", "zeros", "scales")}
            parts[i] = replace(part, **fields)
        assert quant.bits == settings["bits"]
        assert quant.group_size == max(settings["group_size"], 0)
        assert quant.asymmetric != symmetric
        assert quant.quantize_activations == ("a8" in row)
        assert quant.half_scales
        stored = tensors[quant.tensor]
        values = np.concatenate([part.values for part in parts])[:, orders[quant.tensor]]
        np.testing.assert_array_equal(stored, values)
        if not symmetric:
            zeros = np.concatenate([part.zeros for part in parts])
            np.testing.assert_array_equal(tensors[quant.tensor + "_zero"], zeros)
        scales = np.concatenate([part.scales for part in parts])
        np.testing.assert_array_equal(tensors[quant.tensor + "_scale"], scales)
        weights = np.concatenate([part.weight() for part in parts])
        weights = weights[:, orders[quant.tensor]]
        np.testing.assert_array_equal(dequantise(tensors, quant)[0], weights)


@pytest.mark.parametrize("row", ROWS)
def test_parity_with_the_dequantised_model(tmp_path, row):
    native = pytest.importorskip("allspark._allspark")
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    from support.parity import FLOAT32_FACTOR, reference_for

    quantized, plain = write(tmp_path / "in", row)
    graph = serialized(tmp_path / "in", tmp_path / "out", enable_quant=True, weight_only_quant=True)
    weights = {name: q.weight() for name, q in quantized.items()}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**GROUPED)).eval()
    state = {name: torch.tensor(values).float() for name, values in {**plain, **weights}.items()}
    model.load_state_dict(state)
    ids = np.random.default_rng(0).integers(3, GROUPED["vocab_size"], 40).tolist()
    ours = native.testing.forward_logits(str(graph), ids, [], 1, "", 16)
    reference_for(model, ids, FLOAT32_FACTOR).check(ours)


# Arguments of the caller.


def quants_of(graph):
    return {
        (quant.bits, quant.group_size, quant.quantize_activations)
        for quant in read_tensors(graph)[0].spec.weight_quant
    }


def test_activations_and_another_quantisation(tmp_path):
    pytest.importorskip("allspark._allspark")
    write(tmp_path, "gptq-int4")

    def found(weight_only=False, **config):
        return quants_of(
            serialized(tmp_path, tmp_path / "out", enable_quant=True, weight_only_quant=weight_only,
                    customized_quant_config=config or None)
        )  # fmt: skip

    assert found() == {(4, 32, True)}
    assert found(weight_only=True) == {(4, 32, False)}
    assert found(quant_method="gptq") == {(4, 32, False)}
    assert found(quant_method="gptq", compute_method="activate_quant") == {(4, 32, True)}
    assert found(quant_method="instant_quant", weight_format="int8") == {(8, 0, False)}
    with pytest.raises(ValueError, match="quant_method is 'awq', but the checkpoint's is 'gptq'"):
        found(quant_method="awq")


def test_activations_are_quantised_where_the_checkpoint_was_made_for_it(tmp_path):
    pytest.importorskip("allspark._allspark")
    write(tmp_path, "w8a8")

    def found(**config):
        options = {"enable_quant": bool(config), "customized_quant_config": config or None}
        return quants_of(serialized(tmp_path, tmp_path / "out", **options))

    method = {"quant_method": "compressed-tensors"}
    assert found() == found(**method) == {(8, 0, True)}
    assert found(**method, compute_method="weight_only") == {(8, 0, False)}


def test_act_order_that_is_quantised_anew(tmp_path):
    pytest.importorskip("allspark._allspark")
    quantized, _ = write(tmp_path, "gptq-act-order-uint8")
    config = {"weight_format": "int8", "modules_to_not_convert": ["o_proj"]}
    loader = HuggingFaceModel(str(tmp_path), "m", user_set_data_type="float32").load_model()
    assert "layers.0.down_order" in loader.plan().computed  # of this plan alone
    loader.serialize_to_path(
        None, str(tmp_path / "out"), enable_quant=True, customized_quant_config=config
    )
    file, tensors = read_tensors(tmp_path / "out" / "m.asgraph")
    assert file.format_version == 2 and not any(name.endswith("_order") for name in tensors)
    exact = quantized[parts_of("layers.1.o")[0]].weight()
    np.testing.assert_array_equal(tensors["layers.1.o"], exact.astype(np.float32))


def test_versions_of_the_file(tmp_path):
    """Of scales that become bfloat16: older programs read these files, too."""
    pytest.importorskip("allspark._allspark")

    def in_float32(tensors):
        tensors.update({n: a.astype("<f4") for n, a in tensors.items() if n.endswith(".scales")})

    for row, edit, version in (
        ("gptq-act-order", in_float32, 4), ("gptq-int4", in_float32, 2), ("gptq-int4", None, 6),
    ):  # fmt: skip
        write(tmp_path, row, edit)
        file, tensors = read_tensors(serialized(tmp_path, tmp_path / "out"))
        assert file.format_version == version
        assert tensors["layers.0.o_scale"].dtype == ("<f2" if edit is None else "<u2")


Q_PROJ, O_PROJ = (f"model.layers.0.self_attn.{name}_proj" for name in "qo")


@pytest.mark.parametrize(
    ("row", "name", "change", "message"),
    [
        (
            "gptq-act-order", f"{Q_PROJ}.g_idx", lambda a: a[::-1].copy(),
            r"k_proj.qweight' cannot stay .* other parts of 'layers.0.qkv' have other groups",
        ),
        (
            "gptq-act-order", f"{O_PROJ}.g_idx", np.zeros_like,
            r"o_proj.qweight' cannot stay as it is: its groups have not all 32 input features",
        ),
        (
            "packed-act-order", f"{Q_PROJ}.weight_g_idx", lambda a: a - 1,
            "weight_g_idx' holds -1 to 0, expected 0 to 1",
        ),
    ],
)  # fmt: skip
def test_act_orders_that_cannot_stay(tmp_path, row, name, change, message):
    pytest.importorskip("allspark._allspark")
    write(tmp_path, row, lambda tensors: tensors.update({name: change(tensors[name])}))
    with pytest.raises((ValueError, NotImplementedError), match=message):
        serialized(tmp_path, tmp_path / "out")


def test_act_order_that_was_not_set(tmp_path):
    """In compressed-tensors: the group is -1 for each feature."""
    pytest.importorskip("allspark._allspark")

    def unset(tensors):
        for name in tensors:
            if name.endswith("g_idx"):
                tensors[name] = np.full_like(tensors[name], -1)

    write(tmp_path, "packed-act-order", unset)
    assert quants_of(serialized(tmp_path, tmp_path / "out")) == {(4, 32, False)}


def test_act_order_with_groups_in_place_is_kept(tmp_path):
    """With static_groups, or with one group for all."""
    pytest.importorskip("allspark._allspark")
    write(tmp_path, "gptq-int4", desc_act=True)
    assert quants_of(serialized(tmp_path, tmp_path / "out")) == {(4, 32, False)}


def test_biases_of_zeros_that_the_model_does_not_have(tmp_path):
    pytest.importorskip("allspark._allspark")
    name = "model.layers.0.self_attn.o_proj.bias"
    write(tmp_path, "gptq-int4", lambda tensors: tensors.update({name: np.zeros(64, "<f2")}))
    serialized(tmp_path, tmp_path / "out")
    write(tmp_path, "gptq-int4", lambda tensors: tensors.update({name: np.ones(64, "<f2")}))
    with pytest.raises(ValueError, match=f"no rule explains '{name}'"):
        serialized(tmp_path, tmp_path / "out")


# Refused checkpoints.

Q = "model.layers.0.self_attn.q_proj."


def put(part, change):
    def edit(tensors):
        tensors[Q + part] = change(tensors[Q + part])

    return edit


def drop(part):
    return lambda tensors: tensors.pop(Q + part)


def first_zero(value, bits=4):
    """qzeros whose first field is ``value``."""

    def change(words):
        words = words.copy()
        words[0, 0] = words[0, 0] & ~((1 << bits) - 1) | value
        return words

    return put("qzeros", change)


DAMAGED = {
    "no scales": ("gptq-int4", drop("scales"), r"'.*q_proj.qweight'.*'.*q_proj.scales' is missing"),
    "no qzeros": ("awq", drop("qzeros"), r"'.*q_proj.qweight'.*'.*q_proj.qzeros' is missing"),
    "scales alone": ("awq", drop("qweight"), "no rule explains .*q_proj.qzeros"),
    "also in floats": (
        "awq", lambda t: t.update({Q + "weight": np.zeros((64, 64), "<f4")}), "a weight is either",
    ),
    "qweight of floats": ("awq", put("qweight", lambda a: a.view("<f4")), "qweight' has dtype fl"),
    "qweight flat": ("gptq-int4", put("qweight", np.ravel), "qweight' has shape .512., expected"),
    "scales of another shape": (
        "gptq-int4", put("scales", lambda a: a[:1]), r"scales' has shape \[1, 64\], expected",
    ),
    "scales of integers": ("awq", put("scales", lambda a: a.astype("<i4")), "has dtype int32"),
    "qzeros of another shape": (
        "awq", put("qzeros", lambda a: a[:, 1:]), r"qzeros' has shape \[2, 7\], expected \[2, 8\]",
    ),
    "g_idx short": ("gptq-int4", put("g_idx", lambda a: a[1:]), r"g_idx' has shape \[63\]"),
    "g_idx out of range": ("gptq-int4", put("g_idx", lambda a: a + 1), "g_idx' holds 1 to 2, exp"),
    "g_idx negative": ("gptq-int4", put("g_idx", lambda a: a - 1), "holds -1 to 0, expected"),
    "not symmetric": ("gptq-int4", first_zero(3), "qzeros' holds a zero point other than 8"),
    "ambiguous zero": ("gptq-uint4", first_zero(15), "qzeros' holds 15, which readers of"),
    "scales not finite": (
        "awq", put("scales", lambda a: a * np.float16(np.inf)), "q_proj.scales'.*must be finite",
    ),
    "packed scales of another shape": (
        "packed-int4", put("weight_scale", np.ravel), r"scale' has shape \[128\], expected \[64, 2",
    ),
    "packed zeros missing": ("packed-uint4", drop("weight_zero_point"), "zero_point' is missing"),
    "packed zeros of another shape": (
        "packed-uint4", put("weight_zero_point", lambda a: a[1:]), "zero_point' has shape .7, 2.",
    ),
    "words that are missing": (
        "packed-int4", put("weight_packed", lambda a: a[:, :4]), "scale' has shape .64, 2.",
    ),
    "int8 of floats": ("w8a8", put("weight", lambda a: a.astype("<f4")), "has dtype float32, exp"),
    "int8 without scales": ("w8a8", drop("weight_scale"), "weight' has dtype int8, expec"),
    "more than 4 bits": (
        "w4a8", put("weight", lambda a: np.full_like(a, 8)), "weight' holds 8, expected -8 to 7",
    ),
    "less than 4 bits": (
        "w4a8", put("weight", lambda a: np.full_like(a, -9)), "weight' holds -9, expected -8 to 7",
    ),
    "a zero point of more bits": (
        "w4a8-zeros", put("weight_zero_point", lambda a: np.full_like(a, 100)),
        "zero_point' holds 100, expected -8 to 7",
    ),
    "w8a8 not symmetric": ("w8a8", put("weight_zero_point", lambda a: a + 1), "rules out"),
    "rows that fill no word": (
        "gptq-int4",
        lambda t: t.update({Q + part: t[Q + part][:, :60] for part in ("qweight", "scales")}),
        "qweight' has 60 output features, expected a multiple of 8",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", DAMAGED)
def test_damaged_checkpoints_are_refused_by_name(tmp_path, case):
    pytest.importorskip("allspark._allspark")
    row, edit, message = DAMAGED[case]
    write(tmp_path / "in", row, edit)
    with pytest.raises(ValueError, match=message) as caught:
        serialized(tmp_path / "in", tmp_path / "out")
    assert "model.safetensors" in str(caught.value) or "no rule" in str(caught.value)
    assert not list(tmp_path.glob("out/*.asparam"))


@pytest.mark.parametrize(
    ("row", "fields", "message"),
    [
        ("gptq-int4", {"bits": 3}, "quantization_config: bits is 3, supported are 4 and 8"),
        ("gptq-int4", {"bits": "4"}, "bits is '4', expected an integer"),
        ("gptq-int4", {"group_size": 0}, "group_size is 0, expected -1 or a size"),
        ("gptq-int4", {"group_size": -2}, "group_size is -2, expected -1 to"),
        ("gptq-int4", {"sym": 1}, "sym is 1, expected true or false"),
        ("gptq-int4", {"checkpoint_format": "marlin"}, "checkpoint_format is 'marlin', supported"),
        ("gptq-int4", {"dynamic": {"+:down": {"bits": 3}}}, "dynamic: .:down: bits is 3, supp"),
        ("gptq-int4", {"dynamic": {"+:down": 8}}, "dynamic: .:down is 8, expected an object"),
        ("gptq-int4", {"dynamic": {"+:d(?=own)": {}}}, "dynamic has 'd..=own.', no regular expr"),
        ("gptq-int4", {"quant_method": None}, "quant_method.* is missing"),
        ("w8a8", {"format": "marlin-24"}, "format is 'marlin-24', supported are pack-quantized"),
        ("w8a8", {"config_groups": {}}, "config_groups has 0 groups, expected 1"),
        ("w8a8", {"config_groups": {"g": {"weights": {"num_bits": 2}}}}, "num_bits is 2, supp"),
        ("w8a8", {"config_groups": {"g": {"targets": []}}}, "'weights' is missing"),
        (
            "w8a8",
            {"config_groups": {"g": {"weights": {"num_bits": 8, "strategy": "block"}}}},
            "strategy is 'block', supported",
        ),
        (
            "w8a8",
            {"config_groups": {"g": {"weights": {"num_bits": 8},
                                     "input_activations": {"num_bits": 8, "dynamic": False}}}},
            "input_activations: type is 'int', num_bits is 8 and dynamic is False, supported",
        ),
        ("awq", {"quant_method": "bitsandbytes"}, "'bitsandbytes', supported.*numbers of a table"),
        ("awq", {"quant_method": "hqq"}, "quant_method is 'hqq', supported are gptq, awq, comp"),
        (
            "w8a8", {"config_groups": {"g": {"format": "dense", "weights": {}}}},
            "config_groups: g: format is 'dense', supported are pack-quantized",
        ),
        ("w8a8", {"format": "mixed-precision"}, "group_0: format is 'mixed-precision', supported"),
        ("w8a8", {"config_groups": {"g": {"targets": "Linear"}}}, "targets is 'Linear', expected"),
        ("awq", {"bits": 8}, "quantization_config: bits is 8, supported is 4"),
        ("awq", {"version": "gemv"}, "version is 'gemv', supported is 'gemm'"),
        ("awq", {"zero_point": False}, "zero_point is False, supported is True"),
    ],
)
def test_bad_settings_are_refused_by_name(tmp_path, row, fields, message):
    write(tmp_path, row, **fields)
    with pytest.raises((ValueError, NotImplementedError), match=message):
        HuggingFaceModel(str(tmp_path), "m").load_model()


def smaller_groups(size):
    def edit(tensors):
        for name in tensors:
            if name.endswith((".scales", ".qzeros")):
                tensors[name] = np.repeat(tensors[name], 32 // size, axis=0)
            elif name.endswith("g_idx"):
                tensors[name] = (np.arange(len(tensors[name])) // size).astype("<i4")

    return edit


def test_groups_of_16(tmp_path):
    pytest.importorskip("allspark._allspark")
    write(tmp_path, "gptq-int4", smaller_groups(16), group_size=16)
    assert quants_of(serialized(tmp_path, tmp_path / "out")) == {(4, 16, False)}


def test_group_sizes_that_the_engine_does_not_have(tmp_path):
    pytest.importorskip("allspark._allspark")
    write(tmp_path, "gptq-int4", smaller_groups(8), group_size=8)
    message = "its group size is 8, the engine has 0, 16, 32, 64"
    with pytest.raises(NotImplementedError, match=message):
        serialized(tmp_path, tmp_path / "out")


def test_packing_of_the_tests_is_the_formats_own():
    """Uses words written by hand, so that test and reader cannot share a mistake."""
    assert pack(np.arange(1, 9, dtype=np.uint8)[None], 4)[0, 0] == np.int32(0x87654321 - (1 << 32))
    assert pack(np.array([[1, 2, 3, 4]], np.uint8), 8)[0, 0] == 0x04030201
