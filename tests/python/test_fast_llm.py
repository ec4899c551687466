"""FastLLM as an oracle for the first InternLM, which llama.cpp does not read, and for Baichuan: the
same checkpoints, with the family's names and configuration, give the same logits.

FastLLM takes the base of InternLM's frequencies to be 10,000, as in all published models, whatever
the field ``rotary`` says.
"""

from __future__ import annotations

import importlib.util
import json
import sys
import types

import numpy as np
import pytest
from support.oracles import environment, run
from support.parity import FLOAT32_FACTOR, reference_for

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("allspark._allspark")

import test_architectures as parity  # noqa: E402

pytestmark = pytest.mark.slow

# Row -> the model_type in published files of the family.
ROWS = {"internlm": "internlm", "baichuan": "baichuan"}
HEADS = ("baichuan2",)  # only the head is compared


@pytest.mark.parametrize("row", ROWS)
def test_logits(tmp_path, row):
    folder = environment("fast-llm")
    model = parity.build(row)
    ids = parity.prompt_ids()
    directory = tmp_path / "hf"
    loader, _ = parity.image_of(parity.save(model, directory), "float32")
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "model_type": ROWS[row]}))
    (directory / "tokenizer_config.json").write_text("{}")
    (tmp_path / "ids").write_text(json.dumps(ids))
    out = tmp_path / "logits.npy"
    size = parity.BASE["vocab_size"]
    run(folder, "fast_llm_logits.py", directory, size, tmp_path / "ids", out, cwd=tmp_path)
    # Both sides are rounded, each as far as support/parity.py says (measured: 1.0 to 1.2 times
    # transformers' own rounding).
    reference = reference_for(model, ids, FLOAT32_FACTOR)
    error = np.abs(parity.forward(loader, ids) - np.load(out)).max()
    assert error <= 2 * reference.bound, f"{error / reference.rounding:.2f} of the rounding"


class Recorder:
    """Replaces FastLLM's library: accepts every call, and does nothing."""

    def __getattr__(self, name):
        return lambda *arguments, **options: 0


def test_the_head_of_baichuan2(tmp_path, monkeypatch):
    """FastLLM's own loading normalises its rows to length 1, in float16."""
    import torch
    from safetensors.torch import load_file
    from support.model_file import read_tensors
    from support.read_back import serialized

    folder = environment("fast-llm")
    (path,) = folder.glob("lib/*/site-packages/ftllm/hf_model.py")
    llm = types.SimpleNamespace(fastllm_lib=Recorder(), model=Recorder().model)
    library = types.SimpleNamespace(llm=llm)
    monkeypatch.setitem(sys.modules, "ftllm", library)
    spec = importlib.util.spec_from_file_location("fast_llm_hf_model", path)
    theirs = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(theirs)

    size = {"vocab_size": 125696}  # FastLLM recognises the model by it
    (row,) = HEADS
    prefix, fields, family = parity.ROWS[row]
    monkeypatch.setitem(parity.ROWS, row, (prefix, {**fields, **size}, family))
    parity.save(parity.build(row), tmp_path / "hf")
    tensors = load_file(tmp_path / "hf" / "model.safetensors")
    model = torch.nn.Module()
    model.lm_head = torch.nn.Linear(parity.BASE["hidden_size"], size["vocab_size"], bias=False)
    model.load_state_dict({"lm_head.weight": tensors["lm_head.weight"]})
    model.config = types.SimpleNamespace(
        model_type="baichuan", architectures=["BaichuanForCausalLM"], **size
    )
    model.generation_config = None
    theirs.create(model)

    head = model.lm_head.weight.detach().double().numpy()
    _, ours = read_tensors(serialized(tmp_path / "hf", tmp_path / "out"))
    assert not np.allclose(head, tensors["lm_head.weight"], atol=0.1)
    # Half a unit of float16's 11 bits, and of its subnormal numbers, plus float32 rounding.
    bound = (2.0**-11 + 2.0**-20) * np.abs(head) + 2.0**-25
    assert (np.abs(ours["lm_head"] - head) <= bound).all()
