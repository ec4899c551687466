"""Mixtures of experts, where they differ from other decoders: what the files contain, quantised or
not, which configurations are refused, and adapters. test_architectures.py tests that they compute
what transformers does.
"""

from __future__ import annotations

import numpy as np
import pytest
from support.checkpoints import write_checkpoint
from support.lora import PREFIX, write_adapter
from support.model_file import dequantise, read_tensors
from support.read_back import serialized

pytest.importorskip("allspark._allspark")

from allspark import (  # noqa: E402
    AsCacheMode,
    AsStatus,
    Engine,
    HuggingFaceModel,
    LoraAdapter,
    TargetDevice,
)
from allspark._allspark import testing  # noqa: E402
from allspark.model_loader.errors import (  # noqa: E402
    ConfigError,
    UnexplainedTensorError,
    UnsupportedModelError,
)

EXPERTS, INNER, HIDDEN, SHARED = 4, 64, 64, 128
CONFIG = {
    "architectures": ["Qwen2MoeForCausalLM"],
    "hidden_act": "silu",
    "hidden_size": HIDDEN,
    "intermediate_size": 96,
    "max_position_embeddings": 64,
    "mlp_only_layers": [0],
    "moe_intermediate_size": INNER,
    "norm_topk_prob": False,
    "num_attention_heads": 4,
    "num_experts": EXPERTS,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "shared_expert_intermediate_size": SHARED,
    "tie_word_embeddings": False,
    "vocab_size": 75,
}
IDS = [5, 17, 3, 30, 8, 21]
FORMATS = [
    {"weight_format": "int8"},
    {"weight_format": "uint4", "group_size": 32},
    {"weight_format": "int8", "compute_method": "activate_quant"},
    {"weight_format": "int4", "group_size": 64, "compute_method": "activate_quant"},
]


def shapes():
    def gated(prefix, inner):
        up, down = (inner, HIDDEN), (HIDDEN, inner)
        sizes = {"gate": up, "up": up, "down": down}
        return {f"{prefix}{name}_proj.weight": size for name, size in sizes.items()}

    found = {"model.embed_tokens.weight": (75, HIDDEN), "lm_head.weight": (75, HIDDEN),
             "model.norm.weight": (HIDDEN,)}  # fmt: skip
    for i in range(2):
        layer = f"model.layers.{i}."
        for name, rows in (("q", 64), ("k", 32), ("v", 32)):
            found[f"{layer}self_attn.{name}_proj.weight"] = (rows, HIDDEN)
            found[f"{layer}self_attn.{name}_proj.bias"] = (rows,)
        found[f"{layer}self_attn.o_proj.weight"] = (HIDDEN, 64)
        found[f"{layer}input_layernorm.weight"] = (HIDDEN,)
        found[f"{layer}post_attention_layernorm.weight"] = (HIDDEN,)
    found.update(gated("model.layers.0.mlp.", 96))
    mlp = "model.layers.1.mlp."
    found[f"{mlp}gate.weight"] = (EXPERTS, HIDDEN)
    found[f"{mlp}shared_expert_gate.weight"] = (1, HIDDEN)
    found.update(gated(f"{mlp}shared_expert.", SHARED))
    for e in range(EXPERTS):
        found.update(gated(f"{mlp}experts.{e}.", INNER))
    return found


def tensors():
    rng = np.random.default_rng(3)
    values = {}
    for name, shape in shapes().items():
        noise = rng.standard_normal(shape, np.float32)
        if "norm" in name:
            values[name] = 1 + np.float32(0.2) * noise
        else:
            values[name] = noise * np.float32(shape[-1] ** -0.5)
    return values


def write(directory, values=None, **fields):
    config = {**CONFIG, **fields}
    return write_checkpoint(directory, values or tensors(), config)


def serialize(directory, **options):
    return serialized(directory, directory, **options)


def logits(graph, **options):
    return testing.forward_logits(str(graph), IDS, **options)


