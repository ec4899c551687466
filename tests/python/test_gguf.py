"""GGUF files: they serialise to the same as the model in transformers' layout, blocks in a format
of the engine are copied bit by bit, and tokenizers give the same tokens.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings

import numpy as np
import pytest
from safetensors.numpy import load
from support import gguf_files
from support.checkpoints import llama_tensors, write_checkpoint
from support.gguf_files import llama_file, metadata, quantized, renamed, write_gguf
from support.model_file import floats, parts_of, read_tensors
from support.quantized import GROUPED
from support.read_back import serialized
from support.vocabularies import tokenizer_directory

gguf = pytest.importorskip("gguf")
native = pytest.importorskip("allspark._allspark")

from allspark.model_loader import DashInferModel, HuggingFaceModel, derived  # noqa: E402
from allspark.model_loader.gguf import read_gguf, tokenizer_files  # noqa: E402

# Families.

WINDOW2 = {"attention__sliding_window": 11}
POSTS = {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 20.0, **WINDOW2}
FACTORS = {"rope_freqs.weight": "llama3"}
LAYER_NORM = {"attention__layer_norm_rms_epsilon": None, "attention__layer_norm_epsilon": 1e-2}
NO_ROPE = {"rope__freq_base": None, "rope__dimension_count": None}
COUNTS = {"expert_count": 8, "expert_used_count": 2}
GROUPS = {"expert_group_count": 2, "expert_group_used_count": 1}
LATENTS = {
    **COUNTS, "expert_feed_forward_length": 64, "expert_shared_count": 2,
    "expert_weights_scale": 1.5, "leading_dense_block_count": 1, "attention__kv_lora_rank": 64,
    "attention__key_length": 40, "attention__value_length": 64, "rope__dimension_count": 16,
}  # fmt: skip
# Row of the parity test -> (architecture in the file, rows in pairs, additional keys).
ROWS = {
    "llama": ("llama", True, {}),
    "llama-tied": ("llama", True, {}),
    "llama-3.1-rope": ("llama", True, {}),
    "llama-linear-rope": (
        "llama", True, {"rope__scaling__type": "linear", "rope__scaling__factor": 3.0},
    ),
    "llama-yarn-rope": (
        "llama", True,
        {"rope__scaling__type": "yarn", "rope__scaling__factor": 4.0,
         "rope__scaling__original_context_length": 64, "rope__scaling__finetuned": True},
    ),
    "llama-biases": ("llama", True, {}),
    "llama-head-dim": ("llama", True, {}),
    "llama-one-kv-head": ("llama", True, {}),
    "mistral-window": ("llama", True, WINDOW2),
    "internlm3": ("llama", True, {}),
    "internlm2": ("internlm2", True, {}),
    "baichuan": ("baichuan", True, {}),
    "qwen1": ("qwen", False, {"feed_forward_length": 2 * 172}),
    "qwen2": ("qwen2", False, {}),
    "qwen2-tied": ("qwen2", False, {}),
    "qwen3": ("qwen3", False, {}),
    "qwen3-head-dim": ("qwen3", False, {}),
    "gemma": ("gemma", False, {}),
    "gemma2": ("gemma2", False, POSTS),
    "gemma3": (
        "gemma3", False,
        {**WINDOW2, "attention__sliding_window_pattern": 2, "rope__scaling__type": "linear",
         "rope__scaling__factor": 8.0, "rope__freq_base": 1e6},
    ),
    "phi3": ("phi3", False, {}),
    "phi3-window": ("phi3", False, WINDOW2),
    "phi3-longrope": ("phi3", False, {"rope__scaling__original_context_length": 32}),
    "phi4-mini": ("phi3", False, {}),
    "chatglm3": ("chatglm", False, {}),
    "glm-4": ("chatglm", False, {}),
    "glm": ("chatglm", False, {"rope__dimension_count": 8}),  # with separate matrices
    "glm4": ("glm4", False, {"rope__dimension_count": 8}),
    "granite": (
        "granite", True,
        {"attention__scale": 0.3, "embedding_scale": 12.0, "residual_scale": 0.22,
         "logit_scale": 4.0},
    ),
    "minicpm": (
        "minicpm", True,
        {"embedding_scale": 12.0, "residual_scale": 1.4 / 2**0.5, "logit_scale": 4.0},
    ),
    "olmo2": ("olmo2", False, {}),
    "phi2": ("phi2", False, LAYER_NORM),
    "starcoder2": ("starcoder2", False, LAYER_NORM),
    "starcoder2-window": ("starcoder2", False, {**LAYER_NORM, **WINDOW2}),
    "gpt2": ("gpt2", False, {**LAYER_NORM, **NO_ROPE}),
    "gpt-neox": (
        "gptneox", False, {**LAYER_NORM, "use_parallel_residual": True, "rope__dimension_count": 8},
    ),
    "falcon": ("falcon", False, {**LAYER_NORM, "attention__head_count_kv": 1}),
    "falcon-40b": ("falcon", False, {**LAYER_NORM, "attention__head_count_kv": 2}),
    "falcon-11b": ("falcon", False, {**LAYER_NORM, "attention__head_count_kv": 2}),
    "bloom": ("bloom", False, {**LAYER_NORM, **NO_ROPE, "feed_forward_length": 256}),
    "mpt": (
        "mpt", False,
        {**LAYER_NORM, **NO_ROPE, "feed_forward_length": 256, "attention__max_alibi_bias": 8.0},
    ),
    "mpt-limit": (
        "mpt", False,
        {**LAYER_NORM, **NO_ROPE, "feed_forward_length": 256, "attention__clamp_kqv": 0.5},
    ),
    "mixtral": ("llama", True, COUNTS),
    "mixtral-window": ("llama", True, {**COUNTS, **WINDOW2}),
    "qwen2-moe": (
        "qwen2moe", False,
        {**COUNTS, "expert_used_count": 3, "expert_feed_forward_length": 64,
         "expert_shared_feed_forward_length": 128},
    ),
    "qwen3-moe": (
        "qwen3moe", False,
        {**COUNTS, "expert_used_count": 3, "expert_feed_forward_length": 64},
    ),
    "deepseek-moe": (
        "deepseek", True,
        {**COUNTS, "expert_used_count": 3, "expert_feed_forward_length": 64,
         "expert_shared_count": 2, "leading_dense_block_count": 1, "expert_gating_func": 1},
    ),
    "deepseek-v2": ("deepseek2", False, {**LATENTS, "attention__q_lora_rank": 96, **GROUPS}),
    "deepseek-v2-lite": ("deepseek2", False, LATENTS),
    "deepseek-v3": (
        "deepseek2", False,
        {**LATENTS, **GROUPS, "attention__q_lora_rank": 96, "expert_gating_func": 2,
         "expert_weights_norm": True},
    ),
    # As in newer files: latent projections split in two, and key and value lengths.
    "deepseek-v2-yarn": (
        "deepseek2", False,
        {**LATENTS, "attention__head_count_kv": 1, "attention__key_length": 80,
         "attention__value_length": 64, "attention__key_length_mla": 40,
         "attention__value_length_mla": 64, "rope__scaling__type": "yarn",
         "rope__scaling__factor": 4.0, "rope__scaling__original_context_length": 64,
         "rope__scaling__yarn_log_multiplier": 0.0700},
    ),
    "dbrx": (
        "dbrx", False,
        {**LAYER_NORM, **COUNTS, "feed_forward_length": 64, "attention__clamp_kqv": 1.0},
    ),
}  # fmt: skip
# Their tensors are taken from the checkpoint that the file is compared with.
AS_SAVED = tuple(ROWS)[tuple(ROWS).index("phi2") :]
# llama.cpp derives this from the size of heads; a file cannot have another value.
SAME_SCALE = {"query_pre_attn_scalar": 16}
# Frequencies are stored as factors, and so rounded once more.
ROUNDED = ("llama-3.1-rope", "phi3-longrope")
# llama.cpp's converter reads these families' own names.
OWN_NAMES = ("qwen1", "chatglm3", "glm-4")


def rope_factors(row, model):
    """The tensors that hold the scaling factors of frequencies in a file."""
    rope = model.config.to_dict().get("rope_parameters")
    if row == "phi3-longrope":
        return {
            f"rope_factors_{kind}.weight": np.array(rope[f"{kind}_factor"], np.float32)
            for kind in ("long", "short")
        }
    if row != "llama-3.1-rope":
        return {}
    dim = model.config.hidden_size // model.config.num_attention_heads
    base = 10000.0 ** -(np.arange(0, dim, 2) / dim)
    return {"rope_freqs.weight": (base / model.model.rotary_emb.inv_freq.numpy()).astype("f4")}


def write_row(directory, row, monkeypatch, expert_kind=None):
    """Saves the model of a row for transformers and as a GGUF file, in which experts' matrices may
    have a block type.
    """
    import test_architectures as parity

    prefix, fields, *family = parity.ROWS[row]
    if row in ("gemma2", "gemma3"):
        monkeypatch.setitem(parity.ROWS, row, (prefix, {**fields, **SAME_SCALE}, *family))
    model = parity.build(row)
    parity.save(model, directory / "hf")
    arch, pairs, changes = ROWS[row]
    config = {**parity.BASE, **model.config.to_dict()}
    keys = metadata(config, **changes)
    state = {name: tensor.float() for name, tensor in model.state_dict().items()}
    if config.get("tie_word_embeddings"):
        state.pop("lm_head.weight", None)
    if row in OWN_NAMES:
        state = model.family(model.config.to_dict(), state)[1]
    state = {name: tensor.numpy() for name, tensor in state.items()}
    if row in AS_SAVED:
        state = load((directory / "hf" / "model.safetensors").read_bytes())
        config["split_latents"] = row == "deepseek-v2-yarn"
        config["num_key_value_heads"] = keys["attention.head_count_kv"]
    tensors = {**renamed(arch, state, config, pairs), **rope_factors(row, model)}
    if row == "phi3-longrope":
        attention = float(np.sqrt(1 + np.log(256 / 32) / np.log(32)))
        keys["rope.scaling.attn_factor"] = attention
    if expert_kind is not None:
        for name in tensors:
            if "_exps." in name:
                tensors[name], _ = quantized(tensors[name], expert_kind)
    ids = {"tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2}
    write_gguf(directory / "m.gguf", arch, tensors, keys, ids)
    return model


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.torch
def test_same_model_as_from_transformers_layout(tmp_path, row, monkeypatch):
    pytest.importorskip("transformers")
    model = write_row(tmp_path, row, monkeypatch)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*without a tokenizer")
        file, found = read_tensors(serialized(tmp_path / "m.gguf", tmp_path / "a"))
    expected_file, expected = read_tensors(serialized(tmp_path / "hf", tmp_path / "b"))
    for spec in (file.spec, expected_file.spec):
        spec.architecture = ""  # Some are read by the declaration of an equivalent architecture.
        if spec.attention_scale == spec.head_dim**-0.5:  # The default if it is not set.
            spec.ClearField("attention_scale")
    assert file.spec == expected_file.spec
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        if row in ROUNDED and name == "rope.inv_freq":
            np.testing.assert_allclose(found[name], values, rtol=2.0**-22)
        else:
            np.testing.assert_array_equal(found[name], values, err_msg=name)
    if row in ROUNDED:
        import test_architectures as parity

        ids = parity.prompt_ids()
        logits = native.testing.forward_logits(str(tmp_path / "a/m.asgraph"), ids, [], 1, "", 16)
        parity.reference_for(model, ids, parity.FLOAT32_FACTOR).check(logits)


@pytest.mark.parametrize(
    ("arch", "caps", "windows"), [("gemma2", (50.0, 30.0), [4096, 0]), ("gemma3", (0.0, 0.0), [])]
)
def test_a_gemma_without_its_caps_and_window_has_those_of_llama_cpp(tmp_path, arch, caps, windows):
    from allspark.model_loader.convert import describe_decoder
    from allspark.model_loader.gguf.families import find_family, model_config
    from allspark.model_loader.gguf.source import Source

    tensors = renamed("llama", llama_tensors(GROUPED), GROUPED)
    write_gguf(tmp_path / "m.gguf", arch, tensors, metadata(GROUPED))
    source = Source(read_gguf(tmp_path / "m.gguf"))
    fields = describe_decoder(model_config(find_family(source), source)).fields
    assert (fields["attention_soft_cap"], fields["logits_soft_cap"]) == caps
    assert fields["layer_window"] == windows


@pytest.mark.parametrize("said", [None, False, True])
def test_weights_of_experts_are_normalised_where_the_file_says_so(tmp_path, said):
    """llama.cpp's converter writes the key only if it is true."""
    from allspark.model_loader.gguf.families import find_family, model_config
    from allspark.model_loader.gguf.source import Source

    keys = {**LATENTS, "expert_gating_func": 2, "expert_weights_norm": said}
    tensors = renamed("llama", llama_tensors(GROUPED), GROUPED)
    write_gguf(tmp_path / "m.gguf", "deepseek2", tensors, metadata(GROUPED, **keys))
    source = Source(read_gguf(tmp_path / "m.gguf"))
    assert model_config(find_family(source), source).flag("norm_topk_prob") is bool(said)


