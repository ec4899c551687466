"""The loaders with a fake writer: rules, configurations, plans, tokenizers, chaining."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import warnings
from dataclasses import replace

import numpy as np
import pytest
from allspark.model_loader import (
    ConfigFieldMissingError,
    HuggingFaceModel,
    LoadFormat,
    ModelScopeModel,
    ModelSerializerException,
)
from allspark.model_loader import spec as spec_module
from allspark.model_loader.checkpoint import Checkpoint
from allspark.model_loader.config import ModelConfig
from allspark.model_loader.convert import describe_decoder, make_plan, write_model
from allspark.model_loader.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    UnexplainedTensorError,
    UnsupportedModelError,
)
from allspark.model_loader.native import native, required_of
from allspark.model_loader.spec import (
    Weight,
    expand,
    find_architecture,
    message_class,
    register,
    registered,
    resolve,
    with_architecture,
)
from support.checkpoints import CONFIG, llama_tensors, shared_data, write_checkpoint
from support.fake_native import FakeEngine, FakeWriter
from support.vocabularies import tokenizer_directory


@pytest.fixture
def fake_native(monkeypatch):
    """Makes loaders write with the fake writer; returns the list of its instances."""
    monkeypatch.setattr(native(), "ModelWriter", FakeWriter)
    monkeypatch.setattr(FakeWriter, "made", [])
    return FakeWriter.made


def config_with(**fields):
    return {**CONFIG, **fields}


def fields_of(**changes):
    return describe_decoder(ModelConfig(config_with(**changes))).fields


def plan_for(directory, config=CONFIG, data_type="float32"):
    checkpoint = Checkpoint.open(directory)
    return make_plan(describe_decoder(ModelConfig(config)), checkpoint, data_type)


# Rules and resolver.


def test_registry():
    expected = ["LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"]
    assert set(expected) <= set(registered())
    with pytest.raises(ValueError, match="already registered"):
        register(find_architecture("LlamaForCausalLM"))
    with pytest.raises(NotImplementedError, match="'GPT5ForCausalLM'.*LlamaForCausalLM"):
        find_architecture("GPT5ForCausalLM")


def test_expand():
    rules = (Weight("a", ("x",)), Weight("l.{i}.b", ("m.{i}.y", "m.{i}.z"), optional=True))
    assert expand(rules, 2) == [
        Weight("a", ("x",)),
        Weight("l.0.b", ("m.0.y", "m.0.z"), True),
        Weight("l.1.b", ("m.1.y", "m.1.z"), True),
    ]


def test_sources_are_stacked_along_rows(tmp_path, fake_native):
    tensors = llama_tensors()
    plan = plan_for(write_checkpoint(tmp_path, tensors))
    image = write_model(plan)
    layer = "model.layers.1."
    stacked = [tensors[f"{layer}self_attn.{name}_proj.weight"] for name in "qkv"]
    np.testing.assert_array_equal(image.tensors["layers.1.qkv"], np.concatenate(stacked))
    stacked = [tensors[f"{layer}mlp.{name}_proj.weight"] for name in ("gate", "up")]
    np.testing.assert_array_equal(image.tensors["layers.1.gate_up"], np.concatenate(stacked))
    for target, source in {
        "embedding": "model.embed_tokens.weight",
        "layers.0.attention_norm": "model.layers.0.input_layernorm.weight",
        "layers.0.mlp_norm": "model.layers.0.post_attention_layernorm.weight",
        "layers.0.o": "model.layers.0.self_attn.o_proj.weight",
        "layers.0.down": "model.layers.0.mlp.down_proj.weight",
        "final_norm": "model.norm.weight",
        "lm_head": "lm_head.weight",
    }.items():
        np.testing.assert_array_equal(image.tensors[target], tensors[source])


@pytest.mark.parametrize("dtype", ["<f2", "<u2"])
def test_16_bit_checkpoints(tmp_path, fake_native, dtype):
    plan = plan_for(write_checkpoint(tmp_path, llama_tensors(dtype=dtype)))
    image = write_model(plan)
    expected = llama_tensors()["model.norm.weight"]
    np.testing.assert_allclose(image.tensors["final_norm"], expected, rtol=2**-7)


def test_parts_are_read_in_the_order_of_the_file(tmp_path):
    parts = plan_for(write_checkpoint(tmp_path, shards=2)).parts
    places = [(part.source.file.path.name, part.source.offset) for part in parts]
    assert places == sorted(places)


def test_a_mystery_tensor_is_refused(tmp_path):
    tensors = {**llama_tensors(), "mystery": np.zeros(3, "<f4")}
    with pytest.raises(UnexplainedTensorError, match="no rule explains 'mystery'"):
        plan_for(write_checkpoint(tmp_path, tensors))


def test_biases_the_configuration_does_not_speak_of_are_refused(tmp_path, fake_native):
    write_checkpoint(tmp_path, llama_tensors(biases=True))
    with pytest.raises(UnexplainedTensorError, match="no rule explains.*bias.*and 6 more"):
        plan_for(tmp_path)
    config = config_with(attention_bias=True, mlp_bias=True)
    image = write_model(plan_for(tmp_path, config))
    assert image.tensors["layers.0.qkv_bias"].shape == (32,)


def test_a_missing_tensor_is_named(tmp_path):
    tensors = llama_tensors()
    del tensors["model.layers.1.mlp.up_proj.weight"]
    with pytest.raises(UnexplainedTensorError, match=r"lacks 'model\.layers\.1\.mlp\.up_proj"):
        plan_for(write_checkpoint(tmp_path, tensors))


def test_a_target_without_a_rule_is_named(tmp_path):
    checkpoint = Checkpoint.open(write_checkpoint(tmp_path))
    llama = find_architecture("LlamaForCausalLM")
    rules = tuple(rule for rule in llama.weights if rule.target != "final_norm")
    less = replace(llama, weights=rules, ignored=(r"model\.norm\.weight",))
    spec = plan_for(tmp_path).spec
    with pytest.raises(UnexplainedTensorError, match="no rule produces 'final_norm'"):
        resolve(
            less, expand(rules, 2), required_of(spec), checkpoint.tensors, ("rope.inv_freq",)
        )


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("model.norm.weight", (17,), "17 rows, but 'final_norm' has 16"),
        ("model.norm.weight", (4, 4), "does not fit 'final_norm'"),
        ("model.layers.0.self_attn.k_proj.weight", (8, 15), r"does not fit 'layers\.0\.qkv'"),
        (
            "model.layers.0.self_attn.k_proj.weight",
            (9, 16),
            r"33 rows, but 'layers.0.qkv' has",
        ),
    ],
)
def test_wrong_shapes_are_named(tmp_path, name, shape, message):
    tensors = {**llama_tensors(), name: np.zeros(shape, "<f4")}
    with pytest.raises(UnexplainedTensorError, match=message) as caught:
        plan_for(write_checkpoint(tmp_path, tensors))
    assert f"model.safetensors: tensor {name!r}" in str(caught.value)


@pytest.mark.parametrize("dtype", ["<f8", "<i8"])
def test_wrong_dtypes_are_named(tmp_path, dtype):
    tensors = llama_tensors()
    tensors["model.norm.weight"] = tensors["model.norm.weight"].astype(dtype)
    with pytest.raises(UnexplainedTensorError, match="'model.norm.weight' has dtype"):
        plan_for(write_checkpoint(tmp_path, tensors))


def test_a_tied_head_may_be_there_or_not(tmp_path, fake_native):
    config = config_with(tie_word_embeddings=True)
    tensors = llama_tensors()
    write_checkpoint(tmp_path, tensors)
    assert "lm_head" not in write_model(plan_for(tmp_path, config)).tensors
    del tensors["lm_head.weight"]
    write_checkpoint(tmp_path, tensors)
    plan_for(tmp_path, config)
    with pytest.raises(UnexplainedTensorError, match="lacks 'lm_head.weight'"):
        plan_for(tmp_path)


def test_rotary_buffers_are_ignored(tmp_path):
    buffers = {
        "model.layers.0.self_attn.rotary_emb.inv_freq": np.zeros(2, "<f4"),
        "model.rotary_emb.inv_freq": np.zeros(2, "<f8"),
    }
    plan_for(write_checkpoint(tmp_path, {**llama_tensors(), **buffers}))


def test_a_failure_of_the_writer_names_the_tensor(tmp_path, fake_native, monkeypatch):
    plan = plan_for(write_checkpoint(tmp_path))
    monkeypatch.setattr(FakeWriter, "fail_on", "final_norm")
    with pytest.raises(CheckpointError, match="tensor 'model.norm.weight': final_norm: refused"):
        write_model(plan)


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_what_a_rule_raises_arrives(tmp_path, fake_native, error):
    def fail(array):
        raise error

    plan = plan_for(write_checkpoint(tmp_path))
    parts = [replace(part, rule=replace(part.rule, transform=fail)) for part in plan.parts]
    with pytest.raises(error):
        write_model(replace(plan, parts=parts))


# Configurations.


def test_sizes_and_defaults():
    fields = fields_of()
    assert fields["head_dim"] == fields["rotary_dim"] == 4
    assert fields["max_position"] == 64 and fields["norm_eps"] == 1e-5
    assert not fields["qkv_bias"] and not fields["o_bias"] and not fields["mlp_bias"]
    assert fields_of(head_dim=6)["head_dim"] == 6
    assert fields_of(head_dim=None)["head_dim"] == 4
    assert fields_of(num_key_value_heads=None)["num_kv_heads"] == 4
    message_class("DecoderSpec")(**fields)


def test_architectures_differ_where_they_should():
    def spec(name, **changes):
        return fields_of(architectures=[name], **changes)

    assert spec("LlamaForCausalLM", attention_bias=True)["o_bias"]
    qwen2 = spec("Qwen2ForCausalLM", attention_bias=True)
    assert qwen2["qkv_bias"] and not qwen2["o_bias"] and not qwen2.get("qk_norm")
    qwen3 = spec("Qwen3ForCausalLM", head_dim=8)
    assert qwen3["qk_norm"] and not qwen3["qkv_bias"] and qwen3["head_dim"] == 8
    assert spec("MistralForCausalLM", sliding_window=8)["layer_window"] == [8, 8]
    assert spec("MistralForCausalLM", sliding_window=None)["layer_window"] == []
    assert "layer_window" not in spec("LlamaForCausalLM", sliding_window=8)


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({"sliding_window": 8}, []),
        ({"sliding_window": 8, "use_sliding_window": False, "max_window_layers": 0}, []),
        ({"sliding_window": 8, "use_sliding_window": True}, []),
        ({"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 1}, [0, 8]),
        ({"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 0}, [8, 8]),
        (
            {
                "sliding_window": 8,
                "use_sliding_window": True,
                "layer_types": ["sliding_attention", "full_attention"],
            },
            [8, 0],
        ),
        (
            {
                "sliding_window": None,
                "use_sliding_window": False,
                "layer_types": ["full_attention", "full_attention"],
            },
            [],
        ),
    ],
)
@pytest.mark.parametrize("name", ["Qwen2ForCausalLM", "Qwen3ForCausalLM"])
def test_windows_of_qwen(name, changes, windows):
    assert fields_of(architectures=[name], **changes)["layer_window"] == windows


@pytest.mark.parametrize(
    "field",
    [
        "architectures",
        "hidden_size",
        "intermediate_size",
        "max_position_embeddings",
        "num_attention_heads",
        "num_hidden_layers",
        "vocab_size",
    ],
)
def test_missing_fields_are_named(tmp_path, field):
    config = {name: value for name, value in CONFIG.items() if name != field}
    write_checkpoint(tmp_path, llama_tensors(), config)
    with pytest.raises(
        ConfigFieldMissingError, match=f"config.json: the field '{field}'"
    ) as caught:
        HuggingFaceModel(str(tmp_path), "m").load_model()
    assert isinstance(caught.value, (KeyError, ValueError))


def test_model_type_stands_for_architectures_that_are_missing(tmp_path):
    config = {**CONFIG, "architectures": None, "model_type": "qwen2"}
    write_checkpoint(tmp_path, llama_tensors(), config)
    spec = HuggingFaceModel(str(tmp_path), "m").read_model_config().decoder_spec()
    assert spec.architecture == "Qwen2ForCausalLM"
    for model_type, meaning in {
        "bert": "is not known",
        "baichuan": "may be BaiChuanForCausalLM or BaichuanForCausalLM",
    }.items():
        with pytest.raises(ConfigFieldMissingError, match=f"{model_type!r} {meaning}"):
            fields_of(architectures=None, model_type=model_type)
    with pytest.raises(ValueError, match="model_type is 3, expected a string"):
        fields_of(architectures=None, model_type=3)


@pytest.mark.torch
def test_model_types_are_those_of_transformers():
    auto = pytest.importorskip("transformers.models.auto.modeling_auto")
    names, architectures = auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, registered()
    # Types of newer releases, whose tensors may have other names, are not known by themselves.
    known = [
        model_type
        for model_type, classes in spec_module._MODEL_TYPES.items()
        if len(classes) == 1 and names.get(model_type) in architectures
    ]
    assert len(known) >= 25
    for model_type in known:
        if model_type != "internlm3":  # for which another class is the default
            config = with_architecture(ModelConfig({"model_type": model_type}))
            assert config.architecture() == names[model_type]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": "64"}, "hidden_size is '64', expected an integer"),
        ({"hidden_size": 0}, "hidden_size is 0, expected 1 to"),
        ({"hidden_size": True}, "hidden_size is True"),
        ({"num_hidden_layers": 1 << 20}, "num_hidden_layers is 1048576, expected 1 to 4096"),
        ({"num_key_value_heads": 3}, "not a multiple of num_key_value_heads, 3"),
        ({"hidden_size": 18}, "not a multiple of num_attention_heads"),
        ({"head_dim": 5}, "head_dim is 5; rotary embedding needs an even number"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings is 'yes'"),
        ({"architectures": []}, "architectures is \\[\\]"),
        ({"architectures": ["A", "B"]}, "names several"),
        ({"rope_theta": -1}, "rope_theta is -1"),
        ({"rope_scaling": 5}, "rope_scaling is 5, expected an object"),
        ({"rope_scaling": {"type": "linear"}}, "'factor' is missing"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8}}, "'low_freq_factor' is missing"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "'short_factor' is missing"),
        (
            {
                "rope_scaling": {"type": "su", "long_factor": [1]},
                "original_max_position_embeddings": 32,
            },
            "long_factor is not a list of 2",
        ),
        ({"rope_scaling": {"type": "longrope", "short_factor": [1, 0]}}, "short_factor has 0"),
        (
            {"rope_scaling": {"type": "longrope"}, "original_max_position_embeddings": 1},
            "original_max_position_embeddings is 1, expected 2 or more",
        ),
        # No float has such a value.
        ({"rope_theta": 10**400}, "rope_theta is 1000"),
        ({"rms_norm_eps": 10**400}, "rms_norm_eps is 1000"),
        ({"max_position_embeddings": 10**400}, "max_position_embeddings is 1000"),
        ({"rope_scaling": {"type": "linear", "factor": 10**400}}, "factor is 1000"),
        (
            {"rope_scaling": {"type": "longrope", "short_factor": [10**400, 1]}},
            "short_factor has 1000",
        ),
        ({"partial_rotary_factor": 10**400}, "partial_rotary_factor is 1000"),
    ],
)
def test_bad_values_are_named(changes, message):
    with pytest.raises(ValueError, match=message) as caught:
        fields_of(**changes)
    assert "config.json" in str(caught.value)


def test_a_head_cannot_be_rotated_beyond_its_end():
    neox = {"architectures": ["GPTNeoXForCausalLM"], "rotary_pct": 0.5, "hidden_act": "gelu"}
    fields_of(**neox)
    for factor in (1.5, 1e308):
        message = f"rotary_pct is {re.escape(str(factor))}, expected at most 1"
        with pytest.raises(ValueError, match=message):
            fields_of(**{**neox, "rotary_pct": factor})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_act": "xielu"}, "hidden_act is 'xielu', supported are silu"),
        ({"rope_scaling": {"type": "mrope"}}, "rope_type is 'mrope', supported are default"),
        ({"rope_parameters": {"full_attention": {}}}, "per layer type"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor is 0.5"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
        ({"quantization_config": {"quant_method": "magic"}}, "quant_method is 'magic', supported"),
        (
            {"quantization": {"group_size": 64, "bits": 4}},
            "quantization is {'bits': 4, 'group_size': 64}, which MLX writes: packed integers",
        ),
        (
            {
                "quantization": {"group_size": 64, "bits": 4, "mode": "affine"},
                "quantization_config": {"group_size": 64, "bits": 4, "mode": "affine"},
            },
            "'mode': 'affine'}, which MLX writes",
        ),
        ({"architectures": ["BertModel"]}, "'BertModel' is not supported"),
    ],
)
def test_what_is_not_supported_says_so(changes, message):
    with pytest.raises(NotImplementedError, match=message):
        fields_of(**changes)


@pytest.mark.parametrize("text", ["", "{", "[]", "3", "\udcff", "[" * 100000])
def test_config_that_is_no_json_object(tmp_path, text):
    write_checkpoint(tmp_path)
    (tmp_path / "config.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(ValueError, match="config.json"):
        HuggingFaceModel(str(tmp_path), "m").load_model()


# Rope.

ROPE_CASES = [
    {"rope_type": "default"},
    {"rope_type": "linear", "factor": 3.0},
    {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024},
    {
        "rope_type": "yarn",
        "factor": 2.0,
        "original_max_position_embeddings": 2048,
        "truncate": False,
        "beta_fast": 16.0,
        "attention_factor": 1.5,
    },
]


@pytest.mark.parametrize("theta", [10000.0, 500000.0, 1000000.0, 12345.678])
@pytest.mark.parametrize("head_dim", [16, 64, 80, 128])
@pytest.mark.parametrize("rope", ROPE_CASES, ids=lambda rope: rope["rope_type"])
def test_frequencies_are_those_of_transformers(theta, head_dim, rope):
    pytest.importorskip("torch")
    from allspark.model_loader.rope import compute_rope
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = LlamaConfig(
        hidden_size=4 * head_dim,
        num_attention_heads=4,
        max_position_embeddings=4096,
        rope_parameters={**rope, "rope_theta": theta},
    )
    reference = LlamaRotaryEmbedding(config)
    ours = compute_rope(ModelConfig(config.to_dict()), head_dim, head_dim)
    expected = reference.inv_freq.numpy()
    assert ours.inv_freq.dtype == np.float32
    # The power differs by one rounding at most, and rarely. The steps after it are the same, so
    # they keep that difference of one unit in the last place (or two, if two such values are
    # combined).
    np.testing.assert_allclose(ours.inv_freq, expected, rtol=2 * 2**-23, atol=0)
    assert np.mean(ours.inv_freq != expected) <= 0.05
    assert ours.attention_scaling == pytest.approx(reference.attention_scaling, rel=1e-15)


@pytest.mark.parametrize("rope", ROPE_CASES[1:], ids=lambda rope: rope["rope_type"])
def test_both_places_of_the_rope_parameters(rope):
    from allspark.model_loader.rope import compute_rope

    new = config_with(rope_parameters={**rope, "rope_theta": 5e5})
    del new["rope_theta"]
    old = config_with(rope_theta=5e5, rope_scaling=rope)
    oldest = config_with(
        rope_theta=5e5,
        rope_scaling={"type" if key == "rope_type" else key: x for key, x in rope.items()},
    )
    first, *others = [compute_rope(ModelConfig(config), 16, 16) for config in (new, old, oldest)]
    for other in others:
        np.testing.assert_array_equal(first.inv_freq, other.inv_freq)
        assert first.attention_scaling == other.attention_scaling


# The loader.


def test_chain_to_memory(tmp_path, fake_native):
    engine = FakeEngine()
    loader = HuggingFaceModel(
        str(write_checkpoint(tmp_path)), "org/m", user_set_data_type="float32"
    )
    result = loader.load_model().read_model_config().serialize_to_memory(engine).free_model()
    assert result is loader
    assert set(engine.images) == {"org/m", "org_m"}
    (writer,) = fake_native
    assert writer.graph_path == writer.param_path == ""
    assert writer.spec.architecture == "LlamaForCausalLM" and writer.spec.compute_type == 1
    assert writer.build.options["data_type"] == "float32" and writer.build.version
    with pytest.raises(ModelSerializerException, match="load_model"):
        loader.serialize_to_memory(engine)


def test_chain_to_path(tmp_path, fake_native):
    write_checkpoint(tmp_path / "in")
    (tmp_path / "in" / "tokenizer.json").write_text("{}")
    (tmp_path / "in" / "generation_config.json").write_text('{"eos_token_id": 7}')
    loader = HuggingFaceModel(str(tmp_path / "in"), "org/m").load_model()
    assert loader.serialize_to_path(None, str(tmp_path / "out" / "deep")) is loader
    names = {path.name for path in (tmp_path / "out" / "deep").iterdir()}
    assert names == {
        "org_m.asgraph",
        "org_m.asparam",
        "config.json",
        "generation_config.json",
        "tokenizer.json",
    }
    assert fake_native[0].spec.compute_type == 2  # bfloat16 by default


@pytest.mark.parametrize("trusted", [False, True])
def test_code_is_copied_if_it_is_trusted_and_its_vocabulary_always(tmp_path, fake_native, trusted):
    source, out = write_checkpoint(tmp_path / "in"), tmp_path / "out"
    settings = {"tokenizer_class": "Tok", "auto_map": {"AutoTokenizer": ["tok.Tok", None]}}
    (source / "tokenizer_config.json").write_text(json.dumps(settings))
    for name in ("tok.py", "helpers.py", "own.tiktoken", "own.model", "notes.md"):
        (source / name).write_text(name)
    loader = HuggingFaceModel(str(source), "m", trust_remote_code=trusted).load_model()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loader.serialize_to_path(None, str(out))
    vocabulary = {"config.json", "tokenizer_config.json", "own.tiktoken", "own.model"}
    names = {path.name for path in out.iterdir() if not path.name.startswith("m.as")}
    assert names == vocabulary | ({"tok.py", "helpers.py"} if trusted else set())
    expected = f"{source}: the tokenizer is code, which is copied only with trust_remote_code"
    assert [str(each.message) for each in caught] == ([] if trusted else [expected])


def test_python_files_that_nothing_refers_to_stay(tmp_path, fake_native):
    source, out = write_checkpoint(tmp_path / "in"), tmp_path / "out"
    for name in ("json.py", "own.tiktoken"):
        (source / name).write_text(name)
    loader = HuggingFaceModel(str(source), "m", trust_remote_code=True).load_model()
    loader.serialize_to_path(None, str(out))
    assert {path.name for path in out.iterdir()} == {"config.json", "m.asgraph", "m.asparam"}


def test_named_chat_templates_are_copied(tmp_path, fake_native):
    source, out = write_checkpoint(tmp_path / "in"), tmp_path / "out"
    (source / "additional_chat_templates").mkdir()
    for name in ("chat_template", "additional_chat_templates/tool_use"):
        (source / f"{name}.jinja").write_text(name)
    loader = HuggingFaceModel(str(source), "m").load_model()
    for _ in range(2):  # over what is there, too
        loader.serialize_to_path(None, str(out))
        for name in ("chat_template", "additional_chat_templates/tool_use"):
            assert (out / f"{name}.jinja").read_text() == name
        assert not any(path.suffix == ".tmp" for path in out.rglob("*"))


def test_a_path_of_none_is_refused(tmp_path, fake_native, monkeypatch):
    monkeypatch.chdir(tmp_path)
    loader = HuggingFaceModel(str(write_checkpoint(tmp_path / "in")), "m").load_model()
    with pytest.raises(TypeError, match="^model_output_dir is None; it must be"):
        loader.serialize_to_path(None, None)
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def test_companions_of_another_model_are_kept(tmp_path, fake_native):
    write_checkpoint(tmp_path / "a")
    write_checkpoint(tmp_path / "b", config=config_with(vocab_size=50))
    HuggingFaceModel(str(tmp_path / "a"), "a").load_model().serialize_to_path(None, str(tmp_path))
    loader = HuggingFaceModel(str(tmp_path / "b"), "b").load_model()
    with pytest.raises(ModelSerializerException, match=r"another model \(a.asgraph\)"):
        loader.serialize_to_path(None, str(tmp_path))
    # Those of a checkpoint, too; beside its own a model may lie.
    with pytest.raises(ModelSerializerException, match=r"another model \(model.safetensors\)"):
        loader.serialize_to_path(None, str(tmp_path / "a"))
    loader.serialize_to_path(None, str(tmp_path / "b"))


def test_serialize_chooses_the_target(tmp_path, fake_native):
    write_checkpoint(tmp_path / "in")
    engine = FakeEngine()
    HuggingFaceModel(str(tmp_path / "in"), "m").load_model().serialize(engine)
    HuggingFaceModel(str(tmp_path / "in"), "m").load_model().serialize(engine, str(tmp_path / "o"))
    HuggingFaceModel(str(tmp_path / "in"), "m", True).load_model().serialize(engine, str(tmp_path))
    assert [bool(writer.graph_path) for writer in fake_native] == [False, True, False]


@pytest.mark.parametrize("data_type", ["half", "int8", "BFLOAT16"])
def test_data_types_that_are_refused(tmp_path, data_type):
    expected = f"'{data_type}', expected one of float32, bfloat16, float16"
    with pytest.raises(ValueError, match=expected):
        HuggingFaceModel(str(tmp_path), "m", user_set_data_type=data_type)
    loader = HuggingFaceModel(str(write_checkpoint(tmp_path)), "m")
    with pytest.raises(ValueError, match="expected one of float32, bfloat16"):
        loader.load_model(override_data_type=data_type)


def test_override_data_type(tmp_path, fake_native):
    loader = HuggingFaceModel(str(write_checkpoint(tmp_path)), "m")
    loader.load_model(override_data_type="float32").serialize_to_memory(FakeEngine())
    assert fake_native[0].spec.compute_type == 1


def test_rope_scale_method(tmp_path, fake_native):
    import enum

    class Method(enum.Enum):
        NO_SCALE, YaRN, NTK = 0, 3, 4

    loader = HuggingFaceModel(str(write_checkpoint(tmp_path)), "m").load_model()
    parameters = {"factor": 4.0, "original_max_position_embeddings": 16}
    loader.set_rope_scale_method(Method.YaRN, parameters).serialize_to_memory(FakeEngine())
    assert fake_native[0].spec.rope_attention_scaling == pytest.approx(1.1386294)
    loader.set_rope_scale_method(Method.NO_SCALE).serialize_to_memory(FakeEngine())
    assert fake_native[1].spec.rope_attention_scaling == 1
    with pytest.raises(NotImplementedError, match="NTK, supported are NO_SCALE and YaRN"):
        loader.set_rope_scale_method(Method.NTK, {})


ROPE5 = {"rope_type": "default", "rope_theta": 5e5, "partial_rotary_factor": 0.75}
PHI2 = {"architectures": ["PhiForCausalLM"], "hidden_act": "gelu_new"}


@pytest.mark.parametrize(
    "config",
    [
        {"architectures": ["Phi3ForCausalLM"], "head_dim": 16, "rope_parameters": ROPE5},
        {**PHI2, "head_dim": 20, "rope_parameters": {**ROPE5, "partial_rotary_factor": 0.4}},
        {
            "architectures": ["Gemma3ForCausalLM"],
            "sliding_window": 8,
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 5e5},
                "sliding_attention": {"rope_type": "default", "rope_theta": 7e3},
            },
        },
    ],
    ids=lambda config: config["architectures"][0],
)
def test_base_and_rotated_part_stay_with_another_scaling(tmp_path, config):
    write_checkpoint(tmp_path, {}, config_with(**config))
    loader = HuggingFaceModel(str(tmp_path), "m")

    def described():
        computed = loader._decoder().computed
        return loader.decoder_spec(), {name: values.tolist() for name, values in computed.items()}

    expected = described()
    loader.set_rope_scale_method("NO_SCALE")
    assert described() == expected
    loader.set_rope_scale_method("YaRN", {"factor": 4.0, "attention_factor": 1.0})
    assert described()[0].rotary_dim == expected[0].rotary_dim and described() != expected


def test_scaling_keeps_the_base_of_the_configuration_at_hand(tmp_path):
    """As where another revision is loaded after it was set."""
    loader = HuggingFaceModel(str(write_checkpoint(tmp_path)), "m")
    loader.set_rope_scale_method("YaRN", {"factor": 4.0})
    write_checkpoint(tmp_path, {}, config_with(rope_theta=7e5))
    fresh = HuggingFaceModel(str(tmp_path), "m").set_rope_scale_method("YaRN", {"factor": 4.0})
    computed, expected = (each.read_model_config()._decoder() for each in (loader, fresh))
    assert computed.fields == expected.fields
    for name, values in expected.computed.items():
        np.testing.assert_array_equal(computed.computed[name], values)


@pytest.mark.parametrize("name", ["GPT2LMHeadModel", "BloomForCausalLM", "MptForCausalLM"])
def test_models_without_rope_have_no_scaling(tmp_path, name):
    sizes = {"n_embd": 16, "n_layer": 2, "n_head": 4} if name.startswith("GPT2") else CONFIG
    fields = {"d_model": 16, "n_layers": 2, "n_heads": 4, "n_positions": 64, "vocab_size": 40}
    write_checkpoint(tmp_path, {}, {**sizes, **fields, "architectures": [name]})
    loader = HuggingFaceModel(str(tmp_path), "m")
    spec = loader.decoder_spec()
    with pytest.raises(UnsupportedModelError, match=f"config.json: {name} has no rotary emb"):
        loader.set_rope_scale_method("YaRN", {"factor": 4.0})
    assert loader.read_model_config().decoder_spec() == spec
    assert loader.set_rope_scale_method("NO_SCALE").decoder_spec() == spec


def test_loading_reads_no_weights(tmp_path, monkeypatch):
    from allspark.model_loader.storage import MappedFile

    def fail(self):
        raise AssertionError("weights were read")

    monkeypatch.setattr(MappedFile, "map", fail)
    HuggingFaceModel(str(write_checkpoint(tmp_path)), "m").load_model().read_model_config()


def test_load_format_and_arguments_without_meaning(tmp_path):
    loader = HuggingFaceModel(str(write_checkpoint(tmp_path)), "m")
    with pytest.raises(CheckpointNotFoundError, match="pytorch_model.bin"):
        loader.load_model(load_format=LoadFormat.PT)
    with pytest.raises(ValueError, match="gguf"):
        loader.load_model(load_format="gguf")
    with pytest.warns(UserWarning, match="ignores low_cpu_mem_usage"):
        loader.load_model(low_cpu_mem_usage=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loader.load_model(direct_load=True, load_format="safetensors")


def test_names(tmp_path):
    for bad in ("", None, 3):
        with pytest.raises(ValueError, match="pretrain_model_name"):
            HuggingFaceModel(str(tmp_path), bad)


def test_directories_that_are_none(tmp_path, monkeypatch):
    file = tmp_path / "file"
    file.write_text("")
    (tmp_path / "model.pt").write_text("")
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    for path, message in {
        str(file): "not a directory",
        str(tmp_path / "model.pt"): "model.pt: weights without the configuration",
        str(loop): "leads nowhere",
        str(tmp_path / "gone"): "no such directory",
        "./gone": "no such directory",
        "a/b/c": "no such directory",
    }.items():
        with pytest.raises(FileNotFoundError, match=message):
            HuggingFaceModel(path, "m").load_model()
    with pytest.raises(FileNotFoundError, match="config.json"):
        HuggingFaceModel(str(tmp_path), "m").load_model()


def test_git_lfs_pointers(tmp_path):
    """Instead of files other than weights."""
    pointer = "version https://git-lfs.example/spec/v1\noid sha256:4d7a\nsize 77\n"
    write_checkpoint(tmp_path)
    (tmp_path / "tokenizer.json").write_text(pointer)
    loader = HuggingFaceModel(str(tmp_path), "m").load_model()
    message = "{}: a Git LFS pointer to the file of 77 bytes, not the file itself"
    with pytest.raises(CheckpointError, match=message.format("tokenizer.json")):
        loader.get_tokenizer()
    (tmp_path / "config.json").write_text(pointer)
    with pytest.raises(CheckpointError, match=message.format("config.json")):
        HuggingFaceModel(str(tmp_path), "m").load_model()
    (tmp_path / "m.gguf").write_text(pointer)
    with pytest.raises(CheckpointError, match=message.format("m.gguf")):
        HuggingFaceModel(str(tmp_path / "m.gguf"), "m").load_model()


def test_a_name_is_downloaded(tmp_path, monkeypatch):
    import huggingface_hub

    write_checkpoint(tmp_path)
    asked = []

    def download(name, revision, allow_patterns, cache_dir):
        asked.append((name, revision, tuple(allow_patterns)))
        assert cache_dir is None
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    HuggingFaceModel("org/model", "m").load_model(revision="main")
    ((name, revision, patterns),) = asked
    assert (name, revision) == ("org/model", "main") and "*.safetensors" in patterns

    # Another revision is another directory, also once something was read.
    asked.clear()
    loader = HuggingFaceModel("org/model", "m").read_model_config()
    loader.load_model(revision="v2").load_model(revision="v2").load_model()
    assert [revision for _, revision, _ in asked] == [None, "v2"]
    loader._tokenizer = object()
    loader.load_model(revision="v3")
    assert loader._tokenizer is None

    def offline(*args, **kwargs):
        raise ConnectionError("no network")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    with pytest.raises(CheckpointNotFoundError, match="org/model.*huggingface_hub.*no network"):
        HuggingFaceModel("org/model", "m").load_model()


def test_modelscope_without_its_package(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "modelscope", None)
    with pytest.raises(ModelSerializerException, match="needs the package 'modelscope'"):
        ModelScopeModel("org/model", "m").load_model()
    ModelScopeModel(str(write_checkpoint(tmp_path)), "m").load_model()


def test_generation_defaults(tmp_path):
    write_checkpoint(tmp_path, config=config_with(eos_token_id=2, bos_token_id=1))
    loader = HuggingFaceModel(str(tmp_path), "m")
    expected = {"eos_token_id": 2, "bos_token_id": 1, "do_sample": False}
    assert loader.get_generation_config() == expected
    fields = {"eos_token_id": [2, 3], "do_sample": True, "top_p": 0.8}
    (tmp_path / "generation_config.json").write_text(json.dumps(fields))
    assert loader.get_generation_config() == {**fields, "bos_token_id": 1}
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(ValueError, match="generation_config.json"):
        loader.get_generation_config()


def test_model_config_is_a_copy(tmp_path):
    loader = HuggingFaceModel(str(write_checkpoint(tmp_path)), "m").load_model()
    loader.get_model_config()["architectures"].append("changed")
    assert loader.get_model_config()["architectures"] == ["LlamaForCausalLM"]
    assert loader.get_model_context_length() == 64


# Tokenizers.


def test_sentencepiece_tokenizer():
    data = shared_data() / "checkpoints" / "stories260K"
    reference = json.loads((data / "reference.json").read_text())
    loader = HuggingFaceModel(str(data), "stories")
    tokenizer = loader.get_tokenizer()
    assert tokenizer.encode(reference["prompt"]) == reference["prompt_ids"]
    assert tokenizer is loader.get_tokenizer() and tokenizer.padding_side == "left"
    assert loader.init_tokenizer("right").get_tokenizer().padding_side == "right"


@pytest.mark.parametrize(
    ("name", "texts"),
    [
        ("sentencepiece", ["What is it?", "two  spaces ", "été 2024。", "a\n\n\tb", "☃ {x}", ""]),
        ("characters", ["What is it?", "two  spaces ", "été 2024。", "(x): [a]"]),
    ],
)
def test_sentencepiece_tokenizers_give_sentencepiece_s_tokens(name, texts):
    sentencepiece = pytest.importorskip("sentencepiece")
    directory = tokenizer_directory(name)
    model = sentencepiece.SentencePieceProcessor(str(directory / "tokenizer.model"))
    tokenizer = HuggingFaceModel(str(directory), "m").get_tokenizer()
    assert len(tokenizer) == model.vocab_size() and tokenizer.eos_token_id == model.eos_id()
    for text in texts:
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert ids == model.encode(text)
        assert tokenizer.decode(ids) == text


@pytest.mark.parametrize(
    ("name", "text", "ids"),
    [
        ("byte_level", "a request's tokens<|im_end|>", [64, 302, 752, 341, 802]),
        ("qwen2.5", "hello world<|im_end|>", [14990, 1879, 151645]),
    ],
)
def test_tokenizer_json_and_chat_template(name, text, ids):
    tokenizer = HuggingFaceModel(str(tokenizer_directory(name)), "m").get_tokenizer()
    assert tokenizer.encode(text) == ids and tokenizer.decode(ids) == text
    messages = [{"role": "user", "content": "hi"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text.endswith("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")


@pytest.mark.parametrize(
    "names", [("byte_level", "unigram", "sentencepiece"), ("qwen2.5", "stories260K")]
)
def test_tokenizers_do_not_import_torch(names):
    program = (
        "import sys\n"
        "from allspark.model_loader import HuggingFaceModel\n"
        "heavy = {'torch', 'transformers', 'google.protobuf', 'tokenizers'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
        "for path in sys.argv[1:]: HuggingFaceModel(path, 'm').get_tokenizer().encode('a')\n"
        "assert 'torch' not in sys.modules\n"
    )
    command = [sys.executable, "-c", program, *(str(tokenizer_directory(name)) for name in names)]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_tokenizer_errors(tmp_path):
    loader = HuggingFaceModel(str(write_checkpoint(tmp_path)), "m")
    with pytest.raises(CheckpointNotFoundError, match="holds no tokenizer"):
        loader.get_tokenizer()
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelSerializerException, match="cannot be loaded"):
        loader.get_tokenizer()
    with pytest.raises(ValueError, match="padding_side"):
        loader.init_tokenizer("middle")


def test_code_in_a_checkpoint_is_not_run(tmp_path):
    write_checkpoint(tmp_path, config=config_with(auto_map={"AutoConfig": "evil.Config"}))
    settings = {"tokenizer_class": "Evil", "auto_map": {"AutoTokenizer": ["evil.Tok", None]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Tok: pass\n")
    program = (
        "import sys\n"
        "from allspark.model_loader import HuggingFaceModel, ModelSerializerException\n"
        "try:\n"
        "    HuggingFaceModel(sys.argv[1], 'm').load_model().get_tokenizer()\n"
        "except ModelSerializerException as error:\n"
        "    print(error)\n"
    )
    # Somebody, or a pipe, that says yes to every question.
    command = [sys.executable, "-c", program, str(tmp_path)]
    result = subprocess.run(command, input="y\n" * 9, capture_output=True, text=True)
    assert "trust_remote_code" in result.stdout, result.stderr
    assert "[y/N]" not in result.stdout
    assert not (tmp_path / "ran").exists()


def test_unsupported_is_also_a_serializer_exception():
    with pytest.raises(ModelSerializerException) as caught:
        find_architecture("X")
    assert isinstance(caught.value, UnsupportedModelError)
    error = ModelSerializerException("why", 3, "name")
    assert (error.message, error.code, error.model_name) == ("why", 3, "name")
    assert str(error) == "name: why" and issubclass(ConfigFieldMissingError, KeyError)
