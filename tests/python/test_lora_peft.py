"""Adapters made and saved by the peft package, against what peft computes with them."""

from __future__ import annotations

import pytest
from support.parity import FLOAT32_FACTOR, reference_for

torch = pytest.importorskip("torch")
peft = pytest.importorskip("peft", reason="the package peft, an oracle, is not installed")
pytest.importorskip("allspark._allspark")

from allspark import AsStatus  # noqa: E402
from allspark.model_loader import LoraAdapter  # noqa: E402
from test_lora import ENDS, NAME, PROMPT, Served, build  # noqa: E402

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),  # peft warns of tied embeddings and of what it saves
]

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
VARIANTS = {
    "names": {"target_modules": ATTENTION},
    "all-linear": {"target_modules": "all-linear"},
    "regex": {"target_modules": r".*\.1\.mlp\.(gate|down)_proj"},
    "exclude": {"target_modules": "all-linear", "exclude_modules": ["o_proj", "0.mlp.up_proj"]},
    "layers": {"target_modules": ATTENTION, "layers_to_transform": [1], "layers_pattern": "layers"},
    "rslora": {"target_modules": ATTENTION, "use_rslora": True, "lora_alpha": 5},
    "patterns": {
        "target_modules": "all-linear",
        "rank_pattern": {"q_proj": 3, r"layers\.1\.mlp\.up_proj": 16},
        "alpha_pattern": {"down_proj": 4, "^model.layers.0.self_attn.q_proj": 7},
    },
    "ends": {"target_modules": [*ENDS, "v_proj"]},
}  # fmt: skip


def save(model, directory, **fields):
    """Saves a random peft adapter; returns the model with it."""
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=8, **{"lora_alpha": 16, **fields}))
    generator = torch.Generator().manual_seed(3)
    for name, parameter in adapted.named_parameters():
        if "lora_" in name:
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.data.copy_(0.5 * noise * parameter.shape[-1] ** -0.5)
    adapted.save_pretrained(directory)
    return adapted.get_base_model().eval()


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("row", ["llama", "llama-tied", "qwen2"])
def test_logits(tmp_path, row, variant):
    model = build(row)
    model.save_pretrained(tmp_path / "base")
    served = Served(tmp_path / "base", lora_max_rank=16)
    reference = reference_for(
        save(model, tmp_path / "lora", **VARIANTS[variant]), PROMPT, FLOAT32_FACTOR
    )
    served.load("a", LoraAdapter(tmp_path / "lora", served.loader))
    reference.check(served.logits(PROMPT, "a"))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"use_dora": True}, "use_dora is True"),
        ({"bias": "all"}, "bias': no part of a LoRA adapter"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save is"),
        ({"trainable_token_indices": [5, 6]}, "trainable_token_indices is"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights is 'pissa'"),
    ],
)
def test_what_is_refused(tmp_path, fields, message):
    model = build("qwen2")
    model.save_pretrained(tmp_path / "base")
    served = Served(tmp_path / "base")
    save(model, tmp_path / "lora", target_modules=ATTENTION, **fields)
    status = served.engine.load_lora(NAME, "a", tmp_path / "lora")
    assert status == AsStatus.ALLSPARK_PARAM_ERROR
    assert message in served.engine.last_error()
