"""Quantised weights: what callers may request, and what the files then contain.

The files are read by support/model_file.py.
"""

from __future__ import annotations

import os
import re

import numpy as np
import pytest
from allspark.model_loader import HuggingFaceModel
from allspark.model_loader.checkpoint import Checkpoint
from allspark.model_loader.config import ModelConfig
from allspark.model_loader.convert import describe_decoder, make_plan
from allspark.model_loader.quantization import parse_quantization
from allspark.model_loader.serialised import read_graph
from support.checkpoints import CONFIG, llama_tensors, write_checkpoint
from support.model_file import PARTS, bfloat16, dequantise, parts_of, read_tensors, restore

# Input features of 64 and 96: groups of 32 divide all, groups of 64 all but "down".
WIDE = {**CONFIG, "hidden_size": 64, "intermediate_size": 96, "vocab_size": 75}
TIED = {**WIDE, "tie_word_embeddings": True}
LAYER = ("qkv", "o", "gate_up", "down")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("wide"), config=WIDE)


def planned(directory, config, quantization):
    """The WeightQuant messages of a plan."""
    described = describe_decoder(ModelConfig(config))
    checkpoint = Checkpoint.open(directory)
    plan = make_plan(described, checkpoint, "bfloat16", quantization)
    return plan.spec.weight_quant


def quants_of(directory, config=WIDE, enable=True, weight_only=False, **fields):
    """{tensor: (bits, group_size, asymmetric, quantize_activations)} of a plan."""
    quantization = parse_quantization(enable, weight_only, fields or None)
    return {
        quant.tensor: (quant.bits, quant.group_size, quant.asymmetric, quant.quantize_activations)
        for quant in planned(directory, config, quantization)
    }


# Requests.


def test_all_linear_weights_and_nothing_else(checkpoint):
    names = [f"layers.{i}.{name}" for i in range(2) for name in LAYER]
    assert quants_of(checkpoint) == dict.fromkeys(names, (8, 0, False, True))
    assert quants_of(checkpoint, weight_only=True) == dict.fromkeys(names, (8, 0, False, False))
    assert quants_of(checkpoint, enable=False) == {}
    # weight_only alone does not quantise: scripts always pass it.
    assert quants_of(checkpoint, enable=False, weight_only=True) == {}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"quant_method": "instant_quant"}, (8, 0, False, False)),
        ({"quant_method": "iq", "weight_format": "int8"}, (8, 0, False, False)),
        ({"weight_format": "uint8"}, (8, 0, True, False)),
        ({"weight_format": "int4", "group_size": 32}, (4, 32, False, False)),
        ({"weight_format": "uint4", "group_size": -1}, (4, 0, True, False)),
        ({"compute_method": "weight_only"}, (8, 0, False, False)),
        ({"compute_method": "weight_only", "activate_format": "bfloat16"}, (8, 0, False, False)),
        ({"compute_method": "activate_quant"}, (8, 0, False, True)),
        ({"compute_method": "activate_quant", "activate_format": "int8"}, (8, 0, False, True)),
        ({"weight_format": "uint4", "compute_method": "activate_quant"}, (4, 0, True, True)),
    ],
)
@pytest.mark.parametrize("weight_only", [False, True])
def test_a_custom_configuration_decides_alone(checkpoint, fields, expected, weight_only):
    quants = quants_of(checkpoint, weight_only=weight_only, **fields)
    assert len(quants) == 8 and set(quants.values()) == {expected}


def test_group_settings_take_the_first_match(checkpoint):
    def sizes(settings, **fields):
        quants = quants_of(checkpoint, group_settings=settings, **fields)
        return {name: quant[1] for name, quant in quants.items()}

    found = sizes({r"layers\.0\.": 32, r"\.(qkv|o)$": 64, "down": 0}, group_size=32)
    assert {found[f"layers.0.{name}"] for name in LAYER} == {32}
    assert [found[f"layers.1.{name}"] for name in LAYER] == [64, 64, 32, 0]
    # The names of the checkpoint's modules match as well; one module of a fused weight is enough.
    found = sizes({r"model\.layers\.1\.self_attn\.k_proj": 64, "up_proj": 32})
    assert [found[f"layers.1.{name}"] for name in LAYER] == [64, 0, 32, 0]
    assert found["layers.0.qkv"] == 0


