"""PEFT adapters: which are read, what is written for them, and which are refused."""

from __future__ import annotations

import json
import warnings

import numpy as np
import pytest
from support.checkpoints import (
    CONFIG,
    llama_tensors,
    safetensors_bytes,
    shared_data,
    write_checkpoint,
)
from support.lora import (
    ATTENTION,
    LINEAR,
    PREFIX,
    adapter_tensors,
    base_shapes,
    deltas,
    modules_named,
    read_aslora,
    write_adapter,
)

pytest.importorskip("allspark._allspark")

from allspark.model_loader import DashInferModel, HuggingFaceModel, LoraAdapter
from allspark.model_loader.config import ModelConfig
from allspark.model_loader.convert import describe_decoder
from allspark.model_loader.errors import (
    ConfigError,
    ConfigFieldMissingError,
    UnexplainedTensorError,
)

Q0 = "model.layers.0.self_attn.q_proj"
EMBED, HEAD = "model.embed_tokens", "lm_head"


@pytest.fixture
def base(tmp_path):
    return HuggingFaceModel(str(write_checkpoint(tmp_path / "base")), "m", False, "float32")


def spec_bytes(**changes):
    return describe_decoder(ModelConfig({**CONFIG, **changes})).spec("float32").SerializeToString()


def open_adapter(tmp_path, tensors=None, base=None, **fields):
    directory = write_adapter(tmp_path / "adapter", tensors, **fields)
    return LoraAdapter(directory, spec_bytes() if base is None else base)


def written(adapter, tmp_path):
    return read_aslora(adapter.serialize_to_path(tmp_path / "x.aslora"))


def written_deltas(adapter, tmp_path, config=CONFIG):
    """What the file adds to each tensor of the decoder."""
    hidden, inner, head = config["hidden_size"], config["intermediate_size"], 4
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    shapes = {
        "embedding": (config["vocab_size"], hidden),
        "lm_head": (config["vocab_size"], hidden),
    }
    for i in range(config["num_hidden_layers"]):
        shapes[f"layers.{i}.qkv"] = ((heads + 2 * kv_heads) * head, hidden)
        shapes[f"layers.{i}.o"] = (hidden, heads * head)
        shapes[f"layers.{i}.gate_up"] = (2 * inner, hidden)
        shapes[f"layers.{i}.down"] = (hidden, inner)
    result = {}
    for tensor, row_begin, a, b in written(adapter, tmp_path):
        whole = result.setdefault(tensor, np.zeros(shapes[tensor]))
        if tensor == "embedding":
            whole += a.astype(np.float64) @ b.T.astype(np.float64)
        else:
            whole[row_begin : row_begin + len(b)] += b.astype(np.float64) @ a.astype(np.float64)
    return result


def fused(by_module):
    """The values for modules of the checkpoint, stacked as the decoder stacks them."""
    shapes, result = base_shapes(), {}

    def of(*modules):
        parts = [by_module.get(module, np.zeros(shapes[module])) for module in modules]
        return np.concatenate(parts)

    for i in range(CONFIG["num_hidden_layers"]):
        layer = f"model.layers.{i}."
        result[f"layers.{i}.qkv"] = of(*(f"{layer}self_attn.{n}_proj" for n in "qkv"))
        result[f"layers.{i}.o"] = of(f"{layer}self_attn.o_proj")
        result[f"layers.{i}.gate_up"] = of(*(f"{layer}mlp.{n}_proj" for n in ("gate", "up")))
        result[f"layers.{i}.down"] = of(f"{layer}mlp.down_proj")
    result["embedding"], result["lm_head"] = of(EMBED), of(HEAD)
    return {tensor: value for tensor, value in result.items() if value.any()}


def expect_deltas(adapter, tensors, scale, tmp_path):
    ours, expected = written_deltas(adapter, tmp_path), fused(deltas(tensors, scale))
    assert ours.keys() == expected.keys()
    for tensor, value in expected.items():
        # One rounding of b; everything else is in double precision.
        np.testing.assert_allclose(ours[tensor], value, rtol=0, atol=2**-23 * np.abs(value).max())


# Accepted adapters.


def test_every_linear_module(tmp_path):
    tensors = adapter_tensors()
    adapter = open_adapter(tmp_path, tensors)
    assert len(adapter.pairs) == 7 * CONFIG["num_hidden_layers"]
    expect_deltas(adapter, tensors, 2.0, tmp_path)