@pytest.mark.torch
@pytest.mark.filterwarnings("ignore:.*without a tokenizer")
@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0"])
def test_integers_of_experts_stay_as_they_are(tmp_path, monkeypatch, kind):
    pytest.importorskip("transformers")
    write_row(tmp_path, "mixtral", monkeypatch, kind)
    file, found = read_tensors(serialized(tmp_path / "m.gguf", tmp_path / "out"))
    quants = {q.tensor: (q.bits, q.group_size) for q in file.spec.weight_quant}
    names = [f"layers.{i}.experts_{part}" for i in range(2) for part in ("gate_up", "down")]
    assert quants == dict.fromkeys(names, (8 if kind == "Q8_0" else 4, 32))
    reader = gguf.GGUFReader(tmp_path / "m.gguf")
    raw = {tensor.name: np.array(tensor.data) for tensor in reader.tensors}
    gate, up = (raw[f"blk.1.ffn_{part}_exps.weight"] for part in ("gate", "up"))
    blocks = np.concatenate([gate, up], axis=1).reshape(-1, gate.shape[-1])
    values, scales = blocks_of(blocks, kind)
    np.testing.assert_array_equal(found["layers.1.experts_gate_up"], values)
    np.testing.assert_array_equal(floats(found["layers.1.experts_gate_up_scale"]), scales)