def test_experts_lie_one_after_the_other(tmp_path):
    values = tensors()
    file, found = read_tensors(serialize(write(tmp_path, values)))
    mlp = "model.layers.1.mlp."
    np.testing.assert_array_equal(
        found["layers.1.router"],
        np.concatenate([values[f"{mlp}gate.weight"], values[f"{mlp}shared_expert_gate.weight"]]),
    )
    gate_up = [
        values[f"{mlp}experts.{e}.{n}_proj.weight"] for e in range(EXPERTS) for n in ("gate", "up")
    ]
    np.testing.assert_array_equal(found["layers.1.experts_gate_up"], np.concatenate(gate_up))
    down = [values[f"{mlp}experts.{e}.down_proj.weight"] for e in range(EXPERTS)]
    np.testing.assert_array_equal(found["layers.1.experts_down"], np.concatenate(down))
    assert file.format_version == 3


def test_stacked_experts_give_the_same_file(tmp_path):
    values = tensors()
    graph = serialize(write(tmp_path / "each", values))
    mlp = "model.layers.1.mlp.experts."
    gate_up = [
        np.concatenate([values.pop(f"{mlp}{e}.{n}_proj.weight") for n in ("gate", "up")])
        for e in range(EXPERTS)
    ]
    values[f"{mlp}gate_up_proj"] = np.stack(gate_up)
    values[f"{mlp}down_proj"] = np.stack(
        [values.pop(f"{mlp}{e}.down_proj.weight") for e in range(EXPERTS)]
    )
    stacked = serialize(write(tmp_path / "stacked", values))
    assert (
        stacked.with_suffix(".asparam").read_bytes() == graph.with_suffix(".asparam").read_bytes()
    )