def test_memory_and_file_are_the_same(tmp_path):
    adapter = open_adapter(tmp_path)
    assert type(adapter.serialize_to_memory()).__name__ == "LoraImage"
    first = adapter.serialize_to_path(tmp_path / "1.aslora").read_bytes()
    assert first == adapter.serialize_to_path(tmp_path / "2.aslora").read_bytes()


@pytest.mark.parametrize(
    ("fields", "scale"),
    [
        ({"lora_alpha": 8}, 2.0),
        ({"lora_alpha": 6.5}, 1.625),
        ({"lora_alpha": 8, "use_rslora": True}, 4.0),
        ({"r": ..., "lora_r": 4}, 2.0),
        ({"r": None}, 2.0),
        ({"peft_type": ..., "target_modules": ..., "lora_dropout": ...}, 2.0),
        ({"target_modules": "all-linear"}, 2.0),
        ({"target_modules": r".*\.(self_attn|mlp)\..*_proj"}, 2.0),
        ({"bias": "all"}, 2.0),
        ({"fan_in_fan_out": True, "init_lora_weights": "gaussian"}, 2.0),
    ],
)
def test_configurations(tmp_path, fields, scale):
    tensors = adapter_tensors()
    expect_deltas(open_adapter(tmp_path, tensors, **fields), tensors, scale, tmp_path)


@pytest.mark.parametrize("prefix", ["", "base_model.model."])
@pytest.mark.parametrize("name", ["", ".default", ".my_adapter"])
def test_keys(tmp_path, prefix, name):
    modules = [*modules_named(ATTENTION), EMBED, HEAD]
    tensors = adapter_tensors(modules, prefix=prefix)
    renamed = {}
    for key, value in tensors.items():
        path = key.removesuffix(".weight")
        renamed[path + name + key.removeprefix(path)] = value
    targets = [*ATTENTION, "embed_tokens", "lm_head"]
    adapter = open_adapter(tmp_path, renamed, target_modules=targets)
    ours = written_deltas(adapter, tmp_path)
    for tensor, value in fused(deltas(tensors, 2.0, prefix)).items():
        np.testing.assert_allclose(ours[tensor], value, atol=1e-6)


def test_an_adapter_of_the_model_without_its_head(tmp_path):
    tensors = adapter_tensors([Q0])
    short = {key.replace("model.model.", "model."): value for key, value in tensors.items()}
    assert f"{PREFIX}layers.0.self_attn.q_proj.lora_A.weight" in short
    fields = {
        "target_modules": r"layers\.0\.self_attn\.q_proj",
        "alpha_pattern": {"layers.0.self_attn.q_proj": 20},
    }
    expect_deltas(open_adapter(tmp_path, short, **fields), tensors, 5.0, tmp_path)


def test_ranks_and_alphas_by_module(tmp_path):
    ranks = dict.fromkeys(modules_named(LINEAR), 4)
    ranks[Q0] = 2
    down1 = "model.layers.1.mlp.down_proj"
    ranks[down1] = 1
    tensors = adapter_tensors(rank=ranks)
    adapter = open_adapter(
        tmp_path,
        tensors,
        rank_pattern={"layers.0.self_attn.q_proj": 2, r"layers\.1\..*down_proj": 1},
        alpha_pattern={"q_proj": 3, r"model.layers.\d.mlp.down_proj": 5, "o_pro": 100},
    )
    by_module = deltas(tensors, 1.0)
    for module, delta in by_module.items():
        alpha = 3 if module.endswith("q_proj") else 5 if module.endswith("down_proj") else 8
        delta *= alpha / ranks[module]
    ours = written_deltas(adapter, tmp_path)
    for tensor, value in fused(by_module).items():
        np.testing.assert_allclose(ours[tensor], value, atol=1e-5)


