"""Families whose checkpoints have other names, orders and configurations: quantised, with adapters,
and what is refused. test_architectures.py tests that they compute the right results.
"""

from __future__ import annotations

import json
import re
import warnings
from pathlib import Path

import numpy as np
import pytest
from support import families, parity
from support.checkpoints import safetensors_bytes
from support.lora import PREFIX, write_adapter

torch = pytest.importorskip("torch")
pytest.importorskip("allspark._allspark")

from allspark.engine import Engine, TargetDevice  # noqa: E402
from allspark.model_loader import HuggingFaceModel, LoraAdapter  # noqa: E402
from allspark.model_loader.config import ModelConfig  # noqa: E402
from allspark.model_loader.convert import describe_decoder  # noqa: E402
from allspark.model_loader.errors import (  # noqa: E402
    ConfigFieldMissingError,
    UnexplainedTensorError,
    UnsupportedModelError,
)
from safetensors.numpy import load  # noqa: E402
from support.int8 import int8_model  # noqa: E402
from test_architectures import NAME, ROWS, build, forward, prompt_ids, save  # noqa: E402
from test_lora import Served  # noqa: E402
from test_model_forms import FAMILIES, matrices  # noqa: E402

SAME_WEIGHTS = [
    "internlm", "internlm2-bias", "internlm3", "baichuan", "qwen1", "chatglm3", "chatglm2-32k",
]  # fmt: skip
QUANTIZED = {
    "float32": {},
    "int8": {"enable_quant": True},
    # The inner size of the rows is not a multiple of 8.
    "int4": {
        "enable_quant": True,
        "customized_quant_config": {
            "weight_format": "int4",
            "modules_to_not_convert": [r"\.down$"],
        },
    },
}


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


def logits_of(directory, quantization):
    loader = HuggingFaceModel(str(directory), NAME, user_set_data_type="float32").load_model()
    loader.serialize_to_memory(Engine(), **QUANTIZED[quantization])
    return forward(loader, prompt_ids())


@pytest.mark.parametrize("quantization", QUANTIZED)
@pytest.mark.parametrize("row", SAME_WEIGHTS)
def test_a_family_is_its_transformers_twin_bit_for_bit(tmp_path, row, quantization):
    model = build(row)
    model.save_pretrained(tmp_path / "twin")
    ours = logits_of(save(model, tmp_path / "family"), quantization)
    np.testing.assert_array_equal(ours, logits_of(tmp_path / "twin", quantization))


# Without those whose head is computed from the checkpoint's.
@pytest.mark.parametrize("row", sorted(set(FAMILIES) - {"baichuan2", "baichuan-13b"}))
def test_float16_has_the_bits_of_float32_in_half_the_memory(tmp_path, row):
    directory = save(build(row).to(torch.float16), tmp_path)
    results, sizes = [], []
    for data_type in ("float32", "float16"):
        loader = HuggingFaceModel(directory, NAME, user_set_data_type=data_type).load_model()
        loader.serialize_to_path(Engine(), str(tmp_path / data_type))
        (file,) = (tmp_path / data_type).glob("*.asparam")
        sizes.append(file.stat().st_size)
        loader.serialize_to_memory(Engine())
        results.append(forward(loader, prompt_ids()))
    np.testing.assert_array_equal(*results)
    assert sizes[1] < 0.7 * sizes[0]  # norms and biases stay


def test_an_adapter_over_float16_has_the_bits_of_one_over_float32(tmp_path):
    directory = save(build("internlm2-bias").to(torch.float16), tmp_path / "base")
    rng = np.random.default_rng(4)
    pair = {"lora_A": (4, 64), "lora_B": (64, 4)}
    tensors = {
        f"{PREFIX}model.layers.0.attention.wo.{part}.weight": rng.standard_normal(
            shape, np.float32
        )
        for part, shape in pair.items()
    }
    write_adapter(tmp_path / "lora", tensors, target_modules=["wo"])
    results = []
    for data_type in ("float32", "float16"):
        served = Served(Path(directory), data_type)
        plain = served.logits(prompt_ids())
        served.load("a", LoraAdapter(tmp_path / "lora", served.loader))
        results.append(served.logits(prompt_ids(), "a"))
        assert not np.array_equal(plain, results[-1])
    np.testing.assert_array_equal(*results)


