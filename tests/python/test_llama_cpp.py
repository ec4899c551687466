"""llama.cpp as an oracle for the architectures: a checkpoint of every row that it knows goes
through its own converter. From the file it must compute the logits that we compute from the
checkpoint, and from the file.

This tests what the tests with transformers cannot. For families that transformers has no class for,
names, orders and fields of checkpoints come from this project's own code there
(support/families.py), so a wrong belief about the family would be on both sides.
"""

from __future__ import annotations

import json

import numpy as np
import pytest
from support.oracles import llama_cpp  # noqa: F401 (a fixture)
from support.parity import FLOAT32_FACTOR, exact_model, logits_of, reference_for

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("allspark._allspark")

import test_architectures as parity  # noqa: E402
from allspark.model_loader.errors import UnsupportedModelError  # noqa: E402

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:.*without a tokenizer", "ignore:.*rope_parameters"),
]

# Sizes that a row needs for llama.cpp: where all models of a family have a single size of the MLP,
# scale of scores, epsilon or order of windows, llama.cpp supports only that.
WIDE = {name: 256 for name in ("intermediate_size", "n_inner", "ffn_hidden_size")}
SCALE = {"query_pre_attn_scalar": 16}
SIX = {
    **SCALE,
    "num_hidden_layers": 6,
    "layer_types": 5 * ["sliding_attention"] + ["full_attention"],
}
LATENTS = {"rms_norm_eps": 1e-6}
LITE = {**LATENTS, "num_hidden_layers": 27}  # llama.cpp recognises the model by it
YARN = parity.rope("yarn", mscale=0.7, **parity.YARN64)
# Fields that config.json must have; most are in published files, but transformers dropped them.
SIGMOID = {"scoring_func": "sigmoid"}
MPT = {"architectures": ["MPTForCausalLM"]}

# Row -> (required changes to it, fields that config.json needs for the converter; None: remove).
ROWS = {
    **dict.fromkeys(
        ("llama", "llama-tied", "llama-3.1-rope", "llama-linear-rope", "llama-yarn-rope",
         "llama-biases", "llama-head-dim", "llama-one-kv-head", "mistral", "yi", "codellama",
         "qwen2", "qwen2-tied", "qwen3", "qwen3-head-dim", "internlm2", "internlm3", "phi3",
         "phi3-longrope", "phi4-mini", "chatglm3", "glm-4", "glm4", "granite", "granite-tied",
         "minicpm", "gemma", "olmo2", "bloom", "bloom-6-heads", "mixtral", "qwen2-moe",
         "qwen3-moe", "deepseek-moe", "dbrx"),
        ({}, {}),
    ),
    # From their sizes llama.cpp finds out whether there is ALiBi.
    "baichuan": ({"num_hidden_layers": 32}, {}),
    "baichuan2": ({"num_hidden_layers": 32}, {}),
    "baichuan-13b": ({"num_hidden_layers": 40}, {}),
    # This release of the converter looks for the epsilon under this name.
    "qwen1": ({}, {"rms_norm_eps": 1e-2, "layer_norm_epsilon": None}),
    "glm": ({}, {"layernorm_epsilon": 1e-2}),
    "gemma2": (SCALE, {}),
    "gemma3": (SIX, {}),
    "gemma3-1b": (SIX, {}),
    "starcoder2": ({}, {"rms_norm_eps": None}),
    "phi2": (WIDE, {}),
    "gpt-neox": ({}, {"rotary_pct": 0.5}),
    "gpt2": (WIDE, {"n_ctx": 256}),
    "falcon": (WIDE, {"num_kv_heads": 1}),
    "falcon-40b": (WIDE, {}),
    "falcon-11b": (WIDE, {}),
    "mpt": ({"layer_norm_epsilon": 1e-5}, MPT),
    "mpt-limit": ({"layer_norm_epsilon": 1e-5}, MPT),
    "glm4-moe": ({}, SIGMOID),
    "glm4-moe-plain": ({}, SIGMOID),
    "deepseek-v2": (LATENTS, {}),
    "deepseek-v2-lite": (LITE, {}),
    "deepseek-v2-yarn": (LITE, {}),
    "deepseek-v3": (LATENTS, SIGMOID),
    "deepseek-v3-yarn": ({**LATENTS, **YARN}, SIGMOID),
}  # fmt: skip
# We cannot read these as GGUF files; the error message says so.
NOT_READ = {"glm4-moe": "'glm4moe'", "glm4-moe-plain": "'glm4moe'", "baichuan-13b": "Baichuan 13B"}
# The factors of frequencies are rounded once more in the file.
ROUNDED = ("llama-3.1-rope", "phi3-longrope")