def test_modules_to_not_convert(checkpoint):
    quants = quants_of(
        checkpoint, modules_to_not_convert=[r"^layers\.0\.o$", r"layers\.1\.mlp\.", "lm_head"]
    )
    assert set(quants) == {"layers.0.qkv", "layers.0.gate_up", "layers.0.down", "layers.1.qkv",
                           "layers.1.o"}  # fmt: skip


def test_head_and_embedding_are_quantised_when_named(checkpoint):
    fields = {"weight_format": "int4", "group_size": 32, "compute_method": "activate_quant"}
    quants = quants_of(checkpoint, **fields, lm_head="int8", group_settings={"lm_head": 64})
    assert quants["lm_head"] == (8, 64, False, True) and "embedding" not in quants
    # Looked up, not multiplied: there are no activations to quantise.
    quants = quants_of(checkpoint, **fields, embedding="uint4", lm_head=None)
    assert quants["embedding"] == (4, 32, True, False) and "lm_head" not in quants


def test_a_tied_embedding_is_one_weight(tmp_path):
    write_checkpoint(tmp_path, config=TIED)
    expected = (8, 32, False, True)
    fields = {"compute_method": "activate_quant", "group_size": 32}
    for tables in (
        {"lm_head": "int8"},
        {"embedding": "int8"},
        {"lm_head": "int8", "embedding": "int8"},
    ):
        quants = quants_of(tmp_path, TIED, **fields, **tables)
        assert quants["embedding"] == expected and "lm_head" not in quants
    assert "embedding" not in quants_of(tmp_path, TIED, lm_head=None, **fields)
    settings = {"lm_head": 64}  # The weight is known by both names.
    quants = quants_of(tmp_path, TIED, embedding="int8", group_settings=settings)
    assert quants["embedding"][1] == 64
    with pytest.raises(ValueError, match="lm_head is 'int8' and embedding is None"):
        quants_of(tmp_path, TIED, lm_head="int8", embedding=None)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"groupsize": 32}, "unknown key 'groupsize', expected quant_method"),
        ({"quant_method": "magic"}, "quant_method is 'magic', expected instant_quant, iq"),
        ({"quant_method": "gptq"}, "quant_method is 'gptq', but the checkpoint's is None"),
        ({"quant_method": "fp8"}, "quant_method is 'fp8', but the checkpoint's is None, without"),
        ({"quant_method": "awq", "group_size": 32}, "group_size is given, which the checkpoint"),
        ({"quant_method": None}, "quant_method is None"),
        ({"weight_format": "int2"}, "weight_format is 'int2', expected int8, uint8, int4, uint4"),
        ({"weight_format": 8}, "weight_format is 8"),
        ({"weight_format": ["int8"]}, "weight_format is "),
        ({"compute_method": "w8a8"}, "compute_method is 'w8a8', expected weight_only, activate"),
        ({"activate_format": "int8"}, "activate_format is 'int8', expected bfloat16"),
        ({"compute_method": "activate_quant", "activate_format": "bfloat16"}, "expected int8"),
        ({"search": 1}, "search is 1, expected False, True"),
        ({"quant_method": "awq", "search": True}, "search is given, which the checkpoint"),
        ({"group_size": 256}, "group_size is 256, expected -1, 0, 32, 64, 128"),
        ({"group_size": "32"}, "group_size is '32'"),
        ({"group_size": 32.0}, "group_size is 32.0"),
        ({"group_size": True}, "group_size is True"),
        ({"group_settings": ["qkv"]}, "group_settings is ..qkv.., expected a dict"),
        ({"group_settings": {"qkv": 16}}, "group_settings.'qkv'. is 16, expected -1, 0, 32"),
        ({"group_settings": {"(": 32}}, r"'\(' is no regular expression"),
        ({"group_settings": {5: 32}}, "group_settings is 5, expected regular expressions"),
        ({"group_settings": {"q_prj": 32}}, "group_settings: 'q_prj' matches no weight"),
        ({"modules_to_not_convert": "qkv"}, "modules_to_not_convert is 'qkv', expected a list"),
        ({"modules_to_not_convert": [""]}, "modules_to_not_convert is ''"),
        ({"modules_to_not_convert": ["visual"]}, "modules_to_not_convert: 'visual' matches no"),
        ({"lm_head": "int3"}, "lm_head is 'int3', expected int8"),
        ({"embedding": True}, "embedding is True"),
        ({"group_size": 128}, "group_size is 128, which does not divide the 64 input features of "
                              "'layers.0.qkv'"),
        ({"group_size": 64}, "group_size is 64, .* the 96 input features of 'layers.0.down'"),
        ({"group_settings": {"down": 64}}, "group_settings.'down'. is 64, which does not divide"),
    ],
)  # fmt: skip
def test_bad_values_are_refused_by_name(checkpoint, fields, message):
    with pytest.raises(ValueError, match=message):
        quants_of(checkpoint, **fields)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"quant_method": "fp8_a8w8"}, "quant_method 'fp8_a8w8' is not available yet"),
        ({"weight_format": "fp8_e4m3"}, "weight_format 'fp8_e4m3' is not available yet"),
    ],
)
def test_what_is_not_there_yet_says_so(checkpoint, fields, message):
    with pytest.raises(NotImplementedError, match=message):
        quants_of(checkpoint, **fields)