@pytest.mark.parametrize("data_type", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "row", ["gemma3", "granite", "olmo2", "starcoder2", "phi2", "gpt-neox", "gpt2", "bloom"]
)
def test_int8_activations_where_norms_and_scales_are_elsewhere(tmp_path, row, data_type):
    """They change logits as int8 products in float64 do, and nothing else changes: `costs` is the
    length of that change. A row's bits still depend only on its own tokens.
    """
    model = build(row).to(getattr(torch, data_type))
    loader = HuggingFaceModel(save(model, tmp_path), NAME, user_set_data_type=data_type)
    loader.load_model().serialize_to_memory(Engine(), enable_quant=True)
    ids = prompt_ids()
    ours = forward(loader, ids)
    np.testing.assert_array_equal(forward(loader, ids, (7,)), ours)
    exact = parity.logits_of(parity.exact_model(model), ids)
    quantized = parity.logits_of(int8_model(model), ids)
    costs = np.linalg.norm(quantized - exact)
    if data_type == "float32":
        # The integers are those of float64, except where rounding in float32 (a hundred-thousandth
        # of a step) moves an activation past the middle between two integers. Such a step is 1 /
        # 0.29 of the errors that each of a product's 64 inputs has anyway (a uniform error's
        # deviation is 0.29 steps), 0.43 of them together. A row has some 16 such sums of errors, of
        # weights and activations, so it moves by a tenth of its part of `costs`. A tenth of the
        # whole means one such step in every row (found: none). Any other mistake in a scale or a
        # rounding gives all errors new values, and the difference is about `costs` itself.
        assert np.linalg.norm(ours - quantized) <= 0.1 * costs
    else:
        # bfloat16 rounds activations by up to a quarter of a step, which gives many of the errors
        # new values of the same size. Its own errors are at most transformers' (support/parity.py).
        rounding = np.linalg.norm(parity.logits_of(model, ids) - exact)
        assert np.linalg.norm(ours - exact) <= costs + rounding


@pytest.mark.parametrize("row", ["llama-tied", "gemma", "gpt2-hub"])
def test_a_head_of_other_values_is_used_where_the_configuration_ties_it(tmp_path, row):
    """As transformers does since version 5: fine-tunes that were merged have such heads."""
    model = build(row)
    directory = Path(save(model, tmp_path))
    tensors = load((directory / "model.safetensors").read_bytes())
    (embedding,) = (tensors[name] for name in tensors if "embed_tokens" in name or "wte" in name)
    head = embedding.copy()
    path = directory / "model.safetensors"

    def opened():
        path.write_bytes(safetensors_bytes({**tensors, "lm_head.weight": head}))
        return HuggingFaceModel(str(directory), NAME, user_set_data_type="float32").load_model()

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert opened().decoder_spec().tie_embeddings
    head[-1] *= 2
    with pytest.warns(
        UserWarning, match="'lm_head.weight' differs from .*: it is used as the head"
    ):
        loader = opened()
    assert loader.get_model_config()["tie_word_embeddings"] is False
    loader.set_rope_scale_method("NO_SCALE").serialize_to_memory(Engine())
    theirs = type(model).from_pretrained(directory, attn_implementation="eager").eval()
    assert theirs.lm_head.weight is not theirs.get_input_embeddings().weight
    ids = prompt_ids()
    parity.reference_for(theirs, ids, parity.FLOAT32_FACTOR).check(forward(loader, ids))