# Blocks of integers.


def blocks_of(raw, kind):
    """(stored integers, float16 scales) of blocks, from the definition of the type."""
    size = {"Q8_0": 34, "Q4_0": 18}[kind]
    blocks = raw.reshape(len(raw), -1, size)
    scales = blocks[..., :2].copy().view("<f2")[..., 0]
    octets = blocks[..., 2:]
    if kind == "Q8_0":
        values = octets.view(np.int8).astype(np.int16) + 128
    else:
        values = np.concatenate([octets & 15, octets >> 4], -1)
    return values.reshape(len(raw), -1), scales


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0"])
@pytest.mark.filterwarnings("error:.*weights are")
@pytest.mark.filterwarnings("ignore:.*without a tokenizer")
def test_integers_stay_as_they_are(tmp_path, kind):
    exact, stored = llama_file(tmp_path / "m.gguf", {"": kind})
    file, tensors = read_tensors(serialized(tmp_path / "m.gguf", tmp_path / "out"))
    assert {(q.bits, q.group_size, q.asymmetric) for q in file.spec.weight_quant} == {
        (8 if kind == "Q8_0" else 4, 32, False)
    }
    assert {q.tensor for q in file.spec.weight_quant} >= {"embedding", "lm_head", "layers.1.qkv"}
    for quant in file.spec.weight_quant:
        parts = [blocks_of(stored[name][1], kind) for name in parts_of(quant.tensor)]
        np.testing.assert_array_equal(
            tensors[quant.tensor], np.concatenate([values for values, _ in parts])
        )
        scales = np.concatenate([scales for _, scales in parts])
        np.testing.assert_array_equal(floats(tensors[quant.tensor + "_scale"]), scales)
        if kind == "Q4_0":
            assert (scales < 0).any()  # About half of them: the sign is that of the largest value.


