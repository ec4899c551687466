"""FastLLM's opinion of the first InternLM, which llama.cpp does not read, and of Baichuan: the same
checkpoints, under the names and with the configuration of the family, give the same logits.
"""

from __future__ import annotations

import json

import numpy as np
import pytest
from support.oracles import environment, run
from support.parity import FLOAT32_FACTOR, reference_for

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("allspark._allspark")

import test_architectures as parity  # noqa: E402

pytestmark = pytest.mark.slow

# Row -> what published files of the family have as their model_type.
ROWS = {"internlm": "internlm", "baichuan": "baichuan"}


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
    # Both sides are rounded, each as far as support/parity.py says (measured: 1.0 to 1.2 times the
    # rounding of transformers' own).
    reference = reference_for(model, ids, FLOAT32_FACTOR)
    error = np.abs(parity.forward(loader, ids) - np.load(out)).max()
    assert error <= 2 * reference.bound, f"{error / reference.rounding:.2f} of the rounding"