@pytest.mark.parametrize("row", FAMILIES)
def test_an_adapter_is_what_it_would_be_merged(tmp_path, row):
    """Tests every matrix of the layers, by the family's own names."""
    model = build(row)
    directory = Path(save(model, tmp_path / "base"))
    tensors = load((directory / "model.safetensors").read_bytes())
    rng = np.random.default_rng(4)
    adapter, merged = {}, dict(tensors)
    for name, weight in sorted(tensors.items()):  # The order in a file is arbitrary.
        module = name.removesuffix(".weight")
        without = ".experts." in name or "kv_b_proj" in name
        if weight.ndim != 2 or name not in matrices(tensors) or without:
            continue  # Not part of a layer, or takes no adapters.
        if row == "gpt2-hub":
            module = f"transformer.{module}"  # the model's own name
        rows, cols = weight.shape[::-1] if row.startswith("gpt2") else weight.shape
        a = rng.standard_normal((4, cols), np.float32) / np.sqrt(cols)
        b = rng.standard_normal((rows, 4), np.float32) * 0.25
        adapter[f"{PREFIX}{module}.lora_A.weight"] = a.astype(np.float32)
        adapter[f"{PREFIX}{module}.lora_B.weight"] = b
        added = 2 * b.astype(np.float64) @ a
        merged[name] = (weight + (added.T if row.startswith("gpt2") else added)).astype(np.float32)
    modules = {key.split(".lora_")[0].rsplit(".", 1)[-1] for key in adapter}
    write_adapter(tmp_path / "lora", adapter, target_modules=sorted(modules))
    (tmp_path / "merged").mkdir()
    (tmp_path / "merged" / "config.json").write_text((directory / "config.json").read_text())
    (tmp_path / "merged" / "model.safetensors").write_bytes(safetensors_bytes(merged))

    served = Served(directory)
    served.load("a", LoraAdapter(tmp_path / "lora", served.loader))
    expected = logits_of(tmp_path / "merged", "float32")
    error = np.abs(served.logits(prompt_ids(), "a") - expected).max()
    # How much one step of every merged weight changes in this very network: as much as one rounding
    # of every product. A sum of k products is rounded k times, which adds up to sqrt(k) of that,
    # and k is at most 64 here.
    for name in sorted(merged):
        towards = rng.choice([-np.inf, np.inf], merged[name].shape).astype(np.float32)
        merged[name] = np.nextafter(merged[name], towards)
    (tmp_path / "merged" / "model.safetensors").write_bytes(safetensors_bytes(merged))
    step = np.abs(logits_of(tmp_path / "merged", "float32") - expected).max()
    assert error <= 8 * step


def test_experts_without_rows_are_refused_by_name(tmp_path):
    path = Path(save(build("dbrx"), tmp_path)) / "model.safetensors"
    tensors, name = dict(load(path.read_bytes())), "transformer.blocks.1.ffn.experts.mlp.w1"
    tensors[name] = tensors[name][:0]
    path.write_bytes(safetensors_bytes(tensors))
    loader = HuggingFaceModel(str(tmp_path), NAME).load_model()
    with pytest.raises(UnexplainedTensorError, match=f"no rule explains .*'{name}'"):
        loader.serialize_to_memory(Engine())


def test_a_computed_head_takes_no_adapter(tmp_path):
    save(build("baichuan2"), tmp_path)
    base = HuggingFaceModel(str(tmp_path), NAME).load_model()
    pair = {"lora_A": (4, 64), "lora_B": (101, 4)}
    tensors = {f"{PREFIX}lm_head.{k}.weight": np.ones(s, np.float32) for k, s in pair.items()}
    write_adapter(tmp_path / "lora", tensors, target_modules=["lm_head"])
    with pytest.raises(UnexplainedTensorError, match="no matrix 'lm_head'"):
        LoraAdapter(tmp_path / "lora", base)


def test_the_context_is_what_the_family_calls_it(tmp_path):
    save(build("qwen1"), tmp_path)
    loader = HuggingFaceModel(str(tmp_path), NAME).load_model()
    assert loader.get_model_context_length() == 256  # seq_length
    assert loader.get_model_config()["max_position_embeddings"] == 1024


def fields_of(family, **changes):
    """The fields for a row's configuration with ``changes``; None removes a field."""
    model = build(family)
    config = {**model.config.to_dict(), "architectures": [type(model).__name__]}
    if model.family is not None:
        config, _ = model.family(config, dict(model.state_dict()))
    config = json.loads(json.dumps({**config, **changes}))
    return describe_decoder(ModelConfig(config)).fields


# Sizes of tensors: a wrong one is refused. DBRX's base of frequencies is in attn_config.
SHOWN = {
    "first_k_dense_replace", "head_dim", "layer_types", "n_positions", "n_routed_experts",
    "n_shared_experts", "num_key_value_heads", "num_kv_heads", "q_lora_rank",
}  # fmt: skip


@pytest.mark.parametrize("row", [row for row in FAMILIES if len(ROWS[row]) == 2])
def test_a_field_that_is_left_out_has_the_value_of_transformers_class(row):
    model = build(row)
    config = {**model.config.to_dict(), "architectures": [type(model).__name__]}
    defaults = type(model.config)().to_dict()

    def described(fields):
        found = describe_decoder(ModelConfig(json.loads(json.dumps(fields))))
        return {**found.fields, **{name: list(rope) for name, rope in found.computed.items()}}

    for name in config.keys() & defaults.keys() - SHOWN - {"model_type"}:
        if (row, name) == ("dbrx", "rope_parameters"):
            continue
        without = {key: value for key, value in config.items() if key != name}
        try:
            found = described(without)
        except ConfigFieldMissingError:
            continue
        assert found == described({**config, name: defaults[name]}), name