def test_input_features_must_fill_a_lane(tmp_path):
    config = {**CONFIG, "intermediate_size": 20}
    write_checkpoint(tmp_path, config=config)
    quants_of(tmp_path, config, weight_format="int8")
    with pytest.raises(ValueError, match="'layers.0.down' has 20 input features, no multiple of 8"):
        quants_of(tmp_path, config, weight_format="int4")
    quants_of(tmp_path, config, weight_format="int4", modules_to_not_convert=["down"])


def test_a_configuration_without_enable_quant_is_refused():
    with pytest.raises(ValueError, match="enable_quant is False; set enable_quant=True"):
        parse_quantization(False, False, {"weight_format": "int8"})
    with pytest.raises(TypeError, match="customized_quant_config is a str"):
        parse_quantization(True, False, "int8")
    assert parse_quantization(True, False, {}).quantize_activations is False


def activation_groups(directory, config=WIDE, **fields):
    """{tensor: activation_group_size} of a plan."""
    quants = planned(directory, config, parse_quantization(True, False, fields or None))
    return {quant.tensor: quant.activation_group_size for quant in quants}


def test_activations_have_a_scale_for_the_larger_group_that_divides(tmp_path):
    config = {**WIDE, "intermediate_size": 96}
    write_checkpoint(tmp_path, config=config)
    sizes = {"qkv": 64, "o": 64, "gate_up": 64, "down": 32}
    assert WIDE["hidden_size"] == 64
    expected = {f"layers.{i}.{name}": sizes[name] for i in range(2) for name in LAYER}
    assert activation_groups(tmp_path, config) == expected
    found = activation_groups(tmp_path, config, compute_method="activate_quant", group_size=32)
    assert found == expected
    for size in (0, 32):
        found = activation_groups(
            tmp_path, config, compute_method="activate_quant", activation_group_size=size
        )
        assert found == dict.fromkeys(expected, size)
    assert set(activation_groups(tmp_path, config, weight_format="int4").values()) == {0}
    odd = {**WIDE, "intermediate_size": 72}
    write_checkpoint(tmp_path / "odd", config=odd)
    assert activation_groups(tmp_path / "odd", odd)["layers.0.down"] == 0


@pytest.mark.parametrize("value", [-1, 16, 256, True, "64"])
def test_other_activation_groups_are_refused(value):
    with pytest.raises(ValueError, match=f"activation_group_size is {value!r}, expected 0, 32, 64"):
        parse_quantization(
            True, False, {"compute_method": "activate_quant", "activation_group_size": value}
        )


