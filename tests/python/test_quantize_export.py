"""Quantised models as checkpoints for other programs: our own readers get the same integers,
scales, zero points and other weights back as the engine's own file has, and what a format cannot
hold is refused before any work.
"""

from __future__ import annotations

import fcntl
import functools
import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support.checkpoints import safetensors_bytes
from support.model_file import floats, read_tensors
from support.oracles import environment, run
from support.quantize_oracle import word_checkpoint
from support.read_back import weights_of

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("allspark._allspark")

import test_architectures as parity  # noqa: E402
from allspark.eval import Text  # noqa: E402
from allspark.model_loader import HuggingFaceModel  # noqa: E402
from allspark.quantize import QuantizeConfig, export, export_files, quantize_model  # noqa: E402
from allspark.quantize.blocked_fp8 import blocked_fp8  # noqa: E402
from allspark.quantize.export_check import check_exportable  # noqa: E402
from allspark.quantize.work import Work  # noqa: E402
from safetensors import safe_open  # noqa: E402
from safetensors.numpy import load_file  # noqa: E402

NAME = parity.NAME
WORDS = [f"w{i}" for i in range(parity.BASE["vocab_size"])]
TEXT = " ".join(np.random.default_rng(3).choice(WORDS[3:], 400))
SMALL = {"group_size": 32, "calib_samples": 4, "calib_seqlen": 64, "data_type": "float32"}
# save_format -> the settings that it can hold.
FORMATS = {
    "compressed-tensors": {
        "int4": {"weight_format": "int4"},
        "uint4": {"weight_format": "uint4"},
        "int8-channel": {"weight_format": "int8", "group_size": 0},
        "uint8": {"weight_format": "uint8"},
        "a8": {"weight_format": "int8", "compute_method": "activate_quant", "group_size": 0},
        "a8-zeros": {"weight_format": "uint8", "compute_method": "activate_quant"},
    },
    "gptq": {
        "int4": {"weight_format": "int4"},
        "uint4": {"weight_format": "uint4"},
        "int8-channel": {"weight_format": "int8", "group_size": 0},
        "uint8": {"weight_format": "uint8"},
    },
    "awq": {"uint4": {"weight_format": "uint4"}, "channel": {"group_size": 0}},
}
CASES = [(save_format, case) for save_format, cases in FORMATS.items() for case in cases]
# Biases, norms that have one added, fused matrices, rows by groups, ungated MLPs, names without a
# prefix, experts, and a matrix that the loader splits.
FAMILIES = [
    "llama", "qwen2", "gemma", "gemma2", "phi3", "internlm2-bias", "baichuan2", "gpt-neox",
    "bloom", "falcon-40b", "starcoder2", "mpt", "chatglm3", "olmo2", "mixtral", "qwen2-moe",
    "deepseek-moe", "deepseek-v2", "deepseek-v3",
]  # fmt: skip


@pytest.fixture(autouse=True)
def sizes(monkeypatch):
    """Groups of 32 divide all input features."""
    monkeypatch.setitem(parity.BASE, "intermediate_size", 128)
    for row in ("gpt2", "falcon-40b"):
        prefix, fields = parity.ROWS[row]
        inner = {"n_inner": 128} if row == "gpt2" else {"ffn_hidden_size": 128}
        monkeypatch.setitem(parity.ROWS, row, (prefix, {**fields, **inner}))


def checkpoint(row, directory, dtype=torch.float32):
    """A random model with a tokenizer of numbered words."""
    parity.save(parity.build(row).to(dtype), directory)
    return word_checkpoint(directory, len(WORDS))


@pytest.fixture
def quantized(monkeypatch, tmp_path):
    """Quantises a checkpoint with some settings: (its file, what exports it as a format)."""
    kept = []
    monkeypatch.setattr(Work, "remove", lambda work: kept.append(work))

    def quantized(source, **settings):
        config = QuantizeConfig(**{**SMALL, **settings})
        texts = [Text.of(TEXT)] if config.needs_text else None
        quantize_model(str(source), tmp_path / "direct", config, texts, name=NAME, threads=1)
        loader, plan = planned(source, config)

        def export_as(save_format, directory=tmp_path / "exported"):
            return export.export_checkpoint(plan, kept[-1], config, loader, directory, save_format)

        return tmp_path / "direct" / f"{NAME}.asgraph", export_as

    return quantized