@pytest.mark.parametrize("fields", FORMATS, ids=lambda fields: "-".join(map(str, fields.values())))
def test_quantised_experts(tmp_path, fields):
    """The values in the file, dequantised, give the same logits; with int8 activations, nearly."""
    values = tensors()
    # With int8 activations every token uses all experts, so that rounding cannot change the choice.
    rounded = "compute_method" in fields
    config = {"num_experts_per_tok": EXPERTS} if rounded else {}
    settings = {"group_settings": {"layers.0.down": 32}} if fields.get("group_size") == 64 else {}
    graph = serialize(
        write(tmp_path / "in", values, **config), enable_quant=True,
        customized_quant_config={**fields, **settings},
    )  # fmt: skip
    file, found = read_tensors(graph)
    quantised = {quant.tensor: quant for quant in file.spec.weight_quant}
    for name in ("experts_gate_up", "experts_down", "shared_gate_up", "shared_down", "qkv", "o"):
        assert f"layers.1.{name}" in quantised
    assert "layers.1.router" not in quantised
    restored = dict(values)
    parts = {"qkv": ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
             "o": ["self_attn.o_proj"], "gate_up": ["mlp.gate_proj", "mlp.up_proj"],
             "down": ["mlp.down_proj"],
             "shared_gate_up": ["mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj"],
             "shared_down": ["mlp.shared_expert.down_proj"],
             "experts_gate_up": [f"mlp.experts.{e}.{n}_proj" for e in range(EXPERTS)
                                 for n in ("gate", "up")],
             "experts_down": [f"mlp.experts.{e}.down_proj" for e in range(EXPERTS)]}  # fmt: skip
    for name, quant in quantised.items():
        weight = dequantise(found, quant)[0].astype(np.float32)
        prefix, _, kind = name.rpartition(".")
        row = 0
        for part in parts[kind]:
            key = f"model.{prefix}.{part}.weight"
            restored[key] = weight[row : row + len(values[key])]
            row += len(values[key])
        assert row == len(weight)
    ours = logits(graph)
    expected = logits(serialize(write(tmp_path / "restored", restored, **config)))
    scale = np.abs(expected).max()
    # Activations of 8 bits are off by half a step of 1/127 each: a few percent of the logits.
    bound = 0.1 if rounded else 1e-5
    assert np.abs(ours - expected).max() <= bound * scale
    for mode in (
        AsCacheMode.AsCacheDefault,
        AsCacheMode.AsCacheQuantI8,
        AsCacheMode.AsCacheQuantU4,
    ):
        whole = logits(graph, cache_mode=mode)
        for chunks in ([1], [4]):
            found = logits(graph, chunk_sizes=chunks, num_threads=2, cache_mode=mode)
            np.testing.assert_array_equal(found, whole)


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"moe_intermediate_size": 96}, ValueError, "expert_intermediate_size is 96"),
        ({"num_experts_per_tok": 5}, ValueError, r"experts_per_token is 5; it must be in \[1, 4\]"),
        ({"mlp_only_layers": [2]}, ConfigError, r"mlp_only_layers is \[2\]"),
        ({"num_experts": 3}, UnexplainedTensorError, "5 rows, but 'layers.1.router' has 4"),
        ({"num_experts": 5}, UnexplainedTensorError, "5 rows, but 'layers.1.router' has 6"),
        ({"mlp_only_layers": []}, UnexplainedTensorError, "layers.0.mlp"),
        ({"architectures": ["DeepseekForCausalLM"], "scoring_func": "sigmoid"},
         UnsupportedModelError, "scoring_func is 'sigmoid'"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_by_name(tmp_path, fields, error, message):
    write(tmp_path, **fields)
    with pytest.raises(error, match=message):
        serialize(tmp_path)


class Served:
    def __init__(self, directory, **settings):
        self.engine = Engine()
        self.loader = HuggingFaceModel(str(directory), "m", user_set_data_type="float32")
        self.loader.load_model().serialize_to_memory(self.engine)
        builder = self.loader.create_reference_runtime_config_builder("m", TargetDevice.CPU, [0], 8)
        config = builder.update_from_dict({"kv_cache_span_size": 16, **settings}).build()
        assert self.engine.install_model(config) == AsStatus.ALLSPARK_SUCCESS
        assert self.engine.start_model("m") == AsStatus.ALLSPARK_SUCCESS

    def logits(self, **fields):
        config = {"prompt_only": True, "output_logits": "all", **fields}
        config["enable_tensors_from_model_inference"] = True
        status, _, queue = self.engine.start_request_ids("m", None, IDS, config)
        assert status == AsStatus.ALLSPARK_SUCCESS, self.engine.last_error()
        return queue.Get().tensors_from_model_inference[0]["logits"]


def adapter(directory, modules, seed=5):
    """An adapter of rank 4 for these modules, given with their shapes in the base model."""
    rng = np.random.default_rng(seed)
    found = {}
    for module in modules:
        rows, cols = shapes()[f"{module}.weight"]
        for kind, shape in (("A", (4, cols)), ("B", (rows, 4))):
            values = rng.standard_normal(shape, np.float32) * np.float32(shape[-1] ** -0.5)
            found[f"{PREFIX}{module}.lora_{kind}.weight"] = values
    names = sorted({module.rpartition(".")[2] for module in modules})
    write_adapter(directory, found, target_modules=names, r=4, lora_alpha=4)
    return found


def test_adapters_of_attention_and_of_the_shared_expert(tmp_path):
    """They act like weights to which the adapter's product was added."""
    values = tensors()
    attention = [f"model.layers.{i}.self_attn.{n}_proj" for i in range(2) for n in "qkvo"]
    shared = [f"model.layers.1.mlp.shared_expert.{n}_proj" for n in ("gate", "up", "down")]
    dense = [f"model.layers.0.mlp.{n}_proj" for n in ("gate", "up", "down")]
    added = adapter(tmp_path / "adapter", attention + shared + dense)
    served = Served(write(tmp_path / "base", values), lora_max_num=1, lora_max_rank=8)
    assert served.engine.load_lora("m", "a", tmp_path / "adapter") == AsStatus.ALLSPARK_SUCCESS, (
        served.engine.last_error()
    )
    merged = dict(values)
    for module in attention + shared + dense:
        a, b = (added[f"{PREFIX}{module}.lora_{kind}.weight"] for kind in "AB")
        merged[f"{module}.weight"] = values[f"{module}.weight"] + b @ a
    expected = Served(write(tmp_path / "merged", merged)).logits()
    found = served.logits(lora_name="a")
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-5 * np.abs(expected).max())
    assert np.abs(served.logits() - expected).max() > 1e-2


def test_adapters_of_experts_are_refused(tmp_path):
    base = HuggingFaceModel(str(write(tmp_path / "base")), "m")
    for i, module in enumerate(("model.layers.1.mlp.experts.2.up_proj", "model.layers.1.mlp.gate")):
        adapter(tmp_path / f"adapter{i}", [module])
        with pytest.raises(UnexplainedTensorError, match=f"no matrix '{module}' that takes"):
            LoraAdapter(tmp_path / f"adapter{i}", base)