# A block of the larger types has 256 columns.
LARGE = {**GROUPED, "hidden_size": 256, "intermediate_size": 256, "head_dim": 64}
# For each weight, or for parts of one, a type without kernels.
FLOATS = {
    "i": (LARGE, {"q_proj": "IQ2_XS", "k_proj": "IQ3_XXS", "": "IQ2_XS"}),
    "ternary": (LARGE, {"": "TQ2_0"}),
    "parts": (GROUPED, {"v_proj": "Q8_0", "k_proj": "F32", "q_proj": "Q4_0", "up": "MXFP4",
                       "gate": "Q5_0", "": "F32"}),
    "one part": (LARGE, {"v_proj": "Q6_K", "k_proj": "IQ2_XS", "q_proj": "Q4_K", "": "F32"}),
}  # fmt: skip


@pytest.mark.parametrize("case", FLOATS)
@pytest.mark.filterwarnings("ignore:.*without a tokenizer")
def test_other_types_become_floats_with_a_warning(tmp_path, case):
    config, kinds = FLOATS[case]
    exact, stored = llama_file(tmp_path / "m.gguf", kinds, config)
    entries = [entry for entry in stored.values() if isinstance(entry, tuple)]
    types = ", ".join(sorted({kind for kind, _ in entries}))
    before = sum(raw.nbytes for _, raw in entries)
    after = sum(4 * exact[name].size for name, entry in stored.items() if isinstance(entry, tuple))
    message = f"m.gguf: {len(entries)} weights are {types}, .*{after} bytes instead of {before}"
    with pytest.warns(UserWarning, match=message) as caught:
        graph = serialized(tmp_path / "m.gguf", tmp_path / "a")
    assert len([w for w in caught if "weights are" in str(w.message)]) == 1
    write_checkpoint(tmp_path / "hf", exact, config)
    other = serialized(tmp_path / "hf", tmp_path / "b")
    assert (
        graph.with_suffix(".asparam").read_bytes()[64:]
        == other.with_suffix(".asparam").read_bytes()[64:]
    )


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_K", "Q6_K", "IQ4_XS", "TQ2_0"])
@pytest.mark.filterwarnings("ignore:.*without a tokenizer", "ignore:.*weights are")
def test_large_weights_are_read_in_pieces(tmp_path, kind, monkeypatch):
    config = GROUPED if kind.endswith("_0") and kind != "TQ2_0" else LARGE
    llama_file(tmp_path / "m.gguf", {"": kind}, config)
    whole = serialized(tmp_path / "m.gguf", tmp_path / "a").with_suffix(".asparam").read_bytes()
    cols = config["hidden_size"]
    monkeypatch.setattr(derived, "_PIECE_ELEMENTS", 64 * cols)
    tensors = HuggingFaceModel(str(tmp_path / "m.gguf"), "m").load_model().checkpoint_tensors()
    entry = tensors["lm_head.weight"]
    pieces = (entry if kind == "TQ2_0" else entry.values).pieces()
    assert [(row, piece.shape) for row, piece in pieces] == [(0, (64, cols)), (64, (37, cols))]
    found = serialized(tmp_path / "m.gguf", tmp_path / "b").with_suffix(".asparam").read_bytes()
    assert found[64:] == whole[64:]


@pytest.mark.filterwarnings("ignore:.*without a tokenizer", "ignore:.*weights are")
def test_what_the_caller_may_say(tmp_path):
    kinds = {"down": "Q4_0", "o_proj": "IQ2_XS", "lm_head": "IQ2_XS", "": "Q8_0"}
    llama_file(tmp_path / "m.gguf", kinds, LARGE)

    def quants(**options):
        file, _ = read_tensors(serialized(tmp_path / "m.gguf", tmp_path / "out", **options))
        found = {quant.tensor: quant for quant in file.spec.weight_quant}
        return {
            name: (found[name].bits, found[name].group_size, found[name].quantize_activations)
            for name in ("embedding", "layers.0.qkv", "layers.0.o", "layers.0.down", "lm_head")
            if name in found
        }

    kept = {"embedding": (8, 32, False), "layers.0.qkv": (8, 32, False),
            "layers.0.down": (4, 32, False)}  # fmt: skip
    assert quants() == kept
    weight_only = quants(enable_quant=True, weight_only_quant=True)
    assert weight_only == {**kept, "layers.0.o": (8, 0, False)}
    assert quants(enable_quant=True) == {
        "embedding": (8, 32, False), "layers.0.qkv": (8, 32, True), "layers.0.o": (8, 0, True),
        "layers.0.down": (4, 32, True),
    }  # fmt: skip
    anew = {"quant_method": "instant_quant", "weight_format": "uint8", "lm_head": "int8"}
    found = quants(enable_quant=True, customized_quant_config=anew)
    assert {name: bits for name, (bits, *_) in found.items()} == {
        "layers.0.qkv": 8, "layers.0.o": 8, "layers.0.down": 8, "lm_head": 8,
    }  # fmt: skip


@pytest.mark.parametrize("kind", ["F16", "BF16"])
@pytest.mark.filterwarnings("ignore:.*without a tokenizer")
def test_half_precision(tmp_path, kind):
    import gguf as package

    tensors = llama_tensors(GROUPED)
    type_id = package.GGMLQuantizationType[kind]
    raw = {
        name: values if values.ndim == 1 else (kind, package.quants.quantize(values, type_id))
        for name, values in tensors.items()
    }
    exact = {
        name: entry if not isinstance(entry, tuple)
        else package.quants.dequantize(entry[1], type_id)
        for name, entry in raw.items()
    }  # fmt: skip
    if kind == "F16":
        raw = {
            name: entry if not isinstance(entry, tuple) else entry[1].view("<f2")
            for name, entry in raw.items()
        }
    names = package.get_tensor_name_map(package.MODEL_ARCH.LLAMA, GROUPED["num_hidden_layers"])
    named = {}
    for name, entry in raw.items():
        heads = 4 if "q_proj" in name else 2 if "k_proj" in name else 0
        if heads:
            array = entry[1] if isinstance(entry, tuple) else entry
            array = gguf_files.in_pairs(array, heads)
            entry = (entry[0], array) if isinstance(entry, tuple) else array
        named[names.get_name(name, try_suffixes=(".weight",))] = entry
    write_gguf(tmp_path / "m.gguf", "llama", named, metadata(GROUPED))
    write_checkpoint(tmp_path / "hf", exact, GROUPED)
    a = serialized(tmp_path / "m.gguf", tmp_path / "a").with_suffix(".asparam")
    b = serialized(tmp_path / "hf", tmp_path / "b").with_suffix(".asparam")
    assert a.read_bytes()[64:] == b.read_bytes()[64:]


