"""Requests longer than a model was trained for: rope_scaling_factor against transformers' dynamic
NTK scaling, use_logn_attn against Qwen's log-n attention, put into transformers' Qwen2 here.
"""

from __future__ import annotations

import math
import re

import numpy as np
import pytest
from support.parity import FLOAT32_FACTOR, randomize, reference_for

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
native = pytest.importorskip("allspark._allspark")

from allspark import AsStatus  # noqa: E402
from allspark.engine import TargetDevice  # noqa: E402
from test_architectures import BASE, NAME, generate, image_of, prompt_ids, rope  # noqa: E402

TRAINED = 64
LENGTH = 160
FACTOR = 2.5


def build(family, **fields):
    model_class = getattr(transformers, f"{family}ForCausalLM")
    config = {**BASE, "attn_implementation": "eager", "max_position_embeddings": TRAINED, **fields}
    model = model_class(model_class.config_class(**config)).eval()
    randomize(model, seed=1)
    return model


def check(tmp_path, model, **options):
    """Also in chunks: tokens beyond the trained length must not depend on where a chunk begins."""
    ids = prompt_ids(LENGTH)
    with torch.no_grad():
        model(torch.tensor([ids]))  # sets its frequencies to those for this length
    reference = reference_for(model, ids, FLOAT32_FACTOR)
    model.save_pretrained(tmp_path)
    loader, _ = image_of(str(tmp_path), "float32")

    def forward(chunks=(), **options):
        return native.testing.forward_logits(loader._image, ids, list(chunks), 2, "", 16, **options)

    ours = forward(**options)
    reference.check(ours)
    np.testing.assert_array_equal(forward((7,), **options), ours)
    assert np.abs(forward() - ours).max() > reference.bound  # the option has an effect


@pytest.mark.parametrize("factor", [1.0, FACTOR])
def test_dynamic_ntk_scaling(tmp_path, factor):
    check(tmp_path, build("Llama", **rope("dynamic", factor=factor)), rope_scaling_factor=factor)


def with_logn(function):
    """transformers' rotation of queries and keys, with the log-n scaling of Qwen's own code."""

    def rotate(q, k, cos, sin, *rest, **options):
        q, k = function(q, k, cos, sin, *rest, **options)
        lengths = range(1, q.shape[-2] + 1)
        factors = [math.log(i, TRAINED) if i > TRAINED else 1 for i in lengths]
        return q * torch.tensor(factors, dtype=q.dtype)[:, None], k

    return rotate


def test_logn_attention(tmp_path, monkeypatch):
    from transformers.models.qwen2 import modeling_qwen2

    monkeypatch.setattr(
        modeling_qwen2, "apply_rotary_pos_emb", with_logn(modeling_qwen2.apply_rotary_pos_emb)
    )
    check(tmp_path, build("Qwen2"), use_logn_attn=True)


def test_an_engine_extends_by_its_runtime_config(tmp_path):
    build("Llama").save_pretrained(tmp_path)
    loader, engine = image_of(str(tmp_path), "float32")
    options = {"rope_scaling_factor": FACTOR, "use_logn_attn": True}
    builder = loader.create_reference_runtime_config_builder(NAME, TargetDevice.CPU, max_batch=2)
    config = builder.max_length(LENGTH).update_from_dict(options).build()
    assert engine.install_model(config) == AsStatus.ALLSPARK_SUCCESS, engine.last_error()
    assert engine.start_model(NAME) == AsStatus.ALLSPARK_SUCCESS, engine.last_error()
    prompt = prompt_ids(100)
    tokens = generate(engine, prompt, LENGTH - len(prompt))
    logits = native.testing.forward_logits(
        loader._image, prompt + tokens, [], 2, "", 16, **options
    )
    assert logits[len(prompt) - 1 : -1].argmax(-1).tolist() == tokens


def test_what_cannot_be_extended_is_refused(tmp_path):
    build("Llama", **rope("linear", factor=8.0)).save_pretrained(tmp_path)
    loader, engine = image_of(str(tmp_path), "float32")
    for factor, message in ((2.0, "rope_scaling_factor is 2.*scaled already"), (0.5, "0.5.*1 or")):
        builder = loader.create_reference_runtime_config_builder(NAME, TargetDevice.CPU)
        engine.install_model(builder.rope_scaling_factor(factor).build())
        assert engine.start_model(NAME) != AsStatus.ALLSPARK_SUCCESS
        assert re.search(message, engine.last_error())
        engine.release_model(NAME)