@pytest.mark.parametrize("end", [0, 3, 28])
def test_layers_of_qwen2_moe_have_the_windows_of_transformers_class(end):
    fields = {"num_hidden_layers": 5, "use_sliding_window": True, "sliding_window": 11}
    fields["max_window_layers"] = end
    types = pytest.importorskip("transformers").Qwen2MoeConfig(**fields).layer_types
    assert ("sliding_attention" in types) == (end > 0)
    windows = fields_of("qwen2-moe", layer_types=None, **fields)["layer_window"]
    expected = [11 if kind == "sliding_attention" else 0 for kind in types]
    assert windows == (expected if any(expected) else [])
    assert fields_of("qwen2-moe", **fields, layer_types=types)["layer_window"] == windows


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "inverse_layer_idx is True"),
        ("gpt2", {"add_cross_attention": True}, "add_cross_attention is True, supported: False"),
        ("gpt2", {"activation_function": "quick_gelu"}, "hidden_act is 'quick_gelu', supported"),
        ("phi2", {"qk_layernorm": True}, "qk_layernorm is True, supported: False"),
        ("falcon-40b", {"parallel_attn": False}, "parallel_attn is False, supported: True"),
        ("dbrx", {"ffn_config": {"moe_normalize_expert_weights": 2}}, "ffn_config: moe_normalize"),
        ("deepseek-v2", {"attention_bias": True}, "attention_bias is True, supported: False"),
        ("deepseek-v2", {"topk_method": "noaux_tc"}, "topk_method is 'noaux_tc'"),
        ("deepseek-v2", {"kv_lora_rank": 100}, "kv_lora_rank is 100, supported: mult"),
        ("deepseek-v2", {"v_head_dim": 100}, "v_head_dim is 100, supported: mult"),
        ("deepseek-v3", {"scoring_func": "softmax"}, "scoring_func is 'softmax'"),
        (
            "bloom",
            {"apply_residual_connection_post_layernorm": True},
            "apply_residual_connection_post_layernorm is True",
        ),
        ("qwen1", {"rotary_pct": 0.5}, "rotary_pct is 0.5, supported: 1.0"),
        ("qwen1", {"scale_attn_weights": False}, "scale_attn_weights is False, supported: True"),
        ("internlm", {"rotary": {"type": "linear"}}, "rotary: type is 'linear', supported: origin"),
        ("internlm2", {"rope_scaling": {"type": "xpos"}}, "rope_type is 'xpos'"),
        ("chatglm3", {"position_encoding_2d": True}, "position_encoding_2d is True"),
        ("chatglm3", {"rmsnorm": False}, "rmsnorm is False, supported: True"),
        ("chatglm3", {"pre_seq_len": 128}, "pre_seq_len is 128, supported: 0"),
        ("chatglm3", {"post_layer_norm": False}, "post_layer_norm is False"),
        ("gemma3-1b", {"use_bidirectional_attention": True}, "use_bidirectional_attention is True"),
        (
            "gemma3-1b",
            {"rope_scaling": None, "rope_parameters": {"full_attention": YARN}},
            "different attention factors",
        ),
    ],
)
def test_what_is_refused_is_named(family, changes, message):
    with pytest.raises(UnsupportedModelError, match=message):
        fields_of(family, **changes)


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("mpt", {"attn_config": {"clip_qkv": "6"}}, "attn_config: clip_qkv is '6'"),
        ("dbrx", {"attn_config": {"clip_qkv": -1}}, "attn_config: clip_qkv is -1"),
        ("deepseek-v2", {"qk_nope_head_dim": 0}, "qk_nope_head_dim is 0"),
        ("qwen1", {"kv_channels": 0}, "kv_channels is 0"),
        ("qwen1", {"seq_length": "long"}, "seq_length is 'long', expected an integer"),
        ("qwen1", {"intermediate_size": 7}, "intermediate_size is 7, which is odd"),
        ("chatglm3", {"multi_query_group_num": 3}, "multiple of multi_query_group_num, 3"),
        ("chatglm3", {"num_layers": None}, "the field 'num_layers' is missing"),
    ],
)
def test_bad_values_are_named_as_the_family_names_them(family, changes, message):
    with pytest.raises(ValueError, match=message):
        fields_of(family, **changes)