@pytest.mark.parametrize(
    ("fields", "layers", "names"),
    [
        ({"layers_to_transform": 1}, [1], LINEAR),
        ({"layers_to_transform": [0], "layers_pattern": "layers"}, [0], LINEAR),
        ({"layers_to_transform": [0], "layers_pattern": "(h|(layer)s)"}, [0], LINEAR),
        ({"layers_to_transform": [1], "layers_pattern": ["h|layers", "x)|(y"]}, [1], LINEAR),
        ({"exclude_modules": ["mlp.up_proj", "down_proj"]}, [0, 1], LINEAR[:5]),
        ({"exclude_modules": r".*\.mlp\..*"}, [0, 1], ATTENTION),
        ({"target_modules": "all-linear", "exclude_modules": ["q_proj"]}, [0, 1], LINEAR[1:]),
        ({"target_modules": ["k_proj", "model.layers.1.mlp.up_proj"]}, [0, 1], ["k_proj"]),
    ],
)  # fmt: skip
def test_tensors_of_what_is_targeted_alone(tmp_path, fields, layers, names):
    modules = [name for name in modules_named(names) if int(name.split(".")[2]) in layers]
    if "model.layers.1.mlp.up_proj" in fields.get("target_modules", ()):
        modules.append("model.layers.1.mlp.up_proj")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        adapter = open_adapter(tmp_path, adapter_tensors(modules), **fields)
    assert {pair.module.name for pair in adapter.pairs} == set(modules)
    extra = next(name for name in modules_named(LINEAR) if name not in modules)
    with pytest.raises(
        UnexplainedTensorError, match=f"adapter_config.json does not target '{extra}"
    ):
        open_adapter(tmp_path, adapter_tensors([*modules, extra]), **fields)


def test_targets_without_tensors_are_told(tmp_path):
    with pytest.warns(UserWarning, match=r"no tensors for .*v_proj' and 1 more"):
        open_adapter(
            tmp_path,
            adapter_tensors(modules_named(["q_proj"])),
            target_modules=["q_proj", "v_proj"],
        )


@pytest.mark.parametrize("dtype", ["<f2", "<u2"])
def test_16_bit_tensors(tmp_path, dtype):
    exact = {key: value.astype("<f2") for key, value in adapter_tensors().items()}
    if dtype == "<u2":
        bits = {key: (v.view("<u4") >> 16).astype("<u2") for key, v in adapter_tensors().items()}
        stored = bits
        exact = {key: (v.astype("<u4") << 16).view("<f4") for key, v in bits.items()}
    else:
        stored = exact
    adapter = open_adapter(tmp_path, stored)
    expect_deltas(adapter, {k: v.astype("<f4") for k, v in exact.items()}, 2.0, tmp_path)


def test_bin_files(tmp_path):
    torch = pytest.importorskip("torch")
    tensors = adapter_tensors()
    directory = write_adapter(tmp_path / "adapter", tensors)
    (directory / "adapter_model.safetensors").unlink()
    state = {key: torch.from_numpy(value) for key, value in tensors.items()}
    torch.save(state, directory / "adapter_model.bin")
    expect_deltas(LoraAdapter(directory, spec_bytes()), tensors, 2.0, tmp_path)


def test_every_loader_is_a_base(tmp_path, base):
    tensors = adapter_tensors()
    directory = write_adapter(tmp_path / "adapter", tensors)
    base.load_model().serialize_to_path(None, str(tmp_path / "out"), enable_quant=True)
    for loader in (base, DashInferModel(str(tmp_path / "out"))):
        expect_deltas(LoraAdapter(directory, loader), tensors, 2.0, tmp_path)


# Copies of the base model's weights.


def copies(tensors):
    adapter = adapter_tensors([EMBED, HEAD])
    for module in (EMBED, HEAD):
        adapter[f"{PREFIX}{module}.base_layer.weight"] = tensors[f"{module}.weight"]
    return adapter


ENDS = {"target_modules": ["embed_tokens", "lm_head"]}


def test_copies_of_the_base_models_weights(tmp_path, base):
    tensors = llama_tensors()
    adapter = open_adapter(tmp_path, copies(tensors), base, **ENDS)
    assert [pair.module.tensor for pair in adapter.pairs] == ["embedding", "lm_head"]
    rounded = {key: value.astype("<f2") for key, value in tensors.items()}
    open_adapter(tmp_path, copies(rounded), base, **ENDS)
    tensors[f"{HEAD}.weight"][39, 15] += 1e-6
    with pytest.raises(UnexplainedTensorError, match="lm_head.base_layer.weight.*differs"):
        open_adapter(tmp_path, copies(tensors), base, **ENDS)
    with pytest.raises(UnexplainedTensorError, match="loader of the base model's checkpoint"):
        open_adapter(tmp_path, copies(tensors), **ENDS)
    tensors[f"{EMBED}.weight"] = np.zeros((41, 16), "<f4")
    with pytest.raises(
        UnexplainedTensorError, match=r"\[41, 16\], the base model's has \[40, 16\]"
    ):
        open_adapter(tmp_path, copies(tensors), base, **ENDS)