# Paths.


@pytest.mark.filterwarnings("ignore:.*without a tokenizer")
def test_shards_and_directories(tmp_path):
    llama_file(tmp_path / "one" / "m.gguf", {"": "Q8_0"})
    llama_file(tmp_path / "many" / "m.gguf", {"": "Q8_0"}, shard_tensors=5)
    shards = sorted((tmp_path / "many").iterdir())
    assert len(shards) > 3
    expected = serialized(tmp_path / "one" / "m.gguf", tmp_path / "a").with_suffix(".asparam")
    for source in (tmp_path / "one", tmp_path / "many", shards[0], shards[-1]):
        found = serialized(source, tmp_path / "b").with_suffix(".asparam")
        assert found.read_bytes()[64:] == expected.read_bytes()[64:]
    shards[1].unlink()
    with pytest.raises(FileNotFoundError, match=f"{shards[1].name}: missing, .* one of 0000"):
        serialized(shards[0], tmp_path / "b")


@pytest.mark.filterwarnings("ignore:.*without a tokenizer")
def test_the_command_names_a_model_after_its_file(tmp_path, capsys):
    from allspark.cli import main

    llama_file(tmp_path / "tiny.Q8_0.gguf", {"": "Q8_0"})
    source, out = str(tmp_path / "tiny.Q8_0.gguf"), str(tmp_path / "out")
    assert main(["convert", source, "--output", out]) == 0
    assert (tmp_path / "out" / "tiny.Q8_0.asgraph").is_file()
    assert main(["inspect", out, "--verify"]) == 0
    assert "weights of 8 bits, groups of 32" in capsys.readouterr().out


def test_several_models_in_a_directory(tmp_path):
    for name in ("a.gguf", "b.gguf"):
        llama_file(tmp_path / name, {"": "F32"})
    with pytest.raises(FileNotFoundError, match=r"holds several models \(a.gguf, b.gguf\)"):
        HuggingFaceModel(str(tmp_path), "m").load_model()
    HuggingFaceModel(str(tmp_path / "a.gguf"), "m").load_model()
    with pytest.raises(FileNotFoundError, match="c.gguf: no such file"):
        HuggingFaceModel(str(tmp_path / "c.gguf"), "m").load_model()


def test_another_form_beside_it_has_priority(tmp_path):
    write_checkpoint(tmp_path)
    (tmp_path / "m.gguf").write_bytes(b"never opened")
    HuggingFaceModel(str(tmp_path), "m").load_model()


# Tokenizers.


def vocabulary(tokenizer):
    """(tokens, types) by id of a transformers tokenizer, with llama.cpp's numbers for types."""
    size = len(tokenizer)
    added = tokenizer.added_tokens_decoder
    tokens = [
        added[i].content if i in added else tokenizer.convert_ids_to_tokens(i) for i in range(size)
    ]
    types = [1 if i not in added else 3 if added[i].special else 4 for i in range(size)]
    return tokens, types


def text_keys(tokenizer, model, pre=None, **fields):
    tokens, types = vocabulary(tokenizer)
    keys = {"model": model, "pre": pre, "tokens": tokens, "token_type": types, **fields}
    for role in ("bos", "eos"):
        token_id = getattr(tokenizer, f"{role}_token_id")
        keys[f"{role}_token_id"] = token_id
    whole = {f"tokenizer.ggml.{key}": value for key, value in keys.items() if value is not None}
    if tokenizer.chat_template:
        whole["tokenizer.chat_template"] = tokenizer.chat_template
    return whole


def bpe_keys(tokenizer, pre):
    """The keys of a tokenizer that merges bytes."""
    merges = json.loads(tokenizer.backend_tokenizer.to_str())["model"]["merges"]
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in merges]
    return text_keys(tokenizer, "gpt2", pre, merges=merges)


TEXTS = (
    "Once upon a time, there was a girl called Lily.\nShe had 12345 red apples!",
    "It's  two   spaces, naïve café, 中文字符 and 🙂🙃\n\n\ttabs; don't WE'LL",
    " leading and trailing ",
    "",
)


def check_tokenizer(directory, tokenizer, whole):
    llama_file(directory / "m.gguf", {"": "F32"}, whole=whole)
    ours = HuggingFaceModel(str(directory / "m.gguf"), "m").get_tokenizer()
    for text in TEXTS:
        expected = tokenizer.encode(text)
        assert ours.encode(text) == expected
        assert ours.decode(expected, skip_special_tokens=True) == tokenizer.decode(
            expected, skip_special_tokens=True
        )
    return ours