def test_groups_count_only_where_there_are_some():
    assert fields_of("chatglm3")["num_kv_heads"] == 2
    assert fields_of("chatglm3", multi_query_attention=False)["num_kv_heads"] == 4
    assert fields_of("qwen1", no_bias=False)["mlp_bias"]


def test_baichuan_13b_has_alibi_and_the_first_of_them_a_plain_head():
    fields = fields_of("baichuan2", hidden_size=5120, num_attention_heads=40, vocab_size=64000)
    assert fields["architecture"] == "BaiChuanForCausalLM"
    assert fields["alibi"] and fields["rotary_dim"] == 0
    fields = fields_of("baichuan-13b", vocab_size=125696)
    assert fields["architecture"] == "BaichuanForCausalLM"
    assert fields["alibi"] and fields["max_position"] == 256
    assert "alibi" not in fields_of("baichuan2")


@pytest.mark.parametrize("heads", [1, 6, 8, 12, 40, 71, 112])
def test_slopes_are_transformers(heads):
    from allspark.model_loader.architectures.alibi import alibi_slopes
    from transformers.models.bloom.modeling_bloom import _get_alibi_slopes

    theirs = _get_alibi_slopes(heads, "cpu").numpy()
    # They take powers of a rounded number, which multiplies its rounding by the exponent.
    np.testing.assert_allclose(alibi_slopes(heads), theirs, rtol=2 * heads * 2.0**-24)


def test_positions_beyond_those_that_were_learned_are_refused(tmp_path):
    loader = HuggingFaceModel(save(build("gpt2"), tmp_path), NAME).load_model()
    engine = Engine()
    loader.serialize_to_memory(engine)
    config = loader.create_reference_runtime_config_builder(NAME, TargetDevice.CPU, [0], 2)
    status = engine.install_model(config.max_length(257).build())
    assert int(status) != 0
    assert "257; the model has embeddings of 256 positions" in engine.last_error()


@pytest.mark.parametrize("row", ["gpt2", "gpt2-hub"])
def test_gpt2_whose_matrices_lie_as_those_of_linear_layers(tmp_path, row):
    directory = Path(save(build(row), tmp_path / "hf"))

    def serialized(out):
        loader = HuggingFaceModel(str(directory), NAME, user_set_data_type="float32").load_model()
        loader.serialize_to_path(None, str(tmp_path / out))
        return (tmp_path / out / f"{NAME}.asparam").read_bytes()

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        expected = serialized("a")
    path = directory / "model.safetensors"
    tensors = load(path.read_bytes())
    matrices = [name for name in tensors if name.endswith(("c_attn.weight", "c_proj.weight"))]
    turned = dict(tensors) | {name: tensors[name].T.copy() for name in matrices}
    path.write_bytes(safetensors_bytes(turned))
    # Only some matrices are transposed, which is not a known layout.
    with pytest.raises(UnexplainedTensorError, match="c_attn.weight' has shape .192, 64., which"):
        serialized("b")
    fc = [name for name in tensors if name.endswith("c_fc.weight")]
    path.write_bytes(safetensors_bytes(turned | {name: tensors[name].T.copy() for name in fc}))
    with pytest.warns(UserWarning, match=r"weight' is \[\d+, 64\], the transpose"):
        assert serialized("c") == expected


def test_position_embeddings_are_neither_quantised_nor_adapted(tmp_path):
    base = HuggingFaceModel(save(build("gpt2"), tmp_path), NAME).load_model()
    base.serialize_to_memory(Engine(), enable_quant=True)
    pair = {"lora_embedding_A": (4, 256), "lora_embedding_B": (64, 4)}
    tensors = {
        f"{PREFIX}transformer.wpe.{key}": np.ones(shape, np.float32) for key, shape in pair.items()
    }
    write_adapter(tmp_path / "lora", tensors, target_modules=["wpe"])
    with pytest.raises(UnexplainedTensorError, match="no matrix 'transformer.wpe'"):
        LoraAdapter(tmp_path / "lora", base)


def test_every_family_is_in_the_guide(repo_root):
    from allspark.model_loader.spec import registered

    guide = (repo_root / "docs" / "models.md").read_text()
    assert [name for name in registered() if f"`{name}`" not in guide] == []