def test_copies_in_bfloat16_are_rounded_to_nearest_even(tmp_path):
    torch = pytest.importorskip("torch")
    tensors = llama_tensors()
    tensors[f"{EMBED}.weight"].view("<u4")[0, :2] = 0x3F808000, 0x3F818000  # Ties.
    loader = HuggingFaceModel(str(write_checkpoint(tmp_path / "base", tensors)), "m", False)
    rounded = {
        key: torch.from_numpy(value).bfloat16().view(torch.int16).numpy().view("<u2")
        for key, value in tensors.items()
    }
    open_adapter(tmp_path, copies(rounded), loader, **ENDS)


def test_a_tied_models_ends(tmp_path):
    config = {**CONFIG, "tie_word_embeddings": True}
    tensors = llama_tensors(config)
    loader = HuggingFaceModel(str(write_checkpoint(tmp_path / "base", tensors, config)), "m", False)
    tensors[f"{HEAD}.weight"] = tensors[f"{EMBED}.weight"]
    adapter = open_adapter(tmp_path, copies(tensors), loader, ensure_weight_tying=True, **ENDS)
    assert [pair.module.tensor for pair in adapter.pairs] == ["embedding", "lm_head"]
    with pytest.raises(UnexplainedTensorError, match="ensure_weight_tying is True.*lm_head alone"):
        open_adapter(
            tmp_path, adapter_tensors([HEAD]), loader,
            ensure_weight_tying=True, target_modules=["lm_head"],
        )  # fmt: skip


def test_an_adapter_with_added_tokens_is_refused(tmp_path):
    folder = shared_data() / "lora" / "fms_tuned_llama_with_added_tokens"
    config = ModelConfig(json.loads((folder / "base_config.json").read_text()))
    spec = describe_decoder(config).spec("bfloat16").SerializeToString()
    with pytest.raises(
        UnexplainedTensorError, match=r"base_model\.model\.(lm_head|model.embed).*whole"
    ):
        LoraAdapter(folder, spec)


# Refused adapters.


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"peft_type": "IA3"}, "peft_type is 'IA3'"),
        ({"peft_type": "PROMPT_TUNING"}, "peft_type is 'PROMPT_TUNING'"),
        ({"use_dora": True}, "use_dora is True"),
        ({"modules_to_save": ["lm_head"]}, r"modules_to_save is \['lm_head'\]"),
        ({"trainable_token_indices": [1, 2]}, r"trainable_token_indices is \[1, 2\]"),
        ({"lora_bias": True}, "lora_bias is True"),
        ({"layer_replication": [[0, 2], [1, 2]]}, "layer_replication is"),
        ({"target_parameters": ["experts.gate"]}, "target_parameters is"),
        ({"alora_invocation_tokens": [5]}, "alora_invocation_tokens is"),
        ({"init_lora_weights": "pissa_niter_16"}, "init_lora_weights is 'pissa_niter_16'"),
        ({"use_something_new": True}, "use_something_new is True"),
        ({"new_config": {"a": 1}}, "new_config is {'a': 1}"),
    ],
)
def test_adapters_of_other_kinds(tmp_path, fields, message):
    with pytest.raises(NotImplementedError, match=f"adapter_config.json: {message}"):
        open_adapter(tmp_path, **fields)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"lora_alpha": "8"}, "lora_alpha is '8', expected a number"),
        ({"lora_alpha": float("inf")}, "lora_alpha is inf"),
        ({"r": 8}, r"r and rank_pattern give the ranks \[8\].* have rank 4"),
        ({"r": "4"}, "r is '4', expected an integer"),
        ({"rank_pattern": {"q_proj": 0}}, "rank_pattern: q_proj is 0"),
        ({"rank_pattern": [4]}, "rank_pattern is"),
        ({"alpha_pattern": {"(": 4}}, r"alpha_pattern has .* no regular expression"),
        ({"target_modules": "*"}, r"target_modules has '\*', no regular expression"),
        (
            {"exclude_modules": "(?!model).*"},
            r"exclude_modules has .* \(\?! \(look-around and references back are not supported",
        ),
        ({"alpha_pattern": {"((a{1000}){1000})": 4}}, "alpha_pattern has .* repetition size"),
        (
            {"alpha_pattern": {str(i): 1 for i in range(10_001)}},
            "alpha_pattern has 10001 patterns, expected at most 10000",
        ),
        ({"target_modules": [1]}, r"target_modules is \[1\], expected names"),
        ({"layers_to_transform": ["1"]}, "layers_to_transform is"),
        ({"use_rslora": "yes"}, "use_rslora is 'yes'"),
    ],
)
def test_malformed_configurations(tmp_path, fields, message):
    with pytest.raises(ConfigError, match=f"adapter_config.json: {message}"):
        open_adapter(tmp_path, **fields)