@pytest.mark.parametrize(
    ("name", "pre"), [("byte_level", "gpt-2"), ("qwen2.5", "qwen2"), ("gpt2", "gpt-2")]
)
def test_byte_level_tokenizers(tmp_path, name, pre):
    transformers = pytest.importorskip("transformers")
    source = tokenizer_directory(name)
    tokenizer = transformers.AutoTokenizer.from_pretrained(source)
    ours = check_tokenizer(tmp_path, tokenizer, bpe_keys(tokenizer, pre))
    assert ours.eos_token_id == tokenizer.eos_token_id
    if tokenizer.chat_template:
        chat = [{"role": "user", "content": "Hello <|im_end|>"}]
        text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        assert ours.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) == text
        assert ours.encode(text) == tokenizer.encode(text)


def test_named_chat_templates(tmp_path):
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tokenizer_directory("byte_level"))
    whole = bpe_keys(tokenizer, "gpt-2")
    named = {"tokenizer.chat_templates": ["tool_use"], "tokenizer.chat_template.tool_use": "tools"}
    ours = check_tokenizer(tmp_path, tokenizer, {**whole, "tokenizer.chat_template": "x", **named})
    assert ours.chat_template == {"default": "x", "tool_use": "tools"}
    assert ours.get_chat_template(tools=[{}]) == "tools"


# How a text is split, by tokenizer.ggml.pre: written from the rules in the models' own
# tokenizer.json. For Falcon, MPT and DeepSeek the splits give the tokens that transformers gives
# with the published vocabularies.
SPLIT_TEXT = "He's 12 of 1234 (2), nai\u0308ve ქართ(li) 東京23  x\n\n y_z<=3 DON'T"
SPLITS = {
    "default": (
        "He|'|s| |12| of| |123|4| |(|2|),| nai|\u0308|ve| ქართ|(|li|)| 東京|23| | x|\n\n| y|_|z"
        "|<=|3| DON|'|T"
    ),
    "gpt-2": (
        "He|'s| 12| of| 1234| (|2|),| nai|\u0308|ve| ქართ|(|li|)| 東京|23| | x|\n\n| y|_|z|<=|3"
        "| DON|'|T"
    ),
    "mpt": (
        "He|'s| 12| of| 1234| (|2|),| naïve| ქართ|(|li|)| 東京|23| | x|\n\n| y|_|z|<=|3| DON|'|T"
    ),
    "falcon": (
        "He|'|s| |12| of| |123|4| |(|2|),| nai|\u0308|ve| ქართ|(|li|)| 東京|23| | x|\n\n| y|_|z"
        "|<=|3| DON|'|T"
    ),
    "deepseek-llm": (
        "He|'|s| |1|2| of| |1|2|3|4| (|2|),| nai|\u0308|ve| |ქართ|(|li|)| |東京|2|3| | x|\n|\n"
        "| y|_|z|<=|3| DON|'|T"
    ),
    "deepseek-coder": (
        "He|'|s| |1|2| of| |1|2|3|4| (|2|),| nai|\u0308|ve| |ქართ|(|li|)| |東京|2|3| | x|\n|\n"
        "| y|_|z|<=|3| DON|'|T"
    ),
    "deepseek-v3": (
        "He|'s| |12| of| |123|4| (|2|),| nai\u0308ve| ქართ|(li|)| |東京|23| | x|\n\n| y|_z|<=|3"
        "| DON|'T"
    ),
    "bloom": (
        "He's| 12| of| 1234| (|2|),| nai\u0308ve| ქართ|(|li|)| 東京23| | x|\n\n| y_z<=3| DON'T"
    ),
    "gpt-4o": (
        "He's| |12| of| |123|4| (|2|),| nai\u0308ve| ქართ|(li|)| 東京|23| | x|\n\n| y|_z|<=|3"
        "| DON'T"
    ),
    "tekken": (
        "He|'s| |1|2| of| |1|2|3|4| (|2|),| nai\u0308ve| ქართ|(li|)| 東京|2|3| | x|\n\n| y|_z"
        "|<=|3| DON|'T"
    ),
    "llama-bpe": (
        "He|'s| |12| of| |123|4| (|2|),| nai|\u0308ve| ქართ|(li|)| 東京|23| | x|\n\n| y|_z|<=|3"
        "| DON|'T"
    ),
    "qwen2": (
        "He|'s| |1|2| of| |1|2|3|4| (|2|),| naïve| ქართ|(li|)| 東京|2|3| | x|\n\n| y|_z|<=|3"
        "| DON|'T"
    ),
    "starcoder": (
        "He|'s| |1|2| of| |1|2|3|4| (|2|),| nai|\u0308|ve| ქართ|(|li|)| 東京|2|3| | x|\n\n| y|_"
        "|z|<=|3| DON|'|T"
    ),
}
ALIKE = {"phi-2": "gpt-2", "smaug-bpe": "llama-bpe", "deepseek-r1-qwen": "qwen2"}


def words_of(text, pre, arch="llama"):
    """The words of ``text`` by the tokenizer of a file with ``pre``, in ByteLevel letters."""
    tokenizers = pytest.importorskip("tokenizers")
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    keys = {"model": "gpt2", "pre": pre, "tokens": [*letters, "!!"], "merges": ["! !"]}
    whole = {f"tokenizer.ggml.{key}": value for key, value in keys.items() if value is not None}
    files = tokenizer_files({"general.architecture": arch, **whole}, "m.gguf")
    backend = tokenizers.Tokenizer.from_str(files["tokenizer.json"])
    if backend.normalizer is not None:
        text = backend.normalizer.normalize_str(text)
    return [word for word, _ in backend.pre_tokenizer.pre_tokenize_str(text)]