def compared_with():
    """{architecture: programs that compute the same from checkpoints not made by this project}."""
    import test_fast_llm
    import test_llama_cpp

    held = {}
    for row, (_, _, *family) in ROWS.items():
        model = build(row)
        config = {"architectures": [type(model).__name__]}
        if family:
            config, _ = family[0](model.config.to_dict(), dict(model.state_dict()))
        who = held.setdefault(config["architectures"][0], set())
        # The others are saved with names that this project chose.
        if not family or family[0] in (families.gemma3, families.stacked, families.without_head):
            who.add("transformers")
        if row in test_llama_cpp.ROWS:
            who.add("llama.cpp")
        if row in (*test_fast_llm.ROWS, *test_fast_llm.HEADS):
            who.add("FastLLM")
    return held


def test_the_guide_says_what_each_family_is_compared_with(repo_root):
    held = compared_with()
    guide = (repo_root / "docs" / "models.md").read_text()
    head = "| family | `architectures` in `config.json` | compared with | remarks |\n"
    lines = guide.partition(head)[2].partition("\n\n")[0].splitlines()[1:]
    found = set()
    for line in lines:
        _, cell, said, _ = (cell.strip() for cell in line.strip("|").split("|"))
        names = set(re.findall(r"`(\w+)`", cell))
        who = set().union(*(held.get(name, set()) for name in names))
        assert set(said.split(", ")) == (who or {"own twin"}), line
        found |= names
    assert found >= held.keys()


def test_the_guide_adds_a_model_as_it_says(tmp_path, repo_root, monkeypatch):
    """The declaration of docs/models.md, run unchanged, reads such a checkpoint."""
    from allspark.model_loader import spec

    registry = dict(spec._REGISTRY)
    monkeypatch.setattr(spec, "_REGISTRY", registry)
    guide = (repo_root / "docs" / "models.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", guide, re.S)
    exec(code, {})
    assert "NimbusForCausalLM" in registry

    model = build("granite-tied")
    model.config.embedding_multiplier = 2.5
    twin = {"attention_multiplier": 0.25, "logits_scaling": 1.0, "residual_multiplier": 1.0}
    for name, value in twin.items():
        setattr(model.config, name, value)
    model.save_pretrained(tmp_path / "twin")
    config = json.loads((tmp_path / "twin" / "config.json").read_text())
    config.update(architectures=["NimbusForCausalLM"], embed_scale=2.5, n_layers=2)
    del config["num_hidden_layers"]
    tensors = load((tmp_path / "twin" / "model.safetensors").read_bytes())
    for i in range(2):
        attention = f"model.layers.{i}.self_attn."
        parts = [tensors.pop(f"{attention}{name}_proj.weight") for name in "qkv"]
        tensors[f"{attention}qkv_proj.weight"] = np.concatenate(parts)
        tensors[f"{attention}dense.weight"] = tensors.pop(f"{attention}o_proj.weight")
    (tmp_path / "nimbus").mkdir()
    (tmp_path / "nimbus" / "config.json").write_text(json.dumps(config))
    (tmp_path / "nimbus" / "model.safetensors").write_bytes(safetensors_bytes(tensors))
    ours, twin = (logits_of(tmp_path / name, "float32") for name in ("nimbus", "twin"))
    np.testing.assert_array_equal(ours, twin)


@pytest.mark.filterwarnings("ignore:.*weights are float8")
def test_deepseek_v3_as_it_is_published(tmp_path):
    """In FP8, with the multi-token prediction layer: the same as its float values without that."""
    model = build("deepseek-v3")
    directory = Path(save(model, tmp_path / "base"))
    config = json.loads((directory / "config.json").read_text())
    plain = dict(load((directory / "model.safetensors").read_bytes()))
    published = dict(plain)
    rng = np.random.default_rng(3)
    for name in sorted(matrices(plain)):
        codes = rng.integers(0, 120, plain[name].shape, np.uint8)
        scale = np.float32(2.0**-12)
        values = torch.from_numpy(codes).view(torch.float8_e4m3fn).float().numpy()
        plain[name] = values * scale
        published[name] = codes
        published[f"{name}_scale_inv"] = np.full((1, 1), scale)
    published["model.layers.61.eh_proj.weight"] = np.zeros((4, 4), np.float32)
    settings = {"quant_method": "fp8", "weight_block_size": [512, 512]}
    images = []
    for name, tensors, more in (
        ("plain", plain, {}),
        ("published", published, {"quantization_config": settings}),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps({**config, **more}))
        (tmp_path / name / "model.safetensors").write_bytes(safetensors_bytes(tensors))
        images.append(logits_of(tmp_path / name, "float32"))
    np.testing.assert_array_equal(*images)