def test_missing_parts(tmp_path):
    with pytest.raises(ConfigFieldMissingError, match="'lora_alpha' is missing"):
        open_adapter(tmp_path, lora_alpha=...)
    (tmp_path / "adapter" / "adapter_config.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"adapter_config\.json: no such file"):
        LoraAdapter(tmp_path / "adapter", spec_bytes())
    write_adapter(tmp_path / "adapter")
    (tmp_path / "adapter" / "adapter_model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"adapter_model\.safetensors.*adapter_model\.bin"):
        LoraAdapter(tmp_path / "adapter", spec_bytes())


def test_unknown_fields_are_told(tmp_path):
    with pytest.warns(UserWarning, match="unknown fields flavour$"):
        open_adapter(tmp_path, flavour="sweet", emptiness=None)


A_KEY, B_KEY = f"{PREFIX}{Q0}.lora_A.weight", f"{PREFIX}{Q0}.lora_B.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({A_KEY: None}, "q_proj.lora_B.weight': there is no A to it"),
        ({B_KEY: None}, "q_proj.lora_A.weight': there is no B to it"),
        ({A_KEY: (4, 17)}, r"lora_A.weight' has shape \[4, 17\], expected \['rank', 16\]"),
        ({B_KEY: (16, 3)}, r"lora_B.weight' has shape \[16, 3\], expected \[16, 4\]"),
        ({B_KEY: (4, 16)}, r"lora_B.weight' has shape \[4, 16\]"),
        ({A_KEY: (0, 16), B_KEY: (16, 0)}, "lora_A.weight' has shape"),
        ({A_KEY: (64,)}, r"has shape \[64\]"),
        ({f"{PREFIX}{Q0}.lora_magnitude_vector": (16,)}, "no part of a LoRA adapter"),
        ({f"{PREFIX}{Q0}.bias": (16,)}, "no part of a LoRA adapter"),
        ({f"{PREFIX}{Q0}.lora_B.bias": (16,)}, "no part of a LoRA adapter"),
        ({f"{PREFIX}score.weight": (2, 16)}, "has no matrix 'score'"),
        ({f"{PREFIX}lm_head.modules_to_save.weight": (40, 16)}, "has no matrix 'lm_head.modules"),
        ({A_KEY.replace("layers.0", "layers.2"): (4, 16)}, "has no matrix 'model.layers.2.self"),
        ({f"{PREFIX}model.norm.lora_A.weight": (4, 16)}, "has no matrix 'model.norm'"),
        ({f"{PREFIX}{EMBED}.lora_A.weight": (4, 40)}, "must have other tensors"),
        ({f"{PREFIX}{Q0}.lora_embedding_A": (4, 16)}, "must have other tensors"),
        ({A_KEY.replace("A.", "A.second."): (4, 16)}, r"several adapters: 'second', None"),
        ({A_KEY.removeprefix(PREFIX): (4, 16)}, "lora_A.weight': is the same as"),
    ],
)  # fmt: skip
def test_tensors_that_do_not_fit(tmp_path, change, message):
    tensors = adapter_tensors()
    for key, shape in change.items():
        if shape is None:
            del tensors[key]
        else:
            tensors[key] = np.ones(shape, "<f4")
    with pytest.raises(UnexplainedTensorError, match=message) as caught:
        open_adapter(tmp_path, tensors)
    assert str(tmp_path / "adapter") in str(caught.value)


@pytest.mark.parametrize("rank", [4096, 4097])
def test_a_rank_is_bounded_before_anything_is_read(tmp_path, rank):
    tensors, fields = adapter_tensors([Q0], rank=rank), {"r": rank, "target_modules": [Q0]}
    if rank == 4096:
        assert open_adapter(tmp_path, tensors, **fields).pairs[0].rank == rank
        return
    with pytest.raises(UnexplainedTensorError, match="lora_A.weight' has rank 4097; it must be at"):
        open_adapter(tmp_path, tensors, **fields)


def test_an_empty_adapter_is_refused(tmp_path):
    with pytest.raises(UnexplainedTensorError, match="holds no adapter"):
        open_adapter(tmp_path, {})