@pytest.mark.parametrize("pre", [*SPLITS, *ALIKE])
def test_words_before_merging(pre):
    found = words_of(SPLIT_TEXT, pre)
    level = pytest.importorskip("tokenizers").pre_tokenizers.ByteLevel(
        add_prefix_space=False, use_regex=False
    )
    expected = SPLITS[ALIKE.get(pre, pre)].split("|")
    assert found == [level.pre_tokenize_str(word)[0][0] for word in expected]


def test_words_of_falcon_are_those_of_its_own_tokenizer():
    """Falcon's looks for digits among the letters that stand for bytes: that of 1/2 ends in one."""
    from tokenizers import Regex, pre_tokenizers

    own = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Punctuation("contiguous"),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
            pre_tokenizers.Digits(individual_digits=False),
            pre_tokenizers.Split(Regex("[0-9][0-9][0-9]"), "isolated"),
        ]
    )
    assert words_of(" \u00bd", "falcon") == ["\u0120\u00c2", "\u00bd"]
    rng = np.random.default_rng(0)
    some = list(" \n'stm0123456789.,$+<=>^~|`_aB\u00bd\u00b2\u00e9\u4e2d\u0667\u2163\u20ac\u2026")
    for _ in range(300):
        text = "".join(rng.choice(some, rng.integers(1, 30)))
        assert words_of(text, "falcon") == [word for word, _ in own.pre_tokenize_str(text)]


def test_letters_of_deepseek():
    """Its expression joins letters of some ranges with a space before them. Tests the ends of the
    ranges and the letters after them. Letters that the next expressions would split anyway are
    tested with a letter before them.
    """
    letters = "Z\u0556\ua78c\uab70\U000104fb\U00010cf2\U000118df\U0001e943"
    others = "\u0561\ua790\uab69\U00010570\U00010d50\U00016e40\U0001d400"
    for letter in letters:
        assert len(words_of(f"{letter} {letter}", "deepseek-llm")) == 2, f"{ord(letter):x}"
    for other in others:
        assert len(words_of(f"{other} {other}", "deepseek-llm")) == 1, f"{ord(other):x}"
    for letter, other in zip("\u10c5\u13fd\u1c90\u2cf3", "\u10c7\u13ff\u1c8a\u2d00", strict=True):
        assert len(words_of(letter + other, "deepseek-llm")) == 2, f"{ord(letter):x}"


@pytest.mark.parametrize(
    ("arch", "pre"), [("falcon", "falcon"), ("gptneox", "mpt"), ("llama", "default")]
)
def test_a_file_that_does_not_say_how_it_splits(arch, pre):
    with pytest.warns(UserWarning, match=f"pre is missing; texts are split as '{pre}' says"):
        assert words_of(SPLIT_TEXT, None, arch) == words_of(SPLIT_TEXT, pre)


def test_a_turn_ends_at_tokens_that_no_key_names(tmp_path):
    """Files of Phi-3 name the end of a text, and their turns end at another token."""
    tokens = ["<unk>", "<|end|>", "a", "<|endoftext|>", "<|user|>"]
    keys = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.eos_token_id": 3}
    llama_file(tmp_path / "m.gguf", {"": "F32"}, whole=keys)
    loader = HuggingFaceModel(str(tmp_path / "m.gguf"), "m")
    assert loader.get_generation_config()["eos_token_id"] == [3, 1]


@pytest.mark.parametrize("name", ["sentencepiece", "stories260K"])
def test_sentence_piece_tokenizer(tmp_path, name):
    sentencepiece = pytest.importorskip("sentencepiece")
    source = tokenizer_directory(name)
    model = sentencepiece.SentencePieceProcessor(str(source / "tokenizer.model"))
    size = model.vocab_size()
    kinds = ((model.is_unknown, 2), (model.is_control, 3), (model.is_byte, 6))
    whole = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [model.id_to_piece(i) for i in range(size)],
        "tokenizer.ggml.scores": [float(model.get_score(i)) for i in range(size)],
        "tokenizer.ggml.token_type": [
            next((kind for is_kind, kind in kinds if is_kind(i)), 1) for i in range(size)
        ],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }
    llama_file(tmp_path / "m.gguf", {"": "F32"}, whole=whole)
    ours = HuggingFaceModel(str(tmp_path / "m.gguf"), "m").get_tokenizer()
    for text in TEXTS:
        assert ours.encode(text) == [1, *model.encode(text)]
        assert ours.decode(model.encode(text)) == model.decode(model.encode(text))
    loader = HuggingFaceModel(str(tmp_path / "m.gguf"), "m").load_model()
    loader.serialize_to_path(None, str(tmp_path / "out"))
    written = DashInferModel(str(tmp_path / "out"), "m")
    assert written.get_tokenizer().encode(TEXTS[0]) == ours.encode(TEXTS[0])
    fields = written.get_generation_config()
    assert (fields["bos_token_id"], fields["eos_token_id"]) == (1, 2)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"model": "t5"}, "tokenizer.ggml.model is 't5', supported are gpt2, llama; put tokenizer"),
        ({"model": "gpt2", "pre": "new"}, "tokenizer.ggml.pre is 'new', supported are default"),
        ({"model": "gpt2", "pre": 3}, "tokenizer.ggml.pre is 3, supported are"),
        ({"model": "gpt2", "pre": "qwen2"}, "tokenizer.ggml.merges is missing"),
        ({"model": "llama"}, "tokenizer.ggml.scores is not a list of 3 numbers"),
        ({"model": "llama", "tokens": None}, "tokenizer.ggml.tokens is missing"),
        (
            {"model": "llama", "eos_token_id": 3},
            "tokenizer.ggml.eos_token_id is 3, expected 0 to 2",
        ),
        (
            {"model": "llama", "tokens": ["a" * 400_000], "scores": [0.0]},
            "tokens: token 0 has 400000 characters, supported are 512",
        ),
        (
            {"model": "llama", "tokens": ["a" * i for i in range(1, 513)], "scores": [0.0] * 512},
            "tokens can be joined from each other in more than 16 ways a token",
        ),
    ],
)
def test_tokenizers_that_cannot_be_made(tmp_path, keys, message):
    keys = {"tokens": ["a", "b", "ab"], **keys}
    whole = {f"tokenizer.ggml.{key}": value for key, value in keys.items() if value is not None}
    llama_file(tmp_path / "m.gguf", {"": "F32"}, whole=whole)
    loader = HuggingFaceModel(str(tmp_path / "m.gguf"), "m").load_model()
    with pytest.raises((ValueError, NotImplementedError), match=message):
        loader.get_tokenizer()
    with pytest.warns(UserWarning, match=f"without a tokenizer: .*{message}"):
        loader.serialize_to_path(None, str(tmp_path / "out"))