def test_activation_groups_that_do_not_fit_are_refused(tmp_path):
    config = {**WIDE, "intermediate_size": 96}
    write_checkpoint(tmp_path, config=config)
    with pytest.raises(ValueError, match="64, which does not divide the 96 input .* 'layers.0.dow"):
        activation_groups(
            tmp_path, config, compute_method="activate_quant", activation_group_size=64
        )
    with pytest.raises(ValueError, match="activation_group_size is 64, but .* 'activate_quant'"):
        parse_quantization(True, False, {"activation_group_size": 64})
    assert parse_quantization(True, False, {"activation_group_size": 0})


def test_refusals_come_before_anything_is_written(checkpoint, tmp_path):
    pytest.importorskip("allspark._allspark")
    loader = HuggingFaceModel(str(checkpoint), "m").load_model()
    for config in ({"weight_format": "int2"}, {"group_size": 128}):
        with pytest.raises(ValueError):
            loader.serialize_to_path(
                None, str(tmp_path / "out"), enable_quant=True, customized_quant_config=config
            )
        with pytest.raises(ValueError):
            loader.serialize(object(), enable_quant=True, customized_quant_config=config)
    assert not (tmp_path / "out").exists()


# Written files.


def sources(checkpoint):
    """The checkpoint's weights under the decoder's names, as float64."""
    tensors = {}
    for name, entry in Checkpoint.open(checkpoint).tensors.items():
        with entry.open() as array:
            values = bfloat16(array) if entry.dtype == "bfloat16" else array
            tensors[name] = values.astype(np.float64)
    layers = {found[1] for name in tensors if (found := re.match(r"model\.layers\.(\d+)\.", name))}
    targets = ["embedding", "lm_head", *(f"layers.{i}.{name}" for i in layers for name in PARTS)]
    return {
        target: np.concatenate([tensors[part] for part in parts_of(target)])
        for target in targets
        if parts_of(target)[0] in tensors
    }


def check_against_source(graph, checkpoint):
    """Every quantised weight matches its source within the bound of the format."""
    file, tensors = read_tensors(graph)
    weights = sources(checkpoint)
    for quant in file.spec.weight_quant:
        weight = weights[quant.tensor]
        restored, scale = dequantise(tensors, quant)
        moved = np.abs(weight - restored)
        clipped = np.zeros(weight.shape, bool)
        if quant.bits == 4 and not quant.asymmetric:
            clipped = tensors[quant.tensor] == 15  # the grid has one value less on this side
        assert (moved <= np.abs(scale) * np.where(clipped, 1, 0.5)).all(), quant.tensor
        # And the steps are no wider than the range requires, except for rounding to bfloat16.
        groups = weight.reshape(len(weight), -1, quant.group_size or weight.shape[1])
        steps = (1 << quant.bits) - 1 if quant.asymmetric else (1 << (quant.bits - 1)) - 1
        low, high = groups.min(-1).clip(max=0), groups.max(-1).clip(min=0)
        width = high - low if quant.asymmetric else np.maximum(high, -low)
        assert (np.abs(scale).reshape(groups.shape)[..., 0] <= width / steps * (1 + 2**-7)).all()
    return file, tensors


FORMATS = [
    {"weight_format": weight_format, "group_size": group_size}
    for weight_format in ("int8", "uint8", "int4", "uint4")
    for group_size in (-1, 32)
]


@pytest.mark.parametrize("fields", FORMATS, ids=lambda fields: "-".join(map(str, fields.values())))
@pytest.mark.parametrize("dtype", ["<f4", "<f2", "<u2"])
def test_round_trip_through_files(tmp_path, fields, dtype):
    pytest.importorskip("allspark._allspark")
    directory = write_checkpoint(tmp_path / "in", llama_tensors(WIDE, dtype), WIDE)
    config = {**fields, "lm_head": "int8", "embedding": fields["weight_format"],
              "modules_to_not_convert": [r"layers\.1\.o"]}  # fmt: skip
    loader = HuggingFaceModel(str(directory), "m").load_model()
    loader.serialize_to_path(None, str(tmp_path), enable_quant=True, customized_quant_config=config)
    file, tensors = check_against_source(tmp_path / "m.asgraph", directory)
    assert file.format_version == 2 and len(file.spec.weight_quant) == 9
    # Weights that are not quantised are unchanged.
    plain = HuggingFaceModel(str(directory), "plain").load_model()
    plain.serialize_to_path(None, str(tmp_path))
    plain_file, plain_tensors = read_tensors(tmp_path / "plain.asgraph")
    assert plain_file.format_version == 1
    quantised = {quant.tensor for quant in file.spec.weight_quant}
    for name, values in plain_tensors.items():
        if name not in quantised:
            np.testing.assert_array_equal(tensors[name], values)