def planned(source, config):
    loader = HuggingFaceModel(str(source), NAME, user_set_data_type=config.data_type).load_model()
    return loader, loader.plan(config.customized_quant_config())


def read_back(directory, out):
    loader = HuggingFaceModel(str(directory), NAME, user_set_data_type="float32").load_model()
    loader.serialize_to_path(None, str(out))
    return out / f"{NAME}.asgraph"


def check_same(direct, again, is_rounded=lambda name: False):
    expected_file, expected = read_tensors(direct)
    found_file, found = read_tensors(again)
    assert {quant.tensor for quant in found_file.spec.weight_quant} == {
        quant.tensor for quant in expected_file.spec.weight_quant
    }
    for first, second in zip(
        sorted(expected_file.spec.weight_quant, key=lambda quant: quant.tensor),
        sorted(found_file.spec.weight_quant, key=lambda quant: quant.tensor),
        strict=True,
    ):
        for field in ("tensor", "bits", "asymmetric", "quantize_activations"):
            assert getattr(first, field) == getattr(second, field)
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        if is_rounded(name):
            np.testing.assert_allclose(found[name], values, rtol=0, atol=2.0**-22, err_msg=name)
        else:
            # Formats with float16 come back as such.
            np.testing.assert_array_equal(floats(found[name]), floats(values), err_msg=name)


@pytest.mark.parametrize(("save_format", "case"), CASES)
@pytest.mark.parametrize("method", ["rtn", "awq+gptq"])
def test_a_format_holds_what_the_engines_file_holds(tmp_path, quantized, save_format, case, method):
    source = checkpoint("llama", tmp_path / "source")
    direct, export_as = quantized(source, **FORMATS[save_format][case], method=method)
    paths = export_as(save_format)
    assert [path.name for path in paths] == ["model.safetensors"]
    check_same(direct, read_back(tmp_path / "exported", tmp_path / "again"))
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        same = (tmp_path / "exported" / name).read_bytes()
        assert same == (source / name).read_bytes()


@pytest.mark.parametrize("row", FAMILIES)
def test_a_familys_rules_are_inverted(tmp_path, quantized, row):
    source = checkpoint(row, tmp_path / "source")
    direct, export_as = quantized(source, method="awq")
    has_ones = row.startswith("gemma")  # Subtracting one and adding it rounds.
    for save_format in FORMATS:
        directory = tmp_path / save_format
        export_as(save_format, directory)
        check_same(
            direct,
            read_back(directory, tmp_path / "again"),
            lambda name: has_ones and "norm" in name,
        )


def test_what_a_method_scaled_is_written_back(tmp_path, quantized):
    """The test above would not see it if AWQ had changed nothing."""
    source = checkpoint("deepseek-v2", tmp_path / "source")
    _, export_as = quantized(source, method="awq")
    export_as("compressed-tensors")
    before = load_file(source / "model.safetensors")
    after = load_file(tmp_path / "exported" / "model.safetensors")
    changed = {name for name, values in before.items()
               if name in after and not np.array_equal(values, after[name])}  # fmt: skip
    assert "model.layers.0.self_attn.kv_b_proj.weight" in changed  # its rows of values
    assert "model.layers.0.input_layernorm.weight" in changed
    keys = [tensors["model.layers.0.self_attn.kv_b_proj.weight"].reshape(4, 24 + 64, 64)[:, :24]
            for tensors in (before, after)]  # fmt: skip
    np.testing.assert_array_equal(*keys)
    for name in ("model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"):
        assert name not in changed


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_scaled_norms_keep_their_type(tmp_path, quantized, dtype):
    source = checkpoint("llama", tmp_path / "source", getattr(torch, dtype))
    direct, export_as = quantized(source, method="awq")
    export_as("compressed-tensors")
    again = read_back(tmp_path / "exported", tmp_path / "again")
    expected, found = read_tensors(direct)[1], read_tensors(again)[1]
    unit = 2.0**-8 if dtype == "bfloat16" else 2.0**-11
    for name, values in expected.items():
        within = unit * np.abs(values) if re.search(r"layers.*norm$", name) else 0
        assert (np.abs(floats(found[name]) - floats(values)) <= within).all(), name