# Refused files.


def test_keys_that_are_not_known(tmp_path):
    path = tmp_path / "m.gguf"
    keys = {**metadata(GROUPED), "attention.clamp_kqv": 8.0}
    write_gguf(path, "llama", renamed("llama", llama_tensors(GROUPED), GROUPED), keys)
    with pytest.raises(NotImplementedError, match=r"'llama.attention.clamp_kqv' \(8.0\) is not kn"):
        HuggingFaceModel(str(path), "m").load_model()


@pytest.mark.parametrize(
    ("arch", "fields", "error", "message"),
    [
        ("bert", {}, NotImplementedError, "general.architecture is 'bert', supported: llama, inte"),
        ("llama", {"block_count": None}, KeyError, "'llama.block_count' is missing"),
        ("llama", {"block_count": 0}, ValueError, "llama.block_count is 0, expected 1 to"),
        ("llama", {"expert_count": 8}, KeyError, "'llama.expert_used_count' is missing"),
        (
            "deepseek2", {**LATENTS, "expert_gating_func": 3}, NotImplementedError,
            "deepseek2.expert_gating_func is 3, supported: 1, 2",
        ),
        (
            "mpt", {**LAYER_NORM, "attention__max_alibi_bias": 4.0}, NotImplementedError,
            "mpt.attention.max_alibi_bias is 4.0, supported: 8.0",
        ),
        (
            "llama", {"attention__value_length": 8}, NotImplementedError,
            "llama.attention.value_length is 8, supported: 16",
        ),
        (
            "llama", {"rope__scaling__type": "su"}, NotImplementedError,
            "llama.rope.scaling.type is 'su', supported: linear, yarn",
        ),
        (
            "llama", {"rope__dimension_count": 8}, NotImplementedError,
            "partial_rotary_factor is 0.5, supported: 1.0",
        ),
        ("baichuan", {"block_count": 40}, NotImplementedError, "block_count is 40: Baichuan 13B"),
    ],
)  # fmt: skip
def test_metadata_that_is_not_served(tmp_path, arch, fields, error, message):
    path = tmp_path / "m.gguf"
    tensors = renamed("llama", llama_tensors(GROUPED), GROUPED)
    write_gguf(path, arch, tensors, metadata(GROUPED, **fields))
    with pytest.raises(error, match=message) as caught:
        HuggingFaceModel(str(path), "m").load_model()
    assert "m.gguf" in str(caught.value)


def hide_the_package(monkeypatch):
    for name in [name for name in sys.modules if name.split(".")[0] == "gguf"]:
        monkeypatch.setitem(sys.modules, name, None)


@pytest.mark.parametrize("kinds", [{"v_proj": "Q6_K", "": "Q4_K"}, {"": "Q4_1"}])
def test_types_that_are_kept_need_no_package(tmp_path, monkeypatch, kinds):
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tokenizer_directory("byte_level"))
    llama_file(tmp_path / "m.gguf", kinds, LARGE, whole=bpe_keys(tokenizer, "gpt-2"))
    hide_the_package(monkeypatch)
    serialized(tmp_path / "m.gguf", tmp_path / "native", "bfloat16")
    ours = DashInferModel(str(tmp_path / "native"), "m").get_tokenizer()
    assert ours.encode(TEXTS[0]) == tokenizer.encode(TEXTS[0])


def test_a_package_that_is_missing(tmp_path, monkeypatch):
    llama_file(tmp_path / "k.gguf", {"": "IQ2_XS"}, LARGE)
    hide_the_package(monkeypatch)
    with pytest.raises(RuntimeError, match=r"GGUF type 17, which needs the extra 'gguf' \(docs/"):
        HuggingFaceModel(str(tmp_path / "k.gguf"), "m").load_model()


def test_a_tokenizer_is_read_where_the_locale_is_ascii(tmp_path):
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tokenizer_directory("byte_level"))
    keys = bpe_keys(tokenizer, "gpt-2")
    llama_file(tmp_path / "m.gguf", {"": "F32"}, whole=keys)
    script = (
        "import locale, sys\n"
        "from allspark import HuggingFaceModel\n"
        "assert locale.getpreferredencoding(False) != 'UTF-8'\n"
        "print(HuggingFaceModel(sys.argv[1], 'm').get_tokenizer().encode('na\\u00efve'))\n"
    )
    ascii_only = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = subprocess.run(
        [sys.executable, "-c", script, tmp_path / "m.gguf"],
        env={**os.environ, **ascii_only}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{tokenizer.encode('naïve')}\n"