@pytest.mark.parametrize("dtype", ["<f8", "<i8"])
def test_other_types_are_refused(tmp_path, dtype):
    tensors = adapter_tensors()
    tensors[B_KEY] = tensors[B_KEY].astype(dtype)
    with pytest.raises(UnexplainedTensorError, match="q_proj.lora_B.weight' has dtype"):
        open_adapter(tmp_path, tensors)


@pytest.mark.parametrize("key", [A_KEY, B_KEY])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_values_that_are_not_finite_are_refused(tmp_path, key, value):
    tensors = adapter_tensors()
    tensors[key][1, 2] = value
    adapter = open_adapter(tmp_path, tensors)
    with pytest.raises(ValueError, match=f"tensor '{key}' holds values that are not finite"):
        adapter.serialize_to_path(tmp_path / "x.aslora")
    assert not list(tmp_path.glob("x.aslora*"))


def test_values_that_overflow_with_the_scale_are_refused(tmp_path):
    tensors = adapter_tensors()
    tensors[B_KEY][0, 0] = 3e38
    with pytest.raises(ValueError, match="lora_B.weight' holds values that are not finite, scale"):
        open_adapter(tmp_path, tensors).serialize_to_memory()


def test_damaged_files_are_refused(tmp_path):
    directory = write_adapter(tmp_path / "adapter")
    data = safetensors_bytes(adapter_tensors())
    (directory / "adapter_model.safetensors").write_bytes(data[:-1])
    with pytest.raises(ValueError, match=r"adapter_model\.safetensors.*truncated"):
        LoraAdapter(directory, spec_bytes())


# lora_cfg of the serialize methods.


def test_adapters_are_written_beside_the_model(tmp_path, base):
    tensors = {name: adapter_tensors(seed=seed) for seed, name in enumerate(("a", "b"))}
    for name, adapter in tensors.items():
        write_adapter(tmp_path / "loras" / name, adapter)
    lora_cfg = {"input_base_dir": str(tmp_path / "loras"), "lora_names": ["a", "b"]}
    out = tmp_path / "out"
    base.load_model().serialize_to_path(None, str(out), lora_cfg=lora_cfg)
    assert {path.name for path in out.iterdir()} == {
        "m.asgraph", "m.asparam", "config.json", "a.aslora", "b.aslora",
    }  # fmt: skip
    assert read_aslora(out / "a.aslora")[0][2].shape == (4, 16)
    assert (out / "a.aslora").read_bytes() != (out / "b.aslora").read_bytes()


def test_adapters_alone(tmp_path, base):
    write_adapter(tmp_path / "loras" / "a")
    lora_cfg = {"input_base_dir": tmp_path / "loras", "lora_names": ["a"], "lora_only": True}
    base.serialize_to_path(None, str(tmp_path / "out"), lora_cfg=lora_cfg)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["a.aslora"]


def test_adapters_are_written_beside_a_model_that_is_serialised(tmp_path, base):
    base.load_model().serialize_to_path(None, str(tmp_path / "out"))
    write_adapter(tmp_path / "loras" / "a")
    lora_cfg = {"input_base_dir": tmp_path / "loras", "lora_names": ["a"]}
    DashInferModel(str(tmp_path / "out")).serialize_to_path(None, "ignored", lora_cfg=lora_cfg)
    assert read_aslora(tmp_path / "out" / "a.aslora")


@pytest.mark.parametrize(
    ("lora_cfg", "message"),
    [
        ({"lora_names": ["a"]}, "input_base_dir None"),
        ({"input_base_dir": ".", "lora_names": []}, r"lora_names \[\]"),
        ({"input_base_dir": ".", "lora_names": "a"}, "lora_names 'a'"),
        ({"input_base_dir": ".", "lora_names": ["../a"]}, "the name '../a'"),
        ({"input_base_dir": ".", "lora_names": [".."]}, "the name '..'"),
        ({"input_base_dir": ".", "lora_names": [""]}, "the name ''"),
        ({"input_base_dir": ".", "lora_names": ["a"], "rank": 3}, r"keys \['rank'\]"),
        ({"input_base_dir": ".", "lora_names": ["missing"]}, r"missing/adapter_config\.json"),
    ],
)
def test_lora_cfg_is_checked_before_anything_is_written(tmp_path, base, lora_cfg, message):
    with pytest.raises(ValueError, match=message):
        base.load_model().serialize_to_path(None, str(tmp_path / "out"), lora_cfg=lora_cfg)
    assert not (tmp_path / "out").exists()