def test_weights_that_stay_as_they_are_are_named(tmp_path, quantized):
    source = checkpoint("qwen2-moe", tmp_path / "source")
    direct, export_as = quantized(
        source, method="awq", modules_to_not_convert=[r"layers\.1\.o$", "shared_down"]
    )
    left = {
        "lm_head",
        "model.layers.1.self_attn.o_proj",
        *(f"model.layers.{i}.mlp.shared_expert.down_proj" for i in (0, 1)),
        *(
            f"model.layers.{i}.mlp.{gate}"
            for i in (0, 1)
            for gate in ("gate", "shared_expert_gate")
        ),
    }
    fields = {
        "compressed-tensors": lambda section: section["ignore"],
        "gptq": lambda section: [pattern[3:-1].replace("\\", "") for pattern in section["dynamic"]],
        "awq": lambda section: section["modules_to_not_convert"],
    }
    for save_format, names in fields.items():
        export_as(save_format, tmp_path / save_format)
        config = json.loads((tmp_path / save_format / "config.json").read_text())
        assert set(names(config["quantization_config"])) == left
        check_same(direct, read_back(tmp_path / save_format, tmp_path / "again"))


def test_buffers_are_copied_and_are_no_modules(tmp_path, quantized):
    source = checkpoint("gpt-neox", tmp_path / "source")
    path, name = source / "model.safetensors", "gpt_neox.layers.0.attention.bias"
    mask = np.tri(8, dtype=np.float32)[np.newaxis, np.newaxis]
    path.write_bytes(safetensors_bytes({**load_file(path), name: mask}))
    _, export_as = quantized(source, method="awq")
    export_as("awq")
    config = json.loads((tmp_path / "exported" / "config.json").read_text())
    left = config["quantization_config"]["modules_to_not_convert"]
    assert set(left) == {"embed_out", "lm_head"}
    found = load_file(tmp_path / "exported" / "model.safetensors")
    np.testing.assert_array_equal(found[name], mask)


def test_names_without_the_prefix_get_it(tmp_path, quantized):
    source = checkpoint("bloom", tmp_path / "source")
    path = source / "model.safetensors"
    tensors = load_file(path)
    stripped = {name.removeprefix("transformer."): values for name, values in tensors.items()}
    path.write_bytes(safetensors_bytes(stripped))
    direct, export_as = quantized(source, method="awq")
    export_as("gptq")
    check_same(direct, read_back(tmp_path / "exported", tmp_path / "again"))
    found = load_file(tmp_path / "exported" / "model.safetensors")
    assert all(name.startswith("transformer.") for name in found)


@pytest.mark.parametrize(
    ("row", "kind"),
    [("llama", "llama"), ("gemma2", "gemma2"), ("gpt-neox", "gpt_neox"), ("mixtral", "mixtral")],
)
@pytest.mark.filterwarnings("ignore:.*without a tokenizer")
def test_a_gguf_file(tmp_path, quantized, monkeypatch, row, kind):
    pytest.importorskip("gguf")
    from test_gguf import write_row

    write_row(tmp_path, row, monkeypatch)
    direct, export_as = quantized(tmp_path / "m.gguf", method="rtn")
    export_as("compressed-tensors")
    check_same(direct, read_back(tmp_path / "exported", tmp_path / "again"))
    config = json.loads((tmp_path / "exported" / "config.json").read_text())
    assert config["model_type"] == kind  # transformers asks for it, and the file does not have it


