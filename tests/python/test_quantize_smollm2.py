"""What quantising with calibration costs a real model, and what it saves: the second table of
docs/quantization.md about SmolLM2."""

from __future__ import annotations

import functools
import json

import numpy as np
import pytest

pytest.importorskip("allspark._allspark")

from allspark import Engine  # noqa: E402
from allspark.eval import compare  # noqa: E402
from allspark.eval.files import to_texts  # noqa: E402
from allspark.pipeline import EngineConfig  # noqa: E402
from allspark.pipeline.model_source import open_loader  # noqa: E402
from allspark.pipeline.served_model import ServedModel  # noqa: E402
from allspark.quantize import QuantizeConfig  # noqa: E402
from allspark.quantize.calibration import read_ids  # noqa: E402
from allspark.quantize.export_files import Output, write_files  # noqa: E402
from support import oracles  # noqa: E402
from support.smollm2 import (  # noqa: E402
    QUANTISED,
    Forms,
    check_figures,
    divergence,
    documented,
    gguf_file,
    rise,
)

OWN = "test_quantize_smollm2.py"


def test_the_table_has_every_form(repo_root):
    assert list(documented(repo_root, OWN)) == list(QUANTISED)


@pytest.fixture(scope="module")
def measure(shared_data, tmp_path_factory):
    """Compares a row's form with float32 on WikiText-2's test text and on stories; each once."""
    texts = shared_data / "text"
    forms = Forms(tmp_path_factory.mktemp("smollm2"), texts / "wikitext2_valid.txt")

    @functools.cache
    def of(row):
        form = forms.quantised(row)
        names = ("wikitext2_test.txt", "tinystories_val.txt")
        found = [compare(form, forms.exact, texts / name, tokens=6 * 512) for name in names]
        form.close()
        return found

    yield of
    forms.exact.close()


@pytest.mark.slow
@pytest.mark.parametrize("row", QUANTISED)
def test_a_form_costs_what_the_table_says(measure, repo_root, row):
    expected = documented(repo_root, OWN)[row]
    check_figures(row, measure(row)[0], expected, change_within=2.5, same_within=2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("row", "rounded", "most"),
    [
        ("`awq+gptq`", "uint4, groups of 64: `rtn`", 0.35),
        ("`awq+gptq`, 5.3 bits", "uint4, groups of 64: `rtn`", 0.22),
        ("int4, `awq+gptq`", "int4, groups of 32: `rtn`", 0.4),
        ("int8, A8: `rtn`, smoothed", "int8, A8, one scale per token: `rtn`", 0.2),
    ],
)
def test_calibration_leaves_a_part_of_what_rounding_costs(measure, row, rounded, most):
    assert divergence(measure(row)[0]) <= most * divergence(measure(rounded)[0])


@pytest.mark.slow
def test_the_perplexity_rises_by_less_than_half(measure):
    rounded = rise(measure("uint4, groups of 64: `rtn`")[0])
    assert rise(measure("`awq+gptq`")[0]) <= 0.45 * rounded


@pytest.mark.slow
def test_what_is_calibrated_on_an_encyclopaedia_is_better_at_stories_too(measure):
    """Of the part of the divergence that calibration takes away there, 70 % go here."""
    rounded = measure("uint4, groups of 64: `rtn`")
    calibrated = measure("`awq+gptq`, 128 sequences")
    gains = [
        1 - divergence(own) / divergence(other)
        for own, other in zip(calibrated, rounded, strict=True)
    ]
    assert gains[1] >= 0.7 * gains[0]


def write_floats(file, folder):
    """The model as a checkpoint in float32, for other programs."""
    loader = open_loader(str(file), "smollm2")
    outputs = [Output.copied(name, entry) for name, entry in loader.checkpoint_tensors().items()]
    folder.mkdir()
    write_files(outputs, folder)
    fields = {**loader.get_model_config(), "model_type": "llama"}
    for name, text in {**loader.made_companions(), "config.json": json.dumps(fields)}.items():
        (folder / name).write_text(text, encoding="utf-8")
    return loader


@pytest.mark.slow
def test_at_equal_bits_it_is_no_worse_than_llm_compressor(measure, shared_data, tmp_path):
    """GPTQ on the same tokens; its AWQ is worse on this model, and takes eight times as long."""
    loader = write_floats(gguf_file(), tmp_path / "floats")
    texts = shared_data / "text"
    own = QuantizeConfig(**QUANTISED["`awq+gptq`"])
    ids = read_ids(
        loader, to_texts([texts / "wikitext2_valid.txt"]), own.calib_samples, own.calib_seqlen
    )
    np.save(tmp_path / "ids.npy", ids)
    folder = oracles.environment("quantizers")
    oracles.run(
        folder, "gptq_of_ids.py", tmp_path / "floats", tmp_path / "ids.npy", tmp_path / "peer"
    )
    engine = Engine()
    models = [
        ServedModel.open(str(path), EngineConfig(session_len=512, **fields), name, engine)
        for path, fields, name in (
            (tmp_path / "peer", {}, "peer"), (gguf_file(), {"data_type": "float32"}, "exact")
        )
    ]  # fmt: skip
    peer = compare(*models, texts / "wikitext2_test.txt", tokens=6 * 512)
    for model in models:
        model.close()
    ours = divergence(measure("`awq+gptq`")[0])
    print(f"KL: ours {ours:.4f}, llm-compressor's GPTQ {divergence(peer):.4f}")
    assert ours <= 1.05 * divergence(peer)