@pytest.mark.parametrize("fields", FORMATS, ids=lambda fields: "-".join(map(str, fields.values())))
def test_round_trip_of_the_demo_model(tmp_path, demo_model, fields):
    config = {**fields, "embedding": fields["weight_format"]}
    loader = HuggingFaceModel(str(demo_model), "demo").load_model()
    loader.serialize_to_path(None, str(tmp_path), enable_quant=True, customized_quant_config=config)
    file, tensors = check_against_source(tmp_path / "demo.asgraph", demo_model)
    assert len(file.spec.weight_quant) == 4 * file.spec.num_layers + 1
    # Trained weights lose little: the relative error by bits of a uniform grid over a bell curve.
    bound = {8: 0.02, 4: 0.25}[file.spec.weight_quant[0].bits]
    weights = sources(demo_model)
    for quant in file.spec.weight_quant:
        error = dequantise(tensors, quant)[0] - weights[quant.tensor]
        assert np.linalg.norm(error) <= bound * np.linalg.norm(weights[quant.tensor]), quant.tensor


def squared_errors(graph, checkpoint):
    """{tensor: sum of the squared errors}"""
    file, tensors = read_tensors(graph)
    weights = sources(checkpoint)
    return {
        quant.tensor: np.square(dequantise(tensors, quant)[0] - weights[quant.tensor]).sum()
        for quant in file.spec.weight_quant
    }


@pytest.mark.parametrize("weight_format", ["int4", "uint4", "int8"])
@pytest.mark.parametrize("group_size", [0, 32])
def test_scales_of_4_bits_are_searched(tmp_path, demo_model, weight_format, group_size):
    found = {}
    for name, search in {"searched": True, "whole": False}.items():
        loader = HuggingFaceModel(str(demo_model), name).load_model()
        config = {"weight_format": weight_format, "group_size": group_size, "search": search}
        loader.serialize_to_path(
            None, str(tmp_path), enable_quant=True, customized_quant_config=config
        )
        found[name] = squared_errors(tmp_path / f"{name}.asgraph", demo_model)
    if weight_format == "int8":
        assert found["searched"] == found["whole"]
        return
    for tensor, error in found["searched"].items():
        assert error < 0.97 * found["whole"][tensor], tensor


@pytest.mark.parametrize("fields", FORMATS, ids=lambda fields: "-".join(map(str, fields.values())))
@pytest.mark.parametrize("config", [WIDE, TIED], ids=["untied", "tied"])
def test_the_engine_computes_with_the_weights_that_the_file_holds(tmp_path, fields, config):
    """A checkpoint of the dequantised weights, not quantised, gives the same logits."""
    native = pytest.importorskip("allspark._allspark")

    def logits(directory, **options):
        loader = HuggingFaceModel(str(directory), "m", user_set_data_type="float32").load_model()
        loader.serialize_to_path(None, str(directory), **options)
        return native.testing.forward_logits(
            str(directory / "m.asgraph"), [5, 17, 3, 30, 8, 21], [], 1, "", 16
        )

    # Small weights, so that attention is not a near tie, in which rounding makes large differences.
    tensors = {name: values * np.float32(0.125) for name, values in llama_tensors(config).items()}
    write_checkpoint(tmp_path / "in", tensors, config)
    quant_config = {**fields, "embedding": fields["weight_format"]}
    if config is WIDE:
        quant_config["lm_head"] = "uint4"
    found = logits(tmp_path / "in", enable_quant=True, customized_quant_config=quant_config)
    restore(tensors, tmp_path / "in" / "m.asgraph")
    expected = logits(write_checkpoint(tmp_path / "restored", tensors, config))
    # The weights are the same numbers; only the sums are rounded in another order.
    np.testing.assert_allclose(found, expected, rtol=0, atol=3e-6 * np.abs(expected).max())