def test_a_checkpoint_that_was_quantised_already(tmp_path, quantized):
    source = checkpoint("llama", tmp_path / "source")
    _, export_as = quantized(source, method="rtn", weight_format="int8")
    export_as("gptq", tmp_path / "int8")
    direct, export_as = quantized(tmp_path / "int8", method="awq", requantize=True)
    export_as("awq")
    check_same(direct, read_back(tmp_path / "exported", tmp_path / "again"))


def test_zero_points_of_zero_and_scales_beyond_float16(tmp_path, quantized):
    source = checkpoint("llama", tmp_path / "source")
    path = source / "model.safetensors"
    tensors = dict(load_file(path))
    name = "model.layers.0.self_attn.o_proj.weight"
    tensors[name] = np.abs(tensors[name])
    tensors["model.layers.1.mlp.up_proj.weight"] = tensors[
        "model.layers.1.mlp.up_proj.weight"
    ] * np.float32(2.0**-24)
    path.write_bytes(safetensors_bytes(tensors))
    direct, export_as = quantized(source, method="rtn")
    assert not read_tensors(direct)[1]["layers.0.o_zero"].any()
    for save_format in FORMATS:
        export_as(save_format, tmp_path / save_format)
        check_same(direct, read_back(tmp_path / save_format, tmp_path / "again"))


def test_large_checkpoints_are_split(tmp_path, quantized, monkeypatch):
    source = checkpoint("llama", tmp_path / "source")
    direct, export_as = quantized(source, method="rtn")
    monkeypatch.setattr(
        export_files, "write_files", functools.partial(export_files.write_files, max_bytes=30_000)
    )
    paths = export_as("compressed-tensors")
    *shards, index = paths
    count = len(shards)
    assert count > 2 and index.name == "model.safetensors.index.json"
    assert shards[0].name == f"model-00001-of-{count:05}.safetensors"
    assert (
        sum(path.stat().st_size for path in shards)
        > json.loads(index.read_text())["metadata"]["total_size"]
    )
    check_same(direct, read_back(tmp_path / "exported", tmp_path / "again"))
    # Other weights there would be mixed up with these.
    monkeypatch.undo()
    with pytest.raises(ValueError, match=r"holds model-00001-of-\d+.safetensors, which loaders"):
        export_as("compressed-tensors")
    assert sorted(tmp_path.glob("exported/.*")) == []


def test_what_a_killed_export_left_is_removed(tmp_path):
    values = np.arange(6, dtype=np.float32)
    output = export_files.Output("a", "float32", values.shape, lambda: values)
    leftovers = [tmp_path / f".model.safetensors.{end}.tmp" for end in ("1", "1-0", "1-1")]
    for path in leftovers:
        path.write_text("a part")
    with leftovers[-1].open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # of a process that is alive
        export_files.write_files([output], tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        leftovers[-1].name, "model.safetensors",
    ]  # fmt: skip