def build(row, monkeypatch):
    prefix, fields, *family = parity.ROWS[row]
    monkeypatch.setitem(parity.ROWS, row, (prefix, {**fields, **ROWS[row][0]}, *family))
    return parity.build(row)


def for_the_converter(row, model, directory):
    """Changes the checkpoint in ``directory`` so that llama.cpp's converter understands it."""
    from safetensors.torch import load_file, save_file

    path = directory / "config.json"
    config = {**json.loads(path.read_text()), **ROWS[row][1]}
    path.write_text(json.dumps({k: v for k, v in config.items() if v is not None}))
    if row.startswith("gemma3"):  # The converter counts its tokens.
        vocabulary = {str(i): i for i in range(config["vocab_size"])}
        tokenizer = {"model": {"vocab": vocabulary}, "added_tokens": []}
        (directory / "tokenizer.json").write_text(json.dumps(tokenizer))
    if row in ("baichuan2", "baichuan-13b"):  # The converter does not normalise the head's rows.
        tensors = load_file(directory / "model.safetensors")
        tensors["lm_head.weight"] = model.lm_head.weight.data
        save_file(tensors, directory / "model.safetensors")


def effect_of_their_gelu(model, ids, exact):
    """How much llama.cpp's activation alone changes the logits. For any GELU of a model, it uses
    the tanh form, from a table in half precision.
    """
    theirs = exact_model(model)
    found = [module for module in theirs.modules() if "gelu" in type(module).__name__.lower()]
    for module in found:
        module.forward = lambda x: torch.where(
            x.abs() < 10,
            torch.nn.functional.gelu(x.half().double(), approximate="tanh").half().double(),
            x.clamp(min=0),
        )
    return float(np.abs(logits_of(theirs, ids) - exact).max()) if found else 0.0


@pytest.mark.parametrize("row", ROWS)
def test_logits(tmp_path, row, llama_cpp, monkeypatch):  # noqa: F811
    model = build(row, monkeypatch)
    ids = parity.prompt_ids(parity.PROMPT_LENGTH + parity.NUM_GREEDY)
    reference = reference_for(model, ids, FLOAT32_FACTOR)
    # Both sides are rounded, each as far as support/parity.py says (measured: 0.8 to 1.6 times
    # transformers' own rounding); near the steps of a table, a value may be on either side.
    bound = 2 * reference.bound + 2 * effect_of_their_gelu(model, ids, reference.logits)

    directory = tmp_path / "hf"
    loader, _ = parity.image_of(parity.save(model, directory), "float32")
    ours = parity.forward(loader, ids)
    for_the_converter(row, model, directory)
    file = llama_cpp.convert(directory, tmp_path / "m.gguf")
    theirs = llama_cpp.logits(file, ids)
    error = np.abs(ours - theirs).max()
    assert error <= bound, f"error {error:.3g}, rounding {reference.rounding:.3g}"

    if row in NOT_READ:
        with pytest.raises(UnsupportedModelError, match=NOT_READ[row]):
            parity.image_of(str(file), "float32")
        return
    loader, _ = parity.image_of(str(file), "float32")
    from_file = parity.forward(loader, ids)
    # For the file the head was normalised already, and its rows are not changed again.
    if row in (*ROUNDED, "baichuan2"):
        assert np.abs(from_file - theirs).max() <= bound
    else:
        np.testing.assert_array_equal(from_file, ours)