def test_the_writer_takes_weights_that_are_quantised_already(checkpoint, tmp_path):
    native = pytest.importorskip("allspark._allspark")
    config = {"weight_format": "uint4", "group_size": 32}
    loader = HuggingFaceModel(str(checkpoint), "m").load_model()
    loader.serialize_to_path(None, str(tmp_path), enable_quant=True, customized_quant_config=config)
    file, tensors = read_tensors(tmp_path / "m.asgraph")
    names = {10: "uint8", 13: "uint8", 9: "bfloat16", 1: "float32"}
    again = (str(tmp_path / "again.asgraph"), str(tmp_path / "again.asparam"))
    writer = native.ModelWriter(
        file.spec.SerializeToString(), file.build.SerializeToString(), *again
    )
    for record in file.tensors:
        values = np.ascontiguousarray(tensors[record.name])
        with pytest.raises(ValueError, match="elements of"):
            writer.add_tensor(record.name, 0, values.astype(np.float64), names[record.dtype])
        wrong = {"float32": (">f4", "i4"), "uint8": ("i1", "?"), "bfloat16": (">u2",)}
        for dtype in wrong[names[record.dtype]]:
            with pytest.raises(ValueError, match="in this machine's byte order"):
                writer.add_tensor(record.name, 0, values.view(dtype), names[record.dtype])
        writer.add_tensor(record.name, 0, values, names[record.dtype])
    assert writer.finish() is None
    for ending in (".asgraph", ".asparam"):
        first, second = tmp_path / f"m{ending}", tmp_path / f"again{ending}"
        assert first.read_bytes() == second.read_bytes()


def test_skip_if_exists_notices_another_quantisation(checkpoint, tmp_path):
    pytest.importorskip("allspark._allspark")
    loader = HuggingFaceModel(str(checkpoint), "m").load_model()
    graph = tmp_path / "m.asgraph"

    def write(**options):
        """The contents of the file, and whether they were written by this call."""
        if graph.is_file():
            os.utime(graph, (1, 1))  # the clock of files may stand still between two calls
        loader.serialize_to_path(None, str(tmp_path), skip_if_exists=True, **options)
        file = read_graph(graph)
        found = list(file.spec.weight_quant), file.build.options.get("search")
        return found, graph.stat().st_mtime != 1

    before, is_written = write()
    assert is_written
    for config in (
        None,
        {},
        {"weight_format": "uint8"},
        {"weight_format": "int4"},
        {"weight_format": "int4", "group_size": 32},
        {"weight_format": "int4", "group_size": 32, "search": True},
        {"weight_format": "int4", "modules_to_not_convert": ["down"]},
    ):
        after, is_written = write(enable_quant=True, customized_quant_config=config)
        assert after != before and is_written
        assert write(enable_quant=True, customized_quant_config=config) == (after, False)
        before = after
    assert write()[0][0] == []


def test_init_quantization_sets_the_defaults(checkpoint, tmp_path):
    pytest.importorskip("allspark._allspark")
    loader = HuggingFaceModel(str(checkpoint), "m").load_model()

    def bits(**options):
        loader.serialize_to_path(None, str(tmp_path), **options)
        quants = read_graph(tmp_path / "m.asgraph").spec.weight_quant
        return {quant.bits for quant in quants}

    assert bits() == set()
    assert loader.init_quantization(customized_quant_config={"weight_format": "int4"}) is loader
    assert bits() == {4}
    assert bits(customized_quant_config={"weight_format": "int8"}) == {8}
    assert loader.init_quantization(enable=False) is loader
    assert bits() == set()
    with pytest.raises(ValueError, match="weight_format is 'int2'"):
        loader.init_quantization(customized_quant_config={"weight_format": "int2"})