def test_an_export_that_fails_leaves_no_file(tmp_path):
    output = export_files.Output("a", "float32", (6,), lambda: np.zeros(5, np.float32))
    with pytest.raises(AssertionError):
        export_files.write_files([output], tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("trusted", [False, True])
def test_the_checkpoints_own_code_is_copied_if_it_is_trusted(tmp_path, trusted):
    source = checkpoint("llama", tmp_path / "source")
    fields = json.loads((source / "config.json").read_text())
    fields["auto_map"] = {"AutoModelForCausalLM": "modeling_x.Model"}
    (source / "config.json").write_text(json.dumps(fields))
    (source / "modeling_x.py").write_text("pass\n")
    (source / "x.tiktoken").write_text("YQ== 0\n")
    quantize_model(
        str(source), tmp_path / "out", QuantizeConfig(method="rtn", **SMALL),
        save_format="gptq", threads=1, trust_remote_code=trusted,
    )  # fmt: skip
    assert (tmp_path / "out" / "modeling_x.py").exists() == trusted
    assert (tmp_path / "out" / "x.tiktoken").read_text() == "YQ== 0\n"


@pytest.mark.parametrize(
    ("row", "save_format", "settings", "message"),
    [
        ("llama", "gguf", {}, "save_format is 'gguf'; it must be one of compressed-tensors, gptq"),
        ("llama", "awq", {"weight_format": "int4"}, "weight_format is 'int4'; awq has uint4 alone"),
        ("llama", "awq", {"weight_format": "uint8"}, "is 'uint8'; awq has uint4 alone"),
        ("llama", "gptq", {"compute_method": "activate_quant"}, "which gptq has no field for"),
        (
            "llama", "compressed-tensors", {"compute_method": "activate_quant"},
            "weights have 4 bits and compute_method is 'activate_quant', which it has for int8",
        ),
        (
            "llama", "compressed-tensors",
            {"weight_format": "int8", "compute_method": "activate_quant",
             "activation_group_size": 32},
            "activation_group_size is 32; it has one scale per token",
        ),
        (
            "llama", "gptq", {"group_settings": {r"\.down$": 64}},
            "one format; 'layers.0.qkv' has uint4 in groups of 32, 'layers.0.down' has uint4 in "
            "groups of 64",
        ),
        ("llama", "compressed-tensors", {"lm_head": "int8"}, "'lm_head' is quantised; weights of"),
        ("llama-tied", "gptq", {"embedding": "int8"}, "'embedding' is quantised; weights of"),
        ("llama", "gptq", {"modules_to_not_convert": ["layers"]}, "no weight is quantised"),
        ("llama", "awq", {"target_bits": 5.5}, "target_bits is 5.5, which mixes formats"),
        (
            "llama-odd", "gptq", {"modules_to_not_convert": [r"\.down$"]},
            "gate_proj.weight' of LlamaForCausalLM has 172 output features; they must be a "
            "multiple of 8",
        ),
        ("gpt2", "gptq", {}, "'transformer.h.0.attn.c_attn.weight' of GPT2LMHeadModel is a matrix"),
        (
            "mixtral-stacked", "compressed-tensors", {},
            r"experts.down_proj' of MixtralForCausalLM has shape \[8, 64, 64\], all experts",
        ),
        ("dbrx", "awq", {}, "mlp.0.w1.weight' of DbrxForCausalLM is not the weight of a module"),
    ],
)  # fmt: skip
def test_what_a_format_cannot_hold(tmp_path, monkeypatch, row, save_format, settings, message):
    if row == "llama-odd":
        monkeypatch.setitem(parity.BASE, "intermediate_size", 172)
        row = "llama"
    source = checkpoint(row, tmp_path / "source")
    config = QuantizeConfig(**{**SMALL, "method": "awq", **settings})
    _, plan = planned(source, config)
    with pytest.raises(ValueError, match=message):
        check_exportable(plan, config, save_format)


def test_transforms_are_inverted_where_they_are_lines():
    from allspark.model_loader.architectures.baichuan import unit_rows
    from allspark.quantize.export_places import affine

    assert affine(lambda norm: norm + 1) == (1, 1)
    assert affine(lambda norm: 2 * norm - 1) == (2, -1)
    for other in (unit_rows, np.square, np.abs, lambda x: 0 * x, lambda x: x - x.mean()):
        assert affine(other) is None


def test_a_scaled_tensor_without_an_inverse_is_refused(tmp_path):
    """No family has one today."""
    source = checkpoint("gemma", tmp_path / "source")
    config = QuantizeConfig(**{**SMALL, "method": "awq"})
    _, plan = planned(source, config)
    for i, part in enumerate(plan.parts):
        if part.rule.transform is not None:
            plan.parts[i] = replace(part, rule=replace(part.rule, transform=np.tanh))
    message = "layernorm.weight' of GemmaForCausalLM is changed when it is read, in a way that"
    with pytest.raises(ValueError, match=message):
        check_exportable(plan, config, "gptq")
    check_exportable(plan, replace(config, method="gptq"), "gptq")


# Float8.


@pytest.mark.parametrize("row", ["llama", "phi3", "mixtral", "deepseek-v2", "starcoder2"])
def test_float8_weights_are_those_that_torch_decodes(tmp_path, row):
    """Blocks of 32, so that there are several of each weight."""
    source = checkpoint(row, tmp_path / "source")
    (path,) = blocked_fp8(str(source), str(tmp_path / "fp8"), block_size=32)
    config = json.loads((tmp_path / "fp8" / "config.json").read_text())["quantization_config"]
    ours, exact = weights_of(tmp_path / "fp8"), load_file(source / "model.safetensors")
    with safe_open(path, "pt") as file:
        stored = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    scales = {name: stored.pop(name) for name in list(stored) if name.endswith("_scale_inv")}
    assert ours.keys() == stored.keys() == exact.keys()
    matrices = {name.removesuffix(".weight") for name in exact if exact[name].ndim == 2}
    rounded = {name.removesuffix(".weight_scale_inv") for name in scales}
    # Tables, routers, and what two of the engine's tensors are computed from.
    left = {name for name in matrices if re.search(r"embed|lm_head|\.gate$|\.kv_b_proj$", name)}
    assert rounded == matrices - left and left <= set(config["modules_to_not_convert"])
    for name, tensor in stored.items():
        if f"{name}_scale_inv" not in scales:
            assert tensor.dtype == torch.float32
            np.testing.assert_array_equal(tensor.numpy(), exact[name], err_msg=name)
            continue
        scale = scales.pop(f"{name}_scale_inv").repeat_interleave(32, 0).repeat_interleave(32, 1)
        scale = scale[: tensor.shape[0], : tensor.shape[1]]
        theirs = (tensor.float() * scale).numpy()
        np.testing.assert_array_equal(ours[name], theirs, err_msg=name)
        # Numbers have 4 bits; those below the smallest normal one, 2^-6, have steps of 2^-9.
        bound = np.maximum(np.abs(exact[name]) * 2.0**-4, scale.numpy() * 2.0**-10)
        assert (np.abs(theirs - exact[name]) <= bound).all(), name
    assert not scales


# Other programs.


# Fused projections, and experts and biases, in the formats that the others read of them: GPTQModel
# takes apart what Phi-3 has fused.
READ = [
    *(("llama", *case) for case in CASES),
    ("phi3", "compressed-tensors", "int4"),
    ("qwen2-moe", "compressed-tensors", "int4"),
    ("qwen2-moe", "gptq", "uint4"),
    ("qwen2-moe", "awq", "uint4"),
    *((row, "fp8", "blocks") for row in ("llama", "phi3", "qwen2-moe")),
]


@pytest.mark.slow
def test_other_programs_read_the_same_weights(tmp_path, quantized):
    """transformers, alone and with compressed-tensors, and GPTQModel."""
    folder = environment("quantizers")
    directories = []
    for row, save_format, case in READ:
        source = tmp_path / row
        if not source.exists():
            checkpoint(row, source, torch.bfloat16)
        directories.append(tmp_path / f"{row}-{save_format}-{case}")
        if save_format == "fp8":
            blocked_fp8(str(source), str(directories[-1]), block_size=32)
            continue
        _, export_as = quantized(source, **FORMATS[save_format][case], method="awq")
        export_as(save_format, directories[-1])
    offline = {"HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    run(folder, "read_checkpoint.py", *directories, cwd=tmp_path, **offline)
    for directory, (_, save_format, _) in zip(directories, READ, strict=True):
        error = Path(f"{directory}.error")
        assert not error.exists(), f"{directory.name}: {error.read_text()}"
        theirs = load_file(f"{directory}.safetensors")
        # GPTQModel computes in float16.
        kind = torch.float16 if save_format in ("gptq", "awq") else torch.bfloat16
        for name, values in weights_of(directory).items():
            rounded = torch.tensor(values).to(kind).float()
            np.testing.assert_array_equal(rounded, theirs[name], err_msg=f"{directory} {name}")
