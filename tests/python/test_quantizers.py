"""Checkpoints saved by common quantisation tools (oracles/quantize_checkpoint.py): we read the same
weights as the tool itself, and the logits agree.
"""

from __future__ import annotations

import copy

import numpy as np
import pytest
from support.model_file import read_tensors
from support.oracles import environment, run
from support.read_back import reference_of, serialized, weights_of

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
native = pytest.importorskip("allspark._allspark")

import test_architectures as parity  # noqa: E402

pytestmark = pytest.mark.slow

# Groups of 128, and blocks of 128 by 128, which keys and values fill only in part.
SIZES = {"hidden_size": 128, "intermediate_size": 256}
WEIGHT_ONLY = {
    "enable_quant": True,
    "customized_quant_config": {
        "quant_method": "compressed-tensors",
        "compute_method": "weight_only",
    },
}
# Recipe -> (the type in which the tool multiplies numbers and scales; the forms of weights in our
# file, (bits, group size, asymmetric); the caller's arguments). One group for all features is none.
RECIPES = {
    "w4a16": ("bfloat16", {(4, 0, False), (4, 128, False)}, {}),
    "w4a16-asym": ("bfloat16", {(4, 32, True)}, {}),
    "w8a16": ("bfloat16", {(8, 0, False), (8, 128, False)}, {}),
    "w8a8": ("bfloat16", {(8, 0, False)}, WEIGHT_ONLY),
    "w4a8": ("bfloat16", {(4, 0, False), (4, 128, False)}, WEIGHT_ONLY),
    "fp8": ("bfloat16", {(8, 0, False)}, {}),
    "fp8-blocks": ("bfloat16", {(8, 0, False), (8, 128, False)}, {}),
    "nvfp4": ("bfloat16", {(4, 16, False)}, {}),
    "mxfp4": ("bfloat16", {(4, 32, False)}, {}),
    "mixed": ("bfloat16", {(8, 0, False), (4, 0, False), (4, 16, False)}, WEIGHT_ONLY),
    "gptq": ("bfloat16", {(4, 32, False)}, {}),
    "auto-gptq": ("float32", {(4, 32, False)}, {}),
    "auto-gptq-asym": ("float32", {(4, 64, True)}, {}),
    "auto-gptq-mixed": ("float32", {(4, 32, False), (8, 64, False)}, {}),
    "auto-gptq-8": ("float32", {(8, 0, False)}, {}),
    "gptq-model-act-order": ("float16", {(4, 32, False)}, {}),
    "auto-awq": ("float32", {(4, 32, True)}, {}),
    "auto-round": ("float32", {(4, 32, False)}, {}),
    "auto-round-asym": ("float32", {(4, 32, True)}, {}),
    "auto-round-8": ("float32", {(8, 64, True)}, {}),
    "auto-round-mixed": ("float32", {(4, 32, False), (8, 64, False)}, {}),
}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """(the model, the folder with the output of each recipe)."""
    folder = environment("quantizers")
    directory = tmp_path_factory.mktemp("quantizers")
    with pytest.MonkeyPatch.context() as patch:
        prefix, fields = parity.ROWS["llama"]
        patch.setitem(parity.ROWS, "llama", (prefix, {**fields, **SIZES}))
        model = parity.build("llama")
    half = copy.deepcopy(model).to(torch.bfloat16)  # this rounds its frequencies, too
    half.save_pretrained(directory / "source")
    # No downloads.
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    script = "quantize_checkpoint.py"
    run(folder, script, directory / "source", directory, *RECIPES, cwd=directory, **offline)
    return model, directory


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_checkpoint_is_what_its_tool_says(checkpoints, tmp_path, recipe):
    from safetensors.torch import load_file

    model, directory = checkpoints
    error = directory / f"{recipe}.error"
    assert not error.exists(), error.read_text()
    theirs = load_file(directory / f"{recipe}.safetensors")
    data_type, forms, options = RECIPES[recipe]
    exact = weights_of(directory / recipe)
    assert exact.keys() == theirs.keys()
    for name, values in exact.items():
        rounded = torch.tensor(values).to(getattr(torch, data_type)).float()
        np.testing.assert_array_equal(rounded, theirs[name], err_msg=name)

    graph = serialized(directory / recipe, tmp_path, **options)
    found = {(q.bits, q.group_size, q.asymmetric) for q in read_tensors(graph)[0].spec.weight_quant}
    assert found == forms
    ids = parity.prompt_ids(64)
    reference, moved = reference_of(model, exact, graph, ids)
    ours = native.testing.forward_logits(str(graph), ids, [], 2, "", 16)
    assert np.abs(ours - reference.logits).max() <= reference.bound + moved
